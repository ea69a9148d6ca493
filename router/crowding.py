"""How busy each stream is, as requests find it, and what that makes a computed token cost."""

from __future__ import annotations

from collections.abc import Iterable

from router.replicas import StreamId

SHARE = 0.002
"""What one request counts for in an average: it is over about the last 500, so that what chance makes of a
minute does not move it.
"""
FIRST_SHARE = 0.05
"""What the first ones count for."""
MANY = round(1 / SHARE - 1 / FIRST_SHARE)
"""From so many on, all count for the same."""
OWN = 0.7
"""How much of a stream's utilisation is its own average; the rest is the mean of all. Its own says where load
stays, but it is made of few observations; the mean steadies it.
"""
MOST = 0.85
"""Beyond this an average says "nearly saturated". How much beyond is chance, and each request would have to
wait ever longer for the sake of others: the mean wait would hardly be shorter, the longest ones would be
longer.
"""
KNOWN_FROM = 100
"""Fewer requests do not say how much waits where they are sent."""


class Crowding:
    """The share of requests that find a stream with prefill in front of them: its utilisation, 0 to 1; and
    how much work is in front of requests where they are sent, against their own.

    Work that is given to a stream is waited for by its own request, and by those that come while the stream
    stays busy with it. In a queue with utilisation u each unit of work is so waited for 1 / (1 - u) times:
    by u requests at first, and by others as these wait, u / (1 - u) behind its own. In a fleet whose requests
    find room elsewhere, fewer do: no more at first than do wait for a unit of work, which is measured.
    """

    def __init__(self) -> None:
        self._busy: dict[StreamId, _Average] = {}
        self._mean = 0.0
        self._sent = 0
        self._ahead_s = 0.0
        self._own_s = 0.0

    def found(self, streams: Iterable[tuple[StreamId, bool]]) -> None:
        """A request came, and found each of the streams busy or not."""
        averages, shares = self._busy, []
        for stream, busy in streams:
            average = averages.get(stream)
            if average is None:
                average = averages[stream] = _Average(self._mean)
            average.count = count = average.count + 1
            share = SHARE if count >= MANY else 1 / (count + 1 / FIRST_SHARE)
            before = average.value
            average.value = after = before + share * (busy - before)
            shares.append(after)
        self._mean = sum(shares) / len(shares)

    def sent(self, ahead_s: float, own_s: float) -> None:
        """A request was sent to where so many seconds of prefill are in front of it, besides its own."""
        self._sent += 1
        share = max(SHARE, 1 / self._sent)
        self._ahead_s += share * (ahead_s - self._ahead_s)
        self._own_s += share * (own_s - self._own_s)

    def behind(self, streams: Iterable[StreamId], echo: float = 0.0) -> list[float]:
        """How many requests behind this one wait for each unit of work that it brings to each of the streams,
        on average.

        Where others have ``echo`` requests for each of ours, the load that is seen is of the last report, and
        much of what makes one stream look better than another is over by now. What the request brings is
        known all the same: it counts for as many times more as there is what we have.

        Beside ``found``: the mean is of the streams that were given last.
        """
        averages, mean, found = self._busy, self._mean, []
        of_all, waited = (1 - OWN) * mean, 1.0
        if self._sent >= KNOWN_FROM and self._ahead_s < self._own_s:
            waited = self._ahead_s / self._own_s
        for stream in streams:
            average = averages.get(stream)
            utilisation = OWN * (mean if average is None else average.value) + of_all
            utilisation = utilisation if utilisation < MOST else MOST
            at_first = waited if waited < utilisation else utilisation
            found.append((1.0 + echo) * (1.0 + at_first / (1.0 - utilisation)) - 1.0)
        return found

    def forget(self, stream: StreamId) -> None:
        """The stream begins anew, or is gone."""
        self._busy.pop(stream, None)

    def gone(self, replica: str) -> None:
        """The replica is none of ours any more, or another one."""
        self._busy = {stream: average for stream, average in self._busy.items() if stream[0] != replica}


class _Average:
    __slots__ = ("count", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self.count = 0
