"""How busy each stream is, as requests find it, and what that makes a computed token cost."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from router.replicas import StreamId

SHARE = 0.002
"""What one request counts for in an average: it is over about the last 500, so that what chance makes of a
minute does not move it.
"""
FIRST_SHARE = 0.05
"""What the first ones count for."""
OWN = 0.7
"""How much of a stream's utilisation is its own average; the rest is the mean of all. Its own says where load
stays, but it is made of few observations; the mean steadies it.
"""
MOST = 0.75
"""Beyond this an average says "nearly saturated". How much beyond is chance, and each request would have to
wait ever longer for the sake of others: the mean wait would hardly be shorter, the longest ones would be
longer.
"""


class Crowding:
    """The share of requests that find a stream with prefill in front of them: its utilisation, 0 to 1.

    Work that is given to a stream is waited for by its own request, and by those that come while the stream
    stays busy with it. In a queue with utilisation u each unit of work is so waited for 1 / (1 - u) times.
    """

    def __init__(self) -> None:
        self._busy: dict[StreamId, _Average] = {}
        self._mean = 0.0

    def found(self, streams: Iterable[tuple[StreamId, bool]]) -> None:
        """A request came, and found each of the streams busy or not."""
        shares = []
        for stream, busy in streams:
            average = self._busy.get(stream) or self._busy.setdefault(stream, _Average(self._mean))
            average.count += 1
            share = 1 / (average.count + 1 / FIRST_SHARE)
            average.value += (share if share > SHARE else SHARE) * (busy - average.value)
            shares.append(average.value)
        self._mean = sum(shares) / len(shares)

    def behind(self, stream: StreamId) -> float:
        """How many requests behind this one wait for each unit of work that it brings there, on average.

        Beside ``found``: the mean is of the streams that were given last.
        """
        average = self._busy.get(stream)
        own = self._mean if average is None else average.value
        utilisation = OWN * own + (1 - OWN) * self._mean
        utilisation = utilisation if utilisation < MOST else MOST
        return utilisation / (1.0 - utilisation)

    def forget(self, stream: StreamId) -> None:
        """The stream begins anew, or is gone."""
        self._busy.pop(stream, None)


class _Average(msgspec.Struct):
    value: float
    count: int = 0
