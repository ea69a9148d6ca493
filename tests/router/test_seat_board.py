"""Where sessions were sent last, by several workers."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.replicas import StreamId
from router.seat_board import PLACES, SeatBoard, SharedSeats
from router.seats import SEAT_FOR_S, Seats
from tests.router.forked import all_at_once

FLEET = {("a", 0), ("a", 1), ("b", 0)}
WORKERS = 3


class Clock:
    now = 10_000.0

    def __call__(self) -> float:
        return self.now


keys = st.integers(0, 20).map(lambda number: b"key %d" % number)
happens = st.one_of(
    st.tuples(st.just("take"), st.integers(0, WORKERS - 1), keys, st.sampled_from(sorted(FLEET))),
    st.tuples(st.just("passes"), st.integers(0, int(SEAT_FOR_S))),
)


@given(st.lists(happens, max_size=40))
@settings(max_examples=100, deadline=None)
def test_every_worker_knows_where_a_key_was_sent_last_whoever_sent_it(steps: list[Any]) -> None:
    clock, board = Clock(), SeatBoard(1 << 12)
    workers = [SharedSeats(board, lambda: FLEET, clock) for _ in range(WORKERS)]
    one = Seats(1000, clock)
    for what, *arguments in steps:
        if what == "passes":
            clock.now += arguments[0] + 0.5
        else:
            number, key, stream = arguments
            workers[number].take(key, stream)
            one.take(key, stream)
        for key in {step[2] for step in steps if step[0] == "take"}:
            assert [seats.of(key) for seats in workers] == [one.of(key)] * WORKERS


def test_a_seat_at_a_replica_that_is_gone_is_none_until_it_is_back() -> None:
    fleet: set[StreamId] = FLEET
    seats = SharedSeats(SeatBoard(), lambda: fleet, Clock())
    seats.take(b"k", ("b", 0))
    fleet = FLEET - {("b", 0)}
    assert seats.of(b"k") is None
    fleet = set(FLEET)
    assert seats.of(b"k") == ("b", 0)


def test_where_a_bucket_is_full_the_key_that_was_quiet_for_longest_goes() -> None:
    clock = Clock()
    seats = SharedSeats(SeatBoard(1), lambda: FLEET, clock)
    names = [b"%d" % number for number in range(PLACES + 1)]
    for name in (*names[:PLACES], names[0], names[PLACES]):
        clock.now += 1.0
        seats.take(name, ("a", 1))
    assert [name for name in names if seats.of(name) is None] == [names[1]]


def test_nobody_is_sent_where_another_key_was_however_many_write_at_once() -> None:
    fleet = {(f"r{number}", 0) for number in range(30)}
    board = SeatBoard(1)  # All write to the same few places.

    def write(worker: int) -> None:
        seats = SharedSeats(board, lambda: fleet)
        for step in range(10_000):
            number = (7 * step + worker) % 30
            found = seats.of(b"key of %d" % number)
            assert found in (None, (f"r{number}", 0))
            seats.take(b"key of %d" % number, (f"r{number}", 0))

    all_at_once(4, write)
