from __future__ import annotations

import random
from collections import Counter

import pytest

from indexer.reader import Matched
from router.chooser import Choice, Chooser, Subject
from router.load import Load
from router.policies import POLICIES, Policy, policy_named
from router.policies.cache_aware import CacheAware
from router.replicas import StreamId
from router.reported import Reported

CACHE_AWARE = POLICIES["cache-aware"]
MARK = 512
FLEET = [(name, 0) for name in "abcd"]
A, B, C, D = FLEET


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def chooser_of(clock: Clock | None = None, seed: int = 1) -> Chooser:
    clock = clock or Clock()
    return Chooser(Load(clock), random.Random(seed), clock, mark_tokens=MARK)


def marks(prompt: str, tokens: int) -> tuple[str, ...]:
    return tuple(f"{prompt} {end}" for end in range(MARK, tokens + 1, MARK))


def matched(stream: StreamId, gpu: int = 0, *, cpu: int = 0, disk: int = 0, weight: float = 1.0) -> Matched:
    return Matched(
        instance=stream[0],
        rank=stream[1],
        block_size=16,
        state="live",
        weight=weight,
        gpu=gpu,
        cpu=max(gpu, cpu),
        disk=max(gpu, cpu, disk),
        generation=1,
        sequence=1,
    )


def nothing(fleet: list[StreamId]) -> dict[StreamId, Matched]:
    return {stream: matched(stream) for stream in fleet}


def with_affinity(affinity: float) -> Policy:
    return policy_named("cache-aware", {"affinity": affinity})


def crowd_on_a_hot_prefix(policy: Policy) -> tuple[list[int], float]:
    """64 requests at any time, 4k tokens of which are cached on ``a`` alone at first, and 200 of each one's
    own.

    Each replica answers one request a step and then holds the prefix. Returns the requests in flight by
    replica after 100 steps, and the share of prompt tokens that were not computed from then on.
    """
    clock = Clock()
    chooser = chooser_of(clock)
    in_flight: dict[StreamId, list[Choice]] = {stream: [] for stream in FLEET}
    warm = {A}
    reused = sent = 0
    for step in range(200):
        while sum(map(len, in_flight.values())) < 64:
            matches = {stream: matched(stream, 4096 if stream in warm else 0) for stream in FLEET}
            prompt = Subject(prompt_tokens=4296, matches=matches, marks=marks("hot", 4096))
            choice = chooser.choose(policy, prompt, FLEET)
            in_flight[choice.reservation.stream].append(choice)
            if step >= 100:
                reused, sent = reused + 4296 - choice.prefill_tokens, sent + 4296
        clock.now += 0.1
        for stream, choices in in_flight.items():
            if choices:
                done = choices.pop(0).reservation
                done.first_byte(0.1)
                done.release()
                warm.add(stream)
    return [len(choices) for choices in in_flight.values()], reused / sent


def test_rq01_a_popular_prefix_does_not_pile_up_on_one_replica() -> None:
    in_flight, hit_rate = crowd_on_a_hot_prefix(CACHE_AWARE)
    assert max(in_flight) <= 2 * sum(in_flight) / len(FLEET)
    assert hit_rate >= 0.95


def test_rq01_at_its_maximum_affinity_is_all_that_counts() -> None:
    in_flight, hit_rate = crowd_on_a_hot_prefix(with_affinity(1.0))
    assert in_flight == [63, 0, 0, 0]
    assert hit_rate >= 0.95


def test_rq01_at_its_minimum_affinity_counts_nothing() -> None:
    matches = {**nothing(FLEET), A: matched(A, 4096)}
    chooser = chooser_of()
    chosen: Counter[StreamId] = Counter()
    for _ in range(400):
        reservation = chooser.choose(
            with_affinity(0.0), Subject(prompt_tokens=4296, matches=matches), FLEET
        ).reservation
        chosen[reservation.stream] += 1
        reservation.release()
    assert min(chosen.values()) >= 70


