"""The indexer beside Dynamo's standalone indexer, on the same publishers, in one run.

The peer is measured where it is installed: set ``WARMROUTE_PEER_PYTHON`` to a Python that has ``ai-dynamo``
and ``ai-dynamo-runtime``. ``WARMROUTE_BENCH_BLOCKS`` sets the size, a million unless set.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from indexer.shard_reader import open_map
from tests.bench.load import (
    BLOCK_SIZE,
    MODEL,
    Fleet,
    Measured,
    fleet,
    free_port,
    indexer,
    publish,
    publishers,
    register,
    wait_until,
)

BLOCKS = int(os.environ.get("WARMROUTE_BENCH_BLOCKS", "1_000_000"))
PEER = os.environ.get("WARMROUTE_PEER_PYTHON")
REPLICAS = 8
SIZES = (1_000, 8_000, 32_000, 128_000)
ROUNDS = 30

Cost = dict[str, float]
Times = dict[int, float]
Row = tuple[str, Cost, float, Times]


@pytest.fixture(scope="module")
def made() -> Fleet:
    return fleet(BLOCKS, REPLICAS)


def scored(answer: Any, replica: int) -> int:
    return int(answer["scores"].get(str(replica), {}).get("0", 0))


def ingested(asked: Measured, made: Fleet) -> bool:
    """Whether the last prompt of every replica is there whole."""
    last = {prompt.replica: prompt.tokens for prompt in made.prompts}
    return all(
        scored(asked.ask("/query", {"model_name": MODEL, "token_ids": tokens.tolist()}), replica)
        == len(tokens)
        for replica, tokens in last.items()
    )


def ingest(measured: Measured, made: Fleet) -> Cost:
    """Publishes everything to a fresh indexer; CPU seconds and memory that it took."""
    with publishers(REPLICAS) as opened:
        register(measured, opened)
        time.sleep(2)
        cpu, rss, begun = measured.cpu_s(), measured.rss(), time.monotonic()
        publish(made, opened)
        wait_until(lambda: ingested(measured, made), 120, 0.5)
        used = measured.cpu_s() - cpu
        return {
            "cpu_s": used,
            "blocks_per_cpu_s": made.blocks / used,
            "blocks_per_s": made.blocks / (time.monotonic() - begun),
            "rss_per_block": (measured.rss() - rss) / made.blocks,
        }


def median_ms(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e3


def prompts_of(made: Fleet) -> dict[int, list[int]]:
    """Prompts of each size, whose beginning is cached."""
    longest = max(made.prompts, key=lambda prompt: len(prompt.tokens)).tokens.tolist()
    return {size: (longest * (size // len(longest) + 1))[:size] for size in SIZES}


def over_http(measured: Measured, tokens: list[int]) -> float:
    return median_ms(lambda: measured.ask("/query", {"model_name": MODEL, "token_ids": tokens}))


def ours_measured(made: Fleet, folder: Path, log: Path, shards: int) -> Iterator[Row]:
    """Our indexer: over HTTP, and in a router's process."""
    ours = indexer(folder, log, "--shards", str(shards))
    name = f"warmroute --shards {shards}"
    try:
        ours.await_health(path="/ready")  # every shard runs
        cost = ingest(ours, made)
        asked = {size: over_http(ours, tokens) for size, tokens in prompts_of(made).items()}
        with closing(open_map(folder)) as reader:
            inside = {
                size: median_ms(lambda t=tokens: reader.query(MODEL, t))
                for size, tokens in prompts_of(made).items()
            }
            per_entry = reader.used_bytes() / made.blocks
    finally:
        ours.end()
    yield f"{name}, HTTP", cost, per_entry, asked
    yield f"{name}, in process", cost, per_entry, inside


def peer_measured(made: Fleet, log: Path) -> Iterator[Row]:
    port = free_port()
    peer = Measured([PEER or "", "-m", "dynamo.indexer", "--port", str(port)], port, log)
    try:
        peer.await_health()
        cost = ingest(peer, made)
        asked = {size: over_http(peer, tokens) for size, tokens in prompts_of(made).items()}
    finally:
        peer.end()
    yield "dynamo.indexer, HTTP", cost, cost["rss_per_block"], asked


def test_indexer_beside_the_peer(made: Fleet, tmp_path: Path) -> None:
    """Blocks per second of wall time are those of a machine that the publishers share."""
    names = ("", "blocks/CPU-s", "blocks/s", "bytes/entry", *(f"query {size // 1000}k ms" for size in SIZES))
    table, rows = Table(*names), []
    for shards in (1, 2):
        rows += ours_measured(made, tmp_path / f"map-{shards}", tmp_path / f"ours-{shards}.log", shards)
    if PEER:
        rows += peer_measured(made, tmp_path / "peer.log")
    for name, costs, entry, times in rows:
        numbers = (f"{costs['blocks_per_cpu_s']:,.0f}", f"{costs['blocks_per_s']:,.0f}", f"{entry:.0f}")
        table.add_row(name, *numbers, *(f"{times[size]:.2f}" for size in SIZES))
    console = Console(width=140)
    console.print(f"{made.blocks:,} entries on {REPLICAS} replicas, block {BLOCK_SIZE}")
    console.print(table)
    for name, costs, _, _ in rows[:4:2] if PEER else ():
        ratio = costs["blocks_per_cpu_s"] / rows[-1][1]["blocks_per_cpu_s"]
        console.print(f"{name}: ingest {ratio:.2f} times the peer's per CPU second")
