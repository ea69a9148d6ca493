"""Several books over one board."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.board import USED, Table
from router.chooser import Chooser, Subject
from router.ledger import Ledger
from router.load import UNKNOWN_REQUEST_TOKENS, FullError, Load, Reservation
from router.policies import POLICIES
from router.replicas import StreamId
from router.reported import Reported
from router.shares import MOST_STREAMS, SHAPE, BoardShares
from router.stream_load import IDLE, StreamLoad
from tests.router.forked import all_at_once, patient_mutex

A, B = ("a", 0), ("b", 1)
WORKERS = 3


class Clock:
    now = 1.0

    def __call__(self) -> float:
        return self.now


def books(clock: Clock, workers: int = WORKERS) -> tuple[list[Load], Table]:
    table = Table(workers, MOST_STREAMS, SHAPE)
    return [Load(clock, shares=BoardShares(table.row(n))) for n in range(workers)], table


class Books:
    """Several books over one board, and one book that is told of the same."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.workers, _ = books(self.clock)
        self.one = Load(self.clock)
        # How fast streams are is learned by each for itself; here only the books are compared.
        for load in self.workers:
            load.latency = self.one.latency
        self.pairs: list[tuple[Reservation, Reservation]] = []

    def reserve(self, worker: int, stream: StreamId, tokens: int, streams: bool) -> None:
        loads = (self.workers[worker], self.one)
        ours, theirs = (load.reserve(stream, tokens, streams=streams) for load in loads)
        assert ours.queued_tokens == theirs.queued_tokens
        self.pairs.append((ours, theirs))

    def report(self, stream: StreamId, running: int, waiting: int) -> None:
        for load in (*self.workers, self.one):
            load.report(stream, Reported(running=running, waiting=waiting), load.together(stream).requests)

    def end(self, step: str, number: int) -> None:
        for reservation in self.pairs[number % len(self.pairs)] if self.pairs else ():
            getattr(reservation, step)()

    def tick(self, hundredths: int) -> None:
        self.clock.now += hundredths / 100

    def compare(self) -> None:
        for load in self.workers:
            for stream in (A, B):
                load.ours(stream)  # as the poller does: what is due is over
        for stream in (A, B):
            for load in self.workers:
                assert load.of(stream) == self.one.of(stream)
                assert load.together(stream) == self.one.together(stream)
                assert load.computed_tokens(stream) == self.one.computed_tokens(stream)


stream_ids, small = st.sampled_from([A, B]), st.integers(0, 12)
ending = st.tuples(st.just("end"), st.sampled_from(["prefilled", "release"]), st.integers(0, 30))
tick = st.tuples(st.just("tick"), st.integers(1, 300))
report = st.tuples(st.just("report"), stream_ids, small, small)


