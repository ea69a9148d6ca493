"""Where each key was sent last, by whichever worker process of one router.

A table in shared memory, in buckets of a few places each: a key has one bucket, and takes the place there
that has been quiet for longest. Nobody waits for anybody: a place that is read while it is written to fails
its check, and is left out. No request depends on a seat.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Set

from xxhash import xxh3_64_intdigest

from router.replicas import StreamId, stream_name
from router.seats import SEAT_FOR_S

BUCKETS = 1 << 16
PLACES = 4
"""In a bucket. So many buckets and places keep 100,000 keys but for one or two in a hundred."""
_PLACE = struct.Struct("@QQQQ")
"""The hashes of the key and of the stream, when it was sent there in microseconds, and all three, one xor the
other.
"""
_BUCKET = struct.Struct("@" + "QQQQ" * PLACES)


class SeatBoard:
    """Made before the workers are forked. Pages that nobody writes to take no memory; all take 8 MB."""

    def __init__(self, buckets: int = BUCKETS) -> None:
        self._buckets = buckets
        self._memory = mmap.mmap(-1, buckets * _BUCKET.size)

    def places(self, key: int) -> list[tuple[int, int, int]]:
        """What is in the bucket of a key: keys, streams and times, zeros for what is not whole."""
        words = _BUCKET.unpack_from(self._memory, self._at(key))
        found = zip(words[::4], words[1::4], words[2::4], words[3::4], strict=True)
        return [
            (one, stream, at) if one ^ stream ^ at == check else (0, 0, 0) for one, stream, at, check in found
        ]

    def write(self, key: int, place: int, stream: int, at: int) -> None:
        """Gives the key a place in its bucket."""
        where = self._at(key) + place * _PLACE.size
        _PLACE.pack_into(self._memory, where, key, stream, at, key ^ stream ^ at)

    def _at(self, key: int) -> int:
        return key % self._buckets * _BUCKET.size


class SharedSeats:
    """The last streams of keys, for an hour since the last request. ``streams`` gives those of the fleet;
    ``clock`` is in seconds, and one that all workers have in common.
    """

    def __init__(
        self,
        board: SeatBoard,
        streams: Callable[[], Set[StreamId]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = board
        self._streams = streams
        self._clock = clock
        self._named: Set[StreamId] = frozenset()
        self._by_hash: dict[int, StreamId] = {}

    def of(self, key: bytes) -> StreamId | None:
        """Where the key was sent last."""
        hashed, since = xxh3_64_intdigest(key), self._now() - round(SEAT_FOR_S * 1e6)
        for one, stream, at in self._board.places(hashed):
            if one == hashed and at > since:
                return self._stream(stream)
        return None

    def take(self, key: bytes, stream: StreamId) -> None:
        """The key was sent there."""
        hashed = xxh3_64_intdigest(key)
        places = self._board.places(hashed)
        own = next((number for number, (one, *_) in enumerate(places) if one == hashed), None)
        quietest = min(range(PLACES), key=lambda number: places[number][2])
        self._board.write(hashed, quietest if own is None else own, _hash_of(stream), self._now())

    def _now(self) -> int:
        return round(self._clock() * 1e6)

    def _stream(self, hashed: int) -> StreamId | None:
        streams = self._streams()
        if streams is not self._named:
            self._named = streams
            self._by_hash = {_hash_of(stream): stream for stream in streams}
        return self._by_hash.get(hashed)


def _hash_of(stream: StreamId) -> int:
    return xxh3_64_intdigest(stream_name(stream))
