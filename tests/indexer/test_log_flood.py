"""What an indexer logs while it is flooded, with good events and with all kinds of bad ones."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from events.publisher import encode
from indexer.registration import Registration

BATCHES, EVENTS = 100, 1_000
"""Ten thousand events a second, for ten seconds."""


def test_op08_a_flood_of_events_logs_next_to_nothing(
    indexers: Any, publishers: Any, engine: Any, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    indexer, publisher, hasher = indexers(), publishers(), engine(1)
    indexer.ingest.register(
        Registration(
            instance_id="A",
            model_name="m",
            endpoint=publisher.endpoint,
            replay_endpoint=publisher.replay_endpoint,
        )
    ).result(10)
    stored = hasher.stored(list(range(28)), 0, 3)
    bad = [*hasher.removed(list(range(500, 528)), 0), hasher.stored([7, *range(27)], 3, 5)]
    good = encode([stored, *bad] * (EVENTS // 3), 1.0, None)
    unknown = msgspec.msgpack.encode([1.0, [{"type": "Unheard"}, ["Of"], 7] * (EVENTS // 3), 0])
    for number in range(BATCHES):
        publisher.publish_payload((good, unknown, b"nonsense")[0 if number % 2 else number // 2 % 2 + 1])

    def applied() -> bool:
        return any(status.record.sequence == BATCHES - 1 for status in indexer.reader.streams())

    until(applied, "all of it is taken in")
    counted = indexer.reader.streams()[0].record.counters
    assert counted.stored + counted.duplicates > 10_000
    assert sum(counted.skipped.values()) > 10_000
    lines = [record.getMessage() for record in caplog.records]
    assert 0 < len(lines) < 50, lines
