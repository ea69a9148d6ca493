"""The fleet simulation, and what the router's own code does in it. Times are virtual."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from msgspec.structs import replace

from router.policies import policy_named
from simulator.errors import SettingsError
from simulator.fleet import FleetRun, Index, Run, Shape
from simulator.replay import measured, pooled, replay
from simulator.replica import CacheChange
from simulator.trace import Traced
from simulator.traffic import workload as made_up

workload = cache(made_up)
SMALL = Shape(replicas=4, cache_tokens=300_000, prefill_rate=4700.0)


def traffic(name: str = "rag", every: int = 4) -> list[Traced]:
    """A part of a made-up workload that four replicas can bear."""
    return workload(name)[::every][:500]


def run(policy: str, shape: Shape = SMALL, trace: list[Traced] | None = None) -> Run:
    return FleetRun(shape, policy_named(policy), traffic() if trace is None else trace).run()


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    assert run("cache-aware") == run("cache-aware")
    assert run("cache-aware") != run("cache-aware", Shape(**{**_fields(SMALL), "seed": 1}))


def _fields(shape: Shape) -> dict[str, object]:
    return {name: getattr(shape, name) for name in shape.__struct_fields__}


def changed(**fields: object) -> Shape:
    return Shape(**{**_fields(SMALL), **fields})  # type: ignore[arg-type]


def test_the_index_matches_leading_blocks_of_each_replica() -> None:
    index = Index()
    index.apply(0, CacheChange((1, 2, 3), ()))
    index.apply(1, CacheChange((1, 2), ()))
    index.apply(0, CacheChange((), (3,)))
    assert index.match((1, 2, 3), 2) == {0: 2, 1: 2}
    index.clear(0)
    assert index.match((1, 2, 3), 2) == {1: 2}


def test_one_request_alone_takes_the_time_of_its_prefill() -> None:
    one = Traced(1.0, 4700, 1, tuple(range(10)))
    again = Traced(5.0, 4700, 1, tuple(range(10)))
    first, second = run("cache-aware", trace=[one, again]).served
    assert (first.ttft_s, first.cached_tokens) == (pytest.approx(1.0), 0)
    assert (second.replica, second.cached_tokens) == (first.replica, 9 * 512)


def test_every_request_is_served_once_whatever_happens_to_the_fleet() -> None:
    for shape in (
        changed(restart_at_s=100.0),
        changed(restart_at_s=100.0, decode_rate=50.0),
        changed(added_at_s=50.0),
        changed(routers=3, event_delay_s=1.0),
        changed(slower=5.0),
    ):
        served = run("cache-aware", shape).served
        assert Counter(one.at_s for one in served) == Counter(one.at_s for one in traffic())


def test_the_pooled_cache_bounds_every_policy() -> None:
    limit = pooled(traffic(), SMALL).hit_rate
    for policy in ("cache-aware", "lowest-ttft", "least-loaded"):
        assert 0 < replay(traffic(), policy, SMALL).hit_rate <= limit
    assert replay(traffic(), "pooled", SMALL).hit_rate == limit


def test_a_fleet_that_cannot_be_is_refused() -> None:
    for fields in ({"replicas": 0}, {"cache_tokens": 1}, {"event_delay_s": -1.0}, {"decode_rate": 0.0}):
        with pytest.raises(SettingsError, match=next(iter(fields))):
            run("cache-aware", changed(**fields))


def test_cache_aware_is_first_and_its_foresight_pays() -> None:
    trace = workload("agents")[:1500]
    results = {name: replay(trace, name, Shape()) for name in ("cache-aware", "lowest-ttft", "least-loaded")}
    best = results.pop("cache-aware")
    for other in results.values():
        assert best.ttft_mean_s < other.ttft_mean_s
        assert best.hit_rate > other.hit_rate


def test_where_little_waits_its_foresight_costs_little_time_for_what_it_finds() -> None:
    trace = workload("rag")[:2000]
    aware, plain = (replay(trace, name, Shape()) for name in ("cache-aware", "lowest-ttft"))
    assert aware.hit_rate >= 1.04 * plain.hit_rate
    assert aware.ttft_mean_s <= 1.05 * plain.ttft_mean_s


def test_events_that_come_a_second_late_cost_little() -> None:
    now, late = (measured(run("cache-aware", changed(event_delay_s=delay))) for delay in (0.0, 1.0))
    assert late.hit_rate >= 0.98 * now.hit_rate
    assert late.load_max_over_mean <= 1.1 * now.load_max_over_mean


def test_rq10_one_prefix_common_to_all_makes_no_hot_spot() -> None:
    trace = traffic("one-prefix")
    aware, least = (measured(run(name, trace=trace)) for name in ("cache-aware", "least-loaded"))
    assert aware.load_max_over_mean <= 1.1 * least.load_max_over_mean
    assert aware.ttft_mean_s <= 1.1 * least.ttft_mean_s


def test_where_nothing_is_shared_cache_aware_is_least_loaded() -> None:
    trace = traffic("nothing-shared", every=2)
    aware, least = (measured(run(name, trace=trace)) for name in ("cache-aware", "least-loaded"))
    assert aware.ttft_mean_s == pytest.approx(least.ttft_mean_s, rel=0.02)


def test_a_replica_five_times_slower_gets_fewer_prompts_and_is_not_given_up() -> None:
    served = run("cache-aware", changed(slower=5.0)).served
    by_replica = Counter(one.replica for one in served[-300:])
    assert 0 < by_replica["r0"] < 0.5 * 300 / 4


def test_several_routers_make_no_herd() -> None:
    for routers in (2, 4):
        assert measured(run("cache-aware", changed(routers=routers))).load_max_over_mean <= 1.25


def test_rq06_several_routers_find_nearly_what_one_finds() -> None:
    trace = workload("chats")[:4000:2]
    shape = Shape(replicas=4)
    one, two, four = (replay(trace, "cache-aware", replace(shape, routers=routers)) for routers in (1, 2, 4))
    assert min(two.hit_rate, four.hit_rate) >= 0.98 * one.hit_rate
    assert max(two.load_max_over_mean, four.load_max_over_mean) <= 1.25


def test_rq06_four_routers_that_see_little_of_each_other_wait_not_much_longer_than_one() -> None:
    trace = workload("rag")[:3000]
    one, four = (replay(trace, "cache-aware", Shape(routers=routers)) for routers in (1, 4))
    assert four.ttft_mean_s <= 1.27 * one.ttft_mean_s
    assert four.ttft_p99_s <= 1.5 * one.ttft_p99_s


def test_a_session_goes_on_only_when_it_is_answered() -> None:
    first = Traced(0.0, 47_000, 1, tuple(range(92)), session=1)
    second = Traced(2.0, 47_512, 1, tuple(range(93)), session=1)
    alone = Traced(3.0, 470, 1, (1000,))
    served = {one.prompt_tokens: one for one in run("cache-aware", trace=[first, second, alone]).served}
    assert served[47_000].ttft_s == pytest.approx(10.0)
    assert served[47_512].at_s == pytest.approx(12.0)
    assert served[47_512].cached_tokens == 91 * 512
    assert served[470].at_s == 3.0


def test_a_session_whose_replica_restarts_goes_on_elsewhere() -> None:
    trace = [
        Traced(float(turn), 47_000, 1, tuple(range(100 * user, 100 * user + 92)), session=user)
        for turn in range(3)
        for user in range(4)
    ]
    served = run("cache-aware", changed(restart_at_s=5.0), trace).served
    assert len(served) == len(trace)
