"""What the router reads of a request: the model, the prompt and what the prompt's tokens depend on.

The body is parsed once and forwarded as it came. Fields that only the engine needs stay raw bytes, so that a
prompt of 100k tokens costs the event loop a scan and nothing more. Field names and meanings are of vLLM 0.32
(``entrypoints/openai/chat_completion/protocol.py``, ``entrypoints/openai/completion/protocol.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec
from msgspec import Raw

from router.errors import RefusedError
from router.headers import shown

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
PRIORITY = "X-Vllm-Priority"
MOST_PRIORITY = 1 << 31

_ABSENT = Raw(b"")
_NULL = b"null"


class RequestBody(msgspec.Struct, frozen=True, dict=True):
    """The fields of a request that routing depends on; absent ones are empty Raw or None."""

    model: str | None = None
    messages: Raw = _ABSENT
    prompt: Raw = _ABSENT
    prompt_embeds: Raw = _ABSENT
    tools: Raw = _ABSENT
    documents: Raw = _ABSENT
    chat_template: Raw = _ABSENT
    chat_template_kwargs: Raw = _ABSENT
    reasoning_effort: Raw = _ABSENT
    add_generation_prompt: Raw = _ABSENT
    continue_final_message: Raw = _ABSENT
    add_special_tokens: Raw = _ABSENT
    truncate_prompt_tokens: Raw = _ABSENT
    cache_salt: Any = None
    n: Any = None
    echo: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    use_beam_search: Any = None
    stream: Any = None
    stream_options: Raw = _ABSENT
    priority: Any = None

    @cached_property
    def said(self) -> Any:
        """The messages as plain values, made once and not to be changed.

        Raises ValueError (of which msgspec's errors are) for what is no JSON.
        """
        return plain(self.messages)

    @property
    def reads_cache(self) -> bool:
        """Whether the engine reads its prefix cache for this request: not when it owes log probabilities of
        the prompt.
        """
        return self.prompt_logprobs is None and not (
            self.echo and self.logprobs is not None and self.logprobs is not False
        )

    @property
    def samples_once(self) -> bool:
        """Whether one sequence is generated: with more, siblings hit each other's blocks."""
        return self.n in (None, 1) and not self.use_beam_search


def given(field: Raw) -> bool:
    """Whether the client set the field to something."""
    if field is _ABSENT:
        return False
    text = memoryview(field)
    # Not by ``bytes(field)`` alone: that copies a prompt.
    return len(text) > len(_NULL) or bytes(text) not in (b"", _NULL)


def plain(field: Raw) -> Any:
    """The value of a field, as the standard library reads it, which vLLM does too.

    msgspec reads it three times as fast, and the same where it reads it at all.
    """
    try:
        return _decode_any(field)
    except msgspec.MsgspecError:
        return json.loads(bytes(field))


# Its own way takes 20 us for some numbers, 1e308 say: 250 kB of them held the loop for a second.
_decode_any = msgspec.json.Decoder(float_hook=float).decode
_decode_body = msgspec.json.Decoder(RequestBody, float_hook=float).decode


class UnreadableBodyError(Exception):
    """JSON that the engine may take but that msgspec refuses (NaN, a byte order mark, lone surrogates): it is
    relayed by load, to a replica of ``model``.
    """

    def __init__(self, model: str | None) -> None:
        super().__init__()
        self.model = model


def read_body(body: bytes, path: str = "") -> RequestBody:
    """The parts of a request body that routing needs, without what its ``path`` does not know: a completion
    has no messages, which vLLM passes over there, as a chat has no prompt.

    Raises RefusedError (400, as vLLM answers) for what is no JSON object or names a model that is no text,
    and UnreadableBodyError for JSON that only the standard library reads.
    """
    try:
        read = _decode_body(body)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableBodyError(_model_as_vllm_reads_it(body, error)) from error
    if path == COMPLETIONS_PATH and given(read.messages):
        return msgspec.structs.replace(read, messages=_ABSENT)
    if path == CHAT_PATH and given(read.prompt):
        return msgspec.structs.replace(read, prompt=_ABSENT)
    return read


def _model_as_vllm_reads_it(body: bytes, why: Exception) -> str | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        detail = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be decoded"
        raise RefusedError(
            400, "Bad Request", f"The body is not valid JSON: {detail}", reason="bad JSON"
        ) from why
    if not isinstance(value, dict):
        raise RefusedError(400, "Bad Request", "The body must be a JSON object", reason="bad JSON") from why
    model = value.get("model")
    if model is not None and not isinstance(model, str):
        raise RefusedError(
            400, "Bad Request", "`model` must be a string", param="body.model", reason="bad model"
        ) from why
    return None if model is None else shown(model)


class _ModelOnly(msgspec.Struct, frozen=True):
    model: str | None = None


_decode_model = msgspec.json.Decoder(_ModelOnly).decode


def read_model(body: bytes) -> RequestBody:
    """No more of a body than its model: all else is passed over."""
    try:
        return RequestBody(model=_decode_model(body).model)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return RequestBody()


_MODEL_PART = re.compile(
    rb'\r\nContent-Disposition: *form-data; *name="?model"?\r\n'
    rb"(?:[^\r\n]{1,256}\r\n){0,8}\r\n([^\r\n]{0,1024})\r\n",
    re.IGNORECASE,
)
_MODEL_NAMED = (b'name="model"\r\n', b"name=model\r\n")
_MOST_PARTS = 100
"""So many places that could be the part with the model are looked at: a file may hold any number of them."""


def _model_in_form(body: bytes) -> str | None:
    for named in _MODEL_NAMED:
        at = -1
        for _ in range(_MOST_PARTS):
            if (at := body.find(named, at + 1)) < 0:
                break
            # The line's beginning, and the rest of its part, are looked at from its end.
            part = _MODEL_PART.match(body, max(0, body.rfind(b"\r\n", max(0, at - 100), at)))
            if part is not None:
                return part[1].decode("utf-8", "replace")
    return None


def model_of(body: bytes, content_type: str) -> str | None:
    """The model that a request of any other path names: as a field of JSON, or as one of a form (audio)."""
    kind = content_type.lower()
    if kind.startswith("multipart/form-data"):
        return _model_in_form(body)
    if not body or "json" not in kind:
        return None
    try:
        return _decode_model(body).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        try:
            return _model_as_vllm_reads_it(body, error)
        except RefusedError:
            return None


class _Other(msgspec.Struct, frozen=True):
    """Where bodies of other paths say the same: ``input`` of responses and embeddings, ``query`` of rerank,
    ``instructions`` of responses and ``system`` of messages, which is a system prompt.
    """

    model: str | None = None
    messages: Raw = _ABSENT
    prompt: Raw = _ABSENT
    input: Raw = _ABSENT
    query: Raw = _ABSENT
    system: Raw = _ABSENT
    instructions: Raw = _ABSENT
    tools: Raw = _ABSENT
    cache_salt: Any = None
    stream: Any = None
    priority: Any = None


_decode_other = msgspec.json.Decoder(_Other, float_hook=float).decode


def read_other(body: bytes, content_type: str) -> RequestBody:
    """What a request of any other path says, in the words of the paths that have prompts; no more than its
    model where that is all that can be read.
    """
    if not body or "json" not in content_type.lower():
        return RequestBody(model=model_of(body, content_type))
    try:
        read = _decode_other(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return RequestBody(model=model_of(body, content_type))
    prompt = next((text for text in (read.prompt, read.input, read.query) if given(text)), _ABSENT)
    messages = read.messages
    if not given(messages) and _is_list_of_objects(prompt):
        messages, prompt = prompt, _ABSENT
    system = read.system if given(read.system) else read.instructions
    if given(system):
        messages = _behind_system(system, messages, prompt)
    return RequestBody(
        model=read.model,
        messages=messages,
        prompt=prompt,
        tools=read.tools,
        cache_salt=read.cache_salt,
        stream=read.stream,
        priority=read.priority,
    )


def _is_list_of_objects(field: Raw) -> bool:
    text = bytes(field)
    return text[:1] == b"[" and text[1:].lstrip()[:1] == b"{"


def _behind_system(system: Raw, messages: Raw, prompt: Raw) -> Raw:
    """Messages that begin with a system prompt, as chat has them."""
    first = b'[{"role":"system","content":' + bytes(system) + b"}"
    text = bytes(messages)
    if text[:1] == b"[":
        rest = text[1:].lstrip()
        return Raw(first + (rest if rest[:1] == b"]" else b"," + rest))
    said = b',{"role":"user","content":' + bytes(prompt) + b"}" if given(prompt) else b""
    return Raw(first + said + b"]")


def priority_of(headers: Mapping[str, str], body: object) -> int:
    """How early a request is wanted, lower is earlier: by its ``X-Vllm-Priority``, else by ``priority`` in
    its ``body``, as vLLM reads them (0.32: ``entrypoints/generate/base/serving.py``); 0 for what is no
    number.
    """
    for told in (headers.get(PRIORITY), body):
        if told is None or isinstance(told, bool):
            continue
        try:
            priority: int = int(told)  # type: ignore[call-overload]
        except (TypeError, ValueError, OverflowError):
            continue
        return max(-MOST_PRIORITY, min(MOST_PRIORITY, priority))
    return 0
