"""The load of each stream: what this router has sent and not yet got back, and what others have sent."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import msgspec

from router.backlog import Backlog, Own, begun_tokens, others_tokens
from router.hints import Hint
from router.latency import Latency
from router.pace import Pace
from router.replicas import StreamId
from router.reported import Reported

UNKNOWN_REQUEST_TOKENS = 512
"""What a request of others leaves to compute, as long as there was none of ours to judge by."""
REQUEST_SHARE = 0.02
"""What one request counts for in the mean request."""
GUESSED_SHARE = 0.1
"""A request with more of others' tokens in front of it, which are a guess, says nothing of its stream's
speed.
"""
STALE_S = 10.0
"""A report older than this says nothing of now."""
FROZEN_S = 5.0
"""An engine that works changes its numbers with every step: word for word the same for so long, while nothing
of ours is there, are those of one that hangs or forgot to count down, and no load.
"""
USUAL_S = 30.0
"""What we sent so long ago counts about a third (1 / e) for how much we usually send."""
MOST_ECHO = 4.0
"""Bounds what is believed of other routers that have not been seen yet."""


class StreamLoad(msgspec.Struct, frozen=True, gc=False):
    """``requests`` in flight; ``prefill_tokens`` uncached prompt tokens of those whose prefill is not over;
    ``decoding`` requests whose is.
    """

    requests: int = 0
    prefill_tokens: int = 0
    decoding: int = 0

    def __add__(self, other: StreamLoad) -> StreamLoad:
        return StreamLoad(
            self.requests + other.requests,
            self.prefill_tokens + other.prefill_tokens,
            self.decoding + other.decoding,
        )


IDLE = StreamLoad()
NEVER = float("inf")


class Share(msgspec.Struct, frozen=True):
    """What worker processes have at a stream, besides one that asks: their ``load``, and how many requests
    they have ever ``sent``, of ``sent_tokens`` to prefill. Of those that wait for their prefill, the first
    came at ``joined`` (NEVER: none waits) and has ``first_tokens``; ``left`` is when one that was first was
    last done. Times are of a clock that all have in common.
    """

    load: StreamLoad = IDLE
    sent: int = 0
    sent_tokens: int = 0
    joined: float = NEVER
    first_tokens: int = 0
    left: float = 0.0


NO_SHARE = Share()


class Shares(Protocol):
    """How the workers of one router tell each other of their requests."""

    def tell(self, stream: StreamId, share: Share) -> None:
        """What this worker has at the stream now."""

    def of(self, stream: StreamId) -> Share:
        """What all others have there together."""

    def forget(self, stream: StreamId) -> None:
        """The stream is none of ours any more."""


class _Seen(msgspec.Struct, frozen=True):
    """A report and when it came, since when the engine says the same, how many requests of it were not ours,
    what they left to compute, how many prompt tokens a second we send there, how many of ours were in
    flight, how many we had ever sent, and the share of its requests that wait for their prefill.
    """

    reported: Reported
    at: float
    same_since: float
    others: int
    backlog: Backlog
    own_per_s: float
    ours: int
    sent: int
    waiting_share: float


class Load:
    """The book of reservations, and what the engines report beside it.

    One loop's tasks use it, so a choice and its reservation cannot be torn apart. The first byte of a stream
    says that its prefill is over. An answer in one piece does not say when: it is taken to be over after the
    time that is predicted for the tokens booked there then.

    Where a router has several worker processes, each has a book, and ``shares`` is how they read each
    other's: what the others have booked counts as what was booked here.

    What an engine reports beyond our own requests is other routers' (or direct clients'). Between two
    reports our own dispatches count at once, and so does what others are likely to have sent after the same
    numbers (``unseen_tokens``), while what they had there is computed. So routers that share nothing but the
    engines' metrics do not chase one minimum. ``clock`` is in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, shares: Shares | None = None) -> None:
        self.latency = Latency(clock)
        self.pace = Pace()
        self._clock = clock
        self._streams: dict[StreamId, StreamLoad] = {}
        self._shares = shares
        self._prefilling: dict[StreamId, _Line] = {}
        self._left: dict[StreamId, float] = {}
        self._prefilled_at: dict[StreamId, list[tuple[float, int, Reservation]]] = {}
        self._numbers = itertools.count()
        self._seen: dict[StreamId, _Seen] = {}
        self._sent: dict[StreamId, int] = {}
        self._sent_tokens: dict[StreamId, int] = {}
        self._echo = 0.0
        self._request_tokens = float(UNKNOWN_REQUEST_TOKENS)
        self._requests_known = False
        self.released: Callable[[], None] = lambda: None

    def of(self, stream: StreamId) -> StreamLoad:
        """The load of one stream: the router's, and what others are thought to have there."""
        ours = self.together(stream)
        if stream not in self._seen or (others := self.others(stream)) is IDLE:
            return ours
        return ours + others

    def together(self, stream: StreamId) -> StreamLoad:
        """What this router has sent to one stream and not yet got back, by whatever worker."""
        ours = self.ours(stream)
        if self._shares is None or (workers := self.workers(stream)) is IDLE:
            return ours
        return ours + workers

    def ours(self, stream: StreamId) -> StreamLoad:
        """What this process has sent to one stream and not yet got back."""
        if stream in self._prefilled_at:
            self._settle(stream)
        return self._streams.get(stream, IDLE)

    def workers(self, stream: StreamId) -> StreamLoad:
        """What the other workers of this router have there."""
        return IDLE if self._shares is None else self._shares.of(stream).load

    def at(self, replica: str, streams: Iterable[StreamId] = ()) -> int:
        """How many requests a replica has of this process, and of other workers at ``streams`` of it."""
        own = sum(load.requests for stream, load in self._streams.items() if stream[0] == replica)
        return own + sum(self.workers(stream).requests for stream in streams)

    def others(self, stream: StreamId) -> StreamLoad:
        """What others have at one stream: requests by its last report, and those that they are likely to have
        sent since; tokens by its last report, less what the engine can have computed of them since.
        """
        seen = self._seen.get(stream)
        if seen is None or not (seen.others or self._echo) or (age_s := self._clock() - seen.at) > STALE_S:
            return IDLE
        ours = self.together(stream)
        requests, share = seen.others, seen.waiting_share
        if ours.requests:
            since = max(0, min(self._sent_together(stream) - seen.sent, ours.requests))
            requests += int(self._echo * since + 0.5)
            share = max(share, 1 - ours.decoding / ours.requests)
        if not requests:
            return IDLE
        waiting = int(share * requests + 0.5)
        tokens = 0.0
        if seen.backlog.others:
            tokens = seen.backlog.others_now(self._own(stream), age_s / self.latency.of(stream).s_per_token)
        return StreamLoad(requests, round(tokens), requests - waiting)

    def unseen_tokens(self, streams: Iterable[StreamId]) -> float:
        """Prompt tokens that others are likely to have sent to some of the streams since these were looked
        at: as many, against ours, as they have requests in flight in the whole fleet. Ours are those that
        were sent since, or that are sent in such a time otherwise, if that is more.
        """
        if not self._echo:
            return 0.0
        now, since, usual = self._clock(), 0, 0.0
        for stream in streams:
            seen = self._seen.get(stream)
            if seen is not None and now - seen.at <= STALE_S:
                since += max(0, self._sent_together_tokens(stream) - seen.backlog.own.sent)
                usual += seen.own_per_s * (now - seen.at)
        return self._echo * max(since, usual)

    def sent_to(self, replica: str) -> list[StreamId]:
        """The streams of a replica that anything was ever sent to."""
        return [stream for stream in self._sent if stream[0] == replica]

    def forget(self, replica: str) -> None:
        """What was learned of a replica that is none of ours any more. Its requests have to be over."""
        for stream in self.sent_to(replica):
            self.latency.forget(stream)
            self.pace.forget(stream)
            if self._shares is not None:
                self._shares.forget(stream)
        books: tuple[dict[StreamId, _Seen] | dict[StreamId, int] | dict[StreamId, float], ...]
        books = (self._seen, self._sent, self._sent_tokens, self._left)
        for book in books:
            for stream in [stream for stream in book if stream[0] == replica]:
                del book[stream]

    def report(self, stream: StreamId, reported: Reported, in_flight: int) -> None:
        """Takes what an engine says. ``in_flight`` is how many requests of this router were there when it
        said so: the most that there were while it was asked, as none of ours may be taken for another's.
        """
        now = self._clock()
        last = self._seen.get(stream)
        same_since = last.same_since if last is not None and last.reported == reported else now
        others = max(0, reported.running + reported.waiting - in_flight)
        if not in_flight and now - same_since >= FROZEN_S:
            others = 0
        ours = self.together(stream).requests
        sent = self._sent_together(stream)
        total = reported.running + reported.waiting
        share = reported.waiting / total if total else 0.0
        backlog = self._backlog(stream, reported, others, share)
        own_per_s = 0.0
        if last is not None and now > last.at:
            weight = 1 - math.exp((last.at - now) / USUAL_S)
            new = max(0, backlog.own.sent - last.backlog.own.sent) / (now - last.at)
            own_per_s = last.own_per_s + weight * (new - last.own_per_s)
        self._seen[stream] = _Seen(reported, now, same_since, others, backlog, own_per_s, ours, sent, share)
        fresh = [seen for seen in self._seen.values() if now - seen.at <= STALE_S]
        theirs = sum(seen.others for seen in fresh)
        self._echo = min(MOST_ECHO, theirs / max(1, sum(seen.ours for seen in fresh)))

    def _backlog(self, stream: StreamId, reported: Reported, others: int, waiting_share: float) -> Backlog:
        """What ``others`` requests have left to compute there."""
        own, last, begun = self._own(stream), self._seen.get(stream), None
        if last is not None:
            computed = (self._clock() - last.at) / self.latency.of(stream).s_per_token
            begun = begun_tokens(last.reported, last.backlog.begun, reported, computed)
        if not others:
            return Backlog(begun, 0.0, own)
        if begun is not None:
            return Backlog(begun, others_tokens(reported, begun, own, self._request_tokens), own)
        if own.requests:
            waiting_share = max(waiting_share, own.waiting / own.requests)
        waiting = int(waiting_share * others + 0.5)
        return Backlog(None, waiting * self._request_tokens, own)

    def _own(self, stream: StreamId) -> Own:
        load = self.together(stream)
        _, first_tokens = self._first(stream)
        return Own(
            load.requests,
            load.requests - load.decoding,
            load.prefill_tokens,
            self.computed_tokens(stream),
            first_tokens,
            self._sent_together_tokens(stream),
        )

    def reported(self, stream: StreamId) -> Reported | None:
        """What the engine said last, however long ago: its room is the same until it restarts."""
        seen = self._seen.get(stream)
        return seen.reported if seen else None

    def report_age_s(self, stream: StreamId) -> float | None:
        """How old the last report of a stream is; None where there was none."""
        seen = self._seen.get(stream)
        return self._clock() - seen.at if seen else None

    def items(self) -> Iterator[tuple[StreamId, StreamLoad]]:
        """All streams that have load of this process."""
        return ((stream, self.ours(stream)) for stream in tuple(self._streams))

    def reserve(self, stream: StreamId, prefill_tokens: int, *, streams: bool = True) -> Reservation:
        """Books a request that leaves ``prefill_tokens`` to compute.

        ``streams``: its first byte will come as soon as its prefill is over.
        """
        guessed = self.others(stream).prefill_tokens
        before = max(0, self.together(stream).prefill_tokens + guessed - self.computed_tokens(stream))
        self._add(stream, 1, prefill_tokens, 0)
        self._sent[stream] = self._sent.get(stream, 0) + 1
        self._sent_tokens[stream] = self._sent_tokens.get(stream, 0) + prefill_tokens
        share = REQUEST_SHARE if self._requests_known else 1.0
        self._request_tokens += share * (prefill_tokens - self._request_tokens)
        self._requests_known = True
        reservation = Reservation(self, stream, prefill_tokens, before + prefill_tokens)
        reservation.teaches = guessed <= GUESSED_SHARE * reservation.queued_tokens
        if prefill_tokens:
            self._prefilling.setdefault(stream, _Line()).join(reservation, self._clock())
        self._tell(stream)
        if not streams:
            due = self._clock() + self.latency.of(stream).seconds(reservation.queued_tokens)
            heap = self._prefilled_at.setdefault(stream, [])
            heapq.heappush(heap, (due, next(self._numbers), reservation))
        return reservation

    def computed_tokens(self, stream: StreamId) -> int:
        """How many of the prompt tokens booked on the stream are computed by now: of the first request in the
        line, at the speed of the stream, since its turn came.
        """
        if stream not in self._prefilling and self._shares is None:
            return 0
        joined, tokens = self._first(stream)
        if joined == NEVER:
            return 0
        left = self._left.get(stream, 0.0)
        if self._shares is not None:
            left = max(left, self._shares.of(stream).left)
        since = max(joined, left)
        return int(min(tokens, max(0.0, self._clock() - since) / self.latency.of(stream).s_per_token))

    def _first(self, stream: StreamId) -> tuple[float, int]:
        """When the first of this router's that wait for their prefill came, and its tokens."""
        line = self._prefilling.get(stream)
        first = line.first() if line is not None else (NEVER, 0)
        if self._shares is None:
            return first
        share = self._shares.of(stream)
        return (share.joined, share.first_tokens) if share.joined < first[0] else first

    def _leave(self, reservation: Reservation) -> None:
        stream = reservation.stream
        line = self._prefilling.get(stream)
        if line is None:
            return
        joined, _ = line.first()
        others_joined = NEVER if self._shares is None else self._shares.of(stream).joined
        if line.leave(reservation) and joined <= others_joined:
            self._left[stream] = self._clock()
        if not line:
            del self._prefilling[stream]

    def _sent_together(self, stream: StreamId) -> int:
        workers = 0 if self._shares is None else self._shares.of(stream).sent
        return self._sent.get(stream, 0) + workers

    def _sent_together_tokens(self, stream: StreamId) -> int:
        workers = 0 if self._shares is None else self._shares.of(stream).sent_tokens
        return self._sent_tokens.get(stream, 0) + workers

    def _tell(self, stream: StreamId) -> None:
        """Has the other workers know what is booked here now."""
        if self._shares is None:
            return
        line = self._prefilling.get(stream)
        joined, tokens = line.first() if line is not None else (NEVER, 0)
        load, left = self._streams.get(stream, IDLE), self._left.get(stream, 0.0)
        sent, sent_tokens = self._sent.get(stream, 0), self._sent_tokens.get(stream, 0)
        self._shares.tell(stream, Share(load, sent, sent_tokens, joined, tokens, left))

    def _settle(self, stream: StreamId) -> None:
        """Moves what is due from prefill to decoding."""
        heap = self._prefilled_at[stream]
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


