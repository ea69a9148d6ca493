"""Whether engines hash alike: the same content has equal hashes only with the same hash function and seed.

Each stream keeps the engine hashes of a few first blocks of prompts, those with the smallest block keys, so
that streams with common prompts keep common ones. The map does not depend on it; clients of engine hashes do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from indexer.layout import StreamKey, StreamRecord

MAX_SAMPLES = 8


def sample(record: StreamRecord, block: bytes, engine_hash: bytes) -> None:
    """Notes the engine hash of a first block of a prompt, if it is among the smallest keys."""
    samples = record.samples
    if block in samples:
        return
    if len(samples) >= MAX_SAMPLES:
        largest = max(samples)
        if block > largest:
            return
        del samples[largest]
    samples[block] = engine_hash


def seeds(records: Iterable[StreamRecord]) -> dict[StreamKey, int]:
    """A number for each way of hashing; streams that share no sampled block with others are left out."""
    streams = list(records)
    ways = {record.id: number for number, record in enumerate(streams)}
    first: dict[tuple[bytes, bytes], StreamKey] = {}
    holders: Counter[bytes] = Counter()
    for record in streams:
        holders.update(record.samples.keys())
        for pair in record.samples.items():
            mine, theirs = ways[record.id], ways[first.setdefault(pair, record.id)]
            if mine != theirs:
                ways = {stream: theirs if way == mine else way for stream, way in ways.items()}
    compared = [record.id for record in streams if any(holders[block] > 1 for block in record.samples)]
    numbers = {way: number for number, way in enumerate(dict.fromkeys(ways[each] for each in compared))}
    return {stream: numbers[ways[stream]] for stream in compared}
