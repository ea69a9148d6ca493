"""How many of the prompts that wait begin alike: who computes what they share makes a copy for them as well.

As many as wait now where the copies are will come again in the time that they wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial

import msgspec

from router.replicas import StreamId


class Run(msgspec.Struct, frozen=True):
    """Marks of a prompt, up to the ``end``-th, that ``waiting`` others begin with."""

    end: int
    waiting: float


class Demand:
    """The marks of the prompts in the line of each stream: those whose prefill is not over."""

    def __init__(self) -> None:
        self._lines: dict[StreamId, Counter[Hashable]] = {}
        self._waiting: Counter[Hashable] = Counter()

    def join(self, stream: StreamId, marks: Sequence[Hashable]) -> Callable[[], None]:
        """A prompt waits at the stream. Gives what is to be called, once, when it does so no more."""
        if not marks:
            return lambda: None
        self._lines.setdefault(stream, Counter()).update(marks)
        self._waiting.update(marks)
        return partial(self._leave, stream, marks)

    def wants(self, mark: Hashable) -> bool:
        """Whether any prompt that waits begins with the mark."""
        return mark in self._waiting

    def alike(self, marks: Sequence[Hashable], held: Sequence[tuple[StreamId, int]]) -> list[Run]:
        """How many wait that begin with the marks, as far as any does: where the fewest of them do, of the
        streams that have as much, as a copy that few wait for is one too many. ``held`` is how many of the
        marks each stream has, or will have soon.
        """
        ends: list[tuple[int, Hashable]] = []
        before = 0
        for end, mark in enumerate(marks, start=1):
            waiting = self._waiting.get(mark, 0)
            if not waiting:
                break
            if waiting == before:
                ends[-1] = (end, mark)
            else:
                ends.append((end, mark))
            before = waiting
        return [Run(end, self._fewest(mark, [s for s, known in held if known >= end])) for end, mark in ends]

    def _fewest(self, mark: Hashable, streams: Sequence[StreamId]) -> int:
        lines = self._lines
        return min((lines[stream][mark] if stream in lines else 0 for stream in streams), default=0)

    def _leave(self, stream: StreamId, marks: Sequence[Hashable]) -> None:
        line = self._lines[stream]
        for counts in (line, self._waiting):
            for mark in marks:
                left = counts[mark] - 1
                if left:
                    counts[mark] = left
                else:
                    del counts[mark]
        if not line:
            del self._lines[stream]


def borne_by_others(runs: Iterable[Run], held: float, part: float) -> float:
    """How many of the marks behind the first ``held`` are for others to bear, if ``part`` of those who wait
    for the same would rather wait here: each bears as much as this one.
    """
    begun, borne = held, 0.0
    for run in runs:
        if run.end > begun:
            others = part * run.waiting
            borne += (run.end - begun) * others / (1.0 + others)
            begun = run.end
    return borne
