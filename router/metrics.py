"""Prometheus metrics of the router, in a registry of its own.

Labels hold names and codes, never parts of requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.fleet import Fleet
from router.load import Load
from router.outliers import Standing
from router.replicas import Health

PREFIX = "warmroute_router_"
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_FAST_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 2.5)


_Kind = TypeVar("_Kind", Counter, Histogram)


class Labelled(Generic[_Kind]):
    """The series of a metric by the values of their labels. Those that were asked for once are at hand:
    ``prometheus_client`` makes text of each value and takes a lock to find one.
    """

    def __init__(self, metric: _Kind) -> None:
        self._metric: _Kind = metric
        self._series: dict[tuple[str, ...], _Kind] = {}

    def labels(self, *values: str) -> _Kind:
        """The one series."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = self._metric.labels(*values)
        return series

    def forget(self, replica: str) -> None:
        """Takes the series of a replica out."""
        self._metric.remove_by_labels({"replica": replica})
        self._series.clear()


class RouterMetrics:
    """All counters and histograms. Gauges are read from the load and the fleet when somebody scrapes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._of_replicas: list[Labelled[Counter] | Labelled[Histogram]] = []
        self.requests = self._counter("requests", "Requests by how they ended", "policy", "replica", "status")
        self.decisions = self._counter(
            "decisions", "Choices by whether the policy had what it needs", "policy", "mode"
        )
        self.fallbacks = self._counter(
            "fallback", "Requests that something in front of the relay failed for", "reason"
        )
        self.rules = self._counter("rule_requests", "Requests whose policy a rule chose", "rule")
        self.tokenize_fallbacks = self._counter(
            "tokenize_fallback",
            "Prompts that the model's local tokenizer could not take, or that have no known tokens",
            "reason",
        )
        self.tokenizer_checks = self._counter(
            "tokenizer_checks", "Local tokenizers compared with an engine", "model", "outcome"
        )
        self.saturated = self._counter("saturated", "Requests that no replica had room for", "reason")
        self.doors_refused = self._counter(
            "doors_refused", "Requests without one of the API keys, or over its limits", "key", "status"
        )
        self.queue_seconds = self._fast("queue_seconds", "Waiting for room at a replica")
        self.queued = Gauge(PREFIX + "queued", "Requests that wait for room now", registry=self.registry)
        self.retries = self._counter(
            "retries", "Attempts that failed before a byte was answered", "replica", "reason"
        )
        self.retries_refused = self._counter(
            "retries_refused", "Requests that were not tried once more though attempts were left", "reason"
        )
        self.broken = self._counter("broken_answers", "Answers that broke off in the middle", "replica")
        self.unknown_streams = Counter(
            PREFIX + "unknown_streams",
            "Streams in answers of the index that are none of ours",
            registry=self.registry,
        )
        self.polls_failed = self._counter(
            "polls_failed", "Times that a replica did not say its load", "replica", "reason"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of compared requests", "replica")
        self.matched_tokens = self._counter(
            "matched_tokens", "Cached tokens predicted for compared requests", "replica"
        )
        self.best_available_tokens = self._counter(
            "best_available_tokens", "Longest match on any replica, of compared requests", "replica"
        )
        self.cached_tokens = self._counter("cached_tokens", "Cached tokens that engines reported", "replica")
        self.compared = self._counter(
            "compared", "Requests whose prediction was compared", "replica", "outcome"
        )
        self.feedback = self._counter("feedback", "Answers told to the indexer, by what it said", "outcome")
        self.token_count_mismatch = self._counter(
            "token_count_mismatch", "Answers whose prompt_tokens differ from ours", "replica"
        )
        self.ttft_seconds = Labelled(
            Histogram(
                PREFIX + "ttft_seconds",
                "From sending a streamed request to the first byte of its body",
                ("policy", "replica"),
                buckets=_TTFT_BUCKETS,
                registry=self.registry,
            )
        )
        self._of_replicas.append(self.ttft_seconds)
        self.lookup_seconds = self._fast("lookup_seconds", "Asking the index")
        self.tokenize_seconds = self._fast("tokenize_seconds", "Getting a prompt's tokens")

    def refused_at_door(self, key: str, status: int) -> None:
        """A request was turned away; ``key`` is the configured name, or nothing."""
        self.doors_refused.labels(key, str(status)).inc()

    def forget(self, replica: str) -> None:
        """Takes the series of a replica out that is none of ours any more."""
        for metric in self._of_replicas:
            metric.forget(replica)

    def _counter(self, name: str, text: str, *labels: str) -> Labelled[Counter]:
        counter = Labelled(Counter(PREFIX + name, text, labels, registry=self.registry))
        if "replica" in labels:
            self._of_replicas.append(counter)
        return counter

    def _fast(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=_FAST_BUCKETS, registry=self.registry)

    def watch(self, fleet: Fleet, load: Load) -> None:
        """Shows the fleet's and the load's state from now on."""
        self.registry.register(_Now(fleet, load))

    def render(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self.registry)


class _Now(Collector):
    def __init__(self, fleet: Fleet, load: Load) -> None:
        self._fleet = fleet
        self._load = load

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(PREFIX + "replica_up", "1 for a replica that is healthy", labels=("replica",))
        kept_out = GaugeMetricFamily(
            PREFIX + "replica_ejected", "1 for a replica that is kept from requests", labels=("replica",)
        )
        ejections = CounterMetricFamily(
            PREFIX + "ejections", "Times that a replica was kept from requests", labels=("replica",)
        )
        requests = self._gauge("inflight_requests", "Requests in flight")
        prefill = self._gauge("inflight_prefill_tokens", "Uncached prompt tokens sent and not yet answered")
        decoding = self._gauge("inflight_decoding", "Requests being answered")
        others = self._gauge("other_requests", "Requests that others are thought to have there")
        age = self._gauge("load_age_seconds", "Age of what the replica last said of its load")
        for replica in self._fleet.replicas.values():
            up.add_metric((replica.name,), float(replica.health is Health.UP))
            standing = self._fleet.outliers.standing(replica.name)
            kept_out.add_metric((replica.name,), float(standing in (Standing.EJECTED, Standing.HALF_OPEN)))
            ejections.add_metric((replica.name,), self._fleet.ejections[replica.name])
            for name, rank in replica.streams():
                load = self._load.ours((name, rank))
                labels = (name, str(rank))
                requests.add_metric(labels, load.requests)
                prefill.add_metric(labels, load.prefill_tokens)
                decoding.add_metric(labels, load.decoding)
                others.add_metric(labels, self._load.others((name, rank)).requests)
                age_s = self._load.report_age_s((name, rank))
                if age_s is not None:
                    age.add_metric(labels, age_s)
        yield from (up, kept_out, ejections, requests, prefill, decoding, others, age)

    @staticmethod
    def _gauge(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(PREFIX + name, text, labels=("replica", "rank"))
