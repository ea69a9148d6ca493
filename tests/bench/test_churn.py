"""Memory and file size while blocks come and go, with as many held at any time.

``WARMROUTE_BENCH_CHURN`` sets how many are stored and removed, ten million unless set; below two million a
quarter of them is not enough to fill the caches first. The batches go to the ingest in this process, without
ZeroMQ, in groups as they come from it under load.
"""

from __future__ import annotations

import os
import random
import time
from array import array
from collections import deque
from pathlib import Path

from rich.console import Console
from rich.table import Table

from events.publisher import encode
from events.schema import BlockRemoved, BlockStored, Event
from events.signals import Connected, Frame
from indexer.check import check
from indexer.ingest import Ingest
from indexer.registration import Registration
from indexer.writer import MapWriter
from tests.bench.load import BLOCK_SIZE, MODEL, NoFeed, own_rss

CHURN = int(os.environ.get("WARMROUTE_BENCH_CHURN", "10_000_000"))
REPLICAS = 8
HELD_PROMPTS = 400
"""Prompts of 64 blocks that each replica has cached at any time: about 205,000 blocks on eight replicas."""
BLOCKS = 64
GROUP = 64
ROWS = 20
TOLERATED = 1.2


class Replica:
    """Stores a new prompt and forgets its oldest one, tail first."""

    def __init__(self, number: int) -> None:
        self.stream = (f"replica-{number}", 0)
        self._chance = random.Random(number)
        self._held: deque[list[bytes]] = deque()
        self._sequence = 0

    def turn(self) -> tuple[tuple[str, int], Frame]:
        """Its next batch."""
        hashes = [self._chance.getrandbits(64).to_bytes(8, "big") for _ in range(BLOCKS)]
        tokens = array("I", self._chance.randbytes(4 * BLOCKS * BLOCK_SIZE))
        events: list[Event] = [BlockStored(hashes, None, tokens, BLOCK_SIZE, group_kind="full_attention")]
        self._held.append(hashes)
        if len(self._held) > HELD_PROMPTS:
            events += [BlockRemoved([each]) for each in reversed(self._held.popleft())]
        frame = Frame(self._sequence, encode(events, float(self._sequence), None))
        self._sequence += 1
        return self.stream, frame


def test_memory_and_file_stay_flat(tmp_path: Path) -> None:
    writer, replicas = MapWriter(tmp_path / "map"), [Replica(number) for number in range(REPLICAS)]
    ingest = Ingest(writer, NoFeed())
    for replica in replicas:
        name = replica.stream[0]
        ingest.follow(Registration(instance_id=name, endpoint="tcp://127.0.0.1:1", model_name=MODEL))
        ingest.step([(replica.stream, Connected())])
    table = Table("stored and removed", "held", "resident MB", "file MB", "used MB", "blocks/CPU-s")
    rows: list[tuple[float, float]] = []
    stored, cpu = 0, time.process_time()
    for row in range(ROWS):
        before = stored
        while stored < CHURN * (row + 1) // ROWS:
            frames = [replica.turn() for _ in range(GROUP // REPLICAS) for replica in replicas]
            ingest.step(frames)
            stored += len(frames) * BLOCKS
        now, file = time.process_time(), (tmp_path / "map" / "data.mdb").stat().st_size
        rows.append((own_rss(), file))
        held = sum(record.blocks for record in writer.streams.values())
        sizes = (f"{size / 1e6:.0f}" for size in (own_rss(), file, writer.used_bytes()))
        table.add_row(f"{stored:,}", f"{held:,}", *sizes, f"{(stored - before) / (now - cpu):,.0f}")
        cpu = now
    assert check(writer.env, writer.tables).clean
    writer.close()
    Console(width=140).print(table)
    for early, late in zip(rows[ROWS // 4], rows[-1], strict=True):
        assert late < TOLERATED * early
