from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from glob import glob
from typing import Any

import pytest
from multidict import CIMultiDict

from events.names import look_up
from router.engine_connection import PIECE_BYTES, EngineConnection
from router.errors import BrokenAnswerError, ConnectTimeoutError, UnreachableError, UpstreamTimeoutError
from router.head import HeadLimits
from router.pool import PooledUpstream, origin_and_target
from tests.router.raw_server import raw_server

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
Act = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Counts connections that were opened and that are open now; what it does on each is ``act``'s."""

    def __init__(self, act: Act) -> None:
        self._act = act
        self.opened = self.open = 0

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        self.open += 1
        try:
            await self._act(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def serving(act: Act) -> AsyncIterator[tuple[Server, str]]:
    made = Server(act)
    async with raw_server(made._connected) as url:
        yield made, url


async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        writer.write(OK)


def pool(keepalive_s: float = 4.0, idle_timeout_s: float = 5.0) -> PooledUpstream:
    return PooledUpstream(1.0, idle_timeout_s, keepalive_s, 65536, 256, ssl.create_default_context())


async def ask(upstream: PooledUpstream, url: str, body: bytes = b"{}", **more: Any) -> bytes:
    answer = await upstream.send("POST", f"{url}/v1/x", CIMultiDict(), body, **more)
    pieces: list[bytes] = []

    def take(piece: bytes) -> bool:
        pieces.append(piece)
        return True

    try:
        assert await answer.pour(take)
        return b"".join(pieces)
    finally:
        answer.close()


@pytest.mark.parametrize(
    ("url", "authority", "target"),
    [
        ("http://vllm-0:8000/v1/x?y=%2F", "vllm-0:8000", "/v1/x?y=%2F"),
        ("http://vllm-0/a//b", "vllm-0", "/a//b"),
        ("https://[::1]:443/v1", "[::1]", "/v1"),
        ("http://10.0.0.1:80", "10.0.0.1", "/"),
    ],
)
def test_an_url_is_an_origin_and_a_target_that_stays_as_it_is(url: str, authority: str, target: str) -> None:
    origin, found = origin_and_target(url)
    assert (origin.host_line.decode(), found) == (f"\r\nHost: {authority}\r\n", target)


async def test_requests_after_one_another_share_a_connection_and_a_fresh_one_does_not() -> None:
    async with serving(answer_all) as (server, url):
        upstream = pool()
        for _ in range(3):
            assert await ask(upstream, url) == b"{}"
        assert server.opened == 1
        await ask(upstream, url, fresh=True)
        assert server.opened == 2
        await asyncio.gather(*(ask(upstream, url) for _ in range(5)))
        assert server.opened == 6
        upstream.close()


async def test_an_idle_connection_is_closed_when_its_time_is_over_and_all_at_the_end(kit: Any) -> None:
    async with serving(answer_all) as (server, url):
        upstream = pool(keepalive_s=0.05)
        await ask(upstream, url)
        await kit.wait_until(lambda: not server.open, "the idle connection is closed")
        lasting = pool()
        await asyncio.gather(*(ask(lasting, url) for _ in range(3)))
        lasting.close()
        await kit.wait_until(lambda: not server.open, "all are closed")
        upstream.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_px08_connects_that_take_too_long_leave_no_socket_behind(host: str, kit: Any) -> None:
    def sockets() -> int:
        return sum(os.path.islink(fd) and "socket" in os.readlink(fd) for fd in glob("/proc/self/fd/*"))

    with socket.socket() as full, ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        upstream = PooledUpstream(0.05, 5.0, 4.0, 65536, 256, ssl.create_default_context())
        before = sockets()
        for _ in range(4):
            with pytest.raises(ConnectTimeoutError):
                await ask(upstream, f"http://{host}:{full.getsockname()[1]}")
        await kit.wait_until(lambda: sockets() <= before, "the sockets are closed")
        upstream.close()


async def test_an_answer_that_is_not_read_to_its_end_takes_its_connection_with_it(kit: Any) -> None:
    async with serving(answer_all) as (server, url):
        upstream = pool()
        answer = await upstream.send("POST", f"{url}/v1/x", CIMultiDict(), b"{}")
        answer.close()
        answer.close()
        await kit.wait_until(lambda: not server.open, "it is closed")
        await ask(upstream, url)
        assert server.opened == 2
        upstream.close()


async def test_a_long_body_that_is_answered_before_all_of_it_came_costs_the_connection(kit: Any) -> None:
    seen = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        seen.append(await reader.read(1))
        await asyncio.sleep(3600)

    async with serving(refuse) as (server, url):
        upstream = pool()
        assert await ask(upstream, url, bytes(64 * PIECE_BYTES)) == b"{}"
        assert seen
        assert await ask(upstream, url, b"") == b"{}"
        assert server.opened == 2
        upstream.close()


async def test_a_long_body_goes_out_as_fast_as_its_engine_takes_it() -> None:
    total, got = 64 * PIECE_BYTES, []

    async def take_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.1)
        got.append(await reader.readexactly(total))
        writer.write(OK)

    async with serving(take_late) as (_, url):
        upstream = pool()
        body = b"".join(b"%016d" % number for number in range(total // 16))
        assert await ask(upstream, url, body) == b"{}"
        assert got == [body]
        upstream.close()


async def test_names_are_asked_for_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(answer_all) as (_, url):
        upstream, asked = pool(), []

        async def names(host: str, port: int) -> Any:
            asked.append(host)
            if len(asked) == 1:
                raise OSError("no such name")
            return await look_up("127.0.0.1", port)

        monkeypatch.setattr("router.pool.look_up", names)
        named = url.replace("127.0.0.1", "engine.test")
        with pytest.raises(UnreachableError, match="no such name"):
            await ask(upstream, named)
        for _ in range(3):
            assert await ask(upstream, named, fresh=True) == b"{}"
        assert asked == ["engine.test"] * 2
        upstream.close()


class Poured:
    """Takes a body; has no room for more after every ``pieces``-th piece."""

    def __init__(self, pieces: int = 1_000_000) -> None:
        self._pieces = pieces
        self.taken: list[bytes] = []

    @property
    def content(self) -> bytes:
        return b"".join(self.taken)

    def __call__(self, piece: bytes) -> bool:
        self.taken.append(piece)
        return len(self.taken) % self._pieces != 0


def saying(*pieces: bytes, then: Act | None = None) -> Act:
    """Answers one request with these bytes, each on its own; then does something else, or closes."""

    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(2)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.005)
        if then is not None:
            await then(reader, writer)

    return act


async def stay(*_: Any) -> None:
    await asyncio.sleep(3600)


async def listen(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def test_a_body_goes_on_where_it_was_left_and_the_engine_waits_meanwhile() -> None:
    total, written = 200 * PIECE_BYTES, 0

    async def pour_out(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        while written < total:
            writer.write(b"%016d" % written * (PIECE_BYTES // 16))
            written += PIECE_BYTES
            await writer.drain()

    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total
    async with serving(saying(head, then=pour_out)) as (_, url):
        upstream = pool()
        answer, taker = await upstream.send("POST", f"{url}/v1/x", CIMultiDict(), b"{}"), Poured(5)
        while not await answer.pour(taker):
            before = 0
            while written != before:
                before = written
                await asyncio.sleep(0.01)
            # What sockets hold, and what is held here.
            assert written - len(taker.content) < total // 2
            taker._pieces *= 2
        expected = b"".join(b"%016d" % at * (PIECE_BYTES // 16) for at in range(0, total, PIECE_BYTES))
        assert taker.content == expected
        answer.close()
        upstream.close()


async def test_nothing_is_handed_over_for_which_there_is_no_room() -> None:
    """However many pieces come in one step of the loop, as they do over TLS."""
    ends, other = socket.socketpair()
    loop, taker = asyncio.get_running_loop(), Poured(1)
    with other:
        _, connection = await loop.create_connection(
            lambda: EngineConnection(loop, 5.0, HeadLimits(65536, 256)), sock=ends
        )
        asked = asyncio.create_task(connection.ask(b"", b"", bodiless=False, closes=False))
        await asyncio.sleep(0)
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n")
        await asked
        poured = asyncio.create_task(connection.pour(taker))
        await asyncio.sleep(0)
        for piece in (b"a", b"b", b"c"):
            connection.data_received(piece)
        assert not await poured
        assert taker.taken == [b"a"]
        assert await connection.pour(taker)
        assert taker.taken == [b"a", b"bc"]
        connection.close()


async def test_a_body_that_nobody_takes_yet_is_there_later() -> None:
    async with serving(saying(b"HTTP/1.1 200 OK\r\n\r\n", b"a", b"b", then=answer_all)) as (_, url):
        upstream = pool()
        answer = await upstream.send("POST", f"{url}/v1/x", CIMultiDict(), b"{}")
        await asyncio.sleep(0.05)
        taker = Poured(1)
        assert not await answer.pour(taker)
        assert taker.content == b"ab"
        answer.close()
        upstream.close()


@pytest.mark.parametrize(
    ("head", "end", "is_whole"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", None, True),
        (b"HTTP/1.0 200 OK\r\n\r\n", None, True),
        (b"HTTP/1.1 200 OK\r\n\r\n", reset, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", None, False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\n", None, False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n", None, True),
    ],
)
async def test_px07_whether_a_body_that_ends_with_its_connection_is_whole_is_told_where_it_can_be(
    head: bytes, end: Act | None, is_whole: bool
) -> None:
    async with serving(saying(head, b"{}", then=end)) as (_, url):
        upstream = pool()
        answer, taker = await upstream.send("POST", f"{url}/v1/x", CIMultiDict(), b"{}"), Poured()
        if is_whole:
            assert await answer.pour(taker)
        else:
            with pytest.raises(BrokenAnswerError, match="broke off"):
                await answer.pour(taker)
        assert taker.content == b"{}"
        answer.close()
        upstream.close()


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n\r\n",
    ],
)
async def test_px10_bytes_behind_an_answer_are_not_taken_for_the_next_one(said: bytes) -> None:
    async with serving(saying(said, then=answer_all)) as (server, url):
        upstream = pool()
        assert await ask(upstream, url) == b"{}"
        assert await ask(upstream, url) == b"{}"
        assert server.opened == 2
        upstream.close()


async def test_px10_bytes_that_come_unasked_end_a_kept_connection() -> None:
    late = asyncio.Event()

    async def say_more(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await late.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        await reader.read()

    async with serving(saying(OK, then=say_more)) as (server, url):
        upstream = pool()
        assert await ask(upstream, url) == b"{}"
        late.set()
        await asyncio.sleep(0.05)
        assert await ask(upstream, url) == b"{}"
        assert server.opened == 2
        upstream.close()


async def test_what_the_taker_raises_ends_the_answer_and_its_connection(kit: Any) -> None:
    def broken(_: bytes) -> bool:
        raise ValueError("no more")

    head = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"
    async with serving(saying(head, b"a", then=listen)) as (server, url):
        upstream = pool()
        answer = await upstream.send("POST", f"{url}/v1/x", CIMultiDict(), b"{}")
        with pytest.raises(ValueError, match="no more"):
            await answer.pour(broken)
        await kit.wait_until(lambda: not server.open, "it is closed")
        upstream.close()


async def test_px02_silence_ends_an_answer_and_slow_takers_do_not() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = [b"2\r\n{}\r\n"] * 30
    async with serving(saying(head, *pieces, then=stay)) as (_, url):
        upstream, taker = pool(idle_timeout_s=0.1), Poured()
        answer = await upstream.send("POST", f"{url}/v1/x", CIMultiDict(), b"{}")
        with pytest.raises(UpstreamTimeoutError):
            await answer.pour(taker)
        assert taker.content == b"{}" * 30
        answer.close()
    flood = b"%x\r\n%b\r\n" % (8 * PIECE_BYTES, b"x" * 8 * PIECE_BYTES)
    async with serving(saying(head, flood, b"0\r\n\r\n", then=stay)) as (_, url):
        answer, taker = await upstream.send("POST", f"{url}/v1/x", CIMultiDict(), b"{}"), Poured(1)
        assert not await answer.pour(taker)
        await asyncio.sleep(0.3)
        while not await answer.pour(taker):
            pass
        assert len(taker.content) == 8 * PIECE_BYTES
        answer.close()
        upstream.close()


async def test_an_answer_is_told_with_its_trailers() -> None:
    said = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-T: 1\r\nX-T: 2\r\n\r\n"
    async with serving(saying(said, then=answer_all)) as (server, url):
        upstream = pool()
        answer = await upstream.send("POST", f"{url}/v1/x", CIMultiDict(), b"{}")
        assert await answer.pour(Poured())
        assert list(answer.trailers.items()) == [("X-T", "1"), ("X-T", "2")]
        assert await ask(upstream, url) == b"{}"
        assert server.opened == 1
        upstream.close()


@pytest.mark.parametrize("rest_s", [0.0, 0.15])
async def test_px02_silence_is_noticed_on_a_connection_that_has_answered_before(rest_s: float) -> None:
    """One timer watches all answers of a connection; it is gone by the time of the longer rest."""

    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await reader.readuntil(b"{}")
            writer.write(OK)
        await reader.readuntil(b"{}")
        await reader.read()

    async with serving(act) as (server, url):
        upstream = pool(idle_timeout_s=0.1)
        for _ in range(2):
            assert await ask(upstream, url) == b"{}"
            await asyncio.sleep(rest_s)
        async with asyncio.timeout(5):
            with pytest.raises(UpstreamTimeoutError):
                await ask(upstream, url)
        assert server.opened == 1
        upstream.close()
