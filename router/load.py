"""The load of each stream: what this router has sent and not yet got back, and what others have sent."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec

from router.backlog import Backlog, Own, begun_tokens, others_tokens
from router.hints import Hint
from router.latency import Latency
from router.pace import Pace
from router.replicas import StreamId
from router.reported import Reported
from router.stream_load import IDLE, NEVER, NO_SHARE, Share, Shares, StreamLoad

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


NONE = (0, 0, 0)


class FullError(Exception):
    """Another worker has taken the last place at the ``stream`` since it was looked at."""

    def __init__(self, stream: StreamId) -> None:
        super().__init__(f"{stream[0]}/{stream[1]} is full")
        self.stream = stream


class _Seen(msgspec.Struct, frozen=True):
    """A report and when it came, since when the engine says the same, how many requests of it were not ours,
    what they left to compute, how many prompt tokens a second we send there, and others do (0 where the
    engine does not say what it has begun with), how many of ours were in flight, how many we had ever sent,
    and the share of its requests that wait for their prefill.
    """

    reported: Reported
    at: float
    same_since: float
    others: int
    backlog: Backlog
    own_per_s: float
    others_per_s: float
    ours: int
    sent: int
    waiting_share: float


class _Book:
    """One stream's page: the ``load`` of this process there; the ``line`` of its requests whose prefill is
    not over, with when they came, in the order in which they were sent, as engines prefill first come, first
    served; those that are taken to be ``prefilled`` at some time (a heap); how many were ever ``sent``, of
    how many tokens; when one that was first in the line ``left``; what the engine said last.
    """

    __slots__ = ("left", "line", "load", "prefilled", "seen", "sent", "sent_tokens")

    def __init__(self) -> None:
        self.load = IDLE
        self.line: dict[Reservation, float] = {}
        self.prefilled: list[tuple[float, int, Reservation]] = []
        self.sent = 0
        self.sent_tokens = 0
        self.left = 0.0
        self.seen: _Seen | None = None

    def first(self) -> tuple[float, int]:
        """When the first in the line came, and its tokens; NEVER where none waits."""
        for reservation, joined in self.line.items():
            return joined, reservation.prefill_tokens
        return NEVER, 0


class Load:
    """The book of reservations, and what the engines report beside it.

    One loop's tasks use it, so a choice and its reservation cannot be torn apart. The first byte of a stream
    says that its prefill is over. An answer in one piece does not say when: it is taken to be over after the
    time that is predicted for the tokens booked there then.

    Where a router has several worker processes, each has a book, and ``shares`` is how they read each
    other's: what the others have booked counts as what was booked here. ``latency`` is what they all have
    learned of speeds then.

    What an engine reports beyond our own requests is other routers' (or direct clients'). Between two
    reports our own dispatches count at once, and so does what others are likely to have sent after the same
    numbers (``unseen_tokens``), while what they had there is computed. So routers that share nothing but the
    engines' metrics do not chase one minimum. ``clock`` is in seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        shares: Shares | None = None,
        latency: Latency | None = None,
    ) -> None:
        self.latency = Latency(clock) if latency is None else latency
        self.pace = Pace()
        self._clock = clock
        self._books: dict[StreamId, _Book] = {}
        self._shares = shares
        self._numbers = itertools.count()
        self._echo = 0.0
        self._request_tokens = float(UNKNOWN_REQUEST_TOKENS)
        self._requests_known = False
        self.released: Callable[[], None] = lambda: None
        self.told: Callable[[StreamId, Reported], None] = lambda stream, reported: None

    def of(self, stream: StreamId) -> StreamLoad:
        """The load of one stream: the router's, and what others are thought to have there."""
        ours, others = self.together(stream), self.others(stream)
        return ours if others is IDLE else ours + others

    def waiting(self, streams: Iterable[StreamId]) -> list[StreamLoad]:
        """The load of each of the streams as :meth:`of` gives it, without the prompt tokens of ours that are
        computed by now.
        """
        books, shares, now, echo = self._books, self._shares, self._clock(), self._echo
        found = []
        for stream in streams:
            book = books.get(stream)
            share = NO_SHARE if shares is None else shares.of(stream)
            if book is None:
                found.append(IDLE if share is NO_SHARE else self._waiting(stream, _NOTHING, share, now))
                continue
            if book.prefilled:
                self._settle(book)
            seen = book.seen
            if share is NO_SHARE and (seen is None or not (seen.others or echo)) and not book.line:
                found.append(book.load)
            else:
                found.append(self._waiting(stream, book, share, now))
        return found

    def _waiting(self, stream: StreamId, book: _Book, share: Share, now: float) -> StreamLoad:
        load, computed = book.load, 0
        if share.load is not IDLE:
            load = load + share.load
        if book.line or share.joined != NEVER:
            computed = self._computed(stream, book, share, now)
        requests, tokens, decoding = self._others(stream, book, share, load, computed, now)
        tokens += load.prefill_tokens - computed
        return StreamLoad(load.requests + requests, tokens if tokens > 0 else 0, load.decoding + decoding)

    def together(self, stream: StreamId) -> StreamLoad:
        """What this router has sent to one stream and not yet got back, by whatever worker."""
        ours = self.ours(stream)
        if self._shares is None or (workers := self.workers(stream)) is IDLE:
            return ours
        return ours + workers

    def ours(self, stream: StreamId) -> StreamLoad:
        """What this process has sent to one stream and not yet got back."""
        book = self._books.get(stream)
        if book is None:
            return IDLE
        if book.prefilled:
            self._settle(book)
        return book.load

    def workers(self, stream: StreamId) -> StreamLoad:
        """What the other workers of this router have there."""
        return IDLE if self._shares is None else self._shares.of(stream).load

    def at(self, replica: str, streams: Iterable[StreamId] = ()) -> int:
        """How many requests a replica has of this process, and of other workers at ``streams`` of it."""
        own = sum(book.load.requests for stream, book in self._books.items() if stream[0] == replica)
        return own + sum(self.workers(stream).requests for stream in streams)

    def others(self, stream: StreamId) -> StreamLoad:
        """What others have at one stream: requests by its last report, and those that they are likely to have
        sent since; tokens by its last report, less what the engine can have computed of them since.
        """
        book = self._books.get(stream)
        if book is None or book.seen is None:
            return IDLE
        share, now = self._share(stream), self._clock()
        computed = self._computed(stream, book, share, now)
        others = self._others(stream, book, share, self.together(stream), computed, now)
        return StreamLoad(*others) if others is not NONE else IDLE

    def _others(
        self, stream: StreamId, book: _Book, share: Share, ours: StreamLoad, computed: int, now: float
    ) -> tuple[int, int, int]:
        """The fields of their load; ``ours`` are this router's, of which so many tokens are ``computed`` by
        now.
        """
        seen = book.seen
        if seen is None or not (seen.others or self._echo) or (age_s := now - seen.at) > STALE_S:
            return NONE
        requests, waiting_share = seen.others, seen.waiting_share
        if ours.requests:
            since = max(0, min(book.sent + share.sent - seen.sent, ours.requests))
            requests += int(self._echo * since + 0.5)
            waiting_share = max(waiting_share, 1 - ours.decoding / ours.requests)
        if not requests:
            return NONE
        waiting = int(waiting_share * requests + 0.5)
        tokens, backlog = 0.0, seen.backlog
        if backlog.others:
            computed_since = age_s / self.latency.of(stream).s_per_token
            left, sent_tokens = ours.prefill_tokens - computed, book.sent_tokens + share.sent_tokens
            tokens = backlog.others_now(left, sent_tokens, computed_since)
        return requests, round(tokens), requests - waiting

    @property
    def echo(self) -> float:
        """How many requests others have in flight in the fleet for each of ours, as of the last reports."""
        return self._echo

    def unseen_tokens(self, streams: Iterable[StreamId]) -> float:
        """Prompt tokens that others are likely to have sent to some of the streams since these were looked
        at: as many, against ours, as they have requests in flight in the whole fleet. Ours are those that
        were sent since, or that are sent in such a time otherwise, if that is more.
        """
        if not self._echo:
            return 0.0
        books, shares, now = self._books, self._shares, self._clock()
        since, usual = 0, 0.0
        for stream in streams:
            book = books.get(stream)
            if book is None or (seen := book.seen) is None:
                continue
            age_s = now - seen.at
            if age_s <= STALE_S:
                sent = book.sent_tokens - seen.backlog.own.sent
                if shares is not None:
                    sent += shares.of(stream).sent_tokens
                if sent > 0:
                    since += sent
                usual += seen.own_per_s * age_s
        return self._echo * max(since, usual)

    def habits(self, streams: Iterable[StreamId]) -> list[float]:
        """The part of what others send to all of the streams that each of these gets, as of late; 0 for all
        where no engine says it.
        """
        found = []
        for stream in streams:
            book = self._books.get(stream)
            seen = None if book is None else book.seen
            found.append(0.0 if seen is None else max(0.0, seen.others_per_s))
        total = sum(found)
        return [one / total for one in found] if total else found

    def sent_to(self, replica: str) -> list[StreamId]:
        """The streams of a replica that anything was ever sent to."""
        return [stream for stream, book in self._books.items() if stream[0] == replica and book.sent]

    def renewed(self, replica: str) -> None:
        """Another engine has the replica's name now. What is booked stays, as its requests go on, but says
        nothing of that one's speed.
        """
        for stream, book in self._books.items():
            if stream[0] == replica:
                for reservation in book.line:
                    reservation.teaches = False
                self.latency.forget(stream)
                self.pace.forget(stream)
                book.seen = None

    def forget(self, replica: str) -> None:
        """What was learned of a replica that is none of ours any more. Its requests have to be over."""
        self.renewed(replica)
        if self._shares is not None:
            for stream in self.sent_to(replica):
                self._shares.forget(stream)
        for stream in [stream for stream in self._books if stream[0] == replica]:
            book = self._books[stream]
            book.sent, book.sent_tokens, book.left = 0, 0, 0.0
            if book.load is IDLE:
                del self._books[stream]

    def report(self, stream: StreamId, reported: Reported, in_flight: int) -> None:
        """Takes what an engine says. ``in_flight`` is how many requests of this router were there when it
        said so: the most that there were while it was asked, as none of ours may be taken for another's.
        """
        now = self._clock()
        book = self._book(stream)
        last = book.seen
        same_since = last.same_since if last is not None and last.reported == reported else now
        others = max(0, reported.running + reported.waiting - in_flight)
        if not in_flight and now - same_since >= FROZEN_S:
            others = 0
        ours = self.together(stream).requests
        sent = book.sent + self._share(stream).sent
        total = reported.running + reported.waiting
        share = reported.waiting / total if total else 0.0
        backlog = self._backlog(stream, reported, others, share)
        own_per_s, others_per_s = (0.0, 0.0) if last is None else (last.own_per_s, last.others_per_s)
        if last is not None and now > last.at:
            weight = 1 - math.exp((last.at - now) / USUAL_S)
            sent_tokens = backlog.own.sent - last.backlog.own.sent
            own_per_s = last.own_per_s + weight * (max(0, sent_tokens) / (now - last.at) - last.own_per_s)
            # Below 0 for a while, where ours wait to be begun with; over a while, what is not ours.
            theirs = _admitted(last.reported, reported, sent_tokens) - sent_tokens
            others_per_s = last.others_per_s + weight * (theirs / (now - last.at) - last.others_per_s)
        book.seen = _Seen(
            reported, now, same_since, others, backlog, own_per_s, others_per_s, ours, sent, share
        )
        every = [book.seen for book in self._books.values() if book.seen is not None]
        fresh = [seen for seen in every if now - seen.at <= STALE_S]
        theirs = sum(seen.others for seen in fresh)
        self._echo = min(MOST_ECHO, theirs / max(1, sum(seen.ours for seen in fresh)))
        self.told(stream, reported)

    def _backlog(self, stream: StreamId, reported: Reported, others: int, waiting_share: float) -> Backlog:
        """What ``others`` requests have left to compute there."""
        book = self._book(stream)
        own, last, begun = self._own(stream, book), book.seen, None
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

    def _own(self, stream: StreamId, book: _Book) -> Own:
        load, share = self.together(stream), self._share(stream)
        return Own(
            load.requests,
            load.requests - load.decoding,
            load.prefill_tokens,
            self._computed(stream, book, share, self._clock()),
            _first(book, share)[1],
            book.sent_tokens + share.sent_tokens,
        )

    def reported(self, stream: StreamId) -> Reported | None:
        """What the engine said last, however long ago: its room is the same until it restarts."""
        book = self._books.get(stream)
        return book.seen.reported if book is not None and book.seen is not None else None

    def report_age_s(self, stream: StreamId) -> float | None:
        """How old the last report of a stream is; None where there was none."""
        book = self._books.get(stream)
        return self._clock() - book.seen.at if book is not None and book.seen is not None else None

    def items(self) -> Iterator[tuple[StreamId, StreamLoad]]:
        """All streams that have load of this process."""
        busy = [stream for stream, book in self._books.items() if book.load is not IDLE]
        return ((stream, self.ours(stream)) for stream in busy)

    def reserve(
        self, stream: StreamId, prefill_tokens: int, *, streams: bool = True, most: int | None = None
    ) -> Reservation:
        """Books a request that leaves ``prefill_tokens`` to compute.

        ``streams``: its first byte will come as soon as its prefill is over. ``most`` is the limit that the
        stream was within when it was looked at; in one process it is so still. Raises FullError.
        """
        if most is None or self._shares is None:
            return self._reserve(stream, prefill_tokens, streams)
        with self._shares.alone():
            if self.of(stream).requests >= most:
                raise FullError(stream)
            return self._reserve(stream, prefill_tokens, streams)

    def _reserve(self, stream: StreamId, prefill_tokens: int, streams: bool) -> Reservation:
        book, now = self._book(stream), self._clock()
        if book.prefilled:
            self._settle(book)
        ours, share = book.load, self._share(stream)
        if share.load is not IDLE:
            ours = ours + share.load
        computed = self._computed(stream, book, share, now)
        _, guessed, _ = self._others(stream, book, share, ours, computed, now)
        before = max(0, ours.prefill_tokens + guessed - computed)
        book.load = StreamLoad(
            book.load.requests + 1, book.load.prefill_tokens + prefill_tokens, book.load.decoding
        )
        book.sent += 1
        book.sent_tokens += prefill_tokens
        weight = REQUEST_SHARE if self._requests_known else 1.0
        self._request_tokens += weight * (prefill_tokens - self._request_tokens)
        self._requests_known = True
        reservation = Reservation(self, stream, prefill_tokens, before + prefill_tokens)
        reservation.teaches = guessed <= GUESSED_SHARE * reservation.queued_tokens
        if prefill_tokens:
            book.line[reservation] = now
        self._tell(stream, book)
        if not streams:
            due = now + self.latency.of(stream).seconds(reservation.queued_tokens)
            heapq.heappush(book.prefilled, (due, next(self._numbers), reservation))
        return reservation

    def computed_tokens(self, stream: StreamId) -> int:
        """How many of the prompt tokens booked on the stream are computed by now: of the first request in the
        line, at the speed of the stream, since its turn came.
        """
        book = self._books.get(stream, _NOTHING)
        return self._computed(stream, book, self._share(stream), self._clock())

    def _computed(self, stream: StreamId, book: _Book, share: Share, now: float) -> int:
        joined, tokens = _first(book, share)
        if joined == NEVER:
            return 0
        since = max(joined, book.left, share.left)
        return int(min(tokens, max(0.0, now - since) / self.latency.of(stream).s_per_token))

    def _book(self, stream: StreamId) -> _Book:
        book = self._books.get(stream)
        if book is None:
            book = self._books[stream] = _Book()
        return book

    def _share(self, stream: StreamId) -> Share:
        return NO_SHARE if self._shares is None else self._shares.of(stream)

    def _leave(self, reservation: Reservation, book: _Book) -> None:
        """Takes a request out of the line, if it waits there."""
        joined, _ = book.first()
        was_first = reservation is next(iter(book.line), None)
        book.line.pop(reservation, None)
        reservation.left()
        if was_first and joined <= self._share(reservation.stream).joined:
            book.left = self._clock()

    def _tell(self, stream: StreamId, book: _Book) -> None:
        """Has the other workers know what is booked here now."""
        if self._shares is None:
            return
        joined, tokens = book.first()
        self._shares.tell(stream, Share(book.load, book.sent, book.sent_tokens, joined, tokens, book.left))

    def _settle(self, book: _Book) -> None:
        """Moves what is due from prefill to decoding."""
        due, now = book.prefilled, self._clock()
        while due and due[0][0] <= now:
            heapq.heappop(due)[2].prefilled()

    def _prefilled(self, reservation: Reservation) -> None:
        """Its prefill is over, and it goes on as one that is decoded."""
        stream = reservation.stream
        book = self._book(stream)
        self._leave(reservation, book)
        load = book.load
        book.load = StreamLoad(
            load.requests, load.prefill_tokens - reservation.prefill_tokens, load.decoding + 1
        )
        self._tell(stream, book)

    def _over(self, reservation: Reservation, *, decoding: bool) -> None:
        """It is gone, from decoding or from before."""
        stream = reservation.stream
        book = self._book(stream)
        load, tokens = book.load, 0
        if not decoding:
            self._leave(reservation, book)
            tokens = reservation.prefill_tokens
        book.load = StreamLoad(load.requests - 1, load.prefill_tokens - tokens, load.decoding - decoding)
        if book.load == IDLE:
            book.load = IDLE
            book.prefilled.clear()
        self._tell(stream, book)


