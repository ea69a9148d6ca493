from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.chooser import Chooser, Subject
from router.latency import COLD_S_PER_TOKEN
from router.load import (
    FROZEN_S,
    STALE_S,
    UNKNOWN_REQUEST_TOKENS,
    Load,
    Reservation,
)
from router.policies import POLICIES
from router.replicas import StreamId
from router.reported import Reported
from router.stream_load import StreamLoad

A, B = ("a", 0), ("b", 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_request_counts_as_prefill_until_its_first_byte_and_as_decoding_after() -> None:
    load = Load()
    reservation = load.reserve(A, 100)
    assert load.of(A) == StreamLoad(1, 100, 0)
    reservation.first_byte(0.1)
    assert load.of(A) == StreamLoad(1, 0, 1)
    reservation.release()
    assert load.of(A) == StreamLoad()


def test_released_after_release_nothing_counts_again() -> None:
    load = Load()
    reservation = load.reserve(A, 100)
    reservation.release()
    reservation.first_byte(0.1)
    reservation.release()
    assert list(load.items()) == []


def load_at_1000_tokens_per_s(clock: Clock) -> Load:
    load = Load(clock)
    for tokens in range(1000, 10_000, 1000):
        load.latency.observe(A, tokens, tokens / 1000)
    return load


def test_an_answer_in_one_piece_leaves_the_queue_when_its_prefill_is_predicted_to_be_over() -> None:
    clock = Clock()
    load = load_at_1000_tokens_per_s(clock)
    whole = load.reserve(A, 3000, streams=False)
    # What is queued in front of it has to be computed first.
    second = load.reserve(A, 2000, streams=False)
    for now, queued in ((2.9, 5000), (3.1, 2000), (4.9, 2000), (5.1, 0)):
        clock.now = now
        assert load.of(A).prefill_tokens == queued
    assert dict(load.items()) == {A: StreamLoad(2, 0, 2)}
    whole.release()
    second.release()
    assert list(load.items()) == []


def test_what_the_first_in_line_has_computed_since_its_turn_came_is_no_queue() -> None:
    clock = Clock()
    load = load_at_1000_tokens_per_s(clock)
    first, second = load.reserve(A, 3000), load.reserve(A, 2000)
    assert second.queued_tokens == 5000
    clock.now = 1.0
    assert load.computed_tokens(A) == 1000
    assert load.reserve(A, 500).queued_tokens == 4500
    clock.now = 10.0
    assert load.computed_tokens(A) == 3000
    # The turn of the second comes when the first is done, not when it should have been.
    first.first_byte(10.0)
    assert load.computed_tokens(A) == 0
    clock.now = 10.5
    assert load.computed_tokens(A) == 500


def test_one_that_leaves_out_of_turn_stops_nobody() -> None:
    clock = Clock()
    load = load_at_1000_tokens_per_s(clock)
    load.reserve(A, 3000)
    gone = load.reserve(A, 2000)
    clock.now = 1.0
    gone.release()
    assert load.computed_tokens(A) == 1000


def test_streams_teach_their_speed() -> None:
    load = Load(Clock())
    assert load.latency.of(A).s_per_token == COLD_S_PER_TOKEN
    for tokens in (1000, 2000, 3000, 4000, 5000, 6000):
        load.reserve(A, tokens).first_byte(tokens / 500)
        load.reserve(A, 10).release()
    assert load.latency.of(A).s_per_token == pytest.approx(1 / 500, rel=0.5)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["first_byte", "prefilled", "release", "tick"])),
        max_size=40,
    )
)
def test_rq11_whatever_the_order_of_endings_the_book_is_empty_afterwards(
    steps: list[tuple[int, str]],
) -> None:
    clock = Clock()
    load = Load(clock)
    reservations = [
        load.reserve(A if number % 2 else B, 10 * number, streams=number > 2) for number in range(5)
    ]
    for number, step in steps:
        if step == "tick":
            clock.now += 0.3
        elif step == "first_byte":
            reservations[number].first_byte(0.1)
        else:
            getattr(reservations[number], step)()
        for now in dict(load.items()).values():
            assert min(now.requests, now.prefill_tokens, now.decoding) >= 0
    for reservation in reservations:
        reservation.release()
    assert list(load.items()) == []


# what others have sent


def test_what_an_engine_has_beyond_ours_is_others_in_tokens_of_the_mean_request() -> None:
    load = Load(Clock())
    load.reserve(A, 1000).prefilled()
    load.report(A, Reported(running=3, waiting=2), 1)
    # Two of its five wait, so do two of the others' four, rounded.
    assert load.others(A) == StreamLoad(4, 2 * 1000, 2)
    assert load.ours(A) == StreamLoad(1, 0, 1)
    assert load.of(A) == StreamLoad(5, 2000, 3)
    assert dict(load.items()) == {A: StreamLoad(1, 0, 1)}


def test_others_requests_wait_for_prefill_as_ours_do() -> None:
    load = Load(Clock())
    load.reserve(A, 300)
    load.report(A, Reported(running=3), 1)
    assert load.others(A) == StreamLoad(2, 600, 0)


