"""EV-09: what waits for a replay is kept in order, and is bounded in number and bytes."""

import pytest

from events.held import Held
from events.signals import Frame


def frame(sequence: int, size: int = 1) -> Frame:
    return Frame(sequence, b"x" * size)


def test_frames_come_out_in_order_and_one_that_is_put_back_is_the_first_again() -> None:
    held: Held[Frame] = Held(max_frames=3, max_bytes=100)
    assert all(held.add(frame(number)) for number in range(3))
    held.put_back(held.take())
    assert [each.sequence for each in held] == [0, 1, 2]
    assert [held.take().sequence for _ in range(3)] == [0, 1, 2]
    with pytest.raises(IndexError):
        held.take()


def test_what_has_no_room_is_not_kept_and_what_leaves_makes_room() -> None:
    held: Held[Frame] = Held(max_frames=2, max_bytes=10)
    assert [held.add(frame(0, 6)), held.add(frame(1, 5)), held.add(frame(2, 4)), held.add(frame(3, 0))] == [
        True,
        False,
        True,
        False,
    ]
    held.take()
    assert held.add(frame(4, 6))
    held.clear()
    assert [held.add(frame(5, 10)), held.add(frame(6))] == [True, False]


def test_a_copy_is_changed_apart_with_a_count_of_its_own() -> None:
    held: Held[Frame] = Held(max_frames=9, max_bytes=10)
    held.add(frame(0, 10))
    copy = held.copy()
    assert not copy.add(frame(1))
    copy.take()
    assert copy.add(frame(1, 10))
    assert [each.sequence for each in held] == [0]
    assert not held.add(frame(2))
