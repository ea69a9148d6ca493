"""An answer on its way to the client: its head, and then its bytes, each in the step that it came in."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping

from aiohttp import http_writer, web
from aiohttp.http_writer import StreamWriter
from multidict import CIMultiDict

from router.headers import to_client
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
            headers.popall("Content-Length", None)
        if "Trailer" in answer.headers and "Content-Length" not in headers:
            headers["Trailer"] = ", ".join(answer.headers.getall("Trailer"))
        super().__init__(status=answer.status, headers=headers)
        self._is_typed = "Content-Type" in answer.headers
        # aiohttp's own switch, off in its web.Response: else each head would be a write of its own.
        self._send_headers_immediately = at_once

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        if not self._is_typed:
            # aiohttp gives a type to an answer that came without one.
            self._headers.popall("Content-Type", None)

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
        await self.write_eof()

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
