"""Services as child processes: waited for, and always ended."""

import os
from pathlib import Path

import aiohttp
import pytest

from simulator.errors import DemoError
from simulator.processes import Service, Services


def runs(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_service_is_reached_where_it_says_it_listens_and_ends_with_the_block(tmp_path: Path) -> None:
    async with Services(tmp_path) as services, aiohttp.ClientSession() as http:
        engine = await services.start("engine", "engine", "--listen", "127.0.0.1:0")
        await services.listening([engine])
        async with http.get(f"{engine.url}/health") as response:
            assert response.status == 200
        services.check()
    assert not runs(engine.pid)


async def test_services_end_too_when_the_block_fails(tmp_path: Path) -> None:
    started: list[Service] = []

    async def fail() -> None:
        async with Services(tmp_path) as services:
            started.append(await services.start("engine", "engine", "--listen", "127.0.0.1:0"))
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        await fail()
    assert not runs(started[0].pid)


async def test_a_service_that_cannot_start_is_named_with_its_code_and_its_last_words(tmp_path: Path) -> None:
    async with Services(tmp_path) as services:
        engine = await services.start("engine-0", "engine", "--blocks", "1")
        with pytest.raises(
            DemoError, match=r"engine-0 ended with code 2:\n(.*\n)*.*blocks 1: must be at least 2"
        ):
            await engine.listening()
