"""The metrics of all shards on one page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from indexer.shard_process import ShardProcess


class _Fixed(Collector):
    """Families that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def of_shards(own: CollectorRegistry, shards: Sequence[ShardProcess], pages: Sequence[bytes | None]) -> bytes:
    """The server's ``own`` metrics, then those on the shards' ``pages`` (None where one does not answer).

    What names no instance gets a label ``shard``. What the server counts itself is left out of the pages.
    """
    families: dict[str, Metric] = {}
    names = {family.name for family in own.collect()}
    for shard, page in zip(shards, pages, strict=True):
        for family in text_string_to_metric_families((page or b"").decode()):
            if family.name.removesuffix("_created") in names:
                continue
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                known = {} if "instance" in sample.labels else {"shard": str(shard.number)}
                whole.samples.append(sample._replace(labels=sample.labels | known))
    merged = CollectorRegistry()
    merged.register(_Fixed([*families.values(), *_processes(shards, pages)]))
    return generate_latest(own) + generate_latest(merged)


def _processes(shards: Sequence[ShardProcess], pages: Sequence[bytes | None]) -> Iterable[Metric]:
    up = GaugeMetricFamily("warmroute_indexer_shard_up", "1 while its writer answers.", labels=["shard"])
    restarts = CounterMetricFamily(
        "warmroute_indexer_shard_restarts", "Starts of its writer after a death.", labels=["shard"]
    )
    for shard, page in zip(shards, pages, strict=True):
        up.add_metric([str(shard.number)], page is not None)
        restarts.add_metric([str(shard.number)], shard.restarts)
    return [up, restarts]
