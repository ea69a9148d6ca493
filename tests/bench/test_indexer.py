"""The indexer beside Dynamo's standalone indexer, on the same publishers, in one run.

The peer is measured where it is installed: set ``WARMROUTE_PEER_PYTHON`` to a Python that has ``ai-dynamo``
and ``ai-dynamo-runtime``. ``WARMROUTE_BENCH_BLOCKS`` sets the size, a million unless set.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from events.publisher import Publisher
from indexer.reader import MapReader
from tests.bench.load import BLOCK_SIZE, MODEL, Fleet, Measured, fleet, free_port, publish, wait_until

BLOCKS = int(os.environ.get("WARMROUTE_BENCH_BLOCKS", "1_000_000"))
PEER = os.environ.get("WARMROUTE_PEER_PYTHON")
REPLICAS = 8
SIZES = (1_000, 8_000, 32_000, 128_000)
ROUNDS = 30


@pytest.fixture(scope="module")
def made() -> Fleet:
    return fleet(BLOCKS, REPLICAS)


@contextmanager
def publishers() -> Iterator[list[Publisher]]:
    opened = [Publisher("tcp://*:0", "tcp://*:0", hwm=0) for _ in range(REPLICAS)]
    try:
        yield opened
    finally:
        for publisher in opened:
            publisher.close()


def reachable(endpoint: str | None) -> str:
    assert endpoint is not None
    return "tcp://127.0.0.1:" + endpoint.rpartition(":")[2]


def register(indexer: Measured, opened: list[Publisher]) -> None:
    for number, publisher in enumerate(opened):
        body = {
            "instance_id": number,
            "endpoint": reachable(publisher.endpoint),
            "replay_endpoint": reachable(publisher.replay_endpoint),
            "model_name": MODEL,
            "block_size": BLOCK_SIZE,
        }
        indexer.ask("/register", body)


def scored(answer: Any, replica: int) -> int:
    return int(answer["scores"].get(str(replica), {}).get("0", 0))


def ingested(indexer: Measured, made: Fleet) -> bool:
    """Whether the last prompt of every replica is there whole."""
    last = {prompt.replica: prompt.tokens for prompt in made.prompts}
    return all(
        scored(indexer.ask("/query", {"model_name": MODEL, "token_ids": tokens.tolist()}), replica)
        == len(tokens)
        for replica, tokens in last.items()
    )


def ingest(indexer: Measured, made: Fleet) -> dict[str, float]:
    """Publishes everything to a fresh indexer; CPU seconds and memory that it took."""
    with publishers() as opened:
        register(indexer, opened)
        time.sleep(2)
        cpu, rss = indexer.cpu_s(), indexer.rss()
        publish(made, opened)
        wait_until(lambda: ingested(indexer, made), 120, 0.5)
        used = indexer.cpu_s() - cpu
        return {
            "cpu_s": used,
            "blocks_per_cpu_s": made.blocks / used,
            "rss_per_block": (indexer.rss() - rss) / made.blocks,
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


def over_http(indexer: Measured, tokens: list[int]) -> float:
    return median_ms(lambda: indexer.ask("/query", {"model_name": MODEL, "token_ids": tokens}))


def test_indexer_beside_the_peer(made: Fleet, tmp_path: Path) -> None:
    table = Table("", "blocks/CPU-s", "bytes/entry", *(f"query {size // 1000}k ms" for size in SIZES))
    port = free_port()
    command = [sys.executable, "-m", "warmroute", "--log-level", "warning", "indexer"]
    ours = Measured(
        [*command, "--map", str(tmp_path / "map"), "--listen", f"127.0.0.1:{port}"],
        port,
        tmp_path / "ours.log",
    )
    try:
        ours.await_health()
        cost = ingest(ours, made)
        asked = {size: over_http(ours, tokens) for size, tokens in prompts_of(made).items()}
        reader = MapReader.open(tmp_path / "map")
        inside = {
            size: median_ms(lambda t=tokens: reader.query(MODEL, t))
            for size, tokens in prompts_of(made).items()
        }
        per_entry = reader.used_bytes() / made.blocks
        reader.close()
    finally:
        ours.end()
    rows = [("warmroute, HTTP", cost, per_entry, asked), ("warmroute, in process", cost, per_entry, inside)]
    if PEER:
        port = free_port()
        peer = Measured([PEER, "-m", "dynamo.indexer", "--port", str(port)], port, tmp_path / "peer.log")
        try:
            peer.await_health()
            peer_cost = ingest(peer, made)
            peer_asked = {size: over_http(peer, tokens) for size, tokens in prompts_of(made).items()}
        finally:
            peer.end()
        rows.append(("dynamo.indexer, HTTP", peer_cost, peer_cost["rss_per_block"], peer_asked))
    for name, costs, entry, times in rows:
        table.add_row(
            name,
            f"{costs['blocks_per_cpu_s']:,.0f}",
            f"{entry:.0f}",
            *(f"{times[size]:.2f}" for size in SIZES),
        )
    console = Console(width=140)
    console.print(f"{made.blocks:,} entries on {REPLICAS} replicas, block {BLOCK_SIZE}")
    console.print(table)
    if PEER:
        console.print(
            f"ingest: {cost['blocks_per_cpu_s'] / peer_cost['blocks_per_cpu_s']:.2f} times the peer's"
        )
