"""Requests that no replica has room for wait here: for so long, so many, the important ones first."""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import insort
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple, Protocol, TypeVar

from router.errors import SaturatedError

LOOK_S = 0.5
"""Room that nobody tells of is looked for this often: others' load falls, a replica comes back."""

_T = TypeVar("_T")


class Place(NamedTuple):
    """A place in a line. The smaller one is better: lower priorities are earlier, equal ones as they came, on
    a clock that all workers have in common. ``number`` is that of the worker's requests.
    """

    priority: int
    came_at: float
    worker: int
    number: int


class Elsewhere(Protocol):
    """What waits in the other workers of this router; ``worker`` is the number of this one."""

    worker: int

    def alone(self) -> AbstractContextManager[None]:
        """While this is held, no other worker's queue changes."""

    def tell(self, line: Hashable, count: int, ends: tuple[Place, Place] | None) -> None:
        """How many wait here in a line now, and the best and the least important of them."""

    def first(self, line: Hashable) -> Place | None:
        """The best that waits there in a line, of workers that look for room."""

    def waiting(self) -> int:
        """How many wait there."""

    def last(self) -> Place | None:
        """The least important that waits there, of workers that look for room."""

    def ring(self, worker: int | None = None) -> None:
        """Has a worker look again; without a number, all in which any wait."""


class Nowhere:
    """There are no other workers."""

    worker = 0

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def tell(self, line: Hashable, count: int, ends: tuple[Place, Place] | None) -> None:
        pass

    def first(self, line: Hashable) -> Place | None:
        return None

    def waiting(self) -> int:
        return 0

    def last(self) -> Place | None:
        return None

    def ring(self, worker: int | None = None) -> None:
        pass


class _Waiter:
    """One that waits."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.woken = asyncio.Event()
        self.displaced = False

    def __lt__(self, other: _Waiter) -> bool:
        return self.place < other.place


class Waitlist:
    """``limit`` requests wait at most, 0 for none, each for ``timeout_s`` at most.

    They wait in lines: requests of one line can go to the same replicas, so none of them overtakes a better
    one, while those of other lines pass by. ``clock`` is in seconds. What waits ``elsewhere``, in other
    workers, is in the same lines, and counts for the same limit.
    """

    def __init__(
        self,
        limit: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._limit = limit
        self._timeout_s = timeout_s
        self._clock = clock
        self._elsewhere: Elsewhere = Nowhere() if elsewhere is None else elsewhere
        self._lines: dict[Hashable, list[_Waiter]] = {}
        self._numbers = itertools.count()
        self.waited: Callable[[float], None] = lambda seconds: None

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    @property
    def together(self) -> int:
        """How many wait in all workers."""
        return len(self) + self._elsewhere.waiting()

    def room(self) -> None:
        """Something was released: those who are first look again."""
        self._wake()
        self._elsewhere.ring()

    def rung(self) -> None:
        """Another worker has released something, or has one that is to wait in place of the last of all."""
        if self._lines:
            self._give_way()
            self._wake()

    def _wake(self) -> None:
        for line in self._lines.values():
            line[0].woken.set()

    async def take(self, line: Hashable, priority: int, choose: Callable[[], _T]) -> _T:
        """What ``choose`` gives, once it does and nobody better waits in the same line.

        ``choose`` raises SaturatedError as long as there is no room. Raises it as well: at once where nothing
        may wait or all places are taken, and when the time is over.
        """
        if line not in self._lines and (self._limit < 1 or self._elsewhere.first(line) is None):
            try:
                return choose()
            except SaturatedError:
                if self._limit < 1:
                    raise
        waiter = self._join(line, priority)
        began = self._clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._turn(line, waiter, choose)
        except TimeoutError:
            raise SaturatedError(
                "queue timeout", f"no replica had room within {self._timeout_s:g} s; try again soon"
            ) from None
        finally:
            self._leave(line, waiter)
            self.waited(self._clock() - began)

    async def _turn(self, line: Hashable, waiter: _Waiter, choose: Callable[[], _T]) -> _T:
        while not waiter.displaced:
            first = self._lines[line][0] is waiter
            if first:
                self._tell(line)  # That it looks.
                better = self._elsewhere.first(line)
                if better is None or waiter.place < better:
                    try:
                        return choose()
                    except SaturatedError:
                        pass
            # Who is not the first is woken when it becomes that.
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if first else None):
                    await waiter.woken.wait()
            waiter.woken.clear()
        raise _full(self._limit)

    def _join(self, line: Hashable, priority: int) -> _Waiter:
        """A place in the line. When all are taken, the least important of all gives way to a better one."""
        elsewhere = self._elsewhere
        waiter = _Waiter(Place(priority, self._clock(), elsewhere.worker, next(self._numbers)))
        with elsewhere.alone():
            if self.together >= self._limit:
                taken = (self._last(), elsewhere.last())
                if waiter.place > max((place for place in taken if place is not None), default=waiter.place):
                    raise _full(self._limit)
            insort(self._lines.setdefault(line, []), waiter)
            self._tell(line)
        self._give_way()
        return waiter

    def _last(self) -> Place | None:
        return max((waiting[-1].place for waiting in self._lines.values()), default=None)

    def _give_way(self) -> None:
        """As long as too many wait, the last of all goes; where it waits elsewhere, it is seen to there."""
        if self.together <= self._limit:
            return
        with self._elsewhere.alone():
            while self.together > self._limit:
                last, there = self._last(), self._elsewhere.last()
                if last is None or (there is not None and last < there):
                    if there is not None:
                        self._elsewhere.ring(there.worker)
                    return
                self._displace(last)

    def _displace(self, place: Place) -> None:
        for line, waiting in self._lines.items():
            if waiting[-1].place == place:
                waiting[-1].displaced = True
                waiting[-1].woken.set()
                self._remove(line, waiting[-1])
                return

    def _tell(self, line: Hashable) -> None:
        waiting = self._lines.get(line, ())
        ends = (waiting[0].place, waiting[-1].place) if waiting else None
        self._elsewhere.tell(line, len(waiting), ends)

    def _remove(self, line: Hashable, waiter: _Waiter) -> None:
        waiting = self._lines.get(line, [])
        if waiter in waiting:
            waiting.remove(waiter)
            if not waiting:
                del self._lines[line]
            self._tell(line)

    def _leave(self, line: Hashable, waiter: _Waiter) -> None:
        self._remove(line, waiter)
        # There may be more room than the one that goes has taken.
        own, first = self._lines.get(line), self._elsewhere.first(line)
        if own:
            own[0].woken.set()
        if first is not None and not (own and own[0].place < first):
            self._elsewhere.ring(first.worker)


def _full(limit: int) -> SaturatedError:
    return SaturatedError("queue full", f"{limit} requests wait for room already; try again soon")
