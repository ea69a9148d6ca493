"""From signals to commits: the one thread that changes the map, its commands, and its groups of signals."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import msgspec

from events.inbox import Inbox, StreamId
from events.logs import Throttled
from events.signals import Signal
from events.source import Source
from events.stream import Stream
from indexer.bounds import Bounds
from indexer.errors import (
    IndexerError,
    MapError,
    RegistrationError,
    SlotsTakenError,
    TooLargeError,
    UnknownInstanceError,
)
from indexer.feedback import Answered
from indexer.followed import Followed, PoisonError, Shared, stream_key, title
from indexer.housekeeping import Housekeeping
from indexer.layout import PARTIAL_TTL_S, StreamRecord
from indexer.outcome import Outcome, refused
from indexer.purges import Purges
from indexer.registration import Registration
from indexer.room import Room
from indexer.writer import Group, MapWriter

log = logging.getLogger(__name__)

NO_BOUNDS = Bounds()
IDLE_S = 0.1
HEARTBEAT_S = 0.5
RECOVERY_PAUSE_S = 1.0

Job = Callable[[Group], Any]


class Feed(Protocol):
    """Where signals come from: the subscriber, or a recording."""

    inbox: Inbox

    def add(self, stream: StreamId, source: Source) -> None: ...

    def remove(self, stream: StreamId) -> None: ...

    def ask_replay(self, stream: StreamId, ask: int, start: int) -> None: ...


class Ingest:
    """Applies what streams say to the map, a group at a time, in one thread.

    :meth:`step` does the work and knows neither thread nor socket; :meth:`start` runs it on what the feed
    has. Commands from other threads (:meth:`register`, :meth:`unregister`) are carried out between groups and
    answer through futures.
    """

    def __init__(
        self,
        writer: MapWriter,
        feed: Feed,
        *,
        bounds: Bounds = NO_BOUNDS,
        partial_ttl_s: float = PARTIAL_TTL_S,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._writer = writer
        self._group_bytes = bounds.group_bytes
        self._feed = feed
        self._clock = clock
        self._warn = Throttled(log)
        self._house = Housekeeping(writer, bounds, self._warn, clock)
        self._shared = Shared(writer, partial_ttl_s=partial_ttl_s, clock=clock, wall=wall)
        self._commands: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        self._jobs: SimpleQueue[tuple[Job, Future[Any]]] = SimpleQueue()
        self._purges = Purges(self._port_of, self.held)
        self._followed: dict[StreamId, Followed] = {}
        self._room = Room()
        self._beat_at = float("-inf")
        self._running = False
        self._thread: threading.Thread | None = None
        self.failures = 0
        self.groups = 0
        self.trouble: str | None = None
        self.feedback: Counter[str] = Counter()

    # from any thread

    def start(self) -> None:
        """Follows the streams that the map knows, and begins to work."""
        self._running = True
        self._follow_all()
        self._thread = threading.Thread(target=self._run, name="ingest", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the group at hand."""
        self._running = False
        self._feed.inbox.wake()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def register(self, registration: Registration) -> Future[None]:
        """Follows a stream; the same again changes nothing, another endpoint replaces it."""
        return self._command(lambda: self.follow(registration))

    def unregister(self, instance_id: str, model_name: str, rank: int | None = None) -> Future[None]:
        """Forgets an instance (or one rank of it). The future raises UnknownInstanceError."""
        return self._command(lambda: self.forget(instance_id, model_name, rank))

    def learn(self, answered: Answered) -> Future[Outcome]:
        """Corrects what is known of a stream by what its engine answered."""
        return self._job(lambda group: self._learn(group, answered))

    def process_started(self, stream: StreamId, at: float, asked: float) -> Future[None]:
        """Tells a stream when its engine's process started (unix seconds), and when it was asked that."""
        return self._job(lambda group: self._witness(group, stream, at, asked))

    def block_size_told(self, stream: StreamId, block_size: int) -> Future[None]:
        """Tells a port the block size that its engine says it has, in tokens: until an event says another."""
        return self._job(lambda group: self._tell_block_size(group, stream, block_size))

    def purge(self, stream: StreamId, lora_name: str | None = None) -> Future[None]:
        """Forgets what a stream held, or of an adapter only; tried again with each group until it is done.

        A stream that is behind its engine is purged once more when it has caught up: what it still has to
        hear was said before.
        """
        return self._job(lambda _: self._purges.ask(stream, lora_name))

    def _job(self, job: Job) -> Future[Any]:
        """Carries out ``job`` in the next group; its result is there once that is committed."""
        future: Future[Any] = Future()
        self._jobs.put((job, future))
        self._feed.inbox.wake()
        return future

    def _command(self, command: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._commands.put((command, future))
        self._feed.inbox.wake()
        return future

    def held(self, stream: StreamId) -> int:
        """Signals of a stream that are received and not yet applied."""
        followed = self._followed.get(stream)
        return self._feed.inbox.depth(stream) + (followed.machine.held if followed else 0)

    def machine(self, stream: StreamId) -> Stream | None:
        """The state machine of a stream, to be looked at."""
        followed = self._followed.get(stream)
        return followed.machine if followed else None

    # on the thread

    def _run(self) -> None:
        failed = False
        while self._running:
            try:
                if failed:
                    self._resume_from_commit()
                    failed = False
                if not self.work(0 if self._busy else IDLE_S):
                    time.sleep(RECOVERY_PAUSE_S)
            except Exception as error:
                failed = True
                self._note_failure(error)
                time.sleep(RECOVERY_PAUSE_S)

    def work(self, patience_s: float = 0.0) -> bool:
        """One turn: a group of what has arrived, what is due, and commands.

        Waits up to ``patience_s`` for a signal. What does not go into the map stays in the inbox, and less of
        it is tried the next time. False when nothing at all can be written now: wait before the next turn.
        """
        signals = self._feed.inbox.take(self._room.signals, patience_s, max_bytes=self._group_bytes)
        able = self._commit_or_put_back(signals)
        try:
            self._house.keep()
        except MapError as error:
            self._note_failure(error)
            able = self._house.make_room() and able
        self._carry_out_commands()
        return able

    def _commit_or_put_back(self, signals: list[tuple[StreamId, Signal]]) -> bool:
        self._shared.most = self._room.batches if len(signals) == 1 else None
        try:
            self._commit_if_due(signals)
        except PoisonError as error:
            self._feed.inbox.put_back(signals)
            self._shared.poison.note(error)
            self._note_failure(error)
            return True
        except MapError as error:
            self._feed.inbox.put_back(signals)
            self._note_failure(error)
            may_pass = not isinstance(error, TooLargeError)
            if may_pass and not isinstance(error, SlotsTakenError):
                self._house.make_room()
            return self._room.lacked(len(signals), self._shared.batches, may_pass=may_pass)
        finally:
            self._shared.most = None
        if signals:
            self._room.had()
        self.trouble = None
        return True

    def _note_failure(self, error: Exception) -> None:
        self.failures += 1
        told = str(error) if isinstance(error, MapError) else "".join(traceback.format_exception(error))
        self.trouble = str(error)
        self._warn.warning(repr(type(error)), "%s; going on from the last commit", told)

    @property
    def _busy(self) -> bool:
        return self._writer.garbage > 0 or not self._commands.empty() or not self._jobs.empty()

    def step(self, signals: list[tuple[StreamId, Signal]]) -> None:
        """Applies one group of signals, and what is due by now, in one commit.

        On an error (MapError: the map is full, or cannot be written) nothing of the group is applied, and the
        same signals may come again.
        """
        self._commit_if_due(signals)
        self._house.keep()

    def _commit_if_due(self, signals: list[tuple[StreamId, Signal]]) -> None:
        now = self._clock()
        if signals or now >= self._beat_at or not self._jobs.empty():
            self._commit(signals, now)

    def _commit(self, signals: list[tuple[StreamId, Signal]], now: float) -> None:
        jobs = [self._jobs.get_nowait() for _ in range(self._jobs.qsize())]
        jobs = [(job, future) for job, future in jobs if future.set_running_or_notify_cancel()]
        try:
            results = self._commit_with(signals, [job for job, _ in jobs], now)
        except Exception as error:
            for followed in self._followed.values():
                followed.go_back()
            known = isinstance(error, IndexerError)
            failure = error if known else IndexerError(f"the indexer failed: {error!r}")
            for _, future in jobs:
                future.set_exception(failure)
            raise
        for (_, future), result in zip(jobs, results, strict=True):
            future.set_result(result)

    def _commit_with(self, signals: list[tuple[StreamId, Signal]], jobs: list[Job], now: float) -> list[Any]:
        self._shared.batches = 0
        with self._writer.group() as group:
            for stream, signal in signals:
                followed = self._followed.get(stream)
                if followed is not None:
                    followed.on(group, signal, now)
            for stream in {stream for stream, _ in signals} & self._followed.keys():
                self._followed[stream].note_state(group)
            results = [job(group) for job in jobs]
            for stream, lora_name in self._purges.due():
                if (port := self._port_of(stream)) is not None:
                    port.purge(group, stream_key(stream), lora_name)
            for stream, followed in self._followed.items():
                if not self._feed.inbox.depth(stream):  # none is silent while signals of it still wait
                    followed.tick(group, now)
                followed.outlive(group)
        self._purges.committed()
        self.groups += 1
        self._beat_at = now + HEARTBEAT_S
        for stream, followed in self._followed.items():
            ask = followed.committed()
            if ask is not None:
                self._feed.ask_replay(stream, ask.ask, ask.start)
        return results

    # what is said of the map from outside

    def _learn(self, group: Group, answered: Answered) -> Outcome:
        followed = self._port_of(answered.stream)
        rank = None if followed is None else followed.rank(stream_key(answered.stream))
        outcome = refused("unknown") if rank is None else rank.learn(group, answered)
        self.feedback[outcome.reason or "taken"] += 1
        return outcome

    def _port_of(self, stream: StreamId) -> Followed | None:
        """The port that a stream's events come from; None for a stream that is not followed."""
        record = self._writer.streams.get(stream_key(stream))
        return None if record is None else self._followed.get(record.port)

    def _witness(self, group: Group, stream: StreamId, at: float, asked: float) -> None:
        """Signals that still wait may be of the process before: the next answer comes soon."""
        followed = self._followed.get(stream)
        if followed is not None and not self._feed.inbox.depth(stream):
            followed.process_started(group, at, self._clock(), asked)

    def _tell_block_size(self, group: Group, stream: StreamId, block_size: int) -> None:
        followed = self._followed.get(stream)
        for rank in followed.every if followed is not None else ():
            rank.take_block_size(group, block_size)

    # streams

    def _follow_all(self) -> None:
        """Takes up every stream of the map; nothing of it is trusted before its continuity is proven."""
        with self._writer.group() as group:
            for record in self._registered:
                followed = self._followed[record.id] = Followed(record, self._shared)
                followed.load()
                followed.note_state(group)
        for record in self._registered:
            self._feed.add(record.id, _source(record.registration))

    @property
    def _registered(self) -> list[StreamRecord]:
        """The streams that were registered, without those that only events name."""
        return [record for record in self._writer.streams.values() if record.rank is None]

    def _resume_from_commit(self) -> None:
        """After a failure: streams start over from what is in the map, as after a restart."""
        for stream in list(self._followed):
            self._feed.remove(stream)
        self._followed.clear()
        self._follow_all()

    def _carry_out_commands(self) -> None:
        while True:
            try:
                command, future = self._commands.get_nowait()
            except Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                command()
            except IndexerError as error:
                future.set_exception(error)
            except Exception as error:
                log.exception("a command failed; nothing of it was done")
                future.set_exception(IndexerError(f"the indexer failed: {error!r}"))
            else:
                future.set_result(None)

    def follow(self, registration: Registration) -> None:
        """Carries out :meth:`register`, on the thread."""
        key = (registration.instance, registration.dp_rank)
        known = self._writer.streams.get(key)
        if known is not None and known.rank is not None:
            self._end_unregistered(known)
            known = None
        if known is not None and known.registration == registration:
            return
        if known is not None and _same_stream(known, registration):
            with self._writer.group() as group:
                for each in self._writer.of_port(known):
                    each.registration = registration
                    group.touch(each)
            return
        self._refuse_shared_topic(registration)
        with self._writer.group() as group:
            for each in self._writer.of_port(known) if known is not None else ():
                self._writer.close_stream(group, each)
            record = self._writer.open_stream(group, registration)
            followed = Followed(record, self._shared)
            record.state, record.reason = followed.machine.state, followed.machine.reason
        if known is not None:
            self._feed.remove(key)
        self._followed[key] = followed
        self._feed.add(key, _source(registration))
        log.info("following %s at %s", title(key), registration.endpoint)

    def _end_unregistered(self, record: StreamRecord) -> None:
        """A rank that only events named gets a port of its own: what is known of it from the other ends."""
        assert record.rank is not None
        with self._writer.group() as group:
            self._writer.close_stream(group, record)
        self._followed[record.port].ranks.pop(record.rank)

    def _refuse_shared_topic(self, registration: Registration) -> None:
        """Two streams on one bound address with one topic could not be told apart."""
        if not registration.binds:
            return
        for record in self._registered:
            other = record.registration
            shared = (other.endpoint, other.topic) == (registration.endpoint, registration.topic)
            if shared and record.id != (registration.instance, registration.dp_rank):
                raise RegistrationError(
                    f"{title(record.id)} has the topic {other.topic!r} at {registration.endpoint} already; "
                    "give each replica a topic of its own"
                )

    def forget(self, instance_id: str, model_name: str, rank: int | None = None) -> None:
        """Carries out :meth:`unregister`, on the thread. Raises UnknownInstanceError."""
        gone = [
            record
            for record in self._writer.streams.values()
            if record.registration.instance == instance_id
            and record.registration.model_name == model_name
            and rank in (None, record.registration.dp_rank)
        ]
        if not gone:
            raise UnknownInstanceError(f"no instance {instance_id!r} of model {model_name!r} is registered")
        with self._writer.group() as group:
            for record in gone:
                self._writer.close_stream(group, record)
        for port in {record.port for record in gone}:
            self._feed.remove(port)
            self._followed.pop(port, None)


def _source(registration: Registration) -> Source:
    return Source(
        registration.address,
        registration.binds,
        registration.topic,
        registration.replay_endpoint,
        registration.instance,
    )


def _same_stream(known: StreamRecord, registration: Registration) -> bool:
    """Whether they differ at most in the names the model goes by, and in saying the block size or not."""
    fits = registration.block_size in (None, known.block_size)
    plain = {"aliases": (), "url": None, "block_size": None, "instance_id": known.registration.instance_id}
    one, other = (msgspec.structs.replace(each, **plain) for each in (known.registration, registration))
    return fits and one == other
