"""From an engine's event to a query that sees it: ZeroMQ, the commit, and the map in a router's process.

Once on an idle indexer, and once with 96 replicas that publish all the time while 20 processes open the map,
query it and close it, over and over.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rich.console import Console

from events.publisher import Publisher
from events.schema import BlockStored
from indexer.shard_reader import View, open_map
from tests.bench.load import BLOCK_SIZE, MODEL, indexer, publishers, register, wait_until

ROUNDS = 300
REPLICAS = 96
READERS = 20
PROMPT_BLOCKS = 16
BACKGROUND_BLOCKS_PER_S = 5_000

READER = """
import json, sys, time
from pathlib import Path
from indexer.shard_reader import open_map
tokens, opened, times = list(range(8_000)), 0, []
print("ready", flush=True)
while not Path(sys.argv[3]).exists():
    reader = open_map(Path(sys.argv[1]))
    begun = time.perf_counter()
    assert len(reader.query("bench", tokens)) == int(sys.argv[2])
    times.append(time.perf_counter() - begun)
    reader.close()
    opened += 1
    time.sleep(0.05)
print(json.dumps({"opened": opened, "p50_ms": sorted(times)[len(times) // 2] * 1e3}))
"""


def stored(chance: random.Random, blocks: int = PROMPT_BLOCKS) -> BlockStored:
    hashes = [chance.getrandbits(64).to_bytes(8, "big") for _ in range(blocks)]
    tokens = array("I", chance.choices(range(128_000), k=blocks * BLOCK_SIZE))
    return BlockStored(hashes, None, tokens, BLOCK_SIZE, group_kind="full_attention")


def holds(reader: View, event: BlockStored, instance: str) -> bool:
    matched = reader.query(MODEL, event.tokens)
    return any((one.instance, one.gpu) == (instance, len(event.tokens)) for one in matched)


def visible_ms(reader: View, publisher: Publisher, instance: str) -> list[float]:
    """Milliseconds from each publish until the reader sees all of the prompt; sorted."""
    chance, times = random.Random(1), []
    for _ in range(ROUNDS):
        event = stored(chance)
        begun = time.perf_counter()
        publisher.publish([event], 0.0)
        while not holds(reader, event, instance):
            assert time.perf_counter() - begun < 10, "not visible within 10 s"
            time.sleep(0.0002)
        times.append((time.perf_counter() - begun) * 1e3)
        time.sleep(0.003)
    return sorted(times)


def line(what: str, times: list[float]) -> str:
    p50, p99 = statistics.median(times), times[int(0.99 * len(times))]
    return f"event to visible, {what}: p50 {p50:.2f} ms, p99 {p99:.2f} ms, worst {times[-1]:.2f} ms"


@contextmanager
def publishing(opened: list[Publisher]) -> Iterator[None]:
    """All of them publish prompts, in turn, at a steady rate."""
    ended = threading.Event()

    def run() -> None:
        chance, number = random.Random(2), 0
        while not ended.wait(PROMPT_BLOCKS / BACKGROUND_BLOCKS_PER_S):
            opened[number % len(opened)].publish([stored(chance)], 0.0)
            number += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_an_event_is_visible_at_once(tmp_path: Path) -> None:
    with publishers(1) as opened:
        ours = indexer(tmp_path / "map", tmp_path / "log")
        try:
            ours.await_health()
            register(ours, opened)
            time.sleep(1)
            with closing(open_map(tmp_path / "map")) as reader:
                Console(width=140).print(line("one replica", visible_ms(reader, opened[0], "0")))
        finally:
            ours.end()


def test_96_replicas_and_20_readers_that_open_and_close(tmp_path: Path) -> None:
    folder, stop = tmp_path / "map", tmp_path / "stop"
    with publishers(REPLICAS) as opened:
        ours = indexer(folder, tmp_path / "log")
        try:
            ours.await_health()
            register(ours, opened)
            arguments = [sys.executable, "-c", READER, str(folder), str(REPLICAS), str(stop)]
            readers = [
                subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                for _ in range(READERS)
            ]
            for each in readers:
                assert each.stdout is not None
                assert each.stdout.readline() == "ready\n"
            with publishing(opened[1:]), closing(open_map(folder)) as reader:
                times = visible_ms(reader, opened[0], "0")
            stop.touch()
            told = [each.communicate(timeout=60)[0] for each in readers]
            assert [each.returncode for each in readers] == [0] * READERS
            wait_until(lambda: ours.ask("/ready")["ready"], 30)
            states = {one["state"] for one in ours.ask("/debug/replicas")["replicas"]}
            failures = ours.ask("/debug/replicas")["map"]["failures"]
        finally:
            ours.end()
    console = Console(width=140)
    console.print(line(f"{REPLICAS} replicas, {READERS} readers", times))
    console.print(f"readers: {' '.join(each.strip() for each in told[:3])} ...")
    assert (states, failures) == ({"live"}, 0)
