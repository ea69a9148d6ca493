"""Who waits for room in the other workers of one router, on a board in shared memory.

Each worker tells of each of its lines how many wait there, and the first and the last of them. So all lines
of a name are one: whoever is first of all looks for room, and whoever is last of all gives way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager

from router.bells import Bells
from router.board import Row
from router.waitlist import LOOK_S, Place

SHAPE = "qqqdqqdqd"
"""The worker, how many wait; priority, arrival and number of the first; of the last; when it last looked."""
MOST_LINES = 1024
ASLEEP_S = 4 * LOOK_S
"""A line whose first has not looked for room for so long is of a worker that hangs: it is passed over, and
nobody waits for it to give way.
"""


class SharedQueue:
    """What one worker sees of the others. ``clock`` is in seconds, and one that all have in common."""

    def __init__(
        self, row: Row, worker: int, bells: Bells, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.worker = worker
        self._row = row
        self._bells = bells
        self._clock = clock
        self._version = b""
        self._waiting: dict[int, int] = {}
        self._lasts: list[tuple[Place, float]] = []

    def alone(self) -> AbstractContextManager[None]:
        return self._row.alone()

    def tell(self, line: Hashable, count: int, ends: tuple[Place, Place] | None) -> None:
        if ends is None:
            self._row.drop(_name(line))
            return
        first, last = ends
        self._row.put(
            _name(line),
            self.worker,
            count,
            first.priority,
            first.came_at,
            first.number,
            last.priority,
            last.came_at,
            last.number,
            self._clock(),
        )

    def first(self, line: Hashable) -> Place | None:
        if not self._look():
            return None
        awake = self._awake()
        found = [
            Place(priority, came_at, int(worker), int(number))
            for worker, _, priority, came_at, number, *_, looked_at in self._row.others(_name(line))
            if looked_at >= awake
        ]
        return min(found, default=None)

    def waiting(self) -> int:
        return sum(self._look().values())

    def last(self) -> Place | None:
        self._look()
        awake = self._awake()
        return max((place for place, looked_at in self._lasts if looked_at >= awake), default=None)

    def ring(self, worker: int | None = None) -> None:
        for one in self._look() if worker is None else (worker,):
            self._bells.ring(one)

    def _awake(self) -> float:
        """Who has looked for room since then does not hang."""
        return self._clock() - ASLEEP_S

    def _look(self) -> dict[int, int]:
        """How many wait in each of the other workers, where any do."""
        version = self._row.version()
        if version != self._version:
            self._version, self._waiting, self._lasts = version, {}, []
            for worker, count, _, _, _, priority, came_at, number, looked_at in self._row.every():
                self._waiting[worker] = self._waiting.get(worker, 0) + count
                self._lasts.append((Place(priority, came_at, worker, number), looked_at))
        return self._waiting


def _name(line: Hashable) -> bytes:
    return repr(line).encode("utf-8", "surrogatepass")
