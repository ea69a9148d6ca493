"""The exact token ids that the engine will see, or None with a reason.

Ids in the request are taken as they are. Text and messages are tokenised here, where the model has a local
tokenizer that can be trusted with them, or else by an engine's own ``/tokenize`` (vLLM 0.32:
``entrypoints/serve/tokenize/protocol.py``), whose answers are kept by a hash of what was asked.
"""

from __future__ import annotations

import asyncio
import io
import random
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec
from msgspec import Raw
from xxhash import xxh3_128_digest

from events.schema import token_array
from router import fallback
from router.fallback import Fallback
from router.local_tokens import LocalTokens
from router.prompt import RequestBody, given
from router.replicas import Replica
from router.token_cache import TokenCache

MISSING_FOR_S = 60.0
"""How long an engine without ``/tokenize`` is not asked again."""
HEDGE_SHARE = 0.25
"""How much of the deadline a replica may be silent for before another one is asked too."""
SLOW_FOR_S = 10.0
"""How long such a replica is asked after the others."""
QUARTER_S = 900
AT_ONCE_BYTES = 256 * 1024
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
CHARS_PER_TOKEN = 4
MEDIA_TOKENS = 1000
"""The guess at what an image comes to: one of 900 x 900 pixels in Qwen2.5-VL has 1,000 tokens, any in LLaVA
1.5 has 576.
"""
_CHAT_FIELDS = (
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
)


class Tokens(msgspec.Struct, frozen=True):
    """``ids`` of the prompt (of the first one, where the request holds several), or None and why.

    ``prompts`` is how many prompts the request holds. ``not_here`` is why a local tokenizer that the model
    has was not used. ``guessed_tokens``, where not 0, is a guess at how many tokens a prompt has of which at
    most the beginning is known: ``ids`` are that then.
    """

    ids: array[int] | None
    why_not: Fallback | None = None
    prompts: int = 1
    not_here: Fallback | None = None
    guessed_tokens: int = 0

    @property
    def whole(self) -> bool:
        """Whether ``ids`` are all of the prompt."""
        return self.ids is not None and not self.guessed_tokens


class _TokenizeAnswer(msgspec.Struct):
    tokens: list[int]


class _ErrorInfo(msgspec.Struct):
    param: str | None = None
    type: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorInfo


_decode_answer = msgspec.json.Decoder(_TokenizeAnswer).decode
_decode_error = msgspec.json.Decoder(_ErrorAnswer).decode
_encode = msgspec.json.Encoder().encode


def _no(why: Fallback, not_here: Fallback | None = None) -> Tokens:
    return Tokens(None, why, not_here=not_here)


def tokens_in_request(body: RequestBody) -> Tokens | None:
    """The ids that the request itself holds; the reason where not all can be known; None where an engine
    must be asked.
    """
    if given(body.truncate_prompt_tokens):
        return _no(fallback.TRUNCATED)
    if given(body.prompt_embeds):
        return _no(fallback.PROMPT_EMBEDS)
    if given(body.messages):
        return _check_messages(body)
    if not given(body.prompt):
        return _no(fallback.NO_PROMPT)
    return _ids_in_prompt(body.prompt)


async def read_tokens(body: RequestBody) -> Tokens | None:
    """As :func:`tokens_in_request`; of much, in a thread. Nobody else has a turn there either while one JSON
    text is read, so one of too many values does not come here (``census``).
    """
    if len(memoryview(body.messages)) + len(memoryview(body.prompt)) <= AT_ONCE_BYTES:
        return tokens_in_request(body)
    return await asyncio.to_thread(tokens_in_request, body)


def is_plain_chat(body: RequestBody) -> bool:
    """Whether it is a chat that holds nothing but texts, as can be seen without reading it: content that is
    parts would be a list in the list of messages. A bracket in a text hides that.
    """
    messages = bytes(body.messages)
    return messages.startswith(b"[") and messages.find(b"[", 1) < 0


