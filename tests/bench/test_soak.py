"""A router under load while everything around it fails in turn: engines are killed, stopped and made to
answer 500s, the indexer is killed, replicas are taken out and added, the settings are broken.

``WARMROUTE_SOAK_S`` sets how long (600), ``WARMROUTE_SOAK_CLIENTS`` how many clients (200).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from tests.bench.load import Measured, free_port, wait_until

SOAK_S = float(os.environ.get("WARMROUTE_SOAK_S", "600"))
CLIENTS = int(os.environ.get("WARMROUTE_SOAK_CLIENTS", "200"))
THINK_S = 1.0
FAULT_S, REST_S = 4.0, 3.0
ENGINES = 4
LOOKS = 12
LEAVING = 0.1
"""Share of the streams that their client leaves in the middle."""


def warmroute(*arguments: str, port: int, log: Path, module: str = "warmroute") -> Measured:
    return Measured([sys.executable, "-m", module, *arguments], port, log)


class SickDoor:
    """A TCP door in front of an engine, which answers every request with 500 while it is ``sick``."""

    ANSWER = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"

    def __init__(self, engine: int) -> None:
        self._engine = engine
        self.sick = False

    async def open(self, port: int) -> None:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", port)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there = await asyncio.open_connection("127.0.0.1", self._engine)
            await asyncio.gather(self._up(reader, there, writer), self._down(there_reader, writer))
        except OSError:
            writer.close()

    async def _up(
        self, reader: asyncio.StreamReader, there: asyncio.StreamWriter, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(1 << 16):
            if self.sick and data.startswith(b"POST"):
                writer.write(self.ANSWER)
                await writer.drain()
                break
            there.write(data)
            await there.drain()
        there.close()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()


class Soak:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = [free_port() for _ in range(ENGINES)]
        self.event_ports = [(free_port(), free_port()) for _ in range(ENGINES)]
        self.door_port = free_port()
        self.door = SickDoor(self.ports[3])
        self.indexer_port, self.listen, self.admin = free_port(), free_port(), free_port()
        self.engines: list[Measured] = []
        self.config = folder / "warmroute.toml"
        self.ends: Counter[str] = Counter()
        self.touched: dict[str, float] = {}
        self.done = asyncio.Event()
        self.names = itertools.count()

    def log(self, what: str) -> Path:
        return self.folder / f"{what}-{next(self.names)}.log"

    def start_engine(self, number: int) -> Measured:
        port, (events, replay) = self.ports[number], self.event_ports[number]
        flags = ("--model", "m", "--decode-rate", "200", "--prefill-rate", "50000")
        flags += ("--events", f"tcp://*:{events}", "--replay", f"tcp://*:{replay}")
        return warmroute("engine", "--listen", f"127.0.0.1:{port}", *flags, port=port, log=self.log("engine"))

    def start_indexer(self) -> Measured:
        flags = ("--map", str(self.folder / "map"), "--listen", f"127.0.0.1:{self.indexer_port}")
        return warmroute("indexer", *flags, port=self.indexer_port, log=self.log("indexer"))

    def write(self, *left_out: int) -> None:
        ports = [*self.ports[:3], self.door_port]
        lines = [f'"e{n}=http://127.0.0.1:{port}"' for n, port in enumerate(ports) if n not in left_out]
        self.config.write_text(f"[router]\nreplica = [{', '.join(lines)}]\n")

    async def start(self) -> None:
        self.write()
        os.environ["COUNT_TASKS_TO"] = str(self.folder / "tasks")
        self.engines = [self.start_engine(number) for number in range(ENGINES)]
        self.indexer = self.start_indexer()
        await self.door.open(self.door_port)
        flags = ("--listen", f"127.0.0.1:{self.listen}", "--admin-listen", f"127.0.0.1:{self.admin}")
        index = ("--map", str(self.folder / "map"), "--indexer", self.indexer.url)
        self.router = warmroute(
            *("--config", str(self.config), "router", *flags, *index),
            port=self.listen,
            log=self.log("router"),
            module="tests.bench.counted_router",
        )
        for service in (*self.engines, self.indexer, self.router):
            await asyncio.to_thread(service.await_health)

    async def end(self) -> None:
        for service in (self.router, self.indexer, *self.engines):
            await asyncio.to_thread(service.end)

    # clients

    async def client(self, session: aiohttp.ClientSession, seed: int) -> None:
        chance = random.Random(seed)
        prefix = [chance.randrange(50_000) for _ in range(256)]
        await asyncio.sleep(chance.random() * THINK_S)
        while not self.done.is_set():
            stream = chance.random() < 0.5
            prompt = prefix + [chance.randrange(50_000) for _ in range(32)]
            body = {"model": "m", "prompt": prompt, "max_tokens": 8, "stream": stream}
            leaves = stream and chance.random() < LEAVING
            self.ends[await self.one(session, body, leaves=leaves)] += 1
            await asyncio.sleep(chance.random() * 2 * THINK_S)

    async def one(self, session: aiohttp.ClientSession, body: dict[str, Any], *, leaves: bool) -> str:
        """How a request ended: ``ok``, ``left`` in the middle by its client, ``cut`` for an answer that a
        killed engine had begun, or why not.
        """
        sent, replica = time.monotonic(), ""
        try:
            async with session.post(f"{self.router.url}/v1/completions", json=body) as response:
                replica = response.headers.get("x-warmroute-replica", "")
                if leaves and response.status == 200 and await response.content.readany():
                    response.close()
                    return "left"
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            return "cut" if self.touched.get(replica, 0) > sent else type(error).__name__
        if response.status != 200:
            return f"{response.status} {response.headers.get('x-warmroute-reason', '')[:60]}"
        if body["stream"] and not content.endswith(b"[DONE]\n\n"):
            return "cut" if self.touched.get(replica, 0) > sent else "no end"
        return "ok"

    # faults

    async def faults(self) -> None:
        for fault in itertools.cycle(
            (self.kill, self.stop, self.sicken, self.no_index, self.leave, self.break_it)
        ):
            if self.done.is_set():
                return
            await fault()
            await asyncio.sleep(REST_S)

    async def kill(self) -> None:
        self.touched["e0"] = time.monotonic() + 1
        os.kill(self.engines[0].pid, signal.SIGKILL)
        await asyncio.sleep(FAULT_S)
        await asyncio.to_thread(self.engines[0].end)
        self.engines[0] = self.start_engine(0)
        await asyncio.to_thread(self.engines[0].await_health)

    async def stop(self) -> None:
        os.kill(self.engines[1].pid, signal.SIGSTOP)
        await asyncio.sleep(FAULT_S)
        os.kill(self.engines[1].pid, signal.SIGCONT)

    async def sicken(self) -> None:
        self.door.sick = True
        await asyncio.sleep(FAULT_S)
        self.door.sick = False

    async def no_index(self) -> None:
        os.kill(self.indexer.pid, signal.SIGKILL)
        await asyncio.sleep(FAULT_S)
        await asyncio.to_thread(self.indexer.end)
        self.indexer = self.start_indexer()
        await asyncio.to_thread(self.indexer.await_health)

    async def leave(self) -> None:
        self.write(2)
        await asyncio.sleep(2 * FAULT_S)
        self.write()

    async def break_it(self) -> None:
        self.config.write_text("[router]\nreplica = nonsense\n")
        await asyncio.sleep(2 * FAULT_S)
        self.write()

    # what is left

    def gauges(self, page: str) -> float:
        found = re.findall(r"^warmroute_router_inflight_\w+\{.*\} (\S+)$", page, re.MULTILINE)
        assert found
        return sum(float(value) for value in found)

    async def tasks(self) -> list[str]:
        """The names of the router's tasks."""
        told = self.folder / "tasks"
        told.unlink(missing_ok=True)
        os.kill(self.router.pid, signal.SIGUSR1)
        await asyncio.to_thread(wait_until, told.exists, 10)
        return told.read_text().splitlines()

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.router.pid}/fd"))


