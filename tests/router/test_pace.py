from __future__ import annotations

import pytest

from router.load import Load
from router.pace import Pace

A, B = ("a", 0), ("b", 0)


def test_room_comes_as_fast_as_requests_end() -> None:
    pace = Pace()
    assert pace.room_in_s({A: 5}) is None
    pace.ended(A, 20.0)
    # One in four seconds at A; what B takes is as little known as A's was, and taken for the same.
    assert pace.room_in_s({A: 5}) == pytest.approx(4)
    assert pace.room_in_s({A: 5, B: 5}) == pytest.approx(2)
    assert pace.room_in_s({A: 5, B: 5}, ahead=9) == pytest.approx(20)
    pace.ended(B, 5.0)
    assert pace.room_in_s({A: 5, B: 5}) == pytest.approx(1 / (1 / 4 + 1))
    assert pace.room_in_s({A: 0, B: 0}) is None
    pace.forget(A)
    assert pace.room_in_s({A: 5}) is None


def test_how_long_requests_last_follows_what_they_last_now() -> None:
    pace = Pace()
    pace.ended(A, 100.0)
    for _ in range(50):
        pace.ended(A, 10.0)
    assert pace.room_in_s({A: 10}) == pytest.approx(1, rel=0.06)


def test_a_request_that_was_not_answered_says_nothing_of_how_long_they_last() -> None:
    now = 0.0
    load = Load(lambda: now)
    failed, answered = load.reserve(A, 100), load.reserve(A, 100)
    now = 1.0
    failed.release()
    assert load.pace.room_in_s({A: 1}) is None
    answered.first_byte(1.0)
    now = 7.0
    answered.release()
    answered.release()
    assert load.pace.room_in_s({A: 1}) == pytest.approx(7)
