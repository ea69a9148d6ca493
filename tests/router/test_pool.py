from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from multidict import CIMultiDict

from events.names import look_up
from router.errors import UnreachableError
from router.pool import PIECE_BYTES, PooledUpstream, origin_and_target

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
    server = await asyncio.start_server(made._connected, "127.0.0.1", 0)
    async with server:
        yield made, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        writer.write(OK)


def pool(keepalive_s: float = 4.0) -> PooledUpstream:
    return PooledUpstream(1.0, 5.0, keepalive_s, 65536, 256, ssl.create_default_context())


async def ask(upstream: PooledUpstream, url: str, body: bytes = b"{}", **more: Any) -> bytes:
    answer = await upstream.send("POST", f"{url}/v1/x", CIMultiDict(), body, **more)
    try:
        return b"".join([chunk async for chunk in answer.chunks()])
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
    assert (origin.authority, found) == (authority, target)


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

    async with serving(refuse) as (_, url):
        upstream = pool()
        assert await ask(upstream, url, bytes(64 * PIECE_BYTES)) == b"{}"
        assert seen
        upstream.close()
        assert not [task for task in asyncio.all_tasks() if "_write" in repr(task) and not task.cancelling()]


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