async def soak(folder: Path) -> dict[str, Any]:
    run = Soak(folder)
    await run.start()
    try:
        files_before, tasks_before = run.files(), await run.tasks()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60)
        ) as session:
            tasks = [asyncio.create_task(run.client(session, seed)) for seed in range(CLIENTS)]
            faults = asyncio.create_task(run.faults())
            rss = []
            for _ in range(LOOKS):
                await asyncio.sleep(SOAK_S / LOOKS)
                rss.append(round(run.router.rss() / 1e6, 1))
            run.done.set()
            await asyncio.gather(*tasks, faults)
            rss_end = run.router.rss()
            # Idle connections are kept for 4 s to replicas, for 15 to 30 s to all others.
            await asyncio.sleep(35)
            async with session.get(f"http://127.0.0.1:{run.admin}/metrics") as response:
                in_flight = run.gauges(await response.text())
        await asyncio.sleep(1)
        tasks_after = await run.tasks()
        return {
            "ends": dict(run.ends),
            "in flight at the end": in_flight,
            "MB over time": rss,
            "MB when warm": rss[LOOKS // 3 - 1],
            "MB at the end": round(rss_end / 1e6, 1),
            "files before": files_before,
            "files after": run.files(),
            "tasks before": len(tasks_before),
            "tasks after": len(tasks_after),
            "tasks left behind": sorted(set(tasks_after) - set(tasks_before)),
        }
    finally:
        await run.end()


def test_no_request_fails_that_had_an_untouched_replica_to_go_to(tmp_path: Path) -> None:
    result = asyncio.run(soak(tmp_path))
    table = Table("what", "is", title=f"{SOAK_S:g} s, {CLIENTS} clients")
    for name, value in result.items():
        table.add_row(name, str(value))
    Console(width=160).print(table)
    assert set(result["ends"]) <= {"ok", "cut", "left"}
    assert not result["tasks left behind"]
    assert result["tasks after"] <= result["tasks before"]
    assert result["in flight at the end"] == 0
    assert result["MB at the end"] < 1.15 * result["MB when warm"] + 5
    assert result["files after"] <= result["files before"] + 10
