"""An answer on its way to the client: its head, and then its bytes, each in the step that it came in."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping

from aiohttp import HttpVersion11, http_writer, web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http_writer import StreamWriter
from multidict import CIMultiDict

from router.framing import BODILESS_STATUSES
from router.headers import CONNECTION, CONTENT_LENGTH, DATE, TRAILER, TRANSFER_ENCODING, to_client
from router.upstream import UpstreamAnswer

_AT_ONCE = struct.pack("ii", 1, 0)


class Delivery(web.StreamResponse):
    """The head of a replica's answer, as the client gets it, goes out ``at_once``, or with its first bytes.

    What it writes goes past aiohttp's coroutines, which would make a task of each piece, and through its
    writer, which knows the state of the connection.
    """

    def __init__(
        self, answer: UpstreamAnswer, ours: Mapping[str, str], *, keeps_length: bool, at_once: bool
    ) -> None:
        headers = to_client(answer.headers, ours)
        if not keeps_length:
            headers.popall(CONTENT_LENGTH, None)
        if TRAILER in answer.headers and CONTENT_LENGTH not in headers:
            headers[TRAILER] = ", ".join(answer.headers.getall(TRAILER))
        # What no status line can carry is replaced by the usual words.
        reason = answer.reason if answer.reason.isprintable() else None
        super().__init__(status=answer.status, reason=reason, headers=headers)
        self._at_once = at_once

    async def prepare(self, request: web.BaseRequest) -> StreamWriter:
        """Makes the head. In one step, where aiohttp takes eight, and it gives no type to an answer that came
        without one.
        """
        writer = request.writer
        assert isinstance(writer, StreamWriter)
        if self._payload_writer is not None:
            return writer
        self._payload_writer = writer
        self._keep_alive = self._frame(request, writer)
        headers, version = self._headers, request.version
        if DATE not in headers:
            headers[DATE] = rfc822_formatted_time()
        if self._keep_alive and version < HttpVersion11:
            headers[CONNECTION] = "keep-alive"
        elif not self._keep_alive and version >= HttpVersion11:
            headers[CONNECTION] = "close"
        line = f"HTTP/{version.major}.{version.minor} {self._status} {self._reason}"
        writer._headers_buf = http_writer._serialize_headers(line, headers)
        if self._at_once:
            writer.send_headers()
        return writer

    def _frame(self, request: web.BaseRequest, writer: StreamWriter) -> bool:
        """Says how the body ends (RFC 9112, section 6.3), and returns whether the connection outlives it."""
        headers = self._headers
        if self._status in BODILESS_STATUSES:
            headers.popall(CONTENT_LENGTH, None)
        elif request.method == "HEAD":
            pass
        elif (length := headers.get(CONTENT_LENGTH)) is not None:
            writer.length = int(length)
        elif request.version >= HttpVersion11:
            writer.enable_chunking()
            headers[TRANSFER_ENCODING] = "chunked"
        else:
            return False
        return request.keep_alive

    def send(self, piece: bytes) -> bool:
        """Writes what is not empty; returns whether the client takes more. Raises ConnectionError."""
        writer = self._writer()
        if writer.chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        if writer._headers_buf:
            piece, writer._headers_buf = writer._headers_buf + piece, None
            writer._headers_written = True
        writer._write(piece)
        return not writer.protocol.writing_paused

    async def room(self, idle_s: float) -> None:
        """Waits until the client takes more; raises TimeoutError when it does not for ``idle_s`` seconds."""
        writer = self._writer()
        if writer.protocol.writing_paused:
            async with asyncio.timeout(idle_s):
                await writer.drain()

    async def end(self, trailers: CIMultiDict[str], idle_s: float) -> None:
        """Writes the end, with ``trailers`` where there is a place for them: behind chunks."""
        writer = self._writer()
        if trailers and writer.chunked:
            writer.send_headers()
            writer._write(http_writer._serialize_headers("0", trailers))
            writer._eof = True
        writer.set_eof()
        await self.room(idle_s)
        # All that is left of aiohttp's own end.
        self._eof_sent = True

    def cut(self) -> None:
        """Ends the connection in the middle of the answer. Where its end is that of the body too, that has to
        be with a reset: else the client would take what it has for all.
        """
        writer = self._writer()
        transport = writer.transport
        if transport is None:
            return
        if not writer.chunked and writer.length is None:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        transport.abort()

    def _writer(self) -> StreamWriter:
        writer = self._payload_writer
        assert isinstance(writer, StreamWriter)
        return writer
