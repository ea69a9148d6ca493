from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.latency import COLD_S_PER_TOKEN, FRESH_S, WINDOW, Latency

A, B, C = ("a", 0), ("b", 0), ("c", 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def teach(
    latency: Latency, stream: tuple[str, int], s_per_token: float, count: int = WINDOW, seed: int = 0
) -> None:
    """Observations on the line 50 ms + tokens, some of them outliers, all with noise."""
    chance = random.Random(seed)
    for number in range(count):
        tokens = chance.randrange(200, 20_000)
        outlier = 7.0 if number % 5 == 4 else 0.0
        latency.observe(stream, tokens, (0.05 + s_per_token * tokens) * chance.uniform(0.95, 1.05) + outlier)


def test_before_anything_is_seen_all_streams_are_equally_fast() -> None:
    latency = Latency(Clock())
    assert latency.of(A) == latency.of(B)
    assert latency.of(A).s_per_token == COLD_S_PER_TOKEN


@pytest.mark.parametrize("s_per_token", [1e-5, 2e-4, 5e-3])
def test_a_fifth_of_outliers_does_not_bend_the_line(s_per_token: float) -> None:
    latency = Latency(Clock())
    teach(latency, A, s_per_token)
    assert latency.of(A).s_per_token == pytest.approx(s_per_token, rel=0.25)
    assert latency.of(A).seconds(10_000) == pytest.approx(0.05 + 10_000 * s_per_token, rel=0.3, abs=0.1)


def test_a_stream_that_becomes_slower_is_known_to_be_after_a_dozen_requests_and_so_is_its_recovery() -> None:
    latency = Latency(Clock())
    for speed in (2e-4, 1e-3, 2e-4):
        teach(latency, A, speed, 18)
        assert latency.of(A).s_per_token == pytest.approx(speed, rel=0.35)


def test_prompts_of_one_length_still_give_a_speed() -> None:
    latency = Latency(Clock())
    for _ in range(20):
        latency.observe(A, 4000, 0.81)
    assert latency.of(A).seconds(4000) == pytest.approx(0.81, rel=0.05)


def test_a_stream_without_observations_is_like_the_middle_of_the_others() -> None:
    latency = Latency(Clock())
    for stream, speed in ((A, 1e-4), (B, 2e-4), (C, 1e-3)):
        teach(latency, stream, speed)
    assert latency.of(("new", 0)).s_per_token == pytest.approx(2e-4, rel=0.25)


def test_speeds_that_differ_by_chance_are_one_speed() -> None:
    latency = Latency(Clock())
    for seed, stream in enumerate((A, B, C)):
        teach(latency, stream, 2e-4 * (1 + 0.2 * seed), seed=seed)
    assert latency.of(A) == latency.of(B) == latency.of(C)
    teach(latency, C, 1e-3)
    assert latency.of(C).s_per_token > 3 * latency.of(A).s_per_token


def test_one_that_looked_slow_gets_another_chance_and_so_does_one_seen_but_thrice() -> None:
    clock = Clock()
    latency = Latency(clock)
    for stream in (A, B):
        teach(latency, stream, 2e-4)
    teach(latency, C, 2e-2, count=3)
    assert latency.of(C) == latency.of(A)
    teach(latency, C, 2e-2, count=10)
    assert latency.of(C) != latency.of(A)
    clock.now = FRESH_S + 1
    assert latency.of(C) == latency.of(A)


def test_what_disturbs_small_prompts_says_nothing_of_the_speed() -> None:
    latency = Latency(Clock())
    for number in range(12):
        latency.observe(A, 200, 3.0)
        latency.observe(A, 8000 + 500 * number, (8000 + 500 * number) * 2e-4)
    assert latency.of(A).s_per_token == pytest.approx(2e-4, rel=0.5)


def test_a_restart_forgets_the_speed() -> None:
    latency = Latency(Clock())
    teach(latency, A, 1e-2)
    teach(latency, B, 1e-4)
    latency.forget(A)
    assert latency.of(A) == latency.of(B)
    latency.forget(B)
    latency.forget(("never seen", 0))


@given(
    st.lists(st.tuples(st.integers(-10, 10**7), st.floats(allow_nan=True, allow_infinity=True)), max_size=40)
)
def test_whatever_is_observed_predictions_are_finite_and_grow_with_the_work(
    observations: list[tuple[int, float]],
) -> None:
    latency = Latency(Clock())
    for tokens, seconds in observations:
        latency.observe(A, tokens, seconds)
    speed = latency.of(A)
    assert 0 <= speed.overhead_s < float("inf")
    assert 0 < speed.s_per_token < float("inf")
