"""``warmroute replay``: a trace under several policies, by numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from router.policies import policy_named
from simulator.errors import TraceError
from simulator.fleet import FleetRun, Run, Served, Shape
from simulator.recorded import is_recording, read_recorded
from simulator.replica import Cache
from simulator.trace import BLOCK_TOKENS, Traced, read_trace, spread
from simulator.traffic import workload

WORKLOAD = "workload:"
POOLED = "pooled"
"""The name of the limit, in the place of a policy's."""


class Replayed(msgspec.Struct, frozen=True):
    """One policy's run. ``hit_rate`` is cached tokens by prompt tokens; ``load_max_over_mean`` the longest
    time that a replica computed prompts, by the mean of all. ``busy`` is that mean by the time in which the
    requests came: above 1 the fleet does not keep up. 0 where all came at once.
    """

    requests: int
    hit_rate: float
    ttft_mean_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    load_max_over_mean: float
    busy: float


def load_trace(
    name: str, seed: int = 0, *, spread_out: bool = False, per_s: float | None = None
) -> list[Traced]:
    """The file of that name, or the made-up traffic of ``workload:NAME``, of which so much begins ``per_s``.
    Raises TraceError.

    ``spread_out``: what a file stamps alike comes one after the other, until its next timestamp.
    """
    if name.startswith(WORKLOAD):
        return workload(name.removeprefix(WORKLOAD), seed, per_s)
    if per_s is not None:
        raise TraceError(f"{per_s} a second: {name} is a file and has its times; {WORKLOAD}NAME has none")
    path = Path(name)
    trace = read_recorded(path) if is_recording(path) else read_trace(path)
    if not trace:
        raise TraceError(f"the trace {name} holds no request")
    return spread(trace, seed) if spread_out else trace


def replay(
    trace: Sequence[Traced], policy: str, shape: Shape, progress: Callable[[int], None] = lambda _: None
) -> Replayed:
    """The trace under one policy, or under ``pooled``: the limit. Raises SettingsError for a fleet or a
    policy that cannot be; ``progress`` is told how many requests have come.
    """
    if policy == POOLED:
        shape.check()
        return pooled(trace, shape)
    return measured(FleetRun(shape, policy_named(policy), trace).run(progress))


def measured(run: Run) -> Replayed:
    """The numbers of a run."""
    loads = run.computed_s.values()
    mean = statistics.fmean(loads)
    return _replayed(run.served, max(loads) / mean, mean)


def pooled(trace: Sequence[Traced], shape: Shape) -> Replayed:
    """The limit: one cache as large as all of the fleet's, and a replica for each prompt, so that none
    waits.
    """
    cache = Cache(shape.replicas * (shape.cache_tokens // BLOCK_TOKENS))
    served = []
    for request in trace:
        usable = request.blocks[: (request.prompt_tokens - 1) // BLOCK_TOKENS]
        cached = cache.leading(usable) * BLOCK_TOKENS
        ttft_s = (request.prompt_tokens - cached) / shape.prefill_rate
        served.append(Served(POOLED, request.at_s, ttft_s, request.prompt_tokens, cached))
        cache.hold(request.full_blocks)
        cache.release(request.full_blocks)
    return _replayed(served, 1.0, sum(one.ttft_s for one in served) / shape.replicas)


def _replayed(served: Sequence[Served], load_max_over_mean: float, computed_s: float) -> Replayed:
    """``computed_s``: how long a replica computed prompts, in the mean."""
    times = sorted(one.ttft_s for one in served)
    came = [one.at_s for one in served]
    lasted_s = max(came) - min(came)
    return Replayed(
        requests=len(times),
        hit_rate=sum(s.cached_tokens for s in served) / sum(s.prompt_tokens for s in served),
        ttft_mean_s=statistics.fmean(times),
        ttft_p95_s=times[int(0.95 * len(times))],
        ttft_p99_s=times[int(0.99 * len(times))],
        load_max_over_mean=load_max_over_mean,
        busy=computed_s / lasted_s if lasted_s else 0.0,
    )
