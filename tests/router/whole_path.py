"""The whole path of a request: an indexer in a process of its own, and simulated engines that publish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from simulator.engine import Engine
from simulator.settings import EngineSettings
from tests.router.command import started


class IndexerProcess:
    """``warmroute indexer`` as people run it."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self.url = ""

    async def start(self, listen: str = "127.0.0.1:0") -> None:
        arguments = ("indexer", "--map", str(self._store), "--listen", listen)
        self._process, self.url = await started(*arguments)
        assert self._process.stderr is not None
        self._drain = asyncio.create_task(self._process.stderr.read())

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._drain.cancel()


@asynccontextmanager
async def engines(count: int, **settings: Any) -> AsyncIterator[list[Engine]]:
    async with AsyncExitStack() as stack:
        values = {"listen": "127.0.0.1:0", "events": "tcp://*:0", "replay": "tcp://*:0", "block_size": 16}
        values |= {"prefill_rate": 200_000.0, "decode_rate": 2000.0}
        yield [
            await stack.enter_async_context(Engine(EngineSettings(**(values | settings))))
            for _ in range(count)
        ]


async def until_live(router: Any, wait_until: Callable[..., Any]) -> None:
    """Waits until all replicas are registered and the index holds every stream for live."""

    def registered() -> bool:
        return all(len(r.sources) == len(r.ranks) for r in router.parts.fleet.replicas.values())

    await wait_until(registered, "sources are known")
    states: list[str | None] = []
    for _ in range(500):
        body = {"prompt": [1, 2], "max_tokens": 1}
        async with router.client.post(f"{router.url}/v1/completions", json=body) as response:
            assert response.status == 200
        ranked = (await router.get("/debug/decisions?limit=1"))["decisions"][0]["ranked"]
        states = [item["candidate"]["state"] for item in ranked]
        if set(states) == {"live"}:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"streams are {states}")