class _Line:
    """The requests of one stream whose prefill is not over, in the order in which they were sent: engines
    prefill first come, first served.
    """

    def __init__(self) -> None:
        self._waiting: dict[Reservation, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, reservation: Reservation, now: float) -> None:
        self._waiting[reservation] = now

    def leave(self, reservation: Reservation) -> bool:
        """Whether it was the first."""
        first = reservation is next(iter(self._waiting))
        self._waiting.pop(reservation, None)
        return first

    def first(self) -> tuple[float, int]:
        """When the first one came, and its tokens."""
        reservation = next(iter(self._waiting))
        return self._waiting[reservation], reservation.prefill_tokens


class Reservation:
    """One request's share of a stream's load. Its methods may be called again without effect.

    ``prefill_tokens`` are its own; ``queued_tokens`` those that had to be computed before its first token,
    its own included. ``teaches``: they are known well enough for its time to say something of the stream's
    speed. ``hint`` is dropped when it ends before its prefill was over.
    """

    def __init__(self, load: Load, stream: StreamId, prefill_tokens: int, queued_tokens: int) -> None:
        self._load = load
        self.prefill_tokens = prefill_tokens
        self.hint: Hint | None = None
        self.teaches = True
        self._decoding = False
        self._released = False
        self.stream = stream
        self.queued_tokens = queued_tokens
        self._begun = load._clock()

    @property
    def answered(self) -> bool:
        """Whether its prefill is over, as far as is known."""
        return self._decoding

    def first_byte(self, ttft_s: float) -> None:
        """A stream has begun to answer, so many seconds after it was sent: its prefill is over."""
        if self.teaches and not self._decoding and not self._released:
            self._load.latency.observe(self.stream, self.queued_tokens, ttft_s)
        self.prefilled()

    def prefilled(self) -> None:
        """The engine is done with the prompt, as far as is known."""
        if not self._decoding and not self._released:
            self._decoding = True
            self._load._leave(self)
            self._load._add(self.stream, 0, -self.prefill_tokens, 1)
            self._load._tell(self.stream)

    def release(self) -> None:
        """The request is over, however it ended."""
        if self._released:
            return
        self._released = True
        if self._decoding:
            self._load.pace.ended(self.stream, self._load._clock() - self._begun)
            self._load._add(self.stream, -1, 0, -1)
        else:
            self._load._leave(self)
            self._load._add(self.stream, -1, -self.prefill_tokens, 0)
            if self.hint is not None:
                self.hint.drop()
        self._load._tell(self.stream)
        self._load.released()
