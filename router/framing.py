"""Where a body ends (RFC 9112, section 6.3), and its bytes without what frames them."""

from __future__ import annotations

import re
from enum import Enum
from typing import Protocol

from aiohttp.http_parser import RawResponseMessage

BODILESS_STATUSES = frozenset({101, 204, 304})


class FramingError(Exception):
    """Bytes that are no body of the kind that the head announced. ``before`` are those of the body that came
    in front of them, in the same piece.
    """

    before = b""


class Framing(Protocol):
    """Reads one body. ``over``: all of it has come. ``rest``: the bytes that came with its end, and are no
    part of it; ``trailers`` are the lines behind the last chunk, as they came.
    """

    over: bool
    rest: bytes
    trailers: bytes

    def feed(self, data: bytes) -> bytes:
        """What ``data`` has of the body. Raises FramingError."""
        ...

    def close(self) -> None:
        """The connection was closed in an orderly way: that may be the end, or may not."""
        ...


def framing_of(message: RawResponseMessage, *, bodiless: bool, trailer_bytes: int) -> Framing:
    """How the body behind an answer's head is framed. ``bodiless``: that of an answer to HEAD.
    ``trailer_bytes`` is the most that trailers may take. The head's parser has refused a length that is none,
    and one beside chunks.
    """
    if bodiless or message.code in BODILESS_STATUSES:
        return Sized(0)
    if message.chunked:
        return Chunked(trailer_bytes)
    length = message.headers.get("Content-Length")
    if length is None or "Transfer-Encoding" in message.headers:
        return UntilClose()
    return Sized(int(length))


class Sized:
    """A body with a length, bytes."""

    trailers = b""

    def __init__(self, length: int) -> None:
        self._left = length
        self.over = not length
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        if len(data) > self._left:
            data, self.rest = data[: self._left], data[self._left :]
        self._left -= len(data)
        self.over = not self._left
        return data

    def close(self) -> None:
        """What is not there by now does not come."""


class UntilClose:
    """A body that ends with its connection."""

    trailers = rest = b""

    def __init__(self) -> None:
        self.over = False

    def feed(self, data: bytes) -> bytes:
        return data

    def close(self) -> None:
        self.over = True


class _Line(Enum):
    """What a line between and behind chunks is."""

    SIZE = "a chunk's size"
    END_OF_DATA = "the end of a chunk"
    TRAILER = "a trailer"


SIZE, END_OF_DATA, TRAILER = _Line


SIZE_LINE_BYTES = 4096
"""The most that a chunk's size may take, with its extensions: they are looked through again with each piece
that comes, be that a byte.
"""
_SIZE_BEGUN = re.compile(rb"[0-9A-Fa-f]{0,16}[ \t]*(?:;[^\r\n]*)?\r?")


class Chunked:
    """A body in chunks (RFC 9112, section 7.1); extensions of chunks are dropped."""

    def __init__(self, trailer_bytes: int) -> None:
        self._trailer_bytes = trailer_bytes
        self._awaited = SIZE
        self._left = 0
        self._held = b""
        self.over = False
        self.rest = self.trailers = b""

    def feed(self, data: bytes) -> bytes:
        if self._held:
            data, self._held = self._held + data, b""
        if self._awaited is SIZE and (whole := _only_chunk(data)):
            return whole
        pieces: list[bytes] = []
        try:
            self._take(data, pieces)
        except FramingError as error:
            error.before = b"".join(pieces)
            raise
        return b"".join(pieces)

    def _take(self, data: bytes, pieces: list[bytes]) -> None:
        at = 0
        while not self.over:
            if self._awaited is SIZE:
                at = _small_chunks(data, at, pieces)
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                pieces.append(piece)
            end = -1 if self._left else data.find(b"\r\n", at)
            if end < 0:
                self._hold(data[at:])
                return
            self._take_line(data[at:end])
            at = end + 2
        self.rest = data[at:]

    def close(self) -> None:
        """What is not there by now does not come."""

    def _size(self, line: bytes) -> int:
        return _number(line if line.isalnum() else _without_extension(line))

    def _hold(self, line: bytes) -> None:
        """The beginning of a line waits for its end."""
        most = self._trailer_bytes if self._awaited is TRAILER else SIZE_LINE_BYTES
        if len(line.removesuffix(b"\r")) > most or self._cannot_end(line):
            raise FramingError(f"{self._awaited.value} does not end")
        self._held = line

    def _cannot_end(self, line: bytes) -> bool:
        if self._awaited is END_OF_DATA:
            return line not in (b"", b"\r")
        return self._awaited is SIZE and _SIZE_BEGUN.fullmatch(line) is None

    def _take_line(self, line: bytes) -> None:
        if self._awaited is SIZE:
            if len(line) > SIZE_LINE_BYTES:
                raise FramingError(f"a chunk's size takes more than {SIZE_LINE_BYTES} bytes")
            self._left = self._size(line)
            self._awaited = END_OF_DATA if self._left else TRAILER
        elif self._awaited is END_OF_DATA:
            if line:
                raise FramingError("a chunk is longer than it says")
            self._awaited = SIZE
        elif line:
            self.trailers += line + b"\r\n"
            if len(self.trailers) > self._trailer_bytes:
                raise FramingError(f"the trailers take more than {self._trailer_bytes} bytes")
        else:
            self.over = True


_EXTENDED = re.compile(rb"([0-9A-Fa-f]+);[\t\x20-\x7e\x80-\xff]*")


class StrictlyChunked(Chunked):
    """A body in chunks as clients have to write them: what follows a size is an extension or nothing."""

    def _size(self, line: bytes) -> int:
        extended = _EXTENDED.fullmatch(line)
        return _number(line if extended is None else extended[1])


_SIZES = {b"%x" % size: size for size in range(1, 1024)}
"""The sizes that chunks of events and of texts have, as they are written nearly always."""


def _only_chunk(data: bytes) -> bytes:
    """The data of a chunk that is all there is, as the pieces of a stream are; nothing where it is not so."""
    start = data.find(b"\r\n", 0, 12) + 2
    if start > 2 and data.endswith(b"\r\n"):
        line = data[: start - 2]
        size = _SIZES.get(line) or (line.isalnum() and _number(line))
        if size == len(data) - start - 2:
            return data[start:-2]
    return b""


def _small_chunks(data: bytes, at: int, pieces: list[bytes]) -> int:
    """Takes whole chunks from ``at`` on, one behind the other, and returns where that ends: somebody may send
    a byte in each.
    """
    while (end := data.find(b"\r\n", at, at + 5)) > 0 and (size := _SIZES.get(data[at:end])) is not None:
        stop = end + 2 + size
        if data[stop : stop + 2] != b"\r\n":
            break
        pieces.append(data[end + 2 : stop])
        at = stop + 2
    return at


def _number(digits: bytes) -> int:
    """Raises FramingError."""
    try:
        # Python's int takes signs, underscores and 0x, too.
        if digits.isalnum() and len(digits) < 16 and not digits.startswith((b"0x", b"0X")):
            return int(digits, 16)
    except ValueError:
        pass
    raise FramingError("a chunk's size is no number")


def _without_extension(line: bytes) -> bytes:
    return b"" if b"\n" in line or b"\r" in line else line.partition(b";")[0].rstrip(b" \t")
