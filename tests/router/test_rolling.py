"""Two routers behind a TCP balancer, restarted one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.router.command import started

BODY = {"model": "m", "prompt": [1]}
CHECK_S = 0.05


class Balancer:
    """Passes each connection to the next router that says it is ready, as a TCP balancer does."""

    def __init__(self) -> None:
        self.backends: list[int] = []
        self.ready: set[int] = set()
        self._turn = 0
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Balancer]:
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        checks = asyncio.create_task(self._check())
        try:
            yield self
        finally:
            checks.cancel()
            server.close()

    async def _check(self) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client:
            while True:
                for port in tuple(self.backends):
                    try:
                        async with client.get(f"http://127.0.0.1:{port}/ready") as response:
                            (self.ready.add if response.status == 200 else self.ready.discard)(port)
                    except aiohttp.ClientError:
                        self.ready.discard(port)
                await asyncio.sleep(CHECK_S)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._turn += 1
        port = sorted(self.ready)[self._turn % len(self.ready)]
        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def start(engines: list[Any], port: int = 0) -> tuple[asyncio.subprocess.Process, int]:
    replicas = [f"--replica=e{number}={engine.url}" for number, engine in enumerate(engines)]
    process, url = await started(
        *("router", "--listen", f"127.0.0.1:{port}", "--admin-listen", "same"),
        *("--shutdown-delay-s", "1", "--grace-s", "10", *replicas),
    )
    return process, int(url.rpartition(":")[2])


async def test_px17_a_rolling_restart_of_two_routers_costs_no_request(start_engine: Any, kit: Any) -> None:
    async def answer(request: Any) -> Any:
        async def pause() -> None:
            await asyncio.sleep(0.02)

        return await kit.stream(request, [b"data: {}\n\n"] * 5 + [b"data: [DONE]\n\n"], pause)

    engines = [await start_engine(answer=answer) for _ in range(2)]
    balancer, done, ends = Balancer(), asyncio.Event(), []
    processes = dict([(pair[1], pair[0]) for pair in [await start(engines), await start(engines)]])
    balancer.backends = list(processes)

    async def client(session: aiohttp.ClientSession) -> None:
        while not done.is_set():
            async with session.post(
                f"{balancer.url}/v1/completions", json={**BODY, "stream": True}
            ) as response:
                content = await response.read()
                ends.append((response.status, content.endswith(b"[DONE]\n\n")))

    try:
        async with balancer.running(), aiohttp.ClientSession() as session:
            await kit.wait_until(lambda: len(balancer.ready) == 2, "both are ready")
            clients = [asyncio.create_task(client(session)) for _ in range(8)]
            for port, process in tuple(processes.items()):
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(20):
                    assert await process.wait() == 0
                processes[port], _ = await start(engines, port)
                await kit.wait_until(lambda: len(balancer.ready) == 2, "both are ready again")
            done.set()
            await asyncio.gather(*clients)
    finally:
        for process in processes.values():
            if process.returncode is None:
                process.terminate()
            await process.wait()
    assert len(ends) > 50
    assert set(ends) == {(200, True)}
