"""Requests that wait for room in several workers of one router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.bells import Bells
from router.board import Table
from router.errors import SaturatedError
from router.queue_board import ASLEEP_S, MOST_LINES, SHAPE, SharedQueue
from router.waitlist import Nowhere, Place, Waitlist
from tests.router.forked import forked

WORKERS = 3


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Wires:
    """Bells within one loop: who is rung is called in a later step."""

    def __init__(self) -> None:
        self.calls: dict[int, Callable[[], None]] = {}

    def ring(self, worker: int) -> None:
        asyncio.get_running_loop().call_soon(self.calls[worker])


class House:
    """Several workers, or one, before the same replica with so many ``places``, and what became of those who
    came, by name.
    """

    def __init__(self, clock: Clock, workers: int, limit: int) -> None:
        wires: Any = Wires()
        self.table = Table(workers, MOST_LINES, SHAPE)
        self.lists = [
            Waitlist(limit, 30.0, clock, elsewhere=SharedQueue(self.table.row(number), number, wires, clock))
            for number in range(workers)
        ]
        if workers == 1:
            self.lists = [Waitlist(limit, 30.0, clock)]
        wires.calls = {number: waitlist.rung for number, waitlist in enumerate(self.lists)}
        self.places: dict[str, int] = {}
        self.ended: list[tuple[str, str]] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def of(self, worker: int) -> Waitlist:
        return self.lists[worker % len(self.lists)]

    def comes(self, worker: int, who: str, line: str, priority: int) -> None:
        def choose() -> str:
            if self.places.get(line, 0) < 1:
                raise SaturatedError("saturated", "no room")
            self.places[line] -= 1
            self.ended.append((who, "taken"))
            return who

        async def take() -> None:
            try:
                await self.of(worker).take(line, priority, choose)
            except SaturatedError as error:
                self.ended.append((who, error.code))

        self.tasks[who] = asyncio.create_task(take())

    def gives(self, worker: int, line: str, places: int) -> None:
        self.places[line] = self.places.get(line, 0) + places
        self.of(worker).room()

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def settle() -> None:
    for _ in range(60):
        await asyncio.sleep(0)


workers = st.integers(0, WORKERS - 1)
lines = st.sampled_from(["m", "n"])
happens = st.one_of(
    st.tuples(st.just("comes"), workers, lines, st.integers(-1, 1)),
    st.tuples(st.just("comes"), workers, lines, st.integers(-1, 1)),
    st.tuples(st.just("gives"), workers, lines, st.integers(1, 2)),
    st.tuples(st.just("leaves"), st.integers(0, 30)),
)


@given(st.integers(1, 4), st.lists(happens, max_size=30))
@example(4, [("comes", 0, "m", 0), ("comes", 1, "m", 0), ("gives", 1, "m", 2)])
@settings(max_examples=150, deadline=None)
def test_rq17_requests_wait_in_several_workers_as_in_one(limit: int, steps: list[Any]) -> None:
    async def run() -> None:
        clock = Clock()
        together, one = House(clock, WORKERS, limit), House(clock, 1, limit)
        for number, step in enumerate(steps):
            clock.now += 0.01
            for house in (together, one):
                if step[0] == "comes":
                    house.comes(step[1], f"r{number}", *step[2:])
                elif step[0] == "gives":
                    house.gives(*step[1:])
                elif (task := house.tasks.get(f"r{step[1]}")) is not None:
                    task.cancel()
            await settle()
            assert sorted(together.ended) == sorted(one.ended)
            for line in "mn":
                taken = [
                    [who for who, how in house.ended if how == "taken" and steps[int(who[1:])][2] == line]
                    for house in (together, one)
                ]
                assert taken[0] == taken[1]
            waiting = len(one.lists[0])
            assert [waitlist.together for waitlist in together.lists] == [waiting] * WORKERS
        for house in (together, one):
            await house.close()
        assert [waitlist.together for waitlist in together.lists] == [0] * WORKERS

    asyncio.run(run())


async def test_a_newcomer_does_not_overtake_those_that_wait_in_another_worker() -> None:
    house = House(Clock(), 2, 10)
    house.comes(0, "first", "m", 0)
    await settle()
    house.places["m"] = 1  # And nobody has heard of it yet.
    house.comes(1, "newcomer", "m", 0)
    await settle()
    assert house.ended == []
    house.gives(1, "m", 0)
    await settle()
    assert house.ended == [("first", "taken")]
    await house.close()


async def test_nobody_waits_for_the_first_of_a_worker_that_is_gone_or_hangs() -> None:
    for gone in (True, False):
        clock = Clock()
        house = House(clock, 2, 10)
        house.comes(0, "first", "m", 0)
        await settle()
        house.comes(1, "second", "m", 0)
        await settle()
        # From here on nothing runs in worker 0.
        house.lists[0]._wake = lambda: None  # type: ignore[method-assign]
        house.gives(1, "m", 1)
        await settle()
        assert house.ended == []
        if gone:
            house.table.clear(0)
        else:
            clock.now += ASLEEP_S + 0.1
        house.lists[1].room()
        await settle()
        assert house.ended == [("second", "taken")]
        await house.close()


async def test_the_limit_holds_also_while_those_who_should_give_way_are_of_a_worker_that_hangs() -> None:
    clock = Clock()
    house = House(clock, 2, 2)
    for who in ("one", "two"):
        house.comes(0, who, "m", 5)
        await settle()
    # From here on nothing runs in worker 0.
    house.lists[0]._wake = house.lists[0]._give_way = lambda: None  # type: ignore[method-assign]
    clock.now += ASLEEP_S + 0.1
    for who in ("three", "four"):
        house.comes(1, who, "m", 0)
        await settle()
    assert house.ended == [("three", "queue full"), ("four", "queue full")]
    assert house.lists[1].together == 2
    await house.close()


async def test_one_that_is_the_last_of_too_many_by_the_time_that_it_has_joined_is_refused() -> None:
    class Crowd(Nowhere):
        """Better ones that come to another worker as soon as somebody waits here."""

        crowd = 0

        def tell(self, line: Hashable, count: int, ends: tuple[Place, Place] | None) -> None:
            self.crowd = 5

        def waiting(self) -> int:
            return self.crowd

        def last(self) -> Place | None:
            return Place(-1, 0.0, 1, 0) if self.crowd else None

    def full() -> None:
        raise SaturatedError("saturated", "no room")

    waitlist = Waitlist(5, 30.0, Clock(), elsewhere=Crowd())
    with pytest.raises(SaturatedError, match="5 requests wait for room already"):
        await waitlist.take("m", 0, full)
    assert len(waitlist) == 0


async def test_without_a_queue_nothing_waits_and_nothing_is_told() -> None:
    house = House(Clock(), 2, 0)
    house.comes(0, "a", "m", 0)
    await settle()
    assert house.ended == [("a", "saturated")]
    assert house.table.heads_of(0) == bytes(16)


async def test_a_bell_is_heard_in_the_process_that_it_is_of_and_ringing_never_waits() -> None:
    bells, heard = Bells(2), asyncio.Event()
    for _ in range(100_000):
        bells.ring(1)  # Nobody listens.

    with bells.heard(0, heard.set):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await heard.wait()
        for _ in range(2):
            with forked(1, lambda _: bells.ring(0)):
                async with asyncio.timeout(10):
                    await heard.wait()
            heard.clear()
