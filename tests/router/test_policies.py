from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.decision import Ask, Candidate
from router.errors import SettingsError
from router.policies import POLICIES, policy_named

CACHE_AWARE, LEAST_LOADED, ROUND_ROBIN = (
    POLICIES[name].rank for name in ("cache-aware", "least-loaded", "round-robin")
)


def candidate(
    name: str, matched: int | None = 0, *, requests: int = 0, queued: int = 0, credited: int | None = None
) -> Candidate:
    return Candidate(
        replica=name,
        rank=0,
        matched_tokens=matched,
        credited_tokens=(matched or 0) if credited is None else credited,
        requests=requests,
        prefill_tokens=queued,
    )


def chi_square(counts: Counter[str], names: int) -> float:
    expected = counts.total() / names
    return sum((counts.get(str(name), 0) - expected) ** 2 / expected for name in range(names))


@pytest.mark.parametrize("matched", [0, 1024, None])
@pytest.mark.parametrize("policy", ["cache-aware", "least-loaded"])
def test_rq03_ties_are_spread_evenly(policy: str, matched: int | None) -> None:
    rng = random.Random(7)
    candidates = [candidate(str(number), matched) for number in range(4)]
    chosen = Counter(
        POLICIES[policy].rank(Ask(1100), candidates, rng)[0].candidate.replica for _ in range(1000)
    )
    # 16.27 is the 99.9 % quantile for three degrees of freedom.
    assert chi_square(chosen, 4) < 16.27


def test_the_longest_match_wins_on_an_idle_fleet() -> None:
    ranked = CACHE_AWARE(
        Ask(2000), [candidate("a", 16), candidate("b", 1984), candidate("c", 512)], random.Random(1)
    )
    assert [item.candidate.replica for item in ranked] == ["b", "c", "a"]


def test_a_longer_queue_outweighs_a_longer_match() -> None:
    ranked = CACHE_AWARE(
        Ask(2000), [candidate("warm", 1500, queued=9000, requests=5), candidate("cold", 0)], random.Random(1)
    )
    assert ranked[0].candidate.replica == "cold"


def test_rq07_a_runaway_replica_does_not_take_affinity_from_the_others() -> None:
    fleet = [candidate("d", 0, requests=200, queued=500_000), candidate("a", 1024), candidate("b", 0)]
    assert CACHE_AWARE(Ask(1100), fleet, random.Random(1))[0].candidate.replica == "a"


def test_rq08_a_miss_goes_to_the_idle_replica() -> None:
    fleet = [candidate("a", 0, requests=30), candidate("b", 0)]
    assert CACHE_AWARE(Ask(1000), fleet, random.Random(1))[0].candidate.replica == "b"


def test_rq16_the_reason_says_how_far_a_match_is_trusted() -> None:
    doubtful = Candidate(replica="a", rank=0, matched_tokens=352, credited_tokens=109, weight=0.31)
    reason = CACHE_AWARE(Ask(361), [doubtful], random.Random(1))[0].reason
    assert reason == "352 of 361 prompt tokens cached, trusted 31 %, 0 queued, 0 requests in flight"


def test_rq16_nothing_is_called_cached_where_no_match_is_trusted() -> None:
    fleet = [Candidate(replica="a", rank=0, matched_tokens=352, weight=0.0, state="offline")]
    assert CACHE_AWARE(Ask(361), fleet, random.Random(1)) == LEAST_LOADED(Ask(361), fleet, random.Random(1))
    fleet.append(Candidate(replica="b", rank=0, matched_tokens=0, weight=1.0, requests=9))
    reasons = [item.reason for item in CACHE_AWARE(Ask(361), fleet, random.Random(1))]
    assert all(reason.startswith("0 of 361") for reason in reasons)


def test_a_match_that_is_not_trusted_counts_for_less() -> None:
    fleet = [candidate("partial", 1024, credited=512), candidate("live", 800)]
    assert CACHE_AWARE(Ask(1100), fleet, random.Random(1))[0].candidate.replica == "live"


@pytest.mark.parametrize(("tokens", "matched"), [(None, 1024), (1100, None)])
def test_without_tokens_or_matches_cache_aware_is_least_loaded(
    tokens: int | None, matched: int | None
) -> None:
    fleet = [candidate("busy", matched, requests=3, queued=300), candidate("idle", matched)]
    assert CACHE_AWARE(Ask(tokens), fleet, random.Random(1)) == LEAST_LOADED(
        Ask(tokens), fleet, random.Random(1)
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 4096), st.integers(0, 50), st.integers(0, 100_000)), min_size=1, max_size=8
    ),
    st.sampled_from(sorted(POLICIES)),
    st.integers(0, 100),
)
def test_every_policy_ranks_each_candidate_once_with_terms_that_add_up(
    fleet: list[tuple[int, int, int]], policy: str, turn: int
) -> None:
    candidates = [
        candidate(str(number), matched, requests=requests, queued=queued)
        for number, (matched, requests, queued) in enumerate(fleet)
    ]
    ranked = POLICIES[policy].rank(Ask(4097, turn), candidates, random.Random(1))
    assert sorted(item.candidate.replica for item in ranked) == sorted(c.replica for c in candidates)
    assert all(item.cost == sum(item.terms.values()) and item.reason for item in ranked)


def test_round_robin_takes_each_in_turn() -> None:
    fleet = [candidate(name) for name in "abc"]
    firsts = [ROUND_ROBIN(Ask(None, turn), fleet, random.Random(1))[0].candidate.replica for turn in range(6)]
    assert firsts == list("abcabc")


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        SettingsError, match=r"cache-awere.*cache-aware, lowest-ttft, least-loaded, round-robin"
    ):
        policy_named("cache-awere")


@pytest.mark.parametrize(("patience_s", "chosen"), [(float("inf"), "warm"), (0.5, "cold")])
def test_nobody_waits_much_longer_than_nearly_all_do_for_the_sake_of_others(
    patience_s: float, chosen: str
) -> None:
    fleet = [candidate("warm", 8000, queued=12_000), candidate("cold", 0, queued=0)]
    fleet = [replace(one, behind=1.0) for one in fleet]
    ranked = CACHE_AWARE(Ask(8192, patience_s=patience_s), fleet, random.Random(1))
    assert ranked[0].candidate.replica == chosen
    assert sum(ranked[0].terms.values()) == pytest.approx(ranked[0].cost)


def test_what_others_wait_for_as_well_is_theirs_to_bear_and_shown() -> None:
    fleet = [candidate("warm", 8000, queued=12_000), candidate("cold", 0, queued=0)]
    for shared_tokens, chosen in ((0.0, "warm"), (7000.0, "cold")):
        both = [
            replace(one, behind=1.0, shared_tokens=shared_tokens * (not one.credited_tokens)) for one in fleet
        ]
        ranked = CACHE_AWARE(Ask(8192), both, random.Random(1))
        assert ranked[0].candidate.replica == chosen
        terms = next(item.terms for item in ranked if item.candidate.replica == "cold")
        assert terms["shared"] == pytest.approx(-terms["behind"] * shared_tokens / 8192)


def test_rq01_patience_changes_neither_end_of_affinity() -> None:
    fleet = [candidate("warm", 8000, queued=90_000), candidate("cold", 0, queued=0)]
    for affinity, chosen in ((0.0, "cold"), (1.0, "warm")):
        rank = policy_named("cache-aware", {"affinity": affinity}).rank
        assert rank(Ask(8192, patience_s=0.1), fleet, random.Random(1))[0].candidate.replica == chosen