def reserve(tokens: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(st.just("reserve"), st.integers(0, WORKERS - 1), stream_ids, tokens, st.booleans())


def run(steps: list[tuple[Any, ...]]) -> None:
    machine = Books()
    for name, *arguments in steps:
        machine.clock.now += 0.001
        getattr(machine, name)(*arguments)
        machine.compare()
    for reservation, _ in machine.pairs:
        reservation.release()
    for load in machine.workers:
        assert load.together(A) == load.together(B) == IDLE


@settings(deadline=None)
@given(st.lists(st.one_of(reserve(st.integers(0, 5000)), ending, tick), max_size=50))
def test_books_over_one_board_are_as_one_book(steps: list[tuple[Any, ...]]) -> None:
    run(steps)


# Each knows the mean of its own requests only: here all are of one size.
@settings(deadline=None)
@given(st.lists(st.one_of(reserve(st.just(UNKNOWN_REQUEST_TOKENS)), ending, tick, report), max_size=50))
def test_others_are_the_same_to_books_over_one_board_as_to_one_book(steps: list[tuple[Any, ...]]) -> None:
    run(steps)


def test_what_a_worker_that_died_had_in_flight_counts_no_more() -> None:
    (first, second), table = books(Clock(), 2)
    first.reserve(A, 100)
    second.reserve(A, 10)
    assert second.of(A) == StreamLoad(2, 110, 0)
    table.clear(0)
    assert second.of(A) == StreamLoad(1, 10, 0)
    assert BoardShares(table.row(0)).of(A).load == StreamLoad(1, 10, 0)


def test_of_workers_that_would_take_the_last_places_at_the_same_instant_as_many_do_as_there_are() -> None:
    table, taken = Table(4, MOST_STREAMS, SHAPE), Ledger(8, "q")
    table.mutex, taken.table.mutex = patient_mutex(), patient_mutex()

    def take(number: int) -> None:
        load, booked = Load(shares=BoardShares(table.row(number))), 0
        for _ in range(500):
            with contextlib.suppress(FullError):
                load.reserve(A, 10, most=500)
                booked += 1
        with taken.alone():
            taken.put(str(number).encode(), booked)

    all_at_once(4, take)
    assert sum(booked for (booked,) in taken.each()) == 500


def test_what_an_engine_reports_of_other_workers_is_not_taken_for_other_routers() -> None:
    (first, second), _ = books(Clock(), 2)
    for _ in range(4):
        first.reserve(A, 100).prefilled()
    second.report(A, Reported(running=6), second.together(A).requests)
    assert second.others(A).requests == 2
    assert second.of(A).requests == 6


def test_rq06_what_other_routers_send_after_the_same_numbers_is_judged_by_all_workers_together() -> None:
    (first, second), _ = books(Clock(), 2)
    for _ in range(4):
        first.reserve(A, 100).prefilled()
    # One other router has as much as both workers: it sends one for each of ours.
    for load in (first, second):
        load.report(A, Reported(running=8), 4)
    second.reserve(A, 100)
    assert first.others(A).requests == second.others(A).requests == 5


def test_a_replica_that_is_gone_leaves_room_on_the_board() -> None:
    (first, second), table = books(Clock(), 2)
    for number in range(2 * MOST_STREAMS):
        first.reserve((f"r{number}", 0), 1).release()
        first.forget(f"r{number}")
    first.reserve(A, 100)
    assert second.of(A).requests == 1
    assert table.head(USED, 0) == 1


def test_rq06_a_burst_over_four_workers_spreads_as_with_one() -> None:
    fleet = [(name, 0) for name in "abcd"]
    for workers in (1, 4):
        clock = Clock()
        loads, _ = books(clock, workers)
        choosers = [
            Chooser(load, random.Random(number), clock, mark_tokens=512) for number, load in enumerate(loads)
        ]
        sent: Counter[StreamId] = Counter()
        for number in range(40):
            subject = Subject(prompt_tokens=1000)
            choice = choosers[number % workers].choose(POLICIES["least-loaded"], subject, fleet)
            sent[choice.reservation.stream] += 1
        assert set(sent.values()) == {10}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_all_streams_looked_at_at_once_are_what_each_is_by_itself(data: st.DataObject) -> None:
    clock, table, fleet = Clock(), Table(2, 8, SHAPE), [A, B, ("c", 0)]
    books = [Load(clock, BoardShares(table.row(0))), Load(clock, BoardShares(table.row(1))), Load(clock)]
    sent: list[tuple[Reservation, float]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        load, stream = data.draw(st.sampled_from(books)), data.draw(st.sampled_from(fleet))
        clock.now += data.draw(st.sampled_from([0.0, 0.02, 0.5, 3.0]))
        step = data.draw(st.sampled_from(["reserve", "reserve", "answer", "release", "report"]))
        if step == "reserve":
            tokens, streams = data.draw(st.sampled_from([0, 100, 5000])), data.draw(st.booleans())
            sent.append((load.reserve(stream, tokens, streams=streams), clock.now))
        elif step == "report":
            running, waiting = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))
            admitted = data.draw(st.sampled_from([None, int(1000 * clock.now)]))
            said = Reported(running=running, waiting=waiting, admitted_tokens=admitted)
            load.report(stream, said, min(running, load.together(stream).requests))
        elif sent:
            reservation, at = data.draw(st.sampled_from(sent))
            reservation.first_byte(clock.now - at) if step == "answer" else reservation.release()
        for load in books:
            for stream, seen in zip(fleet, load.waiting(fleet), strict=True):
                whole = load.of(stream)
                left = max(0, whole.prefill_tokens - load.computed_tokens(stream))
                assert seen == StreamLoad(whole.requests, left, whole.decoding)
