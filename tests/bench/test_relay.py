"""What the relay costs, routing decision included, beside other routers in one run.

``WARMROUTE_LOAD_TOOLS`` is a folder with ``mock_backend.c``, the engines' stand-in; without it nothing runs.
``WARMROUTE_PEERS`` is a folder of programs (the ``bin`` of a virtual environment): ``vllm-router``, ``smg``
and ``sglang-router`` are measured where they are there. Router on one core, load on another, in turns; CPU
counts and not requests per second, as the machine is shared.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from rich.table import Table

from events.publisher import Publisher, encode
from events.schema import BlockStored
from router.conversation import Chat
from router.local_tokenizer import load_tokenizer
from router.token_cache import TokenCache
from tests.bench.load import (
    BLOCK_SIZE,
    Measured,
    fleet,
    free_port,
    indexer,
    publish,
    publishers,
    reachable,
    registrations,
    wait_until,
)
from tests.bench.relay_load import MODEL, Answered, Bodies, Connection, closed, p50_ms, p99_ms, paced

TOOLS = os.environ.get("WARMROUTE_LOAD_TOOLS", "")
PEERS = Path(os.environ.get("WARMROUTE_PEERS", "/nowhere"))
BLOCKS = int(os.environ.get("WARMROUTE_BENCH_BLOCKS", "1_000_000"))
SECONDS = float(os.environ.get("WARMROUTE_BENCH_S", "3"))
TOKENIZER = Path(__file__).parents[3] / "shared" / "data" / "smollm2-tokenizer"
REPLICAS = 8
CLIENTS = 8
WINDOWS = 5
"""The CPU of a request is that of the cheapest part of the run: others share the machine."""
RATE = 50.0
STREAMS, CHUNKS, PACE_US = 100, 50, 20_000
SIZES = {"400 B": 400, "8 kB": 8_000, "128 kB": 128_000}
LONG_BYTES, LONG_PROMPTS, LONG_ROUNDS = 500_000, 32, 5
"""About 100,000 tokens each."""
MANY = 300
CORES = sorted(os.sched_getaffinity(0))


needs_tools = pytest.mark.skipif(
    not TOOLS or not TOKENIZER.exists(), reason="WARMROUTE_LOAD_TOOLS is not set, or no tokenizer"
)


class Cost(msgspec.Struct):
    """By size of the prompt: CPU of a request, microseconds; median time of one at ``RATE``, milliseconds."""

    cpu_us: dict[str, float] = {}
    p50_ms: dict[str, float] = {}


class Streams(msgspec.Struct, frozen=True):
    """CPU of a chunk, its share of the request included, microseconds; time to the first chunk."""

    chunk_us: float
    first_p50_ms: float
    first_p99_ms: float


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[int]]]:
    """Starts engines' stand-ins on ``REPLICAS`` ports; ``renders``: they tell tokens, as vllm-router asks."""
    folder, started = tmp_path_factory.mktemp("load"), []
    program = folder / "mock_backend"
    subprocess.run(["cc", "-O2", "-w", "-o", program, Path(TOOLS) / "mock_backend.c"], check=True)

    def start(*, renders: bool = False) -> list[int]:
        first = free_row(REPLICAS)
        environment = {**os.environ, **({"MOCK_RENDER": "1"} if renders else {})}
        started.append(subprocess.Popen([program, str(first), str(REPLICAS)], env=environment))
        ports = [first + number for number in range(REPLICAS)]
        wait_until(lambda: answers(ports[-1]), 10)
        return ports

    yield start
    for process in started:
        process.terminate()
        process.wait()


def free_row(count: int) -> int:
    """The first of ``count`` free ports in a row, below those that the system hands out."""
    while True:
        first = random.randrange(12_000, 30_000)
        try:
            with ExitStack() as stack:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                return first
        except OSError:
            continue


def answers(port: int, path: str = "/health", timeout_s: float = 2.0) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout_s):
            return True
    except OSError:
        return False


def pace(port: int, *, chunks: int, delay_us: int) -> None:
    assert answers(port, f"/__set?chunks={chunks}&delay_us={delay_us}")


