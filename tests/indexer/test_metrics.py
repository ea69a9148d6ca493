"""What Prometheus is told."""

from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from indexer.registration import Registration
from indexer.service import Indexer

PROMPT = list(range(28))


def scraped(indexer: Indexer, name: str) -> dict[tuple[str, str], float]:
    """A metric's values by instance and rank."""
    text = generate_latest(indexer.metrics.registry).decode()
    return {
        (sample.labels["instance"], sample.labels["rank"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_tr07_the_age_of_the_last_event_and_the_queue_are_told_for_each_replica_and_rank(
    indexers: Any, publishers: Any, engine: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexer: Indexer = indexers()
    made = {("A", 0): publishers(), ("A", 1): publishers(rank=1), ("B", 0): publishers()}
    for (name, rank), publisher in made.items():
        registration = Registration(
            instance_id=name,
            dp_rank=rank,
            endpoint=publisher.endpoint,
            replay_endpoint=publisher.replay_endpoint,
            model_name="m",
        )
        indexer.ingest.register(registration).result(10)
    for stream in (("A", 0), ("A", 1)):
        made[stream].publish([engine().stored(PROMPT)], 1.0)
    until(lambda: sum(status.record.blocks for status in indexer.reader.streams()) == 14)
    until(lambda: not any(scraped(indexer, "warmroute_indexer_queued").values()))
    now = time.time()
    monkeypatch.setattr("indexer.metrics.time.time", lambda: now + 100.0)
    ages = scraped(indexer, "warmroute_indexer_event_age_seconds")
    assert ages.keys() == {("A", "0"), ("A", "1")}, "nothing came of B yet"
    assert all(100.0 <= age < 160.0 for age in ages.values())

    indexer.ingest.stop()
    for _ in range(3):
        made["A", 1].publish([engine().stored(PROMPT)], 1.0)
    until(lambda: scraped(indexer, "warmroute_indexer_queued")["A", "1"] == 3)
    assert scraped(indexer, "warmroute_indexer_queued")["A", "0"] == 0
    indexer.close()