class Reservation:
    """One request's share of a stream's load. Its methods may be called again without effect.

    ``prefill_tokens`` are its own; ``queued_tokens`` those that had to be computed before its first token,
    its own included. ``teaches``: they are known well enough for its time to say something of the stream's
    speed. ``hint`` is dropped when it ends before its prefill was over; ``left`` is called once, when it
    waits no more, however that comes.
    """

    def __init__(self, load: Load, stream: StreamId, prefill_tokens: int, queued_tokens: int) -> None:
        self._load = load
        self.prefill_tokens = prefill_tokens
        self.hint: Hint | None = None
        self.left: Callable[[], None] = lambda: None
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
            self._load._prefilled(self)

    def release(self) -> None:
        """The request is over, however it ended."""
        if self._released:
            return
        self._released = True
        if self._decoding:
            self._load.pace.ended(self.stream, self._load._clock() - self._begun)
        elif self.hint is not None:
            self.hint.drop()
        self._load._over(self, decoding=self._decoding)
        self._load.released()


def _first(book: _Book, share: Share) -> tuple[float, int]:
    """As :meth:`_Book.first`, of all workers of this router."""
    first = book.first()
    return (share.joined, share.first_tokens) if share.joined < first[0] else first


def _admitted(before: Reported, reported: Reported, unknown: int) -> int:
    """Prompt tokens that an engine has begun with between two reports; ``unknown`` where it does not say, or
    has begun anew.
    """
    if before.admitted_tokens is None or reported.admitted_tokens is None:
        return unknown
    new = reported.admitted_tokens - before.admitted_tokens
    return round(new) if new >= 0 else unknown


_NOTHING = _Book()
