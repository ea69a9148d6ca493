"""``warmroute demo``: the same traffic under three policies, measured end to end over real processes."""

from __future__ import annotations

import asyncio
import math
import signal
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from simulator import workload
from simulator.errors import DemoError, SimulatorError
from simulator.processes import POLL_S, Service, Services
from simulator.workload import Conversation, Result, Shape

WORKLOAD = Shape()
POLICIES = ("round-robin", "least-loaded", "cache-aware")
ENGINES = 4
BLOCK_SIZE = 16
CACHE_TOKENS = 60_000
PREFILL_RATE = 8_000
DECODE_RATE = 50
MODEL = "demo"
READY_TIMEOUT_S = 20.0

_QUERIED = "vllm:prefix_cache_queries_total"
_HIT = "vllm:prefix_cache_hits_total"
_COMPUTED = "vllm:prompt_tokens_by_source_total"


class Measured(msgspec.Struct, frozen=True):
    """One policy's run. ``hit_rate`` and ``prefill_tokens`` are the engines' own counts."""

    requests: int
    hit_rate: float
    ttft_mean_s: float
    ttft_p95_s: float
    prefill_tokens: int


class Counted(msgspec.Struct, frozen=True):
    """Token counters summed over all engines."""

    queried: float
    hit: float
    computed: float


async def demo(as_json: bool, shape: Shape = WORKLOAD) -> int:
    """Runs the demo and returns the exit code; ``as_json`` ends stdout with one line of JSON.

    SIGTERM cancels it, so that its processes end with it.
    """
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    terminal = Console(stderr=True)
    report = terminal if as_json else Console()
    report.print(_introduction(shape), highlight=False)
    measured: dict[str, Measured] = {}
    fallbacks = 0
    try:
        with _progress(terminal) as progress:
            for policy in POLICIES:
                task = progress.add_task(f"{policy}: starting {ENGINES} engines", total=shape.requests)
                measured[policy], fell_back = await _measure(policy, shape, _Shown(progress, task, policy))
                fallbacks += fell_back
    except SimulatorError as error:
        terminal.print(f"demo: {error}", style="red", markup=False)
        return 1
    report.print(_table(measured))
    report.print(_conclusion(measured, fallbacks), highlight=False)
    if as_json:
        sys.stdout.write(msgspec.json.encode(measured).decode() + "\n")
        sys.stdout.flush()
    return 0


class _Shown:
    """How far one policy's run is."""

    def __init__(self, progress: Progress, task: TaskID, policy: str) -> None:
        self._progress = progress
        self._task = task
        self._policy = policy

    def phase(self, what: str) -> None:
        self._progress.update(self._task, description=f"{self._policy}: {what}")

    def answered(self) -> None:
        self._progress.advance(self._task)


async def _measure(policy: str, shape: Shape, shown: _Shown) -> tuple[Measured, int]:
    """Fresh processes, one run of the workload; the second value counts requests routed without a match."""
    with tempfile.TemporaryDirectory(prefix="warmroute-demo-") as name:
        async with Services(Path(name)) as services, aiohttp.ClientSession() as http:
            engines, router = await _start(policy, services, http, Path(name))
            made = workload.conversations(shape)
            shown.phase("warming up connections")
            await workload.run(router.url, MODEL, [Conversation(0.0, "hello", ["hello"])] * ENGINES, 1)
            before = await _count(http, engines)
            shown.phase("running")
            results = await workload.run(router.url, MODEL, made, shape.answer_tokens, shown.answered)
            after = await _count(http, engines)
            services.check()
            shown.phase("done")
    return _measured(results, before, after), sum(1 for result in results if result.fallback)


async def _start(
    policy: str, services: Services, http: aiohttp.ClientSession, folder: Path
) -> tuple[list[Service], Service]:
    """Engines and indexer, then the router; returns when the index follows every engine."""
    store = folder / "map"
    indexer = await services.start("indexer", "indexer", "--map", str(store), "--listen", "127.0.0.1:0")
    engines = [await services.start(f"engine-{number}", *_engine_arguments()) for number in range(ENGINES)]
    await services.listening([indexer, *engines])
    replicas: list[str] = []
    for engine in engines:
        source = (await _json(http, f"{engine.url}/kv_event_sources"))["0"]
        line = f"{engine.name}={engine.url},events={source['endpoint']},replay={source['replay_endpoint']}"
        replicas += ["--replica", line]
    router = await services.start(
        *("router", "router", "--listen", "127.0.0.1:0", "--map", str(store), "--indexer", indexer.url),
        *("--policy", policy, *replicas),
    )
    await services.listening([router])
    names = {engine.name for engine in engines}
    await _until(services, "the router is ready", lambda: _answers_200(http, f"{router.url}/health"))
    await _until(services, "the index follows all engines", lambda: _followed(http, indexer.url, names))
    return engines, router


