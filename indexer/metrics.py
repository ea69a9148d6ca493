"""Prometheus metrics of the indexer: streams are read at scrape time, from the map and the ingest thread."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from events.subscriber import Subscriber
from indexer.errors import MapError
from indexer.ingest import Ingest
from indexer.reader import MapReader, StreamStatus
from indexer.seeds import seeds

STREAM = ["instance", "rank"]
QUERY_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)


class IndexerMetrics:
    """The registry and what is measured as it happens."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.query_seconds = Histogram(
            "warmroute_indexer_query_seconds",
            "Time to match one prompt, seconds.",
            registry=self.registry,
            buckets=QUERY_BUCKETS,
        )

    def watch(
        self, ingest: Ingest, reader: MapReader, subscriber: Subscriber, silent: Mapping[str, float]
    ) -> None:
        """Adds the metrics that are read at scrape time; ``silent`` as the witness has it, by URL."""
        self.registry.register(_Streams(ingest, reader, subscriber, silent))


class _Streams(Collector):
    def __init__(
        self, ingest: Ingest, reader: MapReader, subscriber: Subscriber, silent: Mapping[str, float]
    ) -> None:
        self._ingest = ingest
        self._reader = reader
        self._subscriber = subscriber
        self._silent = silent

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._process()
        try:
            yield from self._streams()
        except MapError:
            return

    def _process(self) -> Iterator[Metric]:
        silent = GaugeMetricFamily(
            "warmroute_indexer_silent_seconds",
            "How long a replica has completed requests without an event, seconds.",
            labels=["url"],
        )
        for url, seconds in dict(self._silent).items():
            silent.add_metric([url], seconds)
        yield silent
        yield CounterMetricFamily(
            "warmroute_indexer_groups", "Committed groups of batches.", value=self._ingest.groups
        )
        yield CounterMetricFamily(
            "warmroute_indexer_failures", "Groups that could not be applied.", value=self._ingest.failures
        )
        yield GaugeMetricFamily(
            "warmroute_indexer_write_trouble",
            "1 while what is to be written does not go into the map.",
            value=int(self._ingest.trouble is not None),
        )
        answers = CounterMetricFamily(
            "warmroute_indexer_feedback", "Answers that were told, by what came of them.", labels=["result"]
        )
        for result, count in self._ingest.feedback.copy().items():
            answers.add_metric([result], count)
        yield answers
        unmatched = self._subscriber.faults.unmatched
        yield CounterMetricFamily(
            "warmroute_indexer_unmatched_messages",
            "Messages in bind mode whose topic names no stream.",
            value=sum(unmatched.copy().values()),
        )

    def _streams(self) -> Iterator[Metric]:
        streams = self._reader.streams()
        yield GaugeMetricFamily(
            "warmroute_indexer_hash_seeds",
            "Ways in which engines hash equal content, among those that can be compared.",
            value=len(set(seeds(status.record for status in streams).values())),
        )
        families = _StreamFamilies()
        for status in streams:
            families.add(status, self._ingest, self._subscriber)
        yield from families.all()
        yield GaugeMetricFamily(
            "warmroute_indexer_map_used_bytes", "Pages that hold entries.", value=self._reader.used_bytes()
        )


class _StreamFamilies:
    """The metrics that each stream has."""

    def __init__(self) -> None:
        self.blocks = GaugeMetricFamily("warmroute_indexer_blocks", "Blocks held.", labels=STREAM)
        self.holes = GaugeMetricFamily("warmroute_indexer_orphans", "Blocks behind a hole.", labels=STREAM)
        self.unjudged = GaugeMetricFamily(
            "warmroute_indexer_unjudged_groups",
            "Attention groups of which it is not known what a hit needs.",
            labels=STREAM,
        )
        self.state = GaugeMetricFamily(
            "warmroute_indexer_stream_state", "1 for the state.", labels=[*STREAM, "state"]
        )
        self.trust = GaugeMetricFamily("warmroute_indexer_stream_weight", "Trust, 0 to 1.", labels=STREAM)
        self.right = GaugeMetricFamily(
            "warmroute_indexer_stream_accuracy",
            "Share of the predicted tokens that were cached, averaged over answers.",
            labels=STREAM,
        )
        self.corrections = GaugeMetricFamily(
            "warmroute_indexer_corrections", "Blocks denied or believed by answers.", labels=[*STREAM, "kind"]
        )
        self.age = GaugeMetricFamily(
            "warmroute_indexer_event_age_seconds", "Since the last batch.", labels=STREAM
        )
        self.queue = GaugeMetricFamily("warmroute_indexer_queued", "Batches not yet applied.", labels=STREAM)
        self.batches = CounterMetricFamily("warmroute_indexer_batches", "Applied batches.", labels=STREAM)
        self.evicted = CounterMetricFamily("warmroute_indexer_evicted", "Blocks over a bound.", labels=STREAM)
        self.dropped = CounterMetricFamily(
            "warmroute_indexer_dropped_batches", "Batches that found a full queue.", labels=STREAM
        )
        self.skipped = CounterMetricFamily(
            "warmroute_indexer_skipped", "What was left out of the map.", labels=[*STREAM, "reason"]
        )

    def add(self, status: StreamStatus, ingest: Ingest, subscriber: Subscriber) -> None:
        record = status.record
        label = [record.id[0], str(record.id[1])]
        self.blocks.add_metric(label, record.blocks)
        self.holes.add_metric(label, record.orphans)
        self.unjudged.add_metric(label, len(record.unjudged))
        self.state.add_metric([*label, status.state], 1)
        self.trust.add_metric(label, status.weight)
        self.right.add_metric(label, 1.0 - record.wrong)
        self.corrections.add_metric([*label, "denied"], record.denied)
        self.corrections.add_metric([*label, "believed"], record.believed)
        if record.event_at is not None:
            self.age.add_metric(label, max(0.0, time.time() - record.event_at))
        self.queue.add_metric(label, ingest.held(record.port))
        if record.rank is None:
            self.dropped.add_metric(label, subscriber.inbox.overflows[record.port])
        self.batches.add_metric(label, record.counters.batches)
        self.evicted.add_metric(label, record.counters.evicted)
        faults = subscriber.faults.of(record.id)
        for reason, count in [*record.counters.skipped.items(), *faults.items()]:
            self.skipped.add_metric([*label, reason], count)

    def all(self) -> Iterable[Metric]:
        """In the order in which they are above."""
        metrics: dict[str, Metric] = vars(self)
        return metrics.values()
