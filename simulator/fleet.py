"""A fleet on virtual time: simulated replicas behind one or several routers that choose with the router's own
code. Deterministic: the same trace, shape and seed give the same numbers.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from indexer.match import match
from indexer.reader import Matched
from router.chooser import Chooser, Subject
from router.load import Load, Reservation
from router.policies import Policy
from router.replicas import StreamId
from router.reported import Reported
from router.seats import Seats
from simulator.errors import SettingsError
from simulator.replica import Cache, CacheChange, Job, Replica
from simulator.trace import BLOCK_TOKENS, Traced

RESTART_S = 30.0
"""How long a replica that restarts takes no requests."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet. Rates are tokens/s of each replica; without a decode rate a request ends with its first
    token.

    ``event_delay_s`` is from a change of a cache until the index tells it. ``poll_s`` is how often several
    routers ask the engines for their load. The first replica is ``slower`` times slower than the others, and
    restarts, empty, at ``restart_at_s``; another replica comes at ``added_at_s``.
    """

    replicas: int = 8
    cache_tokens: int = 1_000_000
    prefill_rate: float = 4700.0
    decode_rate: float | None = None
    routers: int = 1
    event_delay_s: float = 0.01
    poll_s: float = 1.0
    slower: float = 1.0
    restart_at_s: float | None = None
    added_at_s: float | None = None
    seed: int = 0

    def check(self) -> None:
        """Raises SettingsError for a fleet that cannot be."""
        for name in ("replicas", "routers", "prefill_rate", "poll_s", "slower"):
            if not 0 < getattr(self, name) < float("inf"):
                raise SettingsError(f"{name} {getattr(self, name)}: must be a number above 0")
        if self.decode_rate is not None and not 0 < self.decode_rate < float("inf"):
            raise SettingsError(f"decode_rate {self.decode_rate}: must be a number above 0")
        if self.cache_tokens < BLOCK_TOKENS:
            raise SettingsError(f"cache_tokens {self.cache_tokens}: a block of the trace is {BLOCK_TOKENS}")
        for name in ("event_delay_s", "restart_at_s", "added_at_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds < float("inf"):
                raise SettingsError(f"{name} {seconds}: must be 0 or more")

    def check_for(self, trace: Sequence[Traced]) -> None:
        """As :meth:`check`; also for what would happen when all requests have come, to no effect. When
        those of sessions come is not known before.
        """
        self.check()
        if any(request.session is not None for request in trace):
            return
        last_s = max((request.at_s for request in trace), default=0.0)
        for name in ("restart_at_s", "added_at_s"):
            at_s = getattr(self, name)
            if at_s is not None and at_s > last_s:
                raise SettingsError(f"{name} {at_s:g}: the last request of the trace comes at {last_s:g} s")


class Served(msgspec.Struct, frozen=True):
    """One request as it went: where, when it came, and how long its first token took."""

    replica: str
    at_s: float
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


class Run(msgspec.Struct, frozen=True):
    """All requests in the order of their first tokens, and for how long each replica computed prompts."""

    served: list[Served]
    computed_s: dict[str, float]


class Index:
    """Who holds which block, as the events have told by now: a bitmap of replicas by block."""

    def __init__(self) -> None:
        self._holders: defaultdict[int, int] = defaultdict(int)

    def apply(self, number: int, change: CacheChange) -> None:
        """The events of replica ``number``."""
        bit = 1 << number
        for block in change.removed:
            self._holders[block] &= ~bit
            if not self._holders[block]:
                del self._holders[block]
        for block in change.stored:
            self._holders[block] |= bit

    def clear(self, number: int) -> None:
        """The replica has lost its cache."""
        for block in [block for block, bits in self._holders.items() if bits >> number & 1]:
            self.apply(number, CacheChange((), (block,)))

    def match(self, blocks: Sequence[int], replicas: int) -> dict[int, int]:
        """Leading blocks held, by number of the replica."""
        return match(self._holder_bits, blocks, (1 << replicas) - 1)  # type: ignore[arg-type]

    def _holder_bits(self, block: int) -> int:
        return self._holders.get(block, 0)


class Sessions:
    """Which conversation a request belongs to, as traces do not say it: to that of an earlier request all of
    whose full blocks it begins with, if the last of them was that request's own.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._by_last_block: dict[int, int] = {}
        self._names = itertools.count()

    def of(self, request: Traced) -> int:
        """The number of the request's session."""
        blocks = request.full_blocks
        known = (self._by_last_block[block] for block in reversed(blocks) if block in self._by_last_block)
        session = next(known, None)
        if session is None:
            session = next(self._names)
        if blocks and blocks[-1] not in self._known:
            self._by_last_block[blocks[-1]] = session
        self._known.update(blocks)
        return session