@contextmanager
def filled_map(folder: Path, prefixes: list[str]) -> Iterator[list[Publisher]]:
    """An indexer's map of ``BLOCKS`` blocks, and the ``prefixes`` on one replica each; it stays live."""
    made, cache = fleet(BLOCKS, REPLICAS), TokenCache(1)
    tokenizer = load_tokenizer(str(TOKENIZER), "bench", cache)
    with ExitStack() as stack:
        opened = stack.enter_context(publishers(REPLICAS))
        writer = indexer(folder / "map", folder / "indexer.log")
        stack.callback(writer.end)
        writer.await_health()
        for body in registrations(opened):
            writer.ask("/register", {**body, "model_name": MODEL})
        time.sleep(1)
        publish(made, opened, 60_000)
        last = array("I")
        for number, prefix in enumerate(prefixes):
            chat = Chat(Bodies.messages(prefix, ""), None, {"add_generation_prompt": True})
            last = tokenizer.encode(tokenizer.render(chat), False)
            count = len(last) // BLOCK_SIZE - 1
            hashes = [os.urandom(8) for _ in range(count)]
            event = BlockStored(
                hashes, None, last[: count * BLOCK_SIZE], BLOCK_SIZE, group_kind="full_attention"
            )
            opened[number % REPLICAS].publish_payload(encode([event], 0.0, 0, "map"))
        asked = {"model_name": MODEL, "token_ids": last.tolist()}
        wait_until(lambda: any(writer.ask("/query", asked)["scores"].values()), 120, 0.5)
        yield opened


