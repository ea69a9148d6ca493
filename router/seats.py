"""Where each key was sent last, so that its next request finds its cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from cachetools import TTLCache

from router.replicas import StreamId

MAX_SEATS = 100_000
SEAT_FOR_S = 3600.0


class SeatKeeper(Protocol):
    """Who knows where keys were sent last."""

    def of(self, key: bytes) -> StreamId | None: ...

    def take(self, key: bytes, stream: StreamId) -> None: ...


class Seats:
    """The last streams of keys: of the most recent ``most`` (some 20 MB), each for an hour since its last
    request. ``clock`` is in seconds.
    """

    def __init__(self, most: int = MAX_SEATS, clock: Callable[[], float] = time.monotonic) -> None:
        self._seats: TTLCache[bytes, StreamId] = TTLCache(most, SEAT_FOR_S, timer=clock)

    def of(self, key: bytes) -> StreamId | None:
        """Where the key was sent last."""
        return self._seats.get(key)

    def take(self, key: bytes, stream: StreamId) -> None:
        """The key was sent there."""
        # Again at the end: what goes first is what has been quiet for longest.
        self._seats.pop(key, None)
        self._seats[key] = stream

    def __len__(self) -> int:
        return len(self._seats)
