"""What workers learn of speeds together."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.latency import COLD_S_PER_TOKEN, FRESH_S, TRUSTED_FROM, Latency
from router.ledger import Ledger
from router.speeds import LOOK_S, SHAPE, SharedLatency
from tests.router.forked import all_at_once, patient_mutex

A, B, C = FLEET = [("a", 0), ("b", 0), ("c", 1)]
WORKERS = 3


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def workers_of(clock: Clock) -> tuple[list[SharedLatency], Ledger]:
    ledger = Ledger(64, SHAPE)
    return [SharedLatency(ledger, clock) for _ in range(WORKERS)], ledger


streams = st.sampled_from(FLEET)
happens = st.one_of(
    st.tuples(
        st.just("observe"), st.integers(0, WORKERS - 1), streams, st.integers(1, 9000), st.floats(1e-5, 9)
    ),
    st.tuples(st.just("observe"), st.integers(0, WORKERS - 1), streams, st.just(4096), st.just(0.5)),
    st.tuples(st.just("forget"), st.integers(0, WORKERS - 1), streams),
    st.tuples(st.just("passes"), st.floats(0, 1.5 * FRESH_S)),
)


@given(st.lists(happens, max_size=60))
@settings(max_examples=150, deadline=None)
def test_workers_learn_together_what_one_learns_alone(steps: list[Any]) -> None:
    clock = Clock()
    one, (workers, _) = Latency(clock), workers_of(clock)
    for what, *arguments in steps:
        if what == "passes":
            clock.now += arguments[0]
        else:
            number, *told = arguments
            for latency in (one, workers[number]):
                getattr(latency, what)(*told)
        clock.now += 2 * LOOK_S
        for latency in workers:
            assert latency.each(FLEET) == one.each(FLEET)
            assert [latency.of(stream) for stream in FLEET] == one.each(FLEET)


def test_another_process_knows_what_was_learned_and_so_does_one_that_is_started_later() -> None:
    clock = Clock()
    (here, *_), ledger = workers_of(clock)
    ledger.table.mutex = patient_mutex()
    assert here.each([A])[0].s_per_token == COLD_S_PER_TOKEN

    def learn(number: int) -> None:
        latency = SharedLatency(ledger, clock)
        for stream, slower in ((A, 10), (B, 1), (C, 1)):
            latency.observe(stream, 5000, slower * 0.5)

    all_at_once(TRUSTED_FROM, learn)
    clock.now += 2 * LOOK_S
    for latency in (here, SharedLatency(ledger, clock)):
        slow, *usual = latency.each(FLEET)
        assert usual[0] == usual[1]
        assert slow.s_per_token > 5 * usual[0].s_per_token


def test_the_records_are_read_ten_times_a_second_at_most_and_at_once_for_a_stream_that_is_new() -> None:
    clock = Clock()
    (one, two, _), _ = workers_of(clock)
    one.observe(A, 5000, 1.0)
    (first,) = two.each([A])
    assert first.s_per_token != COLD_S_PER_TOKEN
    one.observe(A, 5000, 3.0)
    assert two.each([A]) == [first]
    for _ in range(TRUSTED_FROM):
        one.observe(B, 5000, 50.0)
    assert two.each([A, B])[1] != first
    clock.now += 2 * LOOK_S
    assert two.each([A]) != [first]
