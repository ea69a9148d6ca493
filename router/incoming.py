"""The requests of one connection, read from its bytes.

aiohttp's parser reads their heads, one at a time, and never sees a byte of a body: it would keep the trailers
of one to itself, and with something malformed behind a request in the same packet throw away the request.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
from aiohttp import EMPTY_PAYLOAD, HttpVersion10, HttpVersion11, StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import BadHttpMessage, HttpProcessingError
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from aiohttp.web_protocol import _ErrInfo
from multidict import CIMultiDictProxy

from router.framing import Framing, FramingError, Sized, StrictlyChunked
from router.headers import CONTENT_LENGTH, HOST, TRANSFER_ENCODING
from router.upstream import NO_TRAILERS

READ_AHEAD_BYTES = 256 * 1024
"""So much of a body is taken before somebody reads it, and so much again."""
REQUESTS_AHEAD = 32
"""So many requests are read before the first of them is answered."""
_BEFORE_TRAILERS = b"GET / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n"
"""A head that trailers are read behind: what says where a body ends, or whose it is, is refused there."""
_HOST = re.compile(r"[\w.~!$&'()*+,;=%\[\]:-]*", re.ASCII)
"""What the names and addresses of hosts are made of (RFC 3986, section 3.2.2), and their ports."""


class RequestLimits(msgspec.Struct, frozen=True):
    """The most bytes that a header (or all trailers) and a target may take, and how many headers there may
    be.
    """

    header_bytes: int
    target_bytes: int
    headers: int


class BodyAtHand:
    """A body that came whole, with its head: what aiohttp's stream can be asked for, of what is there."""

    __slots__ = ("_content", "trailers")

    def __init__(self, content: bytes, trailers: CIMultiDictProxy[str]) -> None:
        self._content = content
        self.trailers = trailers

    def is_eof(self) -> bool:
        return True

    def at_eof(self) -> bool:
        return not self._content

    def read_nowait(self) -> bytes:
        content, self._content = self._content, b""
        return content

    async def readany(self) -> bytes:
        return self.read_nowait()

    def set_exception(self, *_: BaseException) -> None:
        """Nobody waits for more of it."""


