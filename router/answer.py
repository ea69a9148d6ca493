"""What an answer says about itself: the usage, and for a recorder the text.

Read beside the bytes, never changing them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

TAIL_BYTES = 16 * 1024
"""Kept of a stream's end: the usage stands in its last chunk, in front of ``[DONE]``."""
BODY_LIMIT_BYTES = 8 * 1024 * 1024
"""Bodies beyond this are not read for usage."""
_DONE = re.compile(rb"[\r\n]data: ?\[DONE\]")
_DONE_BYTES = 13
"""The longest that it matches. JSON has no line breaks, so no text of an answer looks like it."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    message: _Delta | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _UsageOnly(msgspec.Struct):
    usage: _Usage | None = None


class _Whole(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[_Choice] = []


class Answer(msgspec.Struct, frozen=True):
    """``prompt_tokens``, ``cached_tokens`` and ``completion_tokens`` as the engine reported them, None where
    it did not. ``text``, ``finish`` and ``token_ids`` are of the first choice, and only read for a recorder.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    text: str | None = None
    finish: str | None = None
    token_ids: tuple[int, ...] | None = None


NOTHING = Answer()

_decode_usage = msgspec.json.Decoder(_UsageOnly).decode
_decode_whole = msgspec.json.Decoder(_Whole).decode


class AnswerTap:
    """Sees the bytes of one answer as they pass. ``whole`` keeps all of a stream, for its text.

    ``done``: the stream has said ``[DONE]``. Nothing comes after it, and clients hang up on it.
    """

    def __init__(self, *, is_stream: bool, whole: bool = False) -> None:
        self._is_stream = is_stream
        self._whole = whole
        self._chunks: list[bytes] = []
        self._size = 0
        self._line = b"\n"
        self.done = False

    def feed(self, chunk: bytes) -> None:
        if self._is_stream and not self.done:
            line = self._line + chunk
            if b"[DONE]" in line:
                self.done = _DONE.search(line) is not None
            self._line = line[-_DONE_BYTES:]
        self._chunks.append(chunk)
        self._size += len(chunk)
        if self._is_stream and not self._whole and self._size > 2 * TAIL_BYTES:
            self._chunks = [b"".join(self._chunks)[-TAIL_BYTES:]]
            self._size = TAIL_BYTES
        elif self._size > BODY_LIMIT_BYTES:
            self._chunks, self._size = [], BODY_LIMIT_BYTES + 1

    def answer(self) -> Answer:
        """What the bytes so far say."""
        content = b"".join(self._chunks)
        try:
            if self._whole:
                parts = [_decode_whole(part) for part in (_events(content) if self._is_stream else [content])]
                return _whole_answer(parts)
            if not self._is_stream:
                return _usage_answer(_decode_usage(content).usage)
            return _usage_answer(self._last_usage(content))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return NOTHING

    @staticmethod
    def _last_usage(content: bytes) -> _Usage | None:
        for part in reversed(list(_events(content))):
            if b'"usage"' in part:
                try:
                    usage = _decode_usage(part).usage
                except msgspec.MsgspecError:
                    continue
                if usage is not None:
                    return usage
        return None


def _events(content: bytes) -> Iterator[bytes]:
    """The JSON of each ``data:`` line of a stream."""
    for line in content.split(b"\n"):
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data.startswith(b"{"):
                yield data


def _usage_answer(usage: _Usage | None) -> Answer:
    if usage is None:
        return NOTHING
    details = usage.prompt_tokens_details
    return Answer(usage.prompt_tokens, details.cached_tokens if details else None, usage.completion_tokens)


def _whole_answer(parts: list[_Whole]) -> Answer:
    usage = next((part.usage for part in reversed(parts) if part.usage is not None), None)
    first = [choice for part in parts for choice in part.choices if choice.index == 0]
    texts = [_text(choice) for choice in first]
    ids = [choice.token_ids for choice in first if choice.token_ids is not None]
    said = _usage_answer(usage)
    return Answer(
        said.prompt_tokens,
        said.cached_tokens,
        said.completion_tokens,
        "".join(text for text in texts if text) if first else None,
        next((choice.finish_reason for choice in reversed(first) if choice.finish_reason), None),
        tuple(token for group in ids for token in group) if ids else None,
    )


def _text(choice: _Choice) -> str | None:
    said = choice.message or choice.delta
    return choice.text if said is None else said.content
