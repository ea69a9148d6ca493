from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import displacement
from router.displacement import Displacement

A, B = ("a", 0), ("b", 0)
MARK = 512


def books(capacity_marks: int, *streams: tuple[str, int]) -> Displacement:
    made = Displacement(MARK)
    for stream in streams:
        made.capacity(stream, capacity_marks * MARK)
    return made


def test_without_a_known_capacity_nothing_is_ever_displaced() -> None:
    made = Displacement(MARK)
    made.capacity(A, None)
    made.placed(A, range(1000))
    made.asked(range(1000), 0)
    assert made.rooms([A])[0] is None
    assert made.worth == 0.0


def test_room_is_what_our_own_placements_leave() -> None:
    made = books(10, A)
    made.placed(A, ("1", "12", "123"))
    made.placed(A, ("1", "12", "124"))
    assert made.rooms([A])[0] == 6 * MARK
    made.forget(A)
    assert made.rooms([A])[0] == 10 * MARK


def test_the_worth_of_what_is_displaced_is_the_share_that_is_asked_for_again() -> None:
    made = books(10, A)
    made.placed(A, tuple(range(10)))
    made.placed(A, tuple(range(10, 18)))
    assert made.rooms([A])[0] == 0
    # The tails go first, as in an engine: the marks 2 to 9 are displaced.
    made.asked((0, 1, 2, 3), held=2)
    assert made.worth == pytest.approx(2 / 8)
    made.asked((0, 1, 2, 3), held=2)
    assert made.worth == pytest.approx(2 / 8)


def test_what_another_stream_still_has_was_not_lost() -> None:
    made = books(4, A, B)
    made.placed(A, (1, 2, 3, 4))
    made.placed(B, (1, 2, 3, 4))
    made.placed(A, (5, 6, 7, 8))
    made.asked((1, 2, 3, 4), held=4)
    assert made.worth == 0.0


def test_where_nothing_comes_back_displacing_costs_nothing() -> None:
    made = books(100, A)
    for number in range(0, 5000, 10):
        made.asked(range(number, number + 10), 0)
        made.placed(A, range(number, number + 10))
    assert made.worth == 0.0


def test_a_large_cache_is_sampled_and_the_book_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(displacement, "MOST_MARKS", 64)
    made = books(1000, A)
    for number in range(20_000):
        made.placed(A, (number,))
    book = made._books[A]
    assert len(book.marks) <= 64
    assert len(made._displaced) <= 64
    assert 0 <= (made.rooms([A])[0] or 0) < 1000 * MARK


def test_a_stream_that_is_removed_leaves_nothing() -> None:
    made = books(4, A)
    made.placed(A, (1, 2))
    made.gone(A[0])
    assert made.rooms([A])[0] is None


@given(
    st.integers(1, 12),
    st.lists(st.lists(st.integers(0, 30), max_size=6, unique=True), max_size=40),
)
def test_the_book_is_a_least_recently_used_list(capacity: int, prompts: list[list[int]]) -> None:
    made = books(capacity, A)
    model: OrderedDict[int, None] = OrderedDict()
    for prompt in prompts:
        made.placed(A, prompt)
        for mark in reversed(prompt):
            model.pop(mark, None)
            model[mark] = None
        while len(model) > capacity:
            model.popitem(last=False)
        assert list(made._books[A].marks) == list(model)
        assert 0.0 <= made.worth <= 1.0
