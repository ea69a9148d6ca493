"""What this router has sent and not yet got back, for each stream."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from router.replicas import StreamId


class StreamLoad(msgspec.Struct, frozen=True):
    """``requests`` in flight; ``prefill_tokens`` uncached prompt tokens of those without a first byte;
    ``decoding`` requests with one.
    """

    requests: int = 0
    prefill_tokens: int = 0
    decoding: int = 0


IDLE = StreamLoad()


class Load:
    """The book of reservations.

    One loop's tasks use it, so a choice and its reservation cannot be torn apart.
    """

    def __init__(self) -> None:
        self._streams: dict[StreamId, StreamLoad] = {}

    def of(self, stream: StreamId) -> StreamLoad:
        """The load of one stream."""
        return self._streams.get(stream, IDLE)

    def items(self) -> Iterator[tuple[StreamId, StreamLoad]]:
        """All streams that have load."""
        return iter(self._streams.items())

    def reserve(self, stream: StreamId, prefill_tokens: int) -> Reservation:
        """Books a request that leaves ``prefill_tokens`` to compute."""
        self._add(stream, 1, prefill_tokens, 0)
        return Reservation(self, stream, prefill_tokens)

    def _add(self, stream: StreamId, requests: int, prefill_tokens: int, decoding: int) -> None:
        now = self.of(stream)
        after = StreamLoad(
            now.requests + requests, now.prefill_tokens + prefill_tokens, now.decoding + decoding
        )
        if after == IDLE:
            self._streams.pop(stream, None)
        else:
            self._streams[stream] = after


class Reservation:
    """One request's share of a stream's load. Both methods may be called again without effect."""

    def __init__(self, load: Load, stream: StreamId, prefill_tokens: int) -> None:
        self._load = load
        self._prefill_tokens = prefill_tokens
        self._decoding = False
        self._released = False
        self.stream = stream

    def first_byte(self) -> None:
        """The engine has begun to answer: its prefill is done."""
        if not self._decoding and not self._released:
            self._decoding = True
            self._load._add(self.stream, 0, -self._prefill_tokens, 1)

    def release(self) -> None:
        """The request is over, however it ended."""
        if self._released:
            return
        self._released = True
        if self._decoding:
            self._load._add(self.stream, -1, 0, -1)
        else:
            self._load._add(self.stream, -1, -self._prefill_tokens, 0)
