"""``prefix-hash``: prompts that begin alike go to the same stream, without asking what is cached where."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw
from xxhash import xxh3_128_digest

from router.decision import Ask, Candidate, RandomSource, Ranked
from router.policies import least_loaded
from router.policies.keyed import Keyed
from router.policies.rendezvous import BOUND, SPARE_REQUESTS, by_key
from router.policies.volatile import steady
from router.prompt import RequestBody, given

LEADING_ROLES = frozenset({"system", "developer"})
CHARS_PER_TOKEN = 4
"""The guess at where so many tokens of a text end."""
DATES = r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"
TIMES = r"\b\d\d?:\d\d(?::\d\d)?(?: ?[AaPp][Mm])?\b"
UUIDS = r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"


class PrefixHash(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the prefix ends. ``boundary`` ``messages``: behind the tools, the system prompt, and the first
    ``messages`` messages after it; of a text without messages, behind as many characters as ``tokens`` tokens
    have. ``tokens``: behind the first ``tokens`` token ids, for which an engine may have to be asked, or in
    front of the first image, where that comes before. Where no id there is known, the text there counts.

    What matches a regular expression of ``volatile`` is left out of messages and texts: by default dates,
    times and UUIDs. A stream gets no more than ``bound`` times the mean of requests in flight, and
    ``spare_requests`` at least.
    """

    boundary: Literal["messages", "tokens"] = "messages"
    messages: Annotated[int, Meta(ge=0)] = 1
    tokens: Annotated[int, Meta(ge=1)] = 512
    volatile: tuple[str, ...] = (DATES, TIMES, UUIDS)
    bound: Annotated[float, Meta(ge=1)] = BOUND
    spare_requests: Annotated[int, Meta(ge=1)] = SPARE_REQUESTS

    def __post_init__(self) -> None:
        for pattern in self.volatile:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"volatile: {pattern!r} is no regular expression: {error}") from error

    def key(self, request: Keyed) -> bytes | None:
        """A hash of the prefix."""
        chat, text = given(request.read.messages), None
        if request.ids is not None and (self.boundary == "tokens" or not chat):
            text = request.ids[: self.tokens].tobytes()
        elif self.boundary == "messages":
            text = self._messages(request.read) if chat else self._text(request.read)
        elif chat:
            text = self._before_media(request.read)
        if text is None:
            return None
        salt = request.read.cache_salt
        return xxh3_128_digest(text + (salt.encode("utf-8", "replace") if isinstance(salt, str) else b""))

    def _messages(self, body: RequestBody) -> bytes | None:
        try:
            messages = msgspec.json.decode(body.messages, type=list[_Message])
        except msgspec.MsgspecError:
            return None
        parts = [bytes(body.tools)] if given(body.tools) else []
        parts += (f"{m.role}:".encode() + _text_of(m.content) for m in _leading(messages, self.messages))
        return steady(b"\n".join(parts), self.volatile)

    def _before_media(self, body: RequestBody) -> bytes | None:
        """As many characters as ``tokens`` tokens have; None where nothing stands there, or all is text."""
        said = [bytes(body.tools)] if given(body.tools) else []
        try:
            for role, part in _parts(body.messages):
                if part is None:
                    return steady(b"\n".join(said), self.volatile)[: CHARS_PER_TOKEN * self.tokens] or None
                said.append(f"{role}:{part}".encode())
        except msgspec.MsgspecError:
            return None
        return None

    def _text(self, body: RequestBody) -> bytes | None:
        try:
            prompt = msgspec.json.decode(body.prompt, type=str | list[str])
        except msgspec.MsgspecError:
            return None
        text = prompt if isinstance(prompt, str) else next(iter(prompt), "")
        return steady(text.encode()[: CHARS_PER_TOKEN * self.tokens], self.volatile) if text else None

    def rank(self, ask: Ask, candidates: Sequence[Candidate], rng: RandomSource) -> list[Ranked]:
        """By the prefix's key; by load without one."""
        if ask.key is None:
            return least_loaded.rank(ask, candidates, rng)
        return by_key("prefix hash", ask.key, candidates, bound=self.bound, spare=self.spare_requests)


class _Message(msgspec.Struct):
    role: str = ""
    content: Raw = Raw(b"")


class _Part(msgspec.Struct):
    type: str
    text: str


class _AnyPart(msgspec.Struct):
    text: Any = None


def _parts(messages: Raw) -> Iterator[tuple[str, str | None]]:
    """Role and text of each part of each message, None for what is no text. Raises MsgspecError."""
    for message in msgspec.json.decode(messages, type=list[_Message]):
        content = message.content if given(message.content) else b'""'
        said = msgspec.json.decode(content, type=str | list[_AnyPart | str])
        for part in [said] if isinstance(said, str) else said:
            text = part if isinstance(part, str) else part.text
            yield message.role, text if isinstance(text, str) else None


def _text_of(content: Raw) -> bytes:
    """A message's text, without the escapes of JSON: in ``\\n12:30`` no pattern would find the time. What is
    more than text as it came.
    """
    try:
        said = msgspec.json.decode(content, type=str | list[_Part] | None)
    except msgspec.MsgspecError:
        return bytes(content)
    texts = [said or ""] if not isinstance(said, list) else [f"{part.type}:{part.text}" for part in said]
    return "\n".join(texts).encode()


def _leading(messages: Sequence[_Message], more: int) -> Iterator[_Message]:
    for message in messages:
        if message.role not in LEADING_ROLES:
            more -= 1
            if more < 0:
                return
        yield message