def test_rq06_new_work_goes_where_others_have_sent_less_of_late() -> None:
    """Both are idle when they are looked at. Others send as much as we do, nearly all of it to ``a``."""
    clock = Clock()
    chooser = chooser_of(clock)
    begun, chosen = {A: 0, B: 0}, Counter[StreamId]()
    for number in range(200):
        clock.now += 0.5
        prompt = Subject(prompt_tokens=1000, matches=nothing([A, B]), marks=marks(f"new {number}", 1000))
        choice = chooser.choose(CACHE_AWARE, prompt, [A, B])
        stream = choice.reservation.stream
        chosen[stream] += number >= 100
        choice.reservation.first_byte(0.1)
        choice.reservation.release()
        begun[stream] += 1000
        for other, tokens in ((A, 900), (B, 100)):
            begun[other] += tokens
            chooser.load.report(other, Reported(running=1, admitted_tokens=begun[other]), 0)
        clock.now += 0.5
    assert chosen[B] >= 90


def test_ix12_twenty_requests_with_one_cold_prefix_go_to_few_replicas_within_the_load_bound() -> None:
    clock = Clock()
    chooser = chooser_of(clock)
    chosen: Counter[StreamId] = Counter()
    computed = 0
    for number in range(20):
        clock.now = 0.005 * number
        prompt = Subject(prompt_tokens=8292, matches=nothing(FLEET), marks=marks("cold", 8192))
        choice = chooser.choose(CACHE_AWARE, prompt, FLEET)
        chosen[choice.reservation.stream] += 1
        computed += choice.prefill_tokens
    assert len(chosen) <= 2
    assert computed <= 2 * 8292 + 18 * 100
    # Without the hints, all four would compute it.
    chooser = chooser_of()
    bare = Subject(prompt_tokens=8292, matches=nothing(FLEET))
    assert len({chooser.choose(CACHE_AWARE, bare, FLEET).reservation.stream for _ in range(20)}) == 4


def choose_beside_a_hot_copy(chooser: Chooser, line: list[str]) -> Choice:
    """A prompt whose first 8k tokens ``a`` has cached, behind prompts that begin like ``line`` there: 2,000
    tokens each. The fleet is busy: what is computed is waited for by others.
    """
    for name in line:
        prompt = Subject(
            prompt_tokens=10_192, matches=nothing([A]) | {A: matched(A, 8192)}, marks=marks(name, 8192)
        )
        chooser.choose(CACHE_AWARE, prompt, [A])
    for stream in FLEET[1:]:
        for _ in range(200):
            chooser.crowding.found([(stream, True)])
    matches = {**nothing(FLEET), A: matched(A, 8192)}
    return chooser.choose(
        CACHE_AWARE, Subject(prompt_tokens=8292, matches=matches, marks=marks("hot", 8192)), FLEET
    )


def test_rq10_a_second_copy_is_made_where_many_wait_for_the_first_and_not_for_one_that_is_alone() -> None:
    alone = choose_beside_a_hot_copy(chooser_of(), ["other"] * 12)
    assert alone.reservation.stream == A
    assert all(item.terms["shared"] == 0.0 for item in alone.ranked)
    many = choose_beside_a_hot_copy(chooser_of(), ["hot"] * 12)
    assert many.reservation.stream != A
    assert many.ranked[0].terms["shared"] < 0


def test_rq10_prompts_that_are_answered_or_gone_wait_no_more() -> None:
    for ends in ("prefilled", "release"):
        chooser = chooser_of()
        prompt = Subject(prompt_tokens=8292, matches=nothing(FLEET), marks=marks("hot", 8192))
        choices = [chooser.choose(CACHE_AWARE, prompt, FLEET) for _ in range(3)]
        held = [(stream, 16) for stream in FLEET]
        assert [run.end for run in chooser.demand.alike(prompt.marks, held)] == [16]
        for choice in choices:
            getattr(choice.reservation, ends)()
            choice.reservation.release()
        assert chooser.demand.alike(prompt.marks, held) == []


def test_ix12_the_hint_of_a_request_that_fails_is_gone_and_that_of_one_that_answered_stays() -> None:
    prompt = Subject(prompt_tokens=8292, matches=nothing(FLEET), marks=marks("cold", 8192))
    for answers in (True, False):
        chooser = chooser_of()
        first = chooser.choose(CACHE_AWARE, prompt, FLEET).reservation
        if answers:
            first.first_byte(0.5)
        first.release()
        hinted = [item.candidate.hinted_tokens for item in chooser.choose(CACHE_AWARE, prompt, FLEET).ranked]
        assert max(hinted) == (8192 if answers else 0)


