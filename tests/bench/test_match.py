"""One match of 3,750 keys (60,000 tokens) over 96 replicas, beside a walk block by block, in the same run."""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from events.schema import BlockStored, token_array
from indexer.keys import keys_behind, root_key
from indexer.layout import decode_holders
from indexer.match import match
from indexer.reader import MapReader
from indexer.registration import Registration
from indexer.writer import MapWriter
from tests.bench.load import BLOCK_SIZE, MODEL

REPLICAS = 96
KEYS = 3_750
ROUNDS = 50

HELD: dict[str, Callable[[random.Random], int]] = {
    "all of it": lambda _: KEYS,
    "half of it each": lambda _: KEYS // 2,
    "each another part": lambda chance: chance.randrange(KEYS + 1),
    "nothing": lambda _: 0,
}


def median_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e3


def block_by_block(lookup: Callable[[bytes], int], keys: Sequence[bytes], slots: int) -> dict[int, int]:
    """The leading run of each slot, looking at every block once for all of them."""
    matched, held = {}, slots
    for number, key in enumerate(keys):
        lost = held & ~lookup(key)
        for slot in range(lost.bit_length()):
            if lost >> slot & 1 and number:
                matched[slot] = number
        held &= ~lost
        if not held:
            return matched
    return matched | {slot: len(keys) for slot in range(held.bit_length()) if held >> slot & 1}


def fill(folder: Path, held: Callable[[random.Random], int], tokens: array[int]) -> MapWriter:
    """A map in which each replica holds the beginning of the prompt."""
    chance, writer = random.Random(1), MapWriter(folder)
    for number in range(REPLICAS):
        count = held(chance)
        with writer.group() as group:
            registration = Registration(
                instance_id=f"replica-{number}",
                endpoint="tcp://127.0.0.1:1",
                model_name=MODEL,
                block_size=BLOCK_SIZE,
            )
            record = writer.open_stream(group, registration)
            record.state = "live"
            hashes = [chance.getrandbits(64).to_bytes(8, "big") for _ in range(count)]
            event = BlockStored(hashes, None, tokens[: count * BLOCK_SIZE], BLOCK_SIZE)
            if count:
                group.blocks(record).store(event)
    return writer


def test_3750_keys_on_96_replicas(tmp_path: Path) -> None:
    tokens = token_array(random.Random(2).choices(range(128_000), k=KEYS * BLOCK_SIZE))
    keys = keys_behind(root_key(MODEL, None, BLOCK_SIZE), tokens, BLOCK_SIZE)
    table = Table("each holds", "match ms", "block by block ms", "times faster", "query with hashing ms")
    slots = (1 << REPLICAS) - 1
    for name, held in HELD.items():
        writer = fill(tmp_path / name, held, tokens)
        reader = MapReader(writer.env, writer.tables)
        with writer.env.begin() as txn:

            def lookup(key: bytes, txn=txn, blocks=writer.tables.blocks) -> int:  # type: ignore[no-untyped-def]
                value = txn.get(key, db=blocks)
                return decode_holders(value)[0] if value else 0

            assert match(lookup, keys, slots) == block_by_block(lookup, keys, slots)
            ours = median_ms(lambda f=lookup: match(f, keys, slots))
            naive = median_ms(lambda f=lookup: block_by_block(f, keys, slots))
        whole = median_ms(lambda r=reader: r.query(MODEL, tokens))
        row = (f"{ours:.3f}", f"{naive:.3f}", f"{naive / ours:.1f}", f"{whole:.2f}")
        table.add_row(name, *row)
        writer.close()
    console = Console(width=140)
    console.print(f"{KEYS:,} keys, {REPLICAS} replicas, medians of {ROUNDS}")
    console.print(table)
