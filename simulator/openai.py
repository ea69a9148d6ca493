"""Requests and answers of the OpenAI API as vLLM 0.32 reads and writes them. Pure: bytes in, bytes out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from simulator import tokenizer
from simulator.errors import RequestError

DEFAULT_CHAT_TOKENS = 128
MAX_CHOICES = 64
DONE = b"data: [DONE]\n\n"

# Anything else a client sends (temperature, stop, seed...) is taken and changes nothing.


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False


class _Body(msgspec.Struct, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = False


class CompletionBody(_Body, kw_only=True):
    prompt: Any


class ChatBody(_Body, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def tokens(self) -> list[int]:
        if self.prompt is not None:
            return tokenizer.encode(self.prompt)
        if self.messages is None:
            raise RequestError("neither prompt nor messages", kind="Bad Request", param="prompt")
        return _render(self.messages, self.tools, self.add_generation_prompt, self.continue_final_message)


class Generation(msgspec.Struct, kw_only=True):
    """What one HTTP request asks for: ``prompts`` in tokens, ``n`` answers to each, choice by choice."""

    prompts: list[list[int]]
    n: int
    max_tokens: int
    salt: str | None
    reads_cache: bool
    chat: bool
    stream: bool
    usage_in_stream: bool
    token_ids: bool

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


Body = TypeVar("Body", bound=msgspec.Struct)


def parse(raw: bytes, shape: type[Body]) -> Body:
    """The body as ``shape``. Raises RequestError with what is wrong where."""
    try:
        return msgspec.json.decode(raw, type=shape)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(str(error), kind="Bad Request") from error


def completion(body: CompletionBody, max_model_len: int) -> Generation:
    return _generation(body, _prompts(body.prompt), body.max_tokens, 16, max_model_len, chat=False)


def chat(body: ChatBody, max_model_len: int) -> Generation:
    prompt = _render(body.messages, body.tools, body.add_generation_prompt, body.continue_final_message)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _generation(body, [prompt], wanted, DEFAULT_CHAT_TOKENS, max_model_len, chat=True)


def _render(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> list[int]:
    return tokenizer.render(
        messages,
        tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )


def _generation(
    body: _Body, prompts: list[list[int]], wanted: int | None, default: int, max_model_len: int, *, chat: bool
) -> Generation:
    longest = max(len(prompt) for prompt in prompts)
    if not min(len(prompt) for prompt in prompts):
        raise RequestError("The decoder prompt cannot be empty", param="prompt")
    if longest + (wanted or 1) > max_model_len:
        asked = f" and {wanted} output tokens" if wanted else ""
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{longest} input tokens{asked}. Please reduce the length of the input prompt.",
            param="input_tokens",
        )
    if wanted is not None and wanted < 1:
        raise RequestError(f"max_tokens must be at least 1, got {wanted}.", param="max_tokens")
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_CHOICES:
        raise RequestError(f"n must be 1 to {MAX_CHOICES}, got {n}.", param="n")
    if body.cache_salt == "":
        raise RequestError(
            "Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt"
        )
    return Generation(
        prompts=prompts,
        n=n,
        max_tokens=min(default, max_model_len - longest) if wanted is None else wanted,
        salt=body.cache_salt,
        reads_cache=body.prompt_logprobs is None,
        chat=chat,
        stream=bool(body.stream),
        usage_in_stream=body.stream_options is not None and bool(body.stream_options.include_usage),
        token_ids=bool(body.return_token_ids),
    )


def _prompts(prompt: Any) -> list[list[int]]:
    """A prompt as text, list of texts, token ids, or lists of ids, always as lists of ids."""
    items: list[Any] = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
    if isinstance(items, list) and items:
        if all(isinstance(item, str) for item in items):
            return [tokenizer.encode(item) for item in items]
        if all(_is_ids(item) for item in items):
            return items
    raise RequestError("prompt is neither text, texts, token ids nor lists of ids", param="prompt")


def _is_ids(value: Any) -> bool:
    """Ids of other tokenizers pass too, so that captured prompts can be sent; vLLM checks the vocabulary."""
    if not isinstance(value, list) or not value:
        return False
    return all(type(item) is int for item in value) and min(value) >= 0 and max(value) < 1 << 32


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def answer(
    generation: Generation, response_id: str, model: str, outputs: Sequence[Sequence[int]], cached_tokens: int
) -> bytes:
    """The whole answer, not streamed; ``outputs`` are the generated ids choice by choice."""
    choices = []
    for index, output in enumerate(outputs):
        text = tokenizer.decode(output)
        choice: dict[str, Any] = {"index": index}
        if generation.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": "length", "stop_reason": None}
        choice["token_ids"] = output if generation.token_ids else None
        if generation.token_ids and not generation.chat:
            choice["prompt_token_ids"] = generation.prompts[index // generation.n]
        choices.append(choice)
    return msgspec.json.encode(
        {
            "id": response_id,
            "object": "chat.completion" if generation.chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": choices,
            "usage": usage(generation.prompt_tokens, cached_tokens, sum(len(output) for output in outputs)),
            "prompt_token_ids": generation.prompts[0] if generation.token_ids and generation.chat else None,
        }
    )


class Stream:
    """Writes one streamed answer; all that does not change between tokens is encoded once."""

    def __init__(self, generation: Generation, response_id: str, model: str) -> None:
        self._generation = generation
        kind = "chat.completion.chunk" if generation.chat else "text_completion"
        head = {"id": response_id, "object": kind, "created": int(time.time()), "model": model}
        self._head = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        self._before_text = b',"delta":{"content":' if generation.chat else b',"text":'
        after = (
            b'},"logprobs":null,"finish_reason":' if generation.chat else b',"logprobs":null,"finish_reason":'
        )
        self._after_text = after
        self._started: set[int] = set()

    def token(self, choice: int, token: int, last: bool) -> bytes:
        """The chunks that one generated token makes: the role before a choice's first, then the text."""
        index = b'{"index":%d' % choice
        ids = msgspec.json.encode([token]) if self._generation.token_ids else b"null"
        reason = b'"length","stop_reason":null' if last else b"null"
        text = msgspec.json.encode(tokenizer.decode((token,)))
        chunk = b"".join(
            (
                *(self._head, index, self._before_text, text, self._after_text),
                *(reason, b',"token_ids":', ids, b"}]}\n\n"),
            )
        )
        if choice in self._started:
            return chunk
        self._started.add(choice)
        return self._first(index, choice) + chunk

    def end(self, cached_tokens: int, completion_tokens: int) -> bytes:
        """The usage chunk when it was asked for, and the end mark."""
        if not self._generation.usage_in_stream:
            return DONE
        counts = usage(self._generation.prompt_tokens, cached_tokens, completion_tokens)
        return self._head + b'],"usage":' + msgspec.json.encode(counts) + b"}\n\n" + DONE

    def _first(self, index: bytes, choice: int) -> bytes:
        if not self._generation.chat:
            return b""
        prompt = (
            self._generation.prompts[choice // self._generation.n] if self._generation.token_ids else None
        )
        role = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        ids = b',"prompt_token_ids":' + msgspec.json.encode(prompt)
        return self._head + index + role + ids + b"}\n\n"


def error(failure: RequestError) -> bytes:
    """An error in the shape of vLLM's ``ErrorResponse``."""
    details = {
        "message": str(failure),
        "type": failure.kind,
        "param": failure.param,
        "code": failure.status,
    }
    return msgspec.json.encode({"error": details})


def models(name: str, max_model_len: int, created: int) -> bytes:
    card = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "warmroute",
        "root": name,
        "parent": None,
        "max_model_len": max_model_len,
    }
    return msgspec.json.encode({"object": "list", "data": [card]})


def tokenized(tokens: list[int], max_model_len: int) -> bytes:
    return msgspec.json.encode(
        {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": None}
    )


def unknown_model(name: str, served: str) -> RequestError:
    return RequestError(
        f"The model `{name}` does not exist. Valid aliases: {served}.",
        status=404,
        kind="NotFoundError",
        param="model",
    )