class FleetRun:
    """One run of a trace under one policy."""

    def __init__(self, shape: Shape, policy: Policy, trace: Sequence[Traced]) -> None:
        shape.check_for(trace)
        self._shape = shape
        self._policy = policy
        self._trace = trace
        self._now = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._chance = random.Random(shape.seed)
        self._index = Index()
        self._replicas: list[Replica] = []
        self._numbers: dict[StreamId, int] = {}
        self._choosers = [self._chooser(number) for number in range(shape.routers)]
        self._flights: dict[Job, tuple[Reservation, float]] = {}
        self._served: list[Served] = []
        self._followed_by = _followed_by(trace)
        self._come = 0
        self._progress: Callable[[int], None] = lambda _: None
        self._turns = itertools.count()
        self._seats = Seats(clock=self._clock)
        self._sessions = Sessions()
        for number in range(shape.replicas):
            self._add_replica(shape.prefill_rate / (shape.slower if number == 0 else 1.0))

    def run(self, progress: Callable[[int], None] = lambda _: None) -> Run:
        """Runs the trace to its last token; ``progress`` is told how many requests have come."""
        shape = self._shape
        if shape.restart_at_s is not None:
            self._at(shape.restart_at_s, lambda: self._restart(self._replicas[0]))
        if shape.added_at_s is not None:
            self._at(shape.added_at_s, lambda: self._add_replica(shape.prefill_rate))
        if shape.routers > 1:
            for number, chooser in enumerate(self._choosers):
                # They were not started at one moment.
                self._at(shape.poll_s * (number + 1) / shape.routers, partial(self._poll, chooser))
        self._progress = progress
        followers = set(map(id, self._followed_by.values()))
        for request in self._trace:
            if id(request) not in followers:
                self._until(request.at_s)
                self._arrive(request)
        self._until(float("inf"))
        return Run(self._served, {replica.name: replica.computed_s for replica in self._replicas})

    def _chooser(self, number: int) -> Chooser:
        load = Load(self._clock)
        chance = random.Random(f"{self._shape.seed} {number}")
        return Chooser(load, chance, self._clock, mark_tokens=BLOCK_TOKENS)

    def _clock(self) -> float:
        return self._now

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._order), what))

    def _until(self, when: float) -> None:
        """Lets everything happen that is due by then."""
        while self._agenda and self._agenda[0][0] <= when:
            self._now, _, what = heapq.heappop(self._agenda)
            what()
        if when < float("inf"):
            self._now = when

    def _add_replica(self, prefill_rate: float) -> None:
        number = len(self._replicas)
        cache = Cache(self._shape.cache_tokens // BLOCK_TOKENS)
        replica = Replica(f"r{number}", cache, prefill_rate, decodes=self._shape.decode_rate is not None)
        self._replicas.append(replica)
        self._numbers[replica.name, 0] = number
        for chooser in self._choosers:
            self._report(chooser, replica)

    def _arrive(self, request: Traced) -> None:
        self._route(Job(request, self._now), self._chance.choice(self._choosers))
        self._come += 1
        self._progress(self._come)

    def _route(self, job: Job, chooser: Chooser) -> None:
        request, replicas = job.request, self._replicas
        streams = [(replica.name, 0) for replica in replicas if replica.up]
        matches = self._matches(request, streams) if self._policy.uses_matches else None
        key = self._key(request)
        subject = Subject(
            prompt_tokens=request.prompt_tokens if self._policy.uses_tokens else None,
            guessed_tokens=request.prompt_tokens,
            matches=matches,
            marks=request.full_blocks,
            turn=next(self._turns),
            key=key,
            seat=self._seats.of(key) if key is not None else None,
        )
        choice = chooser.choose(self._policy, subject, streams)
        chosen = choice.reservation.stream
        if key is not None:
            self._seats.take(key, chosen)
        replica = replicas[self._numbers[chosen]]
        self._flights[job] = (choice.reservation, self._now)
        replica.waiting.append(job)
        self._begin(replica)

    def _key(self, request: Traced) -> bytes | None:
        """What a client would send: its session's name, or a prefix of 1,024 tokens."""
        if self._policy.keeps_seats:
            return str(self._sessions.of(request)).encode()
        return str(request.blocks[:2]).encode() if self._policy.key is not None else None

    def _matches(self, request: Traced, streams: Iterable[StreamId]) -> dict[StreamId, Matched]:
        held = self._index.match(request.full_blocks, len(self._replicas))
        return {
            stream: _matched(stream, held.get(self._numbers[stream], 0) * BLOCK_TOKENS) for stream in streams
        }

    def _begin(self, replica: Replica) -> None:
        begun = replica.begin()
        if begun is not None:
            job, change, seconds = begun
            self._tell(replica, CacheChange((), change.removed))
            self._at(self._now + seconds, lambda: self._first_token(replica, job, change.stored))

    def _first_token(self, replica: Replica, job: Job, stored: Sequence[int]) -> None:
        if job.lost:
            return
        replica.prefilled()
        self._tell(replica, CacheChange(stored, ()))
        reservation, sent_s = self._flights[job]
        reservation.first_byte(self._now - sent_s)
        request, ttft_s = job.request, self._now - job.came_s
        self._served.append(
            Served(replica.name, job.came_s, ttft_s, request.prompt_tokens, job.cached_tokens)
        )
        follower = self._followed_by.get(id(request))
        if follower is not None:
            self._at(self._now + follower.at_s - request.at_s, partial(self._arrive, follower))
        if self._shape.decode_rate is None:
            self._end(replica, job)
        else:
            decoded_at = self._now + request.answer_tokens / self._shape.decode_rate
            self._at(decoded_at, lambda: self._end(replica, job))
        self._begin(replica)

    def _end(self, replica: Replica, job: Job) -> None:
        if job.lost:
            return
        replica.end(job)
        reservation, _ = self._flights.pop(job)
        reservation.release()
        self._begin(replica)

    def _tell(self, replica: Replica, change: CacheChange) -> None:
        """Events on their way to the index."""
        if change.stored or change.removed:
            number = self._numbers[replica.name, 0]
            self._later(lambda: self._index.apply(number, change))

    def _later(self, what: Callable[[], None]) -> None:
        if self._shape.event_delay_s:
            self._at(self._now + self._shape.event_delay_s, what)
        else:
            what()

    def _restart(self, replica: Replica) -> None:
        """Connections break at once; requests that have no byte of an answer are sent elsewhere."""
        stream = (replica.name, 0)
        jobs = replica.go_down()
        self._later(lambda: self._index.clear(self._numbers[stream]))
        for chooser in self._choosers:
            chooser.forget(stream)
        for job in jobs:
            reservation, _ = self._flights.pop(job)
            answered = reservation.answered
            reservation.release()
            if not answered:
                self._route(Job(job.request, job.came_s), self._chance.choice(self._choosers))
        self._at(self._now + RESTART_S, lambda: self._come_up(replica))

    def _come_up(self, replica: Replica) -> None:
        replica.up = True

    def _poll(self, chooser: Chooser) -> None:
        """A router asks every engine for its load."""
        for replica in self._replicas:
            self._report(chooser, replica)
        if len(self._served) < len(self._trace):
            self._at(self._now + self._shape.poll_s, partial(self._poll, chooser))

    def _report(self, chooser: Chooser, replica: Replica) -> None:
        stream = (replica.name, 0)
        reported = Reported(
            running=len(replica.decoding) + (replica.prefilling is not None),
            waiting=len(replica.waiting),
            capacity_tokens=replica.cache.capacity * BLOCK_TOKENS,
            admitted_tokens=replica.admitted_tokens,
        )
        chooser.load.report(stream, reported, chooser.load.ours(stream).requests)


def _followed_by(trace: Iterable[Traced]) -> dict[int, Traced]:
    """The next request of the session, by ``id`` of the one before."""
    last: dict[int, Traced] = {}
    found = {}
    for request in trace:
        if request.session is not None:
            if request.session in last:
                found[id(last[request.session])] = request
            last[request.session] = request
    return found


def _matched(stream: StreamId, tokens: int) -> Matched:
    return Matched(
        instance=stream[0],
        rank=stream[1],
        block_size=BLOCK_TOKENS,
        state="live",
        weight=1.0,
        gpu=tokens,
        cpu=tokens,
        disk=tokens,
        generation=0,
        sequence=None,
    )
