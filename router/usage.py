"""Asks an engine for the usage that a stream's client did not ask for, and takes it out of the answer
again.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from router.prompt import RequestBody, given

MOST_HELD_BYTES = 256 * 1024
"""An event longer than this is passed on unread: the usage chunk is short."""
_END = re.compile(rb"\r?\n\r?\n")
_FINISH = re.compile(rb'"finish_reason": ?"')
_TRUE = Raw(b"true")
_FALSE = Raw(b"false")

_encode = msgspec.json.Encoder().encode


def asking_for_usage(body: bytes, read: RequestBody) -> bytes | None:
    """The body of a stream's request with ``stream_options.include_usage``; None where the client asks for it
    already, wants no stream, or gives options that are none.

    The options go to the end: of a repeated key, JSON parsers take the last (Python's ``json``, which vLLM's
    server reads bodies with, does).
    """
    if read.stream is not True:
        return None
    options: dict[str, Raw] = {}
    if given(read.stream_options):
        try:
            options = msgspec.json.decode(read.stream_options, type=dict[str, Raw])
        except msgspec.MsgspecError:
            return None
        if bytes(options.get("include_usage", _FALSE)) not in (b"false", b"null"):
            return None
    options["include_usage"] = _TRUE
    if "continuous_usage_stats" in options:
        # Without usage this does nothing; with it, every chunk would change.
        options["continuous_usage_stats"] = _FALSE
    head = body.rstrip(b" \t\r\n").removesuffix(b"}")
    return head + b',"stream_options":' + _encode(options) + b"}"


class _Chunk(msgspec.Struct):
    choices: list[Raw] | None = None
    usage: Raw = Raw(b"null")
    system_fingerprint: str | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class UnaskedUsage:
    """Takes the usage chunk (``choices: []``) out of a stream's bytes; all others stay as they are. It stays
    too where the chunks before it have usage: nobody asked for that, so the engine gives it to all
    (``--enable-force-include-usage``).

    Only whole events pass, but for long ones. The one that finishes a choice waits for the next: with usage,
    vLLM (0.32: ``chat_completion/serving.py``, ``completion/serving.py``) writes its ``system_fingerprint``
    into the usage chunk, and without it into that one, as the last field.
    """

    def __init__(self) -> None:
        self._held = b""
        self._finish = b""
        self._in_long = False
        self._for_all = False

    def feed(self, chunk: bytes) -> bytes:
        """What the client gets now."""
        if not self._held and not self._finish and _is_plain(chunk):
            return chunk
        text = self._held + chunk
        passed, start = [], 0
        for end in _END.finditer(text, max(0, len(self._held) - 3)):
            event = text[start : end.end()]
            passed.append(event if self._in_long else self._event(event))
            start, self._in_long = end.end(), False
        self._held = text[start:]
        if self._in_long or len(self._held) > MOST_HELD_BYTES:
            self._in_long = True
            passed.append(self._all_but_an_end())
        return b"".join(passed)

    def _all_but_an_end(self) -> bytes:
        """What is held of a long event, but for its last bytes: the event may end with the next ones."""
        held = self.end()
        self._held = held[-3:]
        return held[:-3]

    def end(self, *, is_whole: bool = True) -> bytes:
        """What was held back, when nothing comes any more; of a stream that is not whole, whole events."""
        held = self._finish + self._held if is_whole else self._finish
        self._finish = self._held = b""
        return held

    def _event(self, event: bytes) -> bytes:
        finish, self._finish = self._finish, b""
        if b'"usage"' in event:
            chunk = _with_usage(event)
            if chunk is not None and chunk.choices:
                self._for_all = True
            elif chunk is not None and not self._for_all:
                return _with_fingerprint(finish, chunk.system_fingerprint)
        if _FINISH.search(event):
            self._finish = event
            return finish
        return finish + event


def _is_plain(chunk: bytes) -> bool:
    """Whole events of which none is of interest: nearly all that ever come."""
    return (
        chunk.endswith(b"\n\n")
        and b'"usage"' not in chunk
        and b'"finish_reason":"' not in chunk
        and b'"finish_reason": "' not in chunk
    )


def _with_usage(event: bytes) -> _Chunk | None:
    """The chunk of an event, if it is one that has usage: with choices, or with nothing else to say."""
    data = event.strip()
    if not data.startswith(b"data:"):
        return None
    try:
        chunk = _decode_chunk(data[5:])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return chunk if chunk.choices is not None and bytes(chunk.usage) != b"null" else None


def _with_fingerprint(finish: bytes, fingerprint: str | None) -> bytes:
    """The finishing event as it is without usage."""
    if fingerprint is None or not finish or b'"system_fingerprint"' in finish:
        return finish
    head, brace, tail = finish.rpartition(b"}")
    return head + b',"system_fingerprint":' + _encode(fingerprint) + brace + tail
