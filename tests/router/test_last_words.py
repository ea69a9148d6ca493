"""Engines that answer before they have read a long body, and are gone."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from multidict import CIMultiDict

from router.connections import configured_upstream, replica_session
from router.settings import UPSTREAM_CLIENTS, RouterSettings
from router.tls import client_context, server_context

TIMES = 20
"""About one in three loses the race that is lost by one who does not look."""
ANSWER = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\n{}"


try:
    from uvloop import new_event_loop as new_uvloop
except ImportError:
    LOOPS = [asyncio.new_event_loop]
else:
    LOOPS = [asyncio.new_event_loop, new_uvloop]


def answer_early(server: socket.socket, tls: ssl.SSLContext | None) -> None:
    """In a thread: what resets a connection has to happen while a piece is written."""
    server.settimeout(5)
    for _ in range(TIMES):
        connection, _ = server.accept()
        connection.settimeout(5)
        # Its own system would keep the answer for the next acknowledgement, and drop it with the connection.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            connection = tls.wrap_socket(connection, server_side=True)
        with connection:
            received = b""
            while b"\r\n\r\n" not in received:
                received += connection.recv(4096)
            connection.sendall(ANSWER)


async def ask(url: str, client: str, tls: ssl.SSLContext) -> list[tuple[int, bytes]]:
    settings = RouterSettings(upstream_client=client)
    got = []
    async with (
        replica_session(settings, tls) as session,
        configured_upstream(settings, session, tls) as upstream,
    ):
        for _ in range(TIMES):
            answer = await upstream.send("POST", url, CIMultiDict(), b" " * 5_000_000)
            body = bytearray()

            def take(piece: bytes, body: bytearray = body) -> bool:
                body += piece
                return True

            while not await answer.pour(take):
                pass
            got.append((answer.status, bytes(body)))
            answer.close()
    return got


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("client", UPSTREAM_CLIENTS)
@pytest.mark.parametrize("over_tls", [False, True])
def test_px06_an_answer_that_comes_before_a_long_body_is_sent_is_not_lost_with_its_connection(
    certificates: Path, loop: Callable[[], asyncio.AbstractEventLoop], client: str, over_tls: bool
) -> None:
    ca, cert, key = (str(certificates / name) for name in ("ca.pem", "server.pem", "server.key"))

    async def run(server: socket.socket) -> list[tuple[int, bytes]]:
        tls = server_context(cert, key, None) if over_tls else None
        engine = asyncio.create_task(asyncio.to_thread(answer_early, server, tls))
        scheme = "https" if over_tls else "http"
        url = f"{scheme}://127.0.0.1:{server.getsockname()[1]}/v1/x"
        got = await ask(url, client, client_context(ca, None, None))
        await engine
        return got

    with socket.create_server(("127.0.0.1", 0)) as server, asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(run(server)) == [(413, b"{}")] * TIMES
