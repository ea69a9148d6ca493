"""What was just routed is cached soon: a side map that lives for seconds, until events tell.

Without it a burst with one new prefix scatters over the fleet before the first event arrives.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

from router.replicas import StreamId

LINGER_S = 5.0
"""How long a hint outlives the first token that is predicted: time for events to come and be applied."""
LONGEST_S = 120.0
MOST_MARKS = 200_000
"""Marks kept over all streams; beyond that, the hints that would expire first go."""


class Hint(Protocol):
    """That a stream computes a prompt now."""

    def drop(self) -> None:
        """The prompt will not be computed after all. Dropping again has no effect."""


class _Own:
    __slots__ = ("_hints", "_number")

    def __init__(self, hints: Hints, number: int) -> None:
        self._hints = hints
        self._number = number

    def drop(self) -> None:
        self._hints._drop(self._number)


class Hints:
    """Marks of prompts on their way, by stream. Times are seconds of the caller's clock.

    Marks are digests of ever longer beginnings of a prompt, so a mark names all that is before it, and who
    has it has them all. Where digests collide hints are lost, and no more.
    """

    def __init__(self) -> None:
        self._holders: dict[Hashable, Mapping[StreamId, int]] = {}
        self._hinted: dict[int, tuple[StreamId, Sequence[Hashable]]] = {}
        self._expiries: list[tuple[float, int]] = []
        self._numbers = itertools.count()
        self._marks = 0

    def __len__(self) -> int:
        """Marks kept now, each counted for each hint that has it."""
        return self._marks

    def add(self, stream: StreamId, marks: Sequence[Hashable], now: float, predicted_s: float) -> Hint:
        """A prompt was sent to ``stream``, whose first token is predicted in ``predicted_s`` seconds."""
        self._expire(now)
        number = next(self._numbers)
        if marks:
            self._hinted[number] = (stream, marks)
            self._marks += len(marks)
            known = self._known(marks)
            before: Mapping[StreamId, int] = {}
            after = before
            for mark in marks[:known]:
                holders = self._holders.get(mark, {})
                if holders is not before:
                    before, after = holders, {**holders, stream: holders.get(stream, 0) + 1}
                self._holders[mark] = after
            alone = {stream: 1}
            self._holders.update(dict.fromkeys(marks[known:], alone))
            heapq.heappush(self._expiries, (now + min(LONGEST_S, predicted_s + LINGER_S), number))
        while self._marks > MOST_MARKS and self._expiries:
            self._drop(heapq.heappop(self._expiries)[1])
        return _Own(self, number)

    def tell(
        self, hint: Hint, stream: StreamId, marks: Sequence[Hashable], now: float, predicted_s: float
    ) -> Hint:
        """Tells other workers of a hint that was added, where there are any; gives the hint to drop."""
        return hint

    def soon(self, marks: Sequence[Hashable], now: float) -> dict[StreamId, int]:
        """How many leading marks each stream will have soon; streams with none are left out."""
        self._expire(now)
        if not marks or marks[0] not in self._holders:
            return {}
        holders, found = self._holders[marks[0]], dict[StreamId, int]()
        for number in range(self._known(marks), 0, -1):
            for stream in self._holders.get(marks[number - 1], ()):
                found.setdefault(stream, number)
            if len(found) == len(holders):
                break
        return found

    def _known(self, marks: Sequence[Hashable]) -> int:
        """How many of the marks anybody has. Who has a mark has all before it, so they are the first ones."""
        if not marks or marks[0] not in self._holders:
            return 0
        return bisect_left(range(len(marks)), True, key=lambda place: marks[place] not in self._holders)

    def forget(self, stream: StreamId) -> None:
        """The stream is gone, or has lost its cache."""
        for number in [n for n, (hinted, _) in self._hinted.items() if hinted == stream]:
            self._drop(number)

    def gone(self, replica: str) -> None:
        """The replica is none of ours any more, or another one."""
        for stream in {stream for stream, _ in self._hinted.values() if stream[0] == replica}:
            self.forget(stream)

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            self._drop(heapq.heappop(self._expiries)[1])

    def _drop(self, number: int) -> None:
        stream, marks = self._hinted.pop(number, (None, ()))
        if stream is None:
            return
        self._marks -= len(marks)
        before: Mapping[StreamId, int] = {}
        left: dict[StreamId, int] = {}
        for place, mark in enumerate(marks):
            holders = self._holders.get(mark, {})
            if holders is not before:
                before, left = holders, {**holders, stream: holders.get(stream, 0) - 1}
                if left[stream] <= 0:
                    del left[stream]
            if not left:
                # Nobody has what comes behind it either.
                for last in marks[place:]:
                    self._holders.pop(last, None)
                return
            self._holders[mark] = left
