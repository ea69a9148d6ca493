"""What an engine said before its connection was reset, and nobody has read yet.

An engine may answer before it has read a long body, a 413 say, and close. That resets the connection under
the piece of the body that is written next; what it had said waits in the socket, where the system keeps it,
and is lost with the socket if it is not read now.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Callable
from typing import cast

READ_BYTES = 256 * 1024


def hear(transport: asyncio.BaseTransport, why: BaseException | None, said: Callable[[bytes], None]) -> None:
    """Hands to ``said`` what is left in the socket of a connection without TLS that was reset, if ``why`` it
    was lost is that.
    """
    connected = transport.get_extra_info("socket")
    if connected is None or not isinstance(why, ConnectionError):
        return
    # The end of what there is: nothing more comes over a connection that was reset.
    with contextlib.suppress(OSError):
        while data := os.read(connected.fileno(), READ_BYTES):
            said(data)


async def over_tls(
    transport: asyncio.Transport, protocol: asyncio.Protocol, context: ssl.SSLContext, host: str | None
) -> asyncio.Transport:
    """Has ``protocol`` go on over TLS, and get the last words of that too. Raises OSError."""
    loop = asyncio.get_running_loop()
    secured = await loop.start_tls(transport, protocol, context, server_hostname=host)
    assert secured is not None
    inner = cast(asyncio.BufferedProtocol, transport.get_protocol())
    transport.set_protocol(_Beneath(transport, inner))
    return secured


class _Beneath(asyncio.BufferedProtocol):
    """Stands between a socket and what undoes the TLS: that throws away what it is not given in time."""

    def __init__(self, transport: asyncio.Transport, inner: asyncio.BufferedProtocol) -> None:
        self._transport = transport
        self._inner = inner
        self.get_buffer = inner.get_buffer  # type: ignore[method-assign]
        self.buffer_updated = inner.buffer_updated  # type: ignore[method-assign]

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        hear(self._transport, exc, self._feed)
        self._inner.connection_lost(exc)

    def _feed(self, data: bytes) -> None:
        while data:
            buffer = memoryview(self._inner.get_buffer(len(data)))
            taken = min(len(buffer), len(data))
            buffer[:taken] = data[:taken]
            self._inner.buffer_updated(taken)
            data = data[taken:]