def _check_messages(body: RequestBody) -> Tokens | None:
    try:
        texts, media = _contents(body.said)
    except (TypeError, ValueError):
        return _no(fallback.UNREADABLE_MESSAGES)
    if not media:
        return None
    chars = len(bytes(body.tools)) + sum(len(text) for text in texts)
    return Tokens(None, fallback.MULTIMODAL, guessed_tokens=chars // CHARS_PER_TOKEN + media * MEDIA_TOKENS)


def _contents(messages: Any) -> tuple[list[str], int]:
    """The texts in messages, and how many parts are no text. Raises TypeError for what are no messages."""
    texts: list[str] = []
    media = 0
    if not isinstance(messages, list):
        raise TypeError("messages")
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else message
        if isinstance(message, dict) and isinstance(content, str | None):
            texts.append(content or "")
        elif isinstance(message, dict) and isinstance(content, list):
            parts = [_part(part) for part in content]
            texts += [text for _, text in parts]
            media += sum(kind not in TEXT_PARTS for kind, _ in parts)
        else:
            raise TypeError("message")
    return texts, media


def _part(part: Any) -> tuple[str, str]:
    """The type and the text of one part of a content."""
    if isinstance(part, str):
        return "text", part
    kind = part.get("type", "") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise TypeError("part")
    text = part.get("text")
    return kind, text if isinstance(text, str) else ""


def _ids_in_prompt(prompt: Raw) -> Tokens | None:
    """``[int]`` and ``[[int]]`` hold ids; text and ``[text]`` do not.

    Of several prompts the first decides.
    """
    text = bytes(memoryview(prompt)[:64]).translate(None, b" \t\r\n")
    try:
        if text.startswith(b"[["):
            lists = msgspec.json.decode(prompt, type=list[list[int]])
            return Tokens(token_array(lists[0]), prompts=len(lists))
        if text.startswith(b"[") and not text.startswith((b'["', b"[]")):
            return Tokens(_ids(bytes(prompt)))
    except msgspec.MsgspecError:
        return _no(fallback.UNREADABLE_PROMPT)
    except ValueError:
        return _no(fallback.BAD_TOKEN_IDS)
    if text.startswith((b'"', b'["')):
        return None
    return _no(fallback.NO_PROMPT if text.startswith(b"[]") else fallback.UNREADABLE_PROMPT)


def _ids(text: bytes) -> array[int]:
    """The numbers of a list that is JSON, so many at a time that others have their turn in between."""
    ids = token_array([])
    at, last = text.index(b"[") + 1, text.rindex(b"]")
    while at < last:
        comma = text.find(b",", at + AT_ONCE_BYTES, last)
        end = last if comma < 0 else comma
        ids += token_array(msgspec.json.decode(b"[%b]" % text[at:end], type=list[int]))
        at = end + 1
    return ids


def tokenize_request(body: RequestBody) -> tuple[bytes, int] | None:
    """The body of ``POST /tokenize`` for this request, and how many prompts it holds; None if it cannot be
    made.
    """
    asked: dict[str, object] = {}
    if body.model:
        asked["model"] = body.model
    try:
        if given(body.messages):
            return _encode(asked | _chat_fields(body)), 1
        prompts = msgspec.json.decode(body.prompt, type=str | list[str])
    except msgspec.MsgspecError:
        return None
    texts = [prompts] if isinstance(prompts, str) else prompts
    asked["prompt"] = texts[0]
    if given(body.add_special_tokens):
        asked["add_special_tokens"] = body.add_special_tokens
    return _encode(asked), len(texts)


def _chat_fields(body: RequestBody) -> dict[str, object]:
    fields: dict[str, object] = {"messages": _as_chat_reads_them(body.messages)}
    fields |= {name: value for name in _CHAT_FIELDS if given(value := getattr(body, name))}
    kwargs: dict[str, Raw] = {}
    if given(body.chat_template_kwargs):
        kwargs = msgspec.json.decode(body.chat_template_kwargs, type=dict[str, Raw])
    # What chat knows as fields of its own and /tokenize does not goes the way that chat sends it to the
    # template.
    if given(body.documents):
        kwargs["documents"] = body.documents
    if given(body.reasoning_effort):
        kwargs.setdefault(
            "enable_thinking", Raw(b"false" if bytes(body.reasoning_effort) == b'"none"' else b"true")
        )
        kwargs["reasoning_effort"] = body.reasoning_effort
    if kwargs:
        fields["chat_template_kwargs"] = kwargs
    return fields


def _as_chat_reads_them(messages: Raw) -> object:
    """Chat takes ``reasoning_content`` for ``reasoning``, ``/tokenize`` does not know it."""
    if b'"reasoning_content"' not in bytes(messages):
        return messages
    renamed = msgspec.json.decode(messages, type=list[dict[str, Raw]])
    for message in renamed:
        reasoning = message.pop("reasoning_content", Raw(b"null"))
        if given(reasoning) and not given(message.get("reasoning", Raw(b"null"))):
            message["reasoning"] = reasoning
    return renamed


def _prompts(body: RequestBody) -> int:
    """How many prompts a request of text holds."""
    if given(body.messages) or bytes(memoryview(body.prompt)[:64]).lstrip()[:1] != b"[":
        return 1
    return len(msgspec.json.decode(body.prompt, type=list[Raw]))


class Tokenizer:
    """Gets the tokens of requests: from themselves, from local tokenizers, or from engines."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        timeout_s: float,
        cache: TokenCache,
        local: LocalTokens | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._session = session
        self._wall_clock = wall_clock
        self._timeout_s = timeout_s
        self._clock = clock
        self._rng = rng or random.Random()
        self._cache = cache
        self._local = local

    async def tokens(self, body: RequestBody, replicas: Sequence[Replica]) -> Tokens:
        """The tokens of a request that any of ``replicas`` may get. Never raises for what engines answer."""
        found = await read_tokens(body)
        if found is not None and found.why_not is not fallback.MULTIMODAL:
            return found
        base = next((known[0] for r in replicas if (known := r.resolve(body.model))), body.model or "")
        not_here: Fallback | None = None
        configured = self._configured(base, body.model, replicas)
        if found is not None:
            return await self._before_media(configured, body, found)
        if self._local is not None and configured is not None:
            ids = await self._local.tokens(configured, body)
            if not isinstance(ids, Fallback):
                return Tokens(ids, prompts=_prompts(body))
            if ids is fallback.TOKENIZE_TIMEOUT:
                return _no(ids, ids)
            not_here = ids
        return await self._from_engines(base, body, replicas, not_here)

    async def _before_media(self, configured: str | None, body: RequestBody, found: Tokens) -> Tokens:
        """What is known of a chat with images, to which an engine's ``/tokenize`` would have to look at them:
        the text in front of the first one, by a local tokenizer alone.
        """
        if self._local is None or configured is None:
            return found
        ids = await self._local.tokens_before_media(configured, body)
        if isinstance(ids, Fallback):
            return msgspec.structs.replace(found, not_here=ids)
        if not ids:
            return found
        return Tokens(ids, guessed_tokens=max(found.guessed_tokens, len(ids) + MEDIA_TOKENS))

    def _configured(self, base: str, asked: str | None, replicas: Sequence[Replica]) -> str | None:
        """The name that the request's model has among the local tokenizers: an alias will do."""
        if self._local is None:
            return None
        names = self._local.models()
        if asked in names:
            return asked
        same = (name for name in names if any(r.resolve(name) == (base, None) for r in replicas))
        return next(same, None)

    async def _from_engines(
        self, base: str, body: RequestBody, replicas: Sequence[Replica], not_here: Fallback | None
    ) -> Tokens:
        asked = tokenize_request(body)
        if asked is None:
            return _no(fallback.UNREADABLE_PROMPT, not_here)
        payload, prompts = asked
        key = xxh3_128_digest(payload + self._day_ends(body))
        kept = self._cache.get(base, key)
        if kept is not None:
            return Tokens(kept, prompts=prompts, not_here=not_here)
        era = self._cache.era(base)
        answer = await self._ask_any(payload, replicas)
        if isinstance(answer, Fallback):
            return _no(answer, not_here)
        self._cache.put(base, era, key, answer)
        return Tokens(answer, prompts=prompts, not_here=not_here)

    def _day_ends(self, body: RequestBody) -> bytes:
        """Other bytes before and behind midnight, wherever an engine is, as a chat's template may say the
        date: zones are whole quarters of an hour apart.
        """
        return str(int(self._wall_clock() // QUARTER_S)).encode() if given(body.messages) else b""

    async def ask(self, replica: Replica, payload: bytes) -> array[int] | Fallback:
        """What one engine's ``/tokenize`` answers, in the time that it has."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._ask(replica, payload)
        except TimeoutError:
            return fallback.TOKENIZE_TIMEOUT

    async def _ask_any(self, payload: bytes, replicas: Sequence[Replica]) -> array[int] | Fallback:
        """Asks one replica; another one too if that fails, or is silent for a quarter of the deadline.

        The first answer counts. Those that have lately been silent come last.
        """
        now = self._clock()
        able = [replica for replica in replicas if replica.tokenize_missing_until <= now]
        if not able:
            return fallback.TOKENIZE_MISSING
        self._rng.shuffle(able)
        able.sort(key=lambda replica: replica.tokenize_slow_until > now)
        asked: dict[asyncio.Task[array[int] | Fallback], Replica] = {}
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._first_answer(payload, able, asked)
        except TimeoutError:
            return fallback.TOKENIZE_TIMEOUT
        finally:
            for task in asked:
                task.cancel()

    async def _first_answer(
        self,
        payload: bytes,
        able: list[Replica],
        asked: dict[asyncio.Task[array[int] | Fallback], Replica],
    ) -> array[int] | Fallback:
        """``asked`` are the calls under way, for the caller to end."""
        why = fallback.TOKENIZE_FAILED
        while able or asked:
            if able:
                replica = able.pop(0)
                asked[asyncio.create_task(self._ask(replica, payload))] = replica
            patience_s = HEDGE_SHARE * self._timeout_s if able else None
            done, silent = await asyncio.wait(asked, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                asked.pop(task)
                answer = task.result()
                if not isinstance(answer, Fallback) or answer is fallback.TOKENIZE_REFUSED:
                    return answer
                why = answer
            if not done:
                for task in silent:
                    asked[task].tokenize_slow_until = self._clock() + SLOW_FOR_S
        return why

    async def _ask(self, replica: Replica, payload: bytes) -> array[int] | Fallback:
        try:
            async with self._session.post(
                replica.url + "/tokenize",
                data=io.BytesIO(payload),
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as answer:
                status, content = answer.status, await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            # A time-out of the whole is the caller's; an OSError here may be a TimeoutError of the connect.
            replica.last_error = f"/tokenize: {error or type(error).__name__}"
            return fallback.TOKENIZE_FAILED
        if status == 200:
            try:
                return token_array(_decode_answer(content).tokens)
            except (msgspec.MsgspecError, ValueError):
                replica.last_error = "/tokenize answered what makes no sense"
                return fallback.TOKENIZE_FAILED
        if status in (404, 405, 501) and not _is_about_model(content):
            replica.tokenize_missing_until = self._clock() + MISSING_FOR_S
            return fallback.TOKENIZE_MISSING
        return fallback.TOKENIZE_REFUSED if status < 500 else fallback.TOKENIZE_FAILED


def _is_about_model(content: bytes) -> bool:
    """Whether a 404 says that the model is unknown (and not the path)."""
    try:
        error = _decode_error(content).error
    except msgspec.MsgspecError:
        return False
    return error.param == "model" or error.type == "NotFoundError"