def test_our_own_are_never_taken_for_others() -> None:
    load = Load(Clock())
    reservations = [load.reserve(A, 100) for _ in range(5)]
    load.report(A, Reported(running=4), 5)
    for reservation in reservations:
        reservation.release()
    assert load.others(A) == StreamLoad()
    load.report(A, Reported(running=1), 0)
    assert load.others(A).requests == 1


def test_a_report_is_of_no_use_when_it_is_old() -> None:
    clock = Clock()
    load = Load(clock)
    load.report(A, Reported(running=9, capacity_tokens=4096), 0)
    clock.now = STALE_S + 0.1
    assert load.of(A) == StreamLoad()
    assert load.report_age_s(A) == clock.now
    assert load.report_age_s(B) is None
    reported = load.reported(A)
    assert reported is not None
    assert reported.capacity_tokens == 4096


def test_numbers_that_do_not_move_while_nothing_of_ours_is_there_are_no_load() -> None:
    clock = Clock()
    load = Load(clock)
    stuck, works = Reported(running=9), [Reported(running=9, worked_tokens=n) for n in range(20)]
    for second in range(int(FROZEN_S)):
        clock.now = float(second)
        load.report(A, stuck, 0)
        load.report(B, works[second], 0)
        assert load.of(A).requests == load.of(B).requests == 9
    clock.now = FROZEN_S
    load.report(A, stuck, 0)
    load.report(B, works[-1], 0)
    assert (load.of(A).requests, load.of(B).requests) == (0, 9)
    load.report(A, Reported(running=9, worked_tokens=5), 0)
    assert load.of(A).requests == 9


def choose(load: Load, fleet: list[StreamId], rng: random.Random, tokens: int = 1000) -> Reservation:
    """Least loaded, as the router does it: the choice and the booking in one step."""
    chooser = Chooser(load, rng, Clock(), mark_tokens=512)
    return chooser.choose(POLICIES["least-loaded"], Subject(prompt_tokens=tokens), fleet).reservation


def test_rq04_metrics_frozen_for_five_seconds_and_a_burst_of_fifty_make_no_herd() -> None:
    clock = Clock()
    load = Load(clock)
    fleet = [(name, 0) for name in "abcde"]
    for stream in fleet[:4]:
        load.report(stream, Reported(running=8), 0)
    load.report(fleet[4], Reported(running=0), 0)
    clock.now = 4.9
    sent = Counter(choose(load, fleet, random.Random(1)).stream for _ in range(50))
    assert sum(sent.values()) == 50
    assert 10 <= sent[fleet[4]] <= 20
    assert min(sent[stream] for stream in fleet[:4]) >= 6


@pytest.mark.parametrize("routers", [2, 3, 4])
def test_rq06_routers_with_the_same_stale_numbers_do_not_chase_one_minimum(routers: int) -> None:
    fleet = [(name, 0) for name in "abcd"]
    loads = [Load(Clock()) for _ in range(routers)]
    rngs = [random.Random(number) for number in range(routers)]
    # Each has six requests at three replicas; the fourth has just become free.
    for load in loads:
        for stream in fleet[:3]:
            for _ in range(6):
                load.reserve(stream, 16).prefilled()
        for stream in fleet:
            running = 6 * routers if stream != fleet[3] else 0
            load.report(stream, Reported(running=running), load.ours(stream).requests)
    sent: Counter[StreamId] = Counter()
    for _ in range(10):
        for load, rng in zip(loads, rngs, strict=True):
            reservation = choose(load, fleet, rng, tokens=16)
            reservation.prefilled()
            sent[reservation.stream] += 1
    # Spread evenly, the free one comes level: that takes seven of ten. Each router that filled it for itself
    # would send all ten.
    assert 6 * routers <= sent[fleet[3]] <= 8 * routers


def test_rq06_from_even_numbers_no_replica_gets_half_of_a_burst() -> None:
    fleet = [(name, 0) for name in "abcd"]
    loads = [Load(Clock()) for _ in range(3)]
    for load in loads:
        for stream in fleet:
            load.report(stream, Reported(running=5), 0)
    sent: Counter[StreamId] = Counter()
    for number, load in enumerate(loads):
        rng = random.Random(number)
        sent.update(choose(load, fleet, rng).stream for _ in range(20))
    assert max(sent.values()) <= 0.5 * 60


def test_rq14_a_stream_of_fifteen_minutes_counts_until_it_ends() -> None:
    clock = Clock()
    load = Load(clock)
    reservation = load.reserve(A, 4000)
    reservation.first_byte(1.0)
    for second in range(900):
        clock.now = float(second)
        load.report(A, Reported(running=1, worked_tokens=second), 1)
        assert load.of(A) == StreamLoad(1, 0, 1)
    reservation.release()
    assert load.of(A) == StreamLoad()