def told_ms(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def anonymous(router: Measured) -> int:
    """Resident memory without the pages of files, such as the map's, bytes."""
    (line,) = re.findall(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{router.pid}/status").read_text())
    return int(line) * 1024


def pinned(cores: Sequence[int], *command: str) -> list[str]:
    return ["taskset", "-c", ",".join(map(str, cores)), *command]


def ours(ports: list[int], folder: Path, *options: str, cores: Sequence[int] = CORES[:1]) -> Measured:
    listen = free_port()
    replicas = [f"--replica={number}=http://127.0.0.1:{port}" for number, port in enumerate(ports)]
    command = [sys.executable, "-m", "warmroute", "--log-level", "warning", "router"]
    command += ["--listen", f"127.0.0.1:{listen}", f"--tokenizer={MODEL}={TOKENIZER}", *replicas, *options]
    return Measured(pinned(cores, *command), listen, folder / "router.log")


def peer(name: str, ports: list[int], folder: Path, opened: list[Publisher]) -> Measured:
    listen = free_port()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    command = [str(PEERS / name), *(() if name == "vllm-router" else ("launch",))]
    command += f"--host 127.0.0.1 --port {listen} --prometheus-port {free_port()}".split()
    if name == "vllm-router":
        command += f"--log-level warning --policy kv_aware --kv-event-model {MODEL}".split()
        command += f"--kv-event-block-size {BLOCK_SIZE}".split()
        for url, publisher in zip(urls, opened, strict=True):
            command += ["--kv-event-source", f"{url}={reachable(publisher.endpoint)}"]
    else:
        command += ["--log-level", "warn", "--policy", "cache_aware"]
    return Measured(pinned(CORES[:1], *command, "--worker-urls", *urls), listen, folder / f"{name}.log")


async def request_cost(router: Measured | None, port: int, *, warm: bool) -> Cost:
    cost = Cost()
    for name, size in SIZES.items():
        body = Bodies(size, warm=warm)
        await closed(port, body, connections=4, seconds=1)
        if router is not None:
            cost.cpu_us[name] = min([await cpu_us(router, port, body) for _ in range(WINDOWS)])
            if cost.cpu_us[name] * RATE > 0.5e6:
                # Half of the core, and more: what is measured then is how requests queue.
                cost.p50_ms[name] = math.nan
                continue
        answered = await paced(port, body, rate=RATE, seconds=SECONDS)
        cost.p50_ms[name] = p50_ms(answer.whole_s for answer in answered)
    return cost


async def cpu_us(router: Measured, port: int, body: Bodies) -> float:
    before = router.cpu_s()
    answered = await closed(port, body, connections=CLIENTS, seconds=SECONDS / WINDOWS)
    return (router.cpu_s() - before) / len(answered) * 1e6


async def stream_cost(router: Measured | None, port: int, backend: int) -> Streams:
    pace(backend, chunks=CHUNKS, delay_us=PACE_US)
    body = Bodies(400, warm=True, stream=True)
    before = router.cpu_s() if router else 0.0
    answered = await closed(port, body, connections=STREAMS, seconds=SECONDS)
    used = router.cpu_s() - before if router else 0.0
    chunks = sum(answer.chunks for answer in answered)
    firsts = [answer.first_s for answer in answered]
    return Streams(used / chunks * 1e6, p50_ms(firsts), p99_ms(firsts))


@needs_tools
def test_relay_cost(backend: Callable[..., list[int]], tmp_path: Path) -> None:
    prefixes = [prefix for size in SIZES.values() for prefix in Bodies(size, warm=True).prefixes]
    os.sched_setaffinity(0, {CORES[-1]})
    ports = backend()
    with filled_map(tmp_path, prefixes) as opened:
        direct = asyncio.run(request_cost(None, ports[0], warm=True))
        table = Table(*["", *[f"{what} {size}" for what in ("CPU us", "added p50 ms") for size in SIZES]])
        streams = Table("", "CPU us per chunk", "first chunk p50 ms", "p99 ms", "MB", "without files")
        straight = asyncio.run(stream_cost(None, ports[0], ports[0]))
        streams.add_row(
            "no router", "", f"{straight.first_p50_ms:.1f}", f"{straight.first_p99_ms:.1f}", "", ""
        )
        routers: list[tuple[str, Callable[[], Measured], list[int]]] = [
            ("warmroute", lambda: ours(ports, tmp_path, "--map", str(tmp_path / "map")), ports)
        ]
        for name in ("vllm-router", "smg", "sglang-router"):
            if (PEERS / name).exists():
                theirs = backend(renders=True) if name == "vllm-router" else ports
                routers.append(
                    (name, lambda name=name, theirs=theirs: peer(name, theirs, tmp_path, opened), theirs)
                )
        for name, start, behind in routers:
            pace(ports[0], chunks=CHUNKS, delay_us=0)
            router = start()
            try:
                router.await_health(60)
                time.sleep(2)
                for warm in (True, False):
                    cost = asyncio.run(request_cost(router, router.port, warm=warm))
                    row = [f"{cost.cpu_us[size]:,.0f}" for size in SIZES]
                    row += [told_ms(cost.p50_ms[size] - direct.p50_ms[size]) for size in SIZES]
                    table.add_row(f"{name}, {'warm' if warm else 'cold'}", *row)
                runs = [asyncio.run(stream_cost(router, router.port, behind[0])) for _ in range(2)]
                told = min(runs, key=lambda run: run.chunk_us)
                row = [f"{told.chunk_us:.0f}", f"{told.first_p50_ms:.1f}", f"{told.first_p99_ms:.1f}"]
                streams.add_row(name, *row, f"{router.rss() / 1e6:.0f}", f"{anonymous(router) / 1e6:.0f}")
            finally:
                router.end()
    console = Console(width=160)
    console.print(f"\nload of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    console.print(table)
    console.print(streams)


@needs_tools
def test_plain_relay_cost(backend: Callable[..., list[int]], tmp_path: Path) -> None:
    """By round robin: no tokens are made and no map is read."""
    os.sched_setaffinity(0, {CORES[-1]})
    ports = backend()
    pace(ports[0], chunks=CHUNKS, delay_us=0)
    router = ours(ports, tmp_path, "--policy", "round-robin")
    try:
        router.await_health(60)
        time.sleep(5)
        cost = asyncio.run(request_cost(router, router.port, warm=True))
    finally:
        router.end()
    told = ", ".join(f"{size} {cost.cpu_us[size]:,.0f}" for size in SIZES)
    print(f"\nCPU us a request by round robin: {told}; load {os.getloadavg()[0]:.1f}")


@needs_tools
def test_plain_streams_cost(backend: Callable[..., list[int]], tmp_path: Path) -> None:
    """By round robin, so that what is seen is what a chunk costs: its share of the request is small."""
    os.sched_setaffinity(0, {CORES[-1]})
    ports = backend()
    router = ours(ports, tmp_path, "--policy", "round-robin")
    try:
        router.await_health(60)
        time.sleep(5)
        runs = [asyncio.run(stream_cost(router, router.port, ports[0])) for _ in range(WINDOWS)]
    finally:
        router.end()
    told = min(runs, key=lambda run: run.chunk_us)
    first = f"first chunk p50 {told.first_p50_ms:.1f} ms, p99 {told.first_p99_ms:.1f} ms"
    print(f"\nCPU us a chunk by round robin: {told.chunk_us:.1f}; {first}; load {os.getloadavg()[0]:.1f}")


async def health_ms(port: int, over: asyncio.Event) -> list[float]:
    """What ``/health`` takes, asked every 100 ms on connections of its own."""
    taken = []
    while not over.is_set():
        begun = time.monotonic()
        assert await asyncio.to_thread(answers, port, timeout_s=30)
        taken.append((time.monotonic() - begun) * 1e3)
        await asyncio.sleep(max(0.0, begun + 0.1 - time.monotonic()))
    return taken


async def long_prompts(port: int) -> tuple[list[float], list[float]]:
    """What ``/health`` takes before they come, and while they are there."""
    body, over = Bodies(LONG_BYTES, warm=False), asyncio.Event()
    rounds = [[body() for _ in range(LONG_PROMPTS)] for _ in range(LONG_ROUNDS)]
    probes = asyncio.create_task(health_ms(port, over))
    await asyncio.sleep(SECONDS)
    over.set()
    idle = await probes
    over.clear()
    probes = asyncio.create_task(health_ms(port, over))
    for bodies in rounds:
        await asyncio.gather(*(once(port, long) for long in bodies))
    over.set()
    return idle, await probes


async def once(port: int, body: bytes) -> Answered:
    connection = await Connection.open(port)
    answer = await connection.ask(body)
    connection.close()
    return answer


@needs_tools
def test_px13_health_answers_while_32_prompts_of_100k_tokens_come(
    backend: Callable[..., list[int]], tmp_path: Path
) -> None:
    router = ours(backend(), tmp_path, cores=CORES)
    try:
        router.await_health(60)
        time.sleep(5)
        idle, taken = asyncio.run(long_prompts(router.port))
    finally:
        router.end()
    p99 = statistics.quantiles(taken, n=100)[98]
    print(f"\n/health during {LONG_ROUNDS} times {LONG_PROMPTS} prompts of {LONG_BYTES:,} bytes: ")
    print(
        f"{len(taken)} probes, p50 {statistics.median(taken):.1f}, p99 {p99:.1f}, most {max(taken):.1f} ms; "
    )
    print(
        f"before: p50 {statistics.median(idle):.1f}, most {max(idle):.1f} ms; load {os.getloadavg()[0]:.1f}"
    )
    assert p99 < 200


@needs_tools
def test_300_streams_at_once_through_one_worker(backend: Callable[..., list[int]], tmp_path: Path) -> None:
    async def streams(port: int) -> list[Answered]:
        body = Bodies(400, warm=True, stream=True)
        return await asyncio.gather(*(once(port, body()) for _ in range(MANY)))

    ports = backend()
    router = ours(ports, tmp_path)
    try:
        router.await_health(60)
        time.sleep(5)
        pace(ports[0], chunks=CHUNKS, delay_us=2 * PACE_US)
        answered = asyncio.run(streams(router.port))
    finally:
        router.end()
    firsts = [answer.first_s for answer in answered]
    print(f"\n{MANY} streams at once: first chunk p50 {p50_ms(firsts):.0f} ms, p99 {p99_ms(firsts):.0f} ms, ")
    print(f"last one whole after {max(answer.whole_s for answer in answered):.2f} s")
    assert {answer.chunks for answer in answered} == {CHUNKS + 1}