def _engine_arguments() -> list[str]:
    arguments = {
        "listen": "127.0.0.1:0",
        "events": "tcp://127.0.0.1:*",
        "replay": "tcp://127.0.0.1:*",
        "model": MODEL,
        "block-size": BLOCK_SIZE,
        "blocks": CACHE_TOKENS // BLOCK_SIZE + 1,  # One is the null block.
        "prefill-rate": PREFILL_RATE,
        "decode-rate": DECODE_RATE,
    }
    return ["engine", *(part for name, value in arguments.items() for part in (f"--{name}", str(value)))]


async def _until(services: Services, what: str, condition: Callable[[], Awaitable[bool]]) -> None:
    end = asyncio.get_running_loop().time() + READY_TIMEOUT_S
    while not await condition():
        services.check()
        if asyncio.get_running_loop().time() > end:
            raise DemoError(f"waited {READY_TIMEOUT_S:.0f} s in vain until {what}")
        await asyncio.sleep(POLL_S)


async def _answers_200(http: aiohttp.ClientSession, url: str) -> bool:
    async with http.get(url) as response:
        return response.status == 200


async def _followed(http: aiohttp.ClientSession, indexer: str, names: set[str]) -> bool:
    """Whether the indexer's stream of every named engine is live."""
    workers = await _json(http, f"{indexer}/workers")
    live = {
        worker["instance_id"]
        for worker in workers
        if all(listener["status"] == "live" for listener in worker["listeners"].values())
    }
    return names <= live


async def _json(http: aiohttp.ClientSession, url: str) -> Any:
    async with http.get(url) as response:
        if response.status != 200:
            raise DemoError(f"{url} answered {response.status}: {(await response.text())[:200]}")
        return msgspec.json.decode(await response.read())


async def _count(http: aiohttp.ClientSession, engines: Sequence[Service]) -> Counted:
    totals = {_QUERIED: 0.0, _HIT: 0.0, _COMPUTED: 0.0}
    for engine in engines:
        async with http.get(f"{engine.url}/metrics") as response:
            text = await response.text()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in totals and sample.labels.get("source") in (None, "local_compute"):
                    totals[sample.name] += sample.value
    return Counted(*totals.values())


def _measured(results: Sequence[Result], before: Counted, after: Counted) -> Measured:
    ttft = sorted(result.ttft_s for result in results)
    return Measured(
        requests=len(results),
        hit_rate=round((after.hit - before.hit) / (after.queried - before.queried), 4),
        ttft_mean_s=round(statistics.fmean(ttft), 4),
        ttft_p95_s=round(ttft[math.ceil(0.95 * len(ttft)) - 1], 4),
        prefill_tokens=int(after.computed - before.computed),
    )


def _progress(terminal: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    return Progress(*columns, TimeElapsedColumn(), console=terminal)


def _introduction(shape: Shape) -> str:
    return (
        f"{ENGINES} simulated engines, the indexer and the router, as real processes. Each engine has room "
        f"for {CACHE_TOKENS:,} tokens and computes {PREFILL_RATE:,} prefill tokens/s.\n"
        f"{shape.conversations} conversations of {shape.turns} turns over {shape.systems} system prompts of "
        f"{shape.system_tokens:,} tokens; the same for every policy.\n"
    )


def _table(measured: dict[str, Measured]) -> Table:
    table = Table(title="Same traffic, three policies")
    table.add_column("policy")
    for name in ("requests", "hit rate", "mean TTFT", "p95 TTFT", "prefill tokens"):
        table.add_column(name, justify="right")
    for policy, run in measured.items():
        table.add_row(
            policy,
            f"{run.requests}",
            f"{run.hit_rate:.1%}",
            f"{run.ttft_mean_s * 1000:.0f} ms",
            f"{run.ttft_p95_s * 1000:.0f} ms",
            f"{run.prefill_tokens:,}",
        )
    return table


def _conclusion(measured: dict[str, Measured], fallbacks: int) -> str:
    plain, aware = measured["round-robin"], measured["cache-aware"]
    prefill, ttft = aware.prefill_tokens / plain.prefill_tokens, aware.ttft_mean_s / plain.ttft_mean_s
    lines = [
        "Hit rate and prefill tokens are the engines' own counts; TTFT, the time to the first token, is the "
        "client's, through the router.",
        f"Cache-aware routing computed {prefill:.2f} times the prefill tokens of round robin, and its mean "
        f"TTFT was {ttft:.2f} times that of round robin.",
    ]
    if fallbacks:
        lines.append(f"{fallbacks} requests were routed without a match, by load alone.")
    lines += [
        "",
        "Look further:",
        "  README.md                        put it in front of your own vLLM",
        "  docs/operating.md                is it worth it on your own traffic?",
        "  warmroute replay workload:rag    policies on other traffic, in seconds",
        "  docs/architecture.md             how the map and the decision work",
        "  compose/compose.yaml             the same parts in containers",
        "  warmroute engine --help          an engine like these, to play with",
    ]
    return "\n".join(lines)