def test_ix12_no_hint_outlives_the_cache_of_its_replica() -> None:
    chooser = chooser_of()
    prompt = Subject(prompt_tokens=8292, matches=nothing(FLEET), marks=marks("cold", 8192))
    chooser.forget(chooser.choose(CACHE_AWARE, prompt, FLEET).reservation.stream)
    assert not any(item.candidate.hinted_tokens for item in chooser.choose(CACHE_AWARE, prompt, FLEET).ranked)


def test_rq07_a_replica_that_runs_away_costs_the_others_no_affinity() -> None:
    chooser = chooser_of()
    for _ in range(50):
        chooser.load.reserve(D, 10_000)
    matches = {**nothing(FLEET), A: matched(A, 1024)}
    prompt = Subject(prompt_tokens=1100, matches=matches)
    assert chooser.choose(CACHE_AWARE, prompt, FLEET).reservation.stream == A


def test_rq08_a_miss_goes_to_the_idle_replica_whose_cache_is_full() -> None:
    chooser = chooser_of()
    chooser.load.report(B, Reported(capacity_tokens=10 * MARK), 0)
    chooser.displacement.capacity(B, 10 * MARK)
    chooser.displacement.placed(B, marks("old", 10 * MARK))
    chooser.displacement.placed(B, marks("older", 10 * MARK))
    chooser.displacement.asked(marks("old", 10 * MARK), 0)
    for _ in range(30):
        chooser.load.reserve(A, 2000).prefilled()
    for _ in range(30):
        chooser.load.reserve(A, 2000)
    prompt = Subject(prompt_tokens=4000, matches=nothing([A, B]), marks=marks("new", 4000))
    choice = chooser.choose(CACHE_AWARE, prompt, [A, B])
    assert choice.reservation.stream == B
    assert choice.ranked[0].terms["displaced"] > 0


def test_rq10_sessions_over_one_system_prompt_spread_and_their_second_turns_stick() -> None:
    """3k tokens of system prompt are everywhere; there is no threshold that they could pass or miss."""
    clock = Clock()
    chooser = chooser_of(clock)
    shared = {stream: matched(stream, 3072) for stream in FLEET}
    first_turns: list[StreamId] = []
    for number in range(200):
        clock.now += 0.2
        prompt = Subject(prompt_tokens=3500, matches=shared, marks=marks(f"session {number}", 3500))
        reservation = chooser.choose(CACHE_AWARE, prompt, FLEET).reservation
        first_turns.append(reservation.stream)
        reservation.first_byte(0.05)
        reservation.release()
    assert max(Counter(first_turns).values()) < 2 * 200 / 4
    clock.now += 60
    for stream in first_turns:
        matches = {**shared, stream: matched(stream, 3488)}
        prompt = Subject(prompt_tokens=4000, matches=matches)
        reservation = chooser.choose(CACHE_AWARE, prompt, FLEET).reservation
        assert reservation.stream == stream
        reservation.release()


def test_rq18_what_is_left_to_compute_is_estimated_in_real_blocks() -> None:
    """Blocks in CPU memory weigh half of those on the GPU, and no number of blocks is ever weighed."""
    chooser = chooser_of()
    matches = {A: matched(A, 0, cpu=1600), B: matched(B, 640)}
    prompt = Subject(prompt_tokens=1650, matches=matches)
    choice = chooser.choose(CACHE_AWARE, prompt, [A, B])
    by_name = {item.candidate.replica: item.candidate for item in choice.ranked}
    assert (by_name["a"].matched_tokens, by_name["a"].credited_tokens) == (1600, 800)
    assert (by_name["b"].matched_tokens, by_name["b"].credited_tokens) == (640, 640)
    assert choice.reservation.stream == A
    assert choice.prefill_tokens == 850


