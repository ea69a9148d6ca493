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

import msgspec
import pytest
from rich.console import Console

from events.publisher import Publisher
from events.signals import Connected, Frame
from indexer.check import check_folder
from indexer.ingest import Ingest
from indexer.registration import Registration
from indexer.shard_reader import open_map
from indexer.writer import MapWriter
from tests.bench.load import (
    MODEL,
    Measured,
    NoFeed,
    fleet,
    indexer,
    publish,
    publishers,
    registrations,
    wait_until,
)

SIZES = [int(size) for size in os.environ.get("WARMROUTE_BENCH_RESTART", "1_000_000 10_000_000").split()]
REPLICAS = 8
ROUNDS = 5
PIECE = 500_000
GROUP = 1_024
LATEST = 20_000
"""Blocks that came just before each kill: what they changed is not on the disk yet."""


def fill(folder: Path, opened: list[Publisher], size: int) -> list[tuple[int, list[int]]]:
    """Has every publisher's batches in the map, as its stream; a prompt that each holds whole.

    Nobody listens to the publishers yet: what they said is applied here, in large groups.
    """
    writer, last = MapWriter(folder), dict[int, list[int]]()
    ingest = Ingest(writer, NoFeed())
    for body in registrations(opened):
        registration = msgspec.convert(body, Registration)
        ingest.follow(registration)
        ingest.step([((registration.instance, 0), Connected())])
    for piece in range(max(1, size // PIECE)):
        made = fleet(min(size, PIECE), REPLICAS, seed=piece)
        frames = [
            ((str(replica), 0), Frame(opened[replica].publish_payload(payload), payload))
            for replica, payload, _ in made.frames
        ]
        for start in range(0, len(frames), GROUP):
            ingest.step(frames[start : start + GROUP])
        last = {prompt.replica: prompt.tokens.tolist() for prompt in made.prompts}
    writer.close()
    return list(last.items())


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
        wanted = fill(folder, opened, size)
        started = indexer(folder, tmp_path / "first.log")
        try:
            wait_until(partial(right_over_http, started, wanted), 60)
            times = []
            for number in range(ROUNDS):
                latest = fleet(LATEST, REPLICAS, seed=-1 - number)
                publish(latest, opened)
                wanted = [(prompt.replica, prompt.tokens.tolist()) for prompt in latest.prompts[-REPLICAS:]]
                wait_until(partial(right_over_http, started, wanted), 60)
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
