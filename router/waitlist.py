"""Requests that no replica has room for wait here: for so long, so many, the important ones first."""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import insort
from collections.abc import Callable, Hashable
from typing import TypeVar

from router.errors import SaturatedError

LOOK_S = 0.5
"""Room that nobody tells of is looked for this often: others' load falls, a replica comes back."""
WORKERS_LOOK_S = 0.02
"""The same where other workers of the router make room; only the first of a line looks."""

_T = TypeVar("_T")


class _Waiter:
    """One that waits: lower priorities are earlier, equal ones as they came."""

    def __init__(self, priority: int, number: int) -> None:
        self.order = (priority, number)
        self.woken = asyncio.Event()
        self.displaced = False

    def __lt__(self, other: _Waiter) -> bool:
        return self.order < other.order


class Waitlist:
    """``limit`` requests wait at most, 0 for none, each for ``timeout_s`` at most.

    They wait in lines: requests of one line can go to the same replicas, so none of them overtakes a better
    one, while those of other lines pass by. ``clock`` is in seconds.
    """

    def __init__(
        self,
        limit: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        look_s: float = LOOK_S,
    ) -> None:
        self._limit = limit
        self._timeout_s = timeout_s
        self._look_s = look_s
        self._clock = clock
        self._lines: dict[Hashable, list[_Waiter]] = {}
        self._numbers = itertools.count()
        self.waited: Callable[[float], None] = lambda seconds: None

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def room(self) -> None:
        """Something was released: those who are first look again."""
        for line in self._lines.values():
            line[0].woken.set()

    async def take(self, line: Hashable, priority: int, choose: Callable[[], _T]) -> _T:
        """What ``choose`` gives, once it does and nobody better waits in the same line.

        ``choose`` raises SaturatedError as long as there is no room. Raises it as well: at once where nothing
        may wait or all places are taken, and when the time is over.
        """
        if line not in self._lines:
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
        while True:
            if self._lines[line][0] is waiter:
                try:
                    return choose()
                except SaturatedError:
                    pass
            try:
                async with asyncio.timeout(self._look_s):
                    await waiter.woken.wait()
            except TimeoutError:
                pass
            waiter.woken.clear()
            if waiter.displaced:
                raise _full(self._limit)

    def _join(self, line: Hashable, priority: int) -> _Waiter:
        """A place in the line. When all are taken, the least important of all gives way to a better one."""
        waiter = _Waiter(priority, next(self._numbers))
        if len(self) >= self._limit:
            worst = max(waiting[-1] for waiting in self._lines.values())
            if not waiter < worst:
                raise _full(self._limit)
            worst.displaced = True
            worst.woken.set()
            self._remove(worst)
        insort(self._lines.setdefault(line, []), waiter)
        return waiter

    def _remove(self, waiter: _Waiter) -> None:
        for line, waiting in list(self._lines.items()):
            if waiter in waiting:
                waiting.remove(waiter)
                if not waiting:
                    del self._lines[line]

    def _leave(self, line: Hashable, waiter: _Waiter) -> None:
        self._remove(waiter)
        if line in self._lines:
            # There may be more room than the one that goes has taken.
            self._lines[line][0].woken.set()


def _full(limit: int) -> SaturatedError:
    return SaturatedError("queue full", f"{limit} requests wait for room already; try again soon")
