"""``/metrics`` under the names and labels of vLLM 0.32, read from the schedulers when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from simulator.core import EngineCore
from simulator.scheduler import Scheduler
from simulator.settings import EngineSettings

LABELS = ("engine", "model_name")
_TTFT_BUCKETS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
)

_Reading = Callable[[Scheduler], float]

_GAUGES: dict[str, tuple[str, _Reading]] = {
    "num_requests_running": ("Requests in model execution batches.", lambda s: len(s.running)),
    "num_requests_waiting": ("Requests waiting to be processed.", lambda s: len(s.waiting)),
    "kv_cache_usage_perc": ("KV blocks in use by requests, 1 is all.", lambda s: s.pool.usage),
}
_COUNTERS: dict[str, tuple[str, _Reading]] = {
    "prefix_cache_queries": ("Tokens looked up in the prefix cache.", lambda s: s.counts.queried),
    "prefix_cache_hits": ("Tokens found in the prefix cache.", lambda s: s.counts.hit),
    "prompt_tokens": ("Prompt tokens processed.", lambda s: s.counts.prompt),
    "prompt_tokens_cached": ("Prompt tokens that were cached.", lambda s: s.counts.prompt_cached),
    "generation_tokens": ("Tokens generated.", lambda s: s.counts.generated),
    "num_preemptions": ("Preemptions.", lambda s: s.counts.preemptions),
}


class EngineMetrics:
    """The registry of one engine process. ``started`` is the unix time at which it began."""

    def __init__(self, settings: EngineSettings, started: float) -> None:
        self._settings = settings
        self._started = started
        self._registry = CollectorRegistry()
        self._first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "Time to first token in seconds.",
            LABELS,
            buckets=_TTFT_BUCKETS_S,
            registry=self._registry,
        )

    def first_token(self, rank: int) -> Callable[[float], None]:
        """Where a rank reports its times to first token, in seconds."""
        return self._first_token.labels(str(rank), self._settings.model).observe

    def watch(self, cores: Sequence[EngineCore]) -> None:
        self._registry.register(_Cores(self._settings, self._started, cores))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Cores(Collector):
    def __init__(self, settings: EngineSettings, started: float, cores: Sequence[EngineCore]) -> None:
        self._settings = settings
        self._started = started
        self._cores = cores

    def collect(self) -> Iterable[Metric]:
        for name, (documentation, reading) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", documentation, labels=LABELS)
            for core in self._cores:
                gauge.add_metric((str(core.rank), self._settings.model), reading(core.scheduler))
            yield gauge
        for name, (documentation, reading) in _COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", documentation, labels=LABELS)
            for core in self._cores:
                counter.add_metric((str(core.rank), self._settings.model), reading(core.scheduler))
            yield counter
        yield self._prompt_tokens_by_source()
        yield self._requests()
        yield self._cache_config()
        yield GaugeMetricFamily(
            "process_start_time_seconds", "Start of the process in unix seconds.", self._started
        )

    def _prompt_tokens_by_source(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where they came from.",
            labels=(*LABELS, "source"),
        )
        for core in self._cores:
            counts = core.scheduler.counts
            labels = (str(core.rank), self._settings.model)
            family.add_metric((*labels, "local_compute"), counts.prompt - counts.prompt_cached)
            family.add_metric((*labels, "local_cache_hit"), counts.prompt_cached)
        return family

    def _requests(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "Requests by how they finished.", labels=(*LABELS, "finished_reason")
        )
        for core in self._cores:
            counts = core.scheduler.counts
            labels = (str(core.rank), self._settings.model)
            family.add_metric((*labels, "length"), counts.finished_requests)
            family.add_metric((*labels, "abort"), counts.aborted_requests)
        return family

    def _cache_config(self) -> Metric:
        names = (
            "block_size",
            "num_gpu_blocks",
            "enable_prefix_caching",
            "prefix_caching_hash_algo",
            "engine",
        )
        family = GaugeMetricFamily("vllm:cache_config_info", "The cache's configuration.", labels=names)
        settings = self._settings
        for core in self._cores:
            family.add_metric(
                (str(settings.block_size), str(settings.blocks), "True", "blake2b_64", str(core.rank)), 1
            )
        return family
