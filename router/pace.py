"""How fast a full fleet gets done with requests: when there will be room again."""

from __future__ import annotations

from collections.abc import Mapping

from router.replicas import StreamId

SHARE = 0.1
"""What one request counts for in how long those of its stream last."""


class Pace:
    """How long requests last at each stream, from being sent to the end of their answer, on average."""

    def __init__(self) -> None:
        self._lasts_s: dict[StreamId, float] = {}

    def ended(self, stream: StreamId, seconds: float) -> None:
        """A request that was answered is over, so long after it was sent."""
        before = self._lasts_s.get(stream, seconds)
        self._lasts_s[stream] = before + SHARE * (seconds - before)

    def forget(self, stream: StreamId) -> None:
        """The stream is gone."""
        self._lasts_s.pop(stream, None)

    def room_in_s(self, requests: Mapping[StreamId, int], ahead: int = 0) -> float | None:
        """When one of the streams is expected to have room, that have so many requests each, for one that
        ``ahead`` others wait before. None where none of their requests has ended yet.

        By Little's law a stream with n requests that last d seconds ends n/d of them a second.
        """
        known = [self._lasts_s[stream] for stream in requests if stream in self._lasts_s]
        if not known:
            return None
        typical = sum(known) / len(known)
        ended = sum(n / max(1e-3, self._lasts_s.get(stream, typical)) for stream, n in requests.items())
        return (1 + ahead) / ended if ended else None
