"""Queries while an engine's clear of a million blocks is applied and collected (IX-01).

``WARMROUTE_BENCH_BLOCKS`` sets the size, a million unless set.
"""

from __future__ import annotations

import os
import random
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from events.inbox import StreamId
from events.publisher import encode
from events.schema import AllBlocksCleared, BlockStored, Event
from events.signals import Connected, Frame
from indexer.ingest import Ingest
from indexer.reader import MapReader
from indexer.registration import Registration
from indexer.writer import MapWriter
from tests.bench.load import BLOCK_SIZE, MODEL, NoFeed

BLOCKS = int(os.environ.get("WARMROUTE_BENCH_BLOCKS", "1_000_000"))
BATCH_BLOCKS = 256
CALM_QUERIES = 2_000
PROMPT_TOKENS = 8_000
PAUSE_S = 0.002


class Map:
    """A map with two streams, one of which holds nearly everything."""

    def __init__(self, folder: Path) -> None:
        self.writer = MapWriter(folder)
        self.feed = NoFeed()
        self.ingest = Ingest(self.writer, self.feed)
        self.reader = MapReader(self.writer.env, self.writer.tables)
        self._sequences: dict[StreamId, int] = {}

    def follow(self, name: str) -> StreamId:
        self.ingest.follow(Registration(instance_id=name, endpoint="tcp://127.0.0.1:1", model_name=MODEL))
        stream = (name, 0)
        self.ingest.step([(stream, Connected())])
        self._sequences[stream] = 0
        return stream

    def frame(self, stream: StreamId, *events: Event) -> tuple[StreamId, Frame]:
        sequence = self._sequences[stream]
        self._sequences[stream] += 1
        return stream, Frame(sequence, encode(events, float(sequence), None))


def timed(query: Callable[[], object], going_on: Callable[[int], bool]) -> list[float]:
    """Milliseconds of each query, asked every two milliseconds as long as it goes on."""
    times: list[float] = []
    while going_on(len(times)):
        begun = time.perf_counter()
        query()
        times.append((time.perf_counter() - begun) * 1e3)
        time.sleep(PAUSE_S)
    return sorted(times)


def at(times: list[float], share: float) -> float:
    return times[min(len(times) - 1, int(share * len(times)))]


def stored(chance: random.Random, tokens: array[int]) -> BlockStored:
    hashes = [chance.getrandbits(64).to_bytes(8, "big") for _ in range(len(tokens) // BLOCK_SIZE)]
    return BlockStored(hashes, None, tokens, BLOCK_SIZE, group_kind="full_attention")


def test_queries_while_a_million_blocks_are_cleared(tmp_path: Path) -> None:
    chance, made = random.Random(1), Map(tmp_path / "map")
    full, calm = made.follow("full"), made.follow("calm")
    prompt = array("I", chance.choices(range(128_000), k=PROMPT_TOKENS))
    made.ingest.step([made.frame(calm, stored(chance, prompt))])
    for _ in range(BLOCKS // BATCH_BLOCKS // 16):
        tokens = [array("I", chance.choices(range(128_000), k=BATCH_BLOCKS * BLOCK_SIZE)) for _ in range(16)]
        made.ingest.step([made.frame(full, stored(chance, each)) for each in tokens])

    def query() -> None:  # streams are unverified after the start, and matched all the same
        matched = {one.instance: one.gpu for one in made.reader.query(MODEL, prompt)}
        assert matched == {"full": 0, "calm": PROMPT_TOKENS}

    before = timed(query, lambda done: done < CALM_QUERIES)
    made.ingest.start()
    for stream in (full, calm):
        made.feed.inbox.put(stream, Connected())
    made.feed.inbox.put(*made.frame(full, AllBlocksCleared()))
    begun = time.monotonic()
    until = begun + 300

    def clearing(done: int) -> bool:
        assert time.monotonic() < until, "not collected in time"
        return not done or made.writer.garbage > 0 or not cleared()

    def cleared() -> bool:
        return any(each.record.id == full and not each.record.blocks for each in made.reader.streams())

    during = timed(query, clearing)
    took = time.monotonic() - begun
    made.ingest.stop()
    made.writer.close()
    table = Table("", "queries", "p50 ms", "p99 ms", "max ms")
    for name, times in (("calm", before), ("during the clear", during)):
        row = (f"{at(times, 0.5):.2f}", f"{at(times, 0.99):.2f}", f"{times[-1]:.2f}")
        table.add_row(name, f"{len(times):,}", *row)
    console = Console(width=140)
    console.print(
        f"{BLOCKS:,} blocks cleared and collected in {took:.1f} s; prompt of {PROMPT_TOKENS:,} tokens"
    )
    console.print(table)
    console.print(f"p99 during the clear: {at(during, 0.99) / at(before, 0.99):.1f} times that before it")
