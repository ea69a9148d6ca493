"""From the start of an indexer whose predecessor was killed to its first right answer.

Right is: every stream is proven against its engine's replay, counts in full, and the prompt is held whole.
``WARMROUTE_BENCH_RESTART`` sets the sizes, "1_000_000 10_000_000" unless set; the larger takes minutes.
"""

from __future__ import annotations

import os
import statistics
import time
import urllib.error
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from indexer.check import check_folder
from indexer.shard_reader import open_map
from tests.bench.load import MODEL, Measured, fleet, indexer, publish, publishers, register, wait_until

SIZES = [int(size) for size in os.environ.get("WARMROUTE_BENCH_RESTART", "1_000_000 10_000_000").split()]
REPLICAS = 8
ROUNDS = 5
PIECE = 500_000
FILL_PACE = 60_000


def fill(started: Measured, opened: Any, size: int) -> list[tuple[int, list[int]]]:
    """Publishes ``size`` blocks in pieces; a prompt that each replica holds whole."""
    last: dict[int, list[int]] = {}
    for piece in range(max(1, size // PIECE)):
        made = fleet(min(size, PIECE), REPLICAS, seed=piece)
        publish(made, opened, FILL_PACE)
        last = {prompt.replica: prompt.tokens.tolist() for prompt in made.prompts}
    wanted = list(last.items())
    wait_until(lambda: right_over_http(started, wanted), 300, 0.5)
    return wanted


def right_over_http(asked: Measured, wanted: list[tuple[int, list[int]]]) -> bool:
    """Whether each replica's prompt is held by it whole, and counts in full."""
    try:
        for replica, tokens in wanted:
            told = asked.ask("/query", {"model_name": MODEL, "token_ids": tokens})
            if not any(is_right(one, replica, tokens) for one in told["streams"]):
                return False
    except (urllib.error.URLError, OSError):
        return False
    return True


def is_right(one: dict[str, Any], replica: int, tokens: list[int]) -> bool:
    return (one["instance"], one["weight"], one["gpu"]) == (str(replica), 1.0, len(tokens))


@pytest.mark.parametrize("size", SIZES)
def test_the_first_right_answer_after_a_kill(size: int, tmp_path: Path) -> None:
    folder = tmp_path / "map"
    with publishers(REPLICAS) as opened:
        started = indexer(folder, tmp_path / "first.log")
        try:
            started.await_health()
            register(started, opened)
            time.sleep(2)
            wanted = fill(started, opened, size)
            times = []
            for number in range(ROUNDS):
                started.kill()
                begun = time.perf_counter()
                started = indexer(folder, tmp_path / f"again-{number}.log")
                wait_until(partial(right_over_http, started, wanted), 60, 0.01)
                times.append((time.perf_counter() - begun, started.cpu_s()))
        finally:
            started.end()
    with closing(open_map(folder)) as reader:
        blocks = sum(status.record.blocks for status in reader.streams())
    walls, cpus = zip(*times, strict=True)
    gigabytes = (folder / "data.mdb").stat().st_size / 1e9
    Console(width=140).print(
        f"restart after kill -9, {blocks:,} entries, {gigabytes:.2f} GB: first right "
        f"answer of all {REPLICAS} replicas after {statistics.median(walls):.2f} s (worst {max(walls):.2f}), "
        f"CPU {statistics.median(cpus):.2f} s"
    )
    assert size > SIZES[0] or check_folder(folder).clean
