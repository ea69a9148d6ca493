"""How fast streams are, learned by all worker processes of one router together.

The last observations of a stream stand in a record that all workers write to, with the line that whoever
wrote last drew through them. So four workers learn as fast as one does, and one that is started again knows
what was known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from router.latency import WINDOW, Latency, Learned, Speed, line, says_something
from router.ledger import Ledger
from router.replicas import StreamId, stream_name

SHAPE = "ddqd" + "qd" * WINDOW
"""On the workers' ledger, of each stream: its line, how many observations there are and when the last one was
made, and the observations, the latest first: tokens and seconds.
"""
LOOK_S = 0.1
"""A line is drawn through many observations: nobody needs the last one at once."""


class SharedLatency(Latency):
    """What all workers know, as of the last choice among streams. ``clock`` is in seconds, and one that all
    have in common.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._ledger = ledger
        self._asked: set[StreamId] = set()
        self._version = b""
        self._looked_at = float("-inf")

    def each(self, streams: Sequence[StreamId]) -> list[Speed]:
        self._look(streams)
        return super().each(streams)

    def observe(self, stream: StreamId, tokens: int, seconds: float) -> None:
        if not says_something(tokens, seconds):
            return
        name = stream_name(stream)
        with self._ledger.alone():
            record = self._ledger.get(name)
            seen = [(tokens, seconds), *([] if record is None else _observations(record))][:WINDOW]
            speed = line(seen, self._typical.overhead_s)
            padded = [*seen, *[(0, 0.0)] * (WINDOW - len(seen))]
            self._ledger.put(
                name,
                speed.overhead_s,
                speed.s_per_token,
                len(seen),
                self._clock(),
                *(number for observation in padded for number in observation),
            )

    def forget(self, stream: StreamId) -> None:
        with self._ledger.alone():
            self._ledger.drop(stream_name(stream))
        self._asked.discard(stream)
        super().forget(stream)

    def _look(self, streams: Sequence[StreamId]) -> None:
        """Reads what is known, where it has changed, ten times a second at most; and for streams that are new
        here.
        """
        version, more = self._ledger.version(), len(streams) > len(self._asked)
        if version == self._version and not more:
            return
        now = self._clock()
        if now - self._looked_at < LOOK_S and not more:
            return
        self._version, self._looked_at = version, now
        self._asked.update(streams)
        records = ((stream, self._ledger.get(stream_name(stream))) for stream in self._asked)
        self._learned = {stream: _learned(record) for stream, record in records if record is not None}
        self._unlike = {}
        if self._learned:
            self._compare()


def _learned(record: tuple[Any, ...]) -> Learned:
    overhead_s, s_per_token, observations, at = record[:4]
    return Learned(Speed(overhead_s, s_per_token), observations, at)


def _observations(record: tuple[Any, ...]) -> list[tuple[int, float]]:
    each = record[4 : 4 + 2 * record[2]]
    return list(zip(each[::2], each[1::2], strict=True))