def test_before_any_request_of_ours_the_mean_request_is_a_guess() -> None:
    load = Load(Clock())
    load.report(A, Reported(waiting=2), 0)
    assert load.of(A).prefill_tokens == 2 * UNKNOWN_REQUEST_TOKENS


def test_what_others_have_is_computed_between_two_looks() -> None:
    clock = Clock()
    load = load_at_1000_tokens_per_s(clock)
    load.reserve(A, 2000).release()
    load.report(A, Reported(waiting=2), 0)
    assert load.others(A).prefill_tokens == 2 * 2000
    clock.now = 1.5
    assert load.others(A).prefill_tokens == 2500
    # Ours waits behind them, and its first byte is not predicted before that.
    assert load.reserve(A, 500).queued_tokens == 3000


def test_of_the_prompt_that_an_engine_has_begun_with_the_tokens_are_known() -> None:
    clock = Clock()
    load = load_at_1000_tokens_per_s(clock)
    load.report(A, Reported(admitted_tokens=10_000), 0)
    clock.now = 1.0
    load.report(A, Reported(running=1, waiting=1, admitted_tokens=18_000), 0)
    assert load.others(A).prefill_tokens == 8000 - 500 + UNKNOWN_REQUEST_TOKENS
    clock.now = 2.0
    load.report(A, Reported(running=1, admitted_tokens=18_000), 0)
    assert load.others(A).prefill_tokens == 8000 - 1500


def test_what_others_may_have_sent_since_is_as_much_against_ours_as_they_have_in_flight() -> None:
    clock = Clock()
    load = load_at_1000_tokens_per_s(clock)
    assert load.unseen_tokens([A, B]) == 0
    load.reserve(A, 16).prefilled()
    for stream, running in ((A, 2), (B, 1)):
        load.report(stream, Reported(running=running), load.ours(stream).requests)
    assert load.unseen_tokens([A, B]) == 0
    load.reserve(A, 1000)
    assert load.unseen_tokens([A, B]) == 2 * 1000
    clock.now = STALE_S + 0.1
    assert load.unseen_tokens([A, B]) == 0


def test_where_we_have_sent_nothing_since_others_are_taken_to_send_as_we_usually_do() -> None:
    clock = Clock()
    load = load_at_1000_tokens_per_s(clock)
    for second in range(300):
        clock.now = float(second)
        load.reserve(A, 100).release()
        load.report(A, Reported(running=2, worked_tokens=second), 0)
    assert load.unseen_tokens([A]) == 0
    clock.now = 301.0
    assert load.unseen_tokens([A]) == pytest.approx(2 * 2 * 100, rel=0.05)


def looked_at(
    load: Load, clock: Clock, ours: int, others: int, *, seconds: int = 100, says: bool = True
) -> None:
    """A look every second. Each engine begins with what is sent to it; ``ours`` tokens a second go to A, and
    ``others`` to B and three times as many to A.
    """
    begun = {A: 0, B: 0}
    for _ in range(seconds):
        clock.now += 1.0
        load.reserve(A, ours).release()
        begun[A] += ours + 3 * others
        begun[B] += others
        for stream, tokens in begun.items():
            load.report(stream, Reported(running=1, admitted_tokens=tokens if says else None), 0)


def test_rq06_where_others_send_is_what_engines_begin_with_and_is_not_ours() -> None:
    clock = Clock()
    load = Load(clock)
    looked_at(load, clock, ours=5000, others=200)
    assert load.habits([A, B]) == pytest.approx([0.75, 0.25], abs=0.01)
    assert load.habits([("new", 0), B]) == [0.0, 1.0]


def test_where_others_send_is_unknown_without_others_and_where_engines_do_not_say() -> None:
    for others, says in ((0, True), (200, False)):
        clock = Clock()
        load = Load(clock)
        looked_at(load, clock, ours=5000, others=others, says=says)
        assert load.habits([A, B]) == [0.0, 0.0]


def test_where_others_send_outlives_an_engine_that_counts_anew() -> None:
    clock = Clock()
    load = Load(clock)
    looked_at(load, clock, ours=100, others=200)
    clock.now += 1.0
    load.report(A, Reported(admitted_tokens=5), 0)
    assert load.habits([A, B]) == pytest.approx([0.75, 0.25], abs=0.05)


def test_rq06_what_others_may_have_sent_counts_where_least_waits() -> None:
    load = load_at_1000_tokens_per_s(Clock())
    for stream, running in ((A, 2), (B, 2)):
        load.reserve(stream, 16).prefilled()
        load.report(stream, Reported(running=running), 1)
    choose(load, [A], random.Random(1), tokens=1000)
    chooser = Chooser(load, random.Random(1), Clock(), mark_tokens=512)
    ranked = chooser.choose(POLICIES["least-loaded"], Subject(prompt_tokens=10), [A, B]).ranked
    # 1,000 of ours at A are told to be 1,000 of others somewhere: at B.
    assert {item.candidate.replica: item.candidate.prefill_tokens for item in ranked} == {
        "a": 1000,
        "b": 1000,
    }
