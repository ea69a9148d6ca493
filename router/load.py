"""What this router has sent and not yet got back, for each stream."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator

import msgspec

from router.replicas import StreamId

LEARN_FROM_TOKENS = 512
"""With fewer tokens to prefill, the time to a first byte says little about the speed of prefill."""
LEARN_SHARE = 0.2
"""What one observation counts for in the moving average."""
UNKNOWN_PREFILL_S = 1.0


class StreamLoad(msgspec.Struct, frozen=True):
    """``requests`` in flight; ``prefill_tokens`` uncached prompt tokens of those whose prefill is not over;
    ``decoding`` requests whose is.
    """

    requests: int = 0
    prefill_tokens: int = 0
    decoding: int = 0


IDLE = StreamLoad()


class Load:
    """The book of reservations.

    One loop's tasks use it, so a choice and its reservation cannot be torn apart. The first byte of a stream
    says that its prefill is over. An answer in one piece does not say when: it is taken to be over after the
    time that the replica needs, at the speed seen on its streams, for the tokens booked there then; after
    one second as long as no speed was seen. ``clock`` is in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._streams: dict[StreamId, StreamLoad] = {}
        self._tokens_per_s: dict[str, float] = {}
        self._prefilled_at: dict[StreamId, list[tuple[float, int, Reservation]]] = {}
        self._numbers = itertools.count()

    def of(self, stream: StreamId) -> StreamLoad:
        """The load of one stream."""
        self._settle(stream)
        return self._streams.get(stream, IDLE)

    def items(self) -> Iterator[tuple[StreamId, StreamLoad]]:
        """All streams that have load."""
        return ((stream, self.of(stream)) for stream in tuple(self._streams))

    def reserve(self, stream: StreamId, prefill_tokens: int, *, streams: bool = True) -> Reservation:
        """Books a request that leaves ``prefill_tokens`` to compute.

        ``streams``: its first byte will come as soon as its prefill is over.
        """
        queued_tokens = self.of(stream).prefill_tokens + prefill_tokens
        self._add(stream, 1, prefill_tokens, 0)
        reservation = Reservation(self, stream, prefill_tokens, queued_tokens)
        if not streams:
            due = self._clock() + self.prefill_s(stream[0], queued_tokens)
            heap = self._prefilled_at.setdefault(stream, [])
            heapq.heappush(heap, (due, next(self._numbers), reservation))
        return reservation

    def prefill_s(self, replica: str, tokens: int) -> float:
        """How long the replica is thought to need for so many tokens, seconds."""
        speed = self._tokens_per_s.get(replica)
        return UNKNOWN_PREFILL_S if speed is None else tokens / speed

    def _observe(self, replica: str, tokens: int, seconds: float) -> None:
        if tokens < LEARN_FROM_TOKENS or seconds <= 0:
            return
        seen = tokens / seconds
        known = self._tokens_per_s.get(replica, seen)
        self._tokens_per_s[replica] = known + LEARN_SHARE * (seen - known)

    def _settle(self, stream: StreamId) -> None:
        """Moves what is due from prefill to decoding."""
        heap = self._prefilled_at.get(stream)
        while heap and heap[0][0] <= self._clock():
            heapq.heappop(heap)[2].prefilled()

    def _add(self, stream: StreamId, requests: int, prefill_tokens: int, decoding: int) -> None:
        now = self._streams.get(stream, IDLE)
        after = StreamLoad(
            now.requests + requests, now.prefill_tokens + prefill_tokens, now.decoding + decoding
        )
        if after == IDLE:
            self._streams.pop(stream, None)
            self._prefilled_at.pop(stream, None)
        else:
            self._streams[stream] = after


class Reservation:
    """One request's share of a stream's load. Its methods may be called again without effect.

    ``queued_tokens`` are those that had to be computed before its first token, its own included.
    """

    def __init__(self, load: Load, stream: StreamId, prefill_tokens: int, queued_tokens: int) -> None:
        self._load = load
        self._prefill_tokens = prefill_tokens
        self._decoding = False
        self._released = False
        self.stream = stream
        self.queued_tokens = queued_tokens

    def first_byte(self, ttft_s: float) -> None:
        """A stream has begun to answer, so many seconds after it was sent: its prefill is over."""
        if not self._decoding and not self._released:
            self._load._observe(self.stream[0], self.queued_tokens, ttft_s)
        self.prefilled()

    def prefilled(self) -> None:
        """The engine is done with the prompt, as far as is known."""
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