@pytest.mark.parametrize("prompt_tokens", [200, 2000, 20_000])
def test_rq19_the_default_shows_affinity_on_two_idle_replicas_from_the_first_block_on(
    prompt_tokens: int,
) -> None:
    for seed in range(50):
        chooser = chooser_of(seed=seed)
        matches = {A: matched(A, prompt_tokens // 2), B: matched(B, 0)}
        prompt = Subject(prompt_tokens=prompt_tokens, matches=matches)
        assert chooser.choose(CACHE_AWARE, prompt, [A, B]).reservation.stream == A
    assert CacheAware() == CacheAware(affinity=0.5, foresight=True)


def test_the_busier_the_fleet_the_more_the_copy_that_exists_is_worth() -> None:
    def waits_for_its_copy(busy: int) -> bool:
        chooser = chooser_of()
        for number in range(1000):
            chooser.crowding.found((stream, number % 4 < busy) for stream in FLEET)
            chooser.crowding.sent(ahead_s=busy, own_s=1.0)
        chooser.load.reserve(A, 6000)
        matches = {**nothing(FLEET), A: matched(A, 4096)}
        prompt = Subject(prompt_tokens=4200, matches=matches)
        return chooser.choose(CACHE_AWARE, prompt, FLEET).reservation.stream == A

    assert [waits_for_its_copy(busy) for busy in (0, 1, 2, 3)] == [False, False, True, True]


def test_new_sessions_go_where_they_push_nothing_out() -> None:
    chooser = chooser_of()
    for stream in (A, B):
        chooser.load.report(stream, Reported(capacity_tokens=20 * MARK), 0)
        chooser.displacement.capacity(stream, 20 * MARK)
    for number in range(4):
        chooser.displacement.placed(A, marks(f"session {number}", 10 * MARK))
    chooser.displacement.asked(marks("session 0", 10 * MARK), 0)
    prompt = Subject(prompt_tokens=10 * MARK, matches=nothing([A, B]), marks=marks("new", 10 * MARK))
    for _ in range(20):
        chooser.displacement.forget(B)
        choice = chooser.choose(CACHE_AWARE, prompt, [A, B])
        assert choice.reservation.stream == B
        choice.reservation.release()


def test_where_no_engine_says_its_capacity_only_time_counts() -> None:
    chooser = chooser_of()
    prompt = Subject(prompt_tokens=8000, matches=nothing(FLEET), marks=marks("new", 8000))
    for item in chooser.choose(CACHE_AWARE, prompt, FLEET).ranked:
        assert item.candidate.room_tokens is None
        assert item.terms["displaced"] == 0.0


def test_rq17_only_those_with_room_are_candidates_however_warm_the_others_are() -> None:
    """The decider leaves out what is full; of what is left, the warmest is taken, full caches or not."""
    chooser = chooser_of()
    matches = {**nothing(FLEET), A: matched(A, 4096), C: matched(C, 1024)}
    prompt = Subject(prompt_tokens=4200, matches=matches, marks=marks("hot", 4096))
    choice = chooser.choose(CACHE_AWARE, prompt, [B, C, D])
    assert choice.reservation.stream == C
    assert chooser.load.of(A).requests == 0


@pytest.mark.parametrize("end", ["renewed", "gone"])
def test_nothing_learned_of_a_replica_outlives_it_though_nothing_was_sent_there(end: str) -> None:
    clock = Clock()
    chooser = chooser_of(clock)
    load, said = chooser.load, marks("x", 4096)
    for seconds in (1.0, 1.1, 1.2, 1.3, 1.4):
        for stream, speed in ((A, 8.0), (B, 1.0), (C, 1.0)):
            load.latency.observe(stream, 4096, speed * seconds)
    load.report(A, Reported(running=3, waiting=2, capacity_tokens=1 << 20), 0)
    chooser.hints.add(A, said, clock.now, 1.0)  # As other workers tell of what they have sent.
    chooser.crowding.found([(A, True), (B, False)])
    booked = load.reserve(A, 4096)
    fresh = chooser_of(clock)
    fresh.crowding.found([(B, False)])
    fresh.crowding._mean = chooser.crowding._mean
    getattr(chooser, end)("a")
    assert chooser.hints.soon(said, clock.now) == {}
    assert load.latency.of(A) == load.latency.of(D), "that of the others"
    assert (load.reported(A), chooser.displacement.rooms([A])) == (None, [None])
    assert chooser.crowding.behind([A]) == fresh.crowding.behind([A])
    assert load.of(A).requests == 1, "its requests go on"
    booked.first_byte(1000.0)
    assert load.latency.of(A) == load.latency.of(D), "and say nothing of the new one"
    booked.release()
    assert load.of(A).requests == 0