class ComingBody(StreamReader):
    """A body that is still on its way. Its trailers are there when it has ended."""

    __slots__ = ("trailers",)

    def __init__(self, protocol: BaseProtocol, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(protocol, READ_AHEAD_BYTES, loop=loop)
        self.trailers: CIMultiDictProxy[str] = NO_TRAILERS


Received = tuple[RawRequestMessage | _ErrInfo, Any]
"""A head and its body; or what was wrong with the bytes, which is the last."""


class RequestReader:
    """Reads requests until one that is the last. ``in_head``: one has begun, and its head is not whole;
    ``in_body``: a body is. ``is_broken``: what came there is none.
    """

    def __init__(
        self, protocol: BaseProtocol, loop: asyncio.AbstractEventLoop, limits: RequestLimits
    ) -> None:
        self._protocol = protocol
        self._loop = loop
        self._limits = limits
        self._heads = _parser(limits)
        self._last = b""
        self._held = b""
        self._queued = 0
        self._framing: Framing | None = None
        self._body: ComingBody | None = None
        self._is_last = False
        self.in_head = self.is_broken = False

    @property
    def in_body(self) -> bool:
        return self._framing is not None

    def feed_data(self, data: bytes) -> list[Received]:
        """The requests whose heads are whole with ``data``."""
        received: list[Received] = []
        if self._held:
            data, self._held = self._held + data, b""
        while data:
            if self._framing is not None:
                data = self._read_body(self._framing, data)
            elif self._is_last:
                break
            elif self._queued >= REQUESTS_AHEAD:
                self._held = data
                break
            else:
                data = self._read_head(data, received)
        return received

    def message_consumed(self) -> None:
        """One of the requests that were read is being answered: another one may be."""
        self._queued -= 1

    def close(self) -> None:
        """Nothing comes any more, and nothing of what came is kept."""
        self._held = self._last = b""
        self._framing = self._body = None
        self._is_last = True

    def pause_reading(self) -> None:
        """What is called here pauses its connection, too."""

    def _read_head(self, data: bytes, received: list[Received]) -> bytes:
        """What of ``data`` is behind a head."""
        if not self.in_head:
            # Empty lines in front of a request are none of it (RFC 9112, section 2.2).
            data = data.lstrip(b"\r\n")
        seen = self._last + data if self._last else data
        end = seen.find(b"\r\n\r\n") + 4 - len(self._last)
        is_whole = end + len(self._last) > 3
        head, data = (data[:end], data[end:]) if is_whole else (data, b"")
        try:
            messages, _, _ = self._heads.feed_data(head)
            if not messages:
                self.in_head, self._last = bool(seen), seen[-3:]
                return data
            message = messages[0][0]
            _check(message)
            framing = _framing(message, self._limits)
        except HttpProcessingError as error:
            self._is_last, self.in_head = True, False
            received.append((_ErrInfo(status=400, exc=error, message=error.message), EMPTY_PAYLOAD))
            return b""
        self.in_head, self._last = False, b""
        self._queued += 1
        self._is_last = message.should_close or message.upgrade
        body: Any = EMPTY_PAYLOAD
        if framing is not None:
            body, data = self._begin_body(framing, data)
        received.append((message, body))
        return data

    def _begin_body(self, framing: Framing, data: bytes) -> tuple[BodyAtHand | ComingBody, bytes]:
        """The body, and what is behind what has come of it."""
        try:
            piece = framing.feed(data)
            if framing.over:
                return BodyAtHand(piece, self._trailers(framing)), framing.rest
        except (FramingError, HttpProcessingError):
            body = ComingBody(self._protocol, self._loop)
            self._break(body)
            return body, b""
        body = self._body = ComingBody(self._protocol, self._loop)
        self._framing = framing
        body.feed_data(piece)
        return body, b""

    def _read_body(self, framing: Framing, data: bytes) -> bytes:
        """What of ``data`` is behind the body."""
        body = self._body
        assert body is not None
        try:
            body.feed_data(framing.feed(data))
            if not framing.over:
                return b""
            body.trailers = self._trailers(framing)
        except (FramingError, HttpProcessingError):
            self._break(body)
            return b""
        self._framing = self._body = None
        body.feed_eof()
        return framing.rest

    def _break(self, body: ComingBody) -> None:
        self._framing = self._body = None
        self._is_last = self.is_broken = True
        body.set_exception(web.RequestPayloadError("malformed"))
        body.feed_eof()

    def _trailers(self, framing: Framing) -> CIMultiDictProxy[str]:
        if not framing.trailers:
            return NO_TRAILERS
        parser = _parser(self._limits)
        messages, _, _ = parser.feed_data(_BEFORE_TRAILERS + framing.trailers + b"\r\n")
        if not messages:
            raise BadHttpMessage("trailers that do not end")
        fields: CIMultiDictProxy[str] = messages[0][0].headers
        return fields


def _check(message: RawRequestMessage) -> None:
    """Raises BadHttpMessage for a head that the parser takes, and that is none by RFC 9112 (section 3.2)."""
    if message.version < HttpVersion10:
        # One of HTTP/0.9, whose end the parser finds in other places.
        raise BadHttpMessage("no version")
    host = message.headers.get(HOST)
    if host is not None and _HOST.fullmatch(host) is None:
        raise BadHttpMessage("a host that is none")


def _framing(message: RawRequestMessage, limits: RequestLimits) -> Framing | None:
    """How the body is framed, if there is one (RFC 9112, section 6.3). The head's parser has refused a length
    that is none, and one beside chunks. Raises BadHttpMessage.
    """
    headers = message.headers
    if message.chunked:
        if message.version < HttpVersion11:
            raise BadHttpMessage("HTTP/1.0 has no chunks")
        return StrictlyChunked(limits.header_bytes)
    length = headers.get(CONTENT_LENGTH)
    if length is not None:
        return Sized(int(length)) if length != "0" else None
    if TRANSFER_ENCODING in headers:
        raise BadHttpMessage("a transfer coding that does not say where the body ends")
    return None


def _parser(limits: RequestLimits) -> HttpRequestParser:
    # Without a body it makes no stream, and needs neither protocol nor loop.
    return HttpRequestParser(
        None,
        None,
        2**16,
        response_with_body=False,
        auto_decompress=False,
        max_line_size=limits.target_bytes,
        max_field_size=limits.header_bytes,
        max_headers=limits.headers,
    )
