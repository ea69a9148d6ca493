"""One of four engines is killed at 200 requests a second and started again 20 s later: what clients see of
it, and how long until it has traffic again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from tests.bench.load import Measured, free_port

RATE = float(os.environ.get("WARMROUTE_BENCH_RATE", "200"))
KILL_AT_S, BACK_AT_S, END_AT_S = 5.0, 25.0, 45.0
ENGINES = 4


class Served(msgspec.Struct, frozen=True):
    """One request: when it was sent and answered, seconds from the start; who answered; what was wrong."""

    sent_s: float
    done_s: float
    replica: str
    failure: str | None


def engine(port: int, folder: Path) -> Measured:
    command = [sys.executable, "-m", "warmroute", "engine", "--listen", f"127.0.0.1:{port}", "--model", "m"]
    return Measured([*command, "--decode-rate", "500"], port, folder / f"engine-{port}.log")


async def one(client: aiohttp.ClientSession, url: str, number: int, begun: float) -> Served:
    stream = number % 2 == 1
    body = {"model": "m", "prompt": list(range(number, number + 64)), "max_tokens": 4, "stream": stream}
    sent, replica, failure = time.monotonic() - begun, "", None
    try:
        async with client.post(f"{url}/v1/completions", json=body) as response:
            content = await response.read()
            replica = response.headers.get("x-warmroute-replica", "")
            if response.status != 200:
                failure = f"status {response.status}"
            elif stream and b"[DONE]" not in content:
                failure = "cut stream" if b'"error"' in content else "no [DONE]"
    except (aiohttp.ClientError, TimeoutError) as error:
        failure = type(error).__name__
    return Served(sent, time.monotonic() - begun, replica, failure)


async def traffic(url: str, begun: float) -> list[Served]:
    """An open loop: the next request does not wait for the one before."""
    tasks = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        for number in range(int(RATE * END_AT_S)):
            await asyncio.sleep(max(0.0, begun + number / RATE - time.monotonic()))
            tasks.append(asyncio.create_task(one(client, url, number, begun)))
        return list(await asyncio.gather(*tasks))


async def healthy_at(url: str, begun: float) -> float:
    async with aiohttp.ClientSession() as client:
        while True:
            try:
                async with client.get(f"{url}/health") as response:
                    if response.status == 200:
                        return time.monotonic() - begun
            except aiohttp.ClientError:
                await asyncio.sleep(0.02)


async def run(folder: Path) -> dict[str, Any]:
    ports = [free_port() for _ in range(ENGINES)]
    engines = [engine(port, folder) for port in ports]
    listen = free_port()
    replicas = [f"--replica=e{n}=http://127.0.0.1:{port}" for n, port in enumerate(ports)]
    command = [sys.executable, "-m", "warmroute", "router", "--listen", f"127.0.0.1:{listen}", *replicas]
    router = Measured(command, listen, folder / "router.log")
    try:
        for service in (*engines, router):
            await asyncio.to_thread(service.await_health)
        begun = time.monotonic() + 0.5
        load = asyncio.create_task(traffic(router.url, begun))
        await asyncio.sleep(begun + KILL_AT_S - time.monotonic())
        os.kill(engines[0].pid, signal.SIGKILL)
        await asyncio.sleep(begun + BACK_AT_S - time.monotonic())
        engines[0].end()
        engines[0] = engine(ports[0], folder)
        back = await healthy_at(engines[0].url, begun)
        return told(await load, back)
    finally:
        for service in (*engines, router):
            await asyncio.to_thread(service.end)


def told(served: list[Served], back: float) -> dict[str, Any]:
    again = [s for s in served if s.replica == "e0" and s.sent_s > back]
    last = [s for s in served if s.sent_s > END_AT_S - 5]
    return {
        "requests": len(served),
        "failures": dict(Counter(s.failure for s in served if s.failure is not None)),
        "healthy_to_first_request_s": round(min(s.sent_s for s in again) - back, 2) if again else None,
        "share_in_first_5_s": round(sum(s.sent_s < back + 5 for s in again) / (5 * RATE), 2),
        "share_in_last_5_s": round(sum(s.replica == "e0" for s in last) / len(last), 2),
        "slowest_ms": round(max(s.done_s - s.sent_s for s in served) * 1000),
    }


def test_px09_a_killed_replica_costs_no_request_and_is_back_within_5_s(tmp_path: Path) -> None:
    result = asyncio.run(run(tmp_path))
    table = Table("one of four killed at", *result, title="Failover")
    table.add_row(f"{RATE:g} requests/s", *(str(value) for value in result.values()))
    Console(width=160).print(table)
    # A stream that had begun on the killed engine cannot be saved: it ends with an error event.
    assert set(result["failures"]) <= {"cut stream"}
    assert result["healthy_to_first_request_s"] is not None
    assert result["healthy_to_first_request_s"] < 5
