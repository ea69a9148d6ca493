"""What others have left to compute, from an engine's numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.backlog import Backlog, Own, begun_tokens, level, others_tokens
from router.reported import Reported


def said(admitted: int | None, waiting: int = 0) -> Reported:
    return Reported(running=1, waiting=waiting, admitted_tokens=admitted)


def test_what_an_engine_has_begun_with_shrinks_as_it_computes() -> None:
    assert begun_tokens(said(5000), 3000.0, said(5000), 1000.0) == 2000.0
    assert begun_tokens(said(5000), 500.0, said(5000), 1000.0) == 0.0


def test_a_prompt_that_had_waited_was_begun_with_when_the_one_before_was_done() -> None:
    assert begun_tokens(said(5000, waiting=1), 400.0, said(9000), 1000.0) == 4000.0 - 600.0


def test_a_prompt_that_found_an_idle_engine_came_in_the_middle_of_the_time_on_average() -> None:
    assert begun_tokens(said(5000), 0.0, said(9000), 1000.0) == 4000.0 - 500.0


def test_an_engine_that_does_not_say_or_began_anew_says_nothing() -> None:
    assert begun_tokens(said(None), None, said(10), 1.0) is None
    assert begun_tokens(said(10), 5.0, said(None), 1.0) is None
    assert begun_tokens(said(9000), 5.0, said(10), 1.0) is None


def test_of_others_the_one_begun_with_is_known_and_those_that_wait_are_like_the_mean_request() -> None:
    assert others_tokens(said(0, waiting=2), 3000.0, Own(), 1000.0) == 3000.0 + 2 * 1000.0


def test_ours_that_wait_are_not_others() -> None:
    ours = Own(waiting=2, tokens=700, first_tokens=400)
    assert others_tokens(said(0, waiting=3), 3000.0, ours, 1000.0) == 3000.0 + 1000.0


def test_one_of_ours_that_cannot_wait_is_what_the_engine_has_begun_with() -> None:
    ours = Own(waiting=2, tokens=700, computed=100, first_tokens=400)
    # 300 of the first are left, and 300 of the second: nothing is others'.
    assert others_tokens(said(0, waiting=1), 300.0, ours, 1000.0) == 0.0


def test_what_the_engine_computes_of_ours_it_does_not_compute_of_others() -> None:
    then = Own(waiting=1, tokens=500, first_tokens=500)
    backlog = Backlog(3000.0, 3000.0, then)
    assert backlog.others_now(500, 0, 800.0) == 2200.0
    assert backlog.others_now(500 - 300, 0, 800.0) == 2500.0
    # Ours is done, and another one of 900 was sent and has its turn.
    assert backlog.others_now(900 - 100, 900, 800.0) == 2800.0
    assert backlog.others_now(500, 0, 9000.0) == 0.0


def test_work_goes_where_least_waits_until_all_are_level() -> None:
    streams = [(1.0, 100.0), (3.0, 100.0), (9.0, 100.0)]
    assert level(streams, 0) == 1.0
    assert level(streams, 100) == 2.0
    assert level(streams, 200) == 3.0
    assert level(streams, 400) == 4.0


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(1, 1e4)), min_size=1, max_size=20), st.floats(0, 1e7))
def test_as_much_is_poured_in_as_fills_up_what_is_below_the_level(
    streams: list[tuple[float, float]], work: float
) -> None:
    reached = level(streams, work)
    filled = sum(max(0.0, reached - seconds) * rate for seconds, rate in streams)
    assert filled == pytest.approx(work, rel=1e-6, abs=1e-3)
