"""Looking host names up for HTTP clients."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from events.names import NameResolver


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(resolver=NameResolver()))


async def test_a_server_is_reached_by_its_name() -> None:
    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", hello)
    async with (
        TestServer(app) as server,
        session() as client,
        client.get(f"http://localhost:{server.port}/") as answer,
    ):
        assert await answer.text() == "hello"


@pytest.mark.parametrize("name", ["no.such.name.invalid", "a" * 64 + ".invalid"])
async def test_a_name_that_is_none_is_an_error_as_of_any_client(name: str) -> None:
    async with session() as client:
        with pytest.raises(aiohttp.ClientConnectorDNSError):
            await client.get(f"http://{name}/")


async def test_slow_lookups_hold_up_no_other_work_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up, goes_on = threading.Semaphore(0), threading.Event()

    def slow(*_: Any, **__: Any) -> Any:
        looked_up.release()
        goes_on.wait(30)
        raise socket.gaierror("no answer")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    async with session() as client:
        asked = [asyncio.create_task(client.get(f"http://slow-{number}/")) for number in range(50)]
        for _ in asked:
            assert await asyncio.to_thread(looked_up.acquire, timeout=20)
        goes_on.set()
        failures = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(each) for each in failures} == {aiohttp.ClientConnectorDNSError}
