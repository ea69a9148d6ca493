"""From signals to commits: the thread that owns the map, the streams' state machines and their order."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import lmdb
import msgspec
from cachetools import TTLCache

from events.inbox import Inbox, StreamId
from events.logs import Throttled
from events.schema import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Decoder,
    PayloadError,
    canonical_hash,
)
from events.stream import Action, Apply, AskReplay, Reset, Signal, Stream, digest_of
from events.subscriber import Source
from indexer.blocks import PREFIX_KINDS
from indexer.bounds import Bounds, Eviction
from indexer.corrections import Corrections
from indexer.errors import IndexerError, MapError, MapFullError, RegistrationError, UnknownInstanceError
from indexer.feedback import Answered, learn
from indexer.layout import PARTIAL_TTL_S, StreamKey, StreamRecord
from indexer.outcome import Outcome, refused
from indexer.registration import Registration
from indexer.writer import Group, MapWriter

log = logging.getLogger(__name__)

GROUP_SIGNALS = 512
GROUP_SHRINK = 16
COLLECT_SHARE = 16
MAX_POISON = 1_000
POISON_AFTER = 4
EVICT_STEPS = 16
NO_BOUNDS = Bounds()
MAX_SAID = 4_096
SAY_AGAIN_S = 10.0
RELEARN_AFTER = 8
IDLE_S = 0.1
HEARTBEAT_S = 0.5
SYNC_S = 60.0
RECOVERY_PAUSE_S = 1.0
PURGED = "it was reset by request: what the engine still holds is not known"

Job = Callable[[Group], Any]


class Feed(Protocol):
    """Where signals come from: the subscriber, or a recording."""

    inbox: Inbox

    def add(self, stream: StreamId, source: Source) -> None: ...

    def remove(self, stream: StreamId) -> None: ...

    def ask_replay(self, stream: StreamId, ask: int, start: int) -> None: ...


class PoisonError(IndexerError):
    """A batch that cannot be applied, though it could be decoded."""

    def __init__(self, stream: StreamId, payload: bytes, error: Exception) -> None:
        super().__init__(f"a batch of {_title(stream)} cannot be applied: {error!r}")
        self.batch = (stream, digest_of(payload))


class Followed:
    """A stream that is followed: its state machine, and a decoder that knows its encoding."""

    def __init__(self, record: StreamRecord) -> None:
        self.machine = Stream(
            has_replay=record.registration.replay_endpoint is not None,
            last=record.sequence,
            digest=record.digest,
            lost=record.lost,
            started_at=record.started_at,
        )
        self.losses = 0
        self.corrections = Corrections(record.generation, -1 if record.sequence is None else record.sequence)
        self.decoder = Decoder()
        self.strays = 0


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
        self._eviction = Eviction(bounds)
        self._feed = feed
        self._clock = clock
        self._wall = wall
        self._warn = Throttled(log)
        self._said: TTLCache[str, None] = TTLCache(MAX_SAID, SAY_AGAIN_S, timer=clock)
        self._commands: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        self._jobs: SimpleQueue[tuple[Job, Future[Any]]] = SimpleQueue()
        self._purges: set[StreamId] = set()
        self._partial_ttl_s = partial_ttl_s
        self._followed: dict[StreamId, Followed] = {}
        self._asks: dict[StreamId, AskReplay] = {}
        self._poison: Counter[tuple[StreamId, bytes]] = Counter()
        self._group_signals = GROUP_SIGNALS
        self._beat_at = float("-inf")
        self._sync_at = clock() + SYNC_S
        self._running = False
        self._thread: threading.Thread | None = None
        self.failures = 0
        self.groups = 0
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

    def purge(self, stream: StreamId) -> Future[None]:
        """Forgets what a stream held; tried again with every group until it is done."""
        return self._job(lambda _: self._purges.add(stream))

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
                signals = self._feed.inbox.take(self._group_signals, 0 if self._busy else IDLE_S)
                self.step(signals)
                self._carry_out_commands()
                self._group_signals = min(GROUP_SIGNALS, self._group_signals + 1 + self._group_signals // 16)
            except PoisonError as error:
                failed = True
                self.failures += 1
                self._note_poison(error)
            except Exception as error:
                failed = True
                self.failures += 1
                if isinstance(error, MapFullError):  # Less at a time may have room.
                    self._group_signals = max(1, self._group_signals // GROUP_SHRINK)
                self._report(error)
                time.sleep(RECOVERY_PAUSE_S)

    def _note_poison(self, error: PoisonError) -> None:
        """What failed once may go well the next time; what fails again and again is left out."""
        self._report(error)
        if len(self._poison) >= MAX_POISON:
            self._poison.clear()
        self._poison[error.batch] += 1

    def _report(self, error: Exception) -> None:
        told = str(error) if isinstance(error, MapError) else "".join(traceback.format_exception(error))
        self._warn.warning(repr(type(error)), "%s; going on from the last commit", told)

    @property
    def _busy(self) -> bool:
        return self._writer.garbage > 0 or not self._commands.empty() or not self._jobs.empty()

    def step(self, signals: list[tuple[StreamId, Signal]]) -> None:
        """Applies one group of signals, and what is due by now, in one commit.

        On an error (MapError: the map is full, or cannot be written) nothing of the group is applied.
        """
        now = self._clock()
        if signals or now >= self._beat_at or not self._jobs.empty():
            self._commit(signals, now)
        for _ in range(1 + self._writer.garbage // COLLECT_SHARE if self._writer.garbage else 0):
            self._writer.collect()
        self._keep_bounds()
        if now >= self._sync_at:
            self._writer.sync()
            self._sync_at = now + SYNC_S

    def _keep_bounds(self) -> None:
        for _ in range(EVICT_STEPS):
            found = self._eviction.next(self._writer.used_bytes(), self._writer.streams.values())
            if found is None:
                return
            count, record = found
            whose = "all streams" if record is None else _title(record.id)
            self._warn.warning(
                f"evict {whose}",
                "at a bound (--map-budget, --max-blocks): forgetting the oldest blocks of %s",
                whose,
            )
            self._writer.evict(count, record)

    def _commit(self, signals: list[tuple[StreamId, Signal]], now: float) -> None:
        jobs = [self._jobs.get_nowait() for _ in range(self._jobs.qsize())]
        jobs = [(job, future) for job, future in jobs if future.set_running_or_notify_cancel()]
        try:
            results = self._commit_with(signals, [job for job, _ in jobs], now)
        except Exception as error:
            known = isinstance(error, IndexerError)
            failure = error if known else IndexerError(f"the indexer failed: {error!r}")
            for _, future in jobs:
                future.set_exception(failure)
            raise
        for (_, future), result in zip(jobs, results, strict=True):
            future.set_result(result)

    def _commit_with(self, signals: list[tuple[StreamId, Signal]], jobs: list[Job], now: float) -> list[Any]:
        self._asks.clear()
        with self._writer.group() as group:
            for stream, signal in signals:
                followed = self._followed.get(stream)
                if followed is not None:
                    self._perform(group, stream, followed.machine.on(signal, now))
            for stream in {stream for stream, _ in signals} & self._followed.keys():
                self._note_state(group, stream)
            results = [job(group) for job in jobs]
            for stream in self._purges & self._followed.keys():
                self._purge(group, stream)
            for stream in self._followed:
                self._tick(group, stream, now)
                self._outlive(group, stream)
        self._purges.clear()
        self.groups += 1
        self._beat_at = now + HEARTBEAT_S
        for stream, ask in self._asks.items():
            self._feed.ask_replay(stream, ask.ask, ask.start)
        return results

    def _tick(self, group: Group, stream: StreamId, now: float) -> None:
        """What follows from time alone; a stream is not called silent while signals of it still wait."""
        machine = self._followed[stream].machine
        if self._feed.inbox.depth(stream):
            return
        before = (machine.state, machine.reason, machine.lost)
        actions = machine.tick(now)
        self._perform(group, stream, actions)
        if actions or before != (machine.state, machine.reason, machine.lost):
            self._note_state(group, stream)

    def _perform(self, group: Group, stream: StreamId, actions: list[Action]) -> None:
        if self._note_loss(stream, actions):
            group.touch(self._record(stream))
        for action in actions:
            match action:
                case Apply():
                    self._apply(group, stream, action)
                case AskReplay():
                    self._asks[stream] = action
                case Reset():
                    self._reset(group, stream, action)

    def _record(self, stream: StreamId) -> StreamRecord:
        return self._writer.streams[_key(stream)]

    def _apply(self, group: Group, stream: StreamId, action: Apply) -> None:
        followed, record = self._followed[stream], self._record(stream)
        try:
            batch = followed.decoder.decode(action.payload)
        except PayloadError as error:
            self._leave_out(stream, "payload", action)
            self._warn.warning(f"payload {stream}", "%s sent %s", _title(stream), error)
        else:
            if self._poison and self._poison[stream, digest_of(action.payload)] >= POISON_AFTER:
                self._leave_out(stream, "poison", action)
            else:
                record = self._apply_or_raise(group, stream, batch, action)
        self._note_touched(group, stream, record, action.sequence)
        record.sequence = action.sequence
        record.event_at = self._wall()
        record.counters.batches += 1
        group.touch(record)

    def _note_touched(self, group: Group, stream: StreamId, record: StreamRecord, sequence: int) -> None:
        """What an answer says of a block from before this batch no longer counts; a stored block is there."""
        stored, removed = group.blocks(record).take_touched()
        if stored or removed:
            corrections = self._corrections(stream, record)
            corrections.touched.note(stored + removed, sequence)
            corrections.end(group.changes, record, stored)

    def _leave_out(self, stream: StreamId, reason: str, action: Apply) -> None:
        """A batch is missing in the map from here on."""
        self._record(stream).counters.skip(reason)
        self._followed[stream].machine.damaged(f"the batch with sequence {action.sequence} could not be used")
        self._note_loss(stream)

    # what may be outdated

    def _note_loss(self, stream: StreamId, actions: Sequence[Action] = ()) -> bool:
        """Notes since when what a stream holds may be outdated; what comes after a reset is not."""
        followed = self._followed[stream]
        if followed.losses == followed.machine.losses:
            return False
        followed.losses = followed.machine.losses
        record = self._record(stream)
        if record.is_empty or record.lost_at is not None or any(isinstance(each, Reset) for each in actions):
            return False
        record.lost_at = self._wall()
        return True

    def _outlive(self, group: Group, stream: StreamId) -> None:
        """Ends corrections that are due, and what was known before a loss that is long ago."""
        record = self._record(stream)
        if record.denied or record.believed:
            corrections = self._corrections(stream, record)
            if corrections.expire(group.changes, record, self._writer.now()):
                group.touch(record)
        if record.lost_at is not None and self._wall() - record.lost_at >= self._partial_ttl_s:
            self._warn.warning(
                f"outdated {stream}",
                "%s: forgetting %d blocks: batches were lost %.0f s ago (--partial-ttl-s)",
                _title(stream),
                record.blocks,
                self._partial_ttl_s,
            )
            self._writer.renew(group, record)
            self._note_state(group, stream)

    def _purge(self, group: Group, stream: StreamId) -> None:
        self._warn.warning(f"purge {stream}", "%s: forgetting all: reset by request", _title(stream))
        self._writer.renew(group, self._record(stream))
        followed = self._followed[stream]
        followed.machine.damaged(PURGED)
        self._note_loss(stream)
        self._note_state(group, stream)

    # what is said of the map from outside

    def _corrections(self, stream: StreamId, record: StreamRecord) -> Corrections:
        """The corrections of the stream's generation."""
        followed = self._followed[stream]
        if followed.corrections.generation != record.generation:
            followed.corrections = Corrections(record.generation)
        return followed.corrections

    def _learn(self, group: Group, answered: Answered) -> Outcome:
        if answered.stream not in self._followed:
            outcome = refused("unknown")
        else:
            record = self._record(answered.stream)
            before = (record.corrected, record.wrong)
            corrections = self._corrections(answered.stream, record)
            outcome = learn(group.changes, record, corrections, answered, self._writer.now())
            if before != (record.corrected, record.wrong):
                group.touch(record)
        self.feedback[outcome.reason or "taken"] += 1
        return outcome

    def _witness(self, group: Group, stream: StreamId, at: float, asked: float) -> None:
        """Signals that still wait may be of the process before: the next answer comes soon."""
        followed = self._followed.get(stream)
        if followed is None or self._feed.inbox.depth(stream):
            return
        self._perform(group, stream, followed.machine.process_started(at, self._clock(), asked))
        self._note_state(group, stream)

    # batches

    def _apply_or_raise(self, group: Group, stream: StreamId, batch: Batch, action: Apply) -> StreamRecord:
        """Applies a batch. Raises PoisonError for a fault that would come back whenever it is tried again."""
        try:
            return self._apply_batch(group, stream, batch, action.sequence)
        except lmdb.Error:
            raise
        except Exception as error:
            raise PoisonError(stream, action.payload, error) from error

    def _apply_batch(self, group: Group, stream: StreamId, batch: Batch, sequence: int) -> StreamRecord:
        record = self._record(stream)
        for event in batch.events:
            if isinstance(event, BlockStored):
                _note_form(record, event)
                record = self._fit_block_size(group, stream, record, event)
                group.blocks(record).store(event)
            elif isinstance(event, BlockRemoved):
                group.blocks(record).remove(event)
            elif isinstance(event, AllBlocksCleared):
                if not record.is_empty:
                    record = self._writer.renew(group, record)
                record.counters.cleared += 1
                self._followed[stream].machine.cleared(sequence)
        for rejected in batch.rejected:
            record.counters.skip(rejected.reason)
            self._warn.warning(
                f"event {stream}", "%s sent an event we skip: %s", _title(stream), rejected.detail
            )
        return record

    def _fit_block_size(
        self, group: Group, stream: StreamId, record: StreamRecord, event: BlockStored
    ) -> StreamRecord:
        """A learned block size that event after event contradicts was learned from a stray one."""
        followed = self._followed[stream]
        if event.group_kind not in PREFIX_KINDS or not event.tokens:
            return record
        if record.block_size in (None, event.block_size):
            followed.strays = 0
            return record
        followed.strays += 1
        registered = record.registration.block_size is not None
        self._warn.warning(
            f"block size {stream}",
            "%s stores blocks of %d tokens, %d are %s; they are skipped",
            _title(stream),
            event.block_size,
            record.block_size,
            "registered (register the right block_size, or none)" if registered else "what it stored first",
        )
        if registered or followed.strays < RELEARN_AFTER:
            return record
        followed.strays = 0
        renewed = self._writer.renew(group, record)
        renewed.block_size = event.block_size
        return renewed

    def _reset(self, group: Group, stream: StreamId, action: Reset) -> None:
        record = self._record(stream)
        self._warn.warning(
            f"reset {stream}", "%s: forgetting %d blocks: %s", _title(stream), record.blocks, action.reason
        )
        renewed = self._writer.renew(group, record)
        renewed.block_size = record.registration.block_size  # another process may have another

    def _note_state(self, group: Group, stream: StreamId) -> None:
        record, machine = self._record(stream), self._followed[stream].machine
        if record.started_at != machine.started_at:
            record.started_at = machine.started_at
            group.touch(record)
        now = (machine.state, machine.reason, machine.lost, machine.last, machine.digest)
        if now != (record.state, record.reason, record.lost, record.sequence, record.digest):
            if machine.state != record.state:
                self._say(f"{_title(stream)} is {machine.state}", machine.reason)
            record.state, record.reason, record.lost, record.sequence, record.digest = now
            if not record.lost:
                record.lost_at = None
            group.touch(record)

    def _say(self, what: str, why: str) -> None:
        """A change of state; one that flaps is not worth a line each time."""
        if what not in self._said:
            log.info("%s: %s", what, why)
        self._said[what] = None

    # streams

    def _follow_all(self) -> None:
        """Takes up every stream of the map; nothing of it is trusted before its continuity is proven."""
        with self._writer.group() as group:
            for record in self._writer.streams.values():
                self._followed[record.id] = Followed(record)
                self._followed[record.id].corrections.load(group.changes, record)
                self._note_state(group, record.id)
        for record in self._writer.streams.values():
            self._feed.add(record.id, _source(record.registration))

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
        if known is not None and known.registration == registration:
            return
        if known is not None and _same_stream(known, registration):
            with self._writer.group() as group:
                known.registration = registration
                group.touch(known)
            return
        self._refuse_shared_topic(registration)
        with self._writer.group() as group:
            if known is not None:
                self._writer.close_stream(group, known)
            record = self._writer.open_stream(group, registration)
            followed = Followed(record)
            record.state, record.reason = followed.machine.state, followed.machine.reason
        if known is not None:
            self._feed.remove(key)
        self._followed[key] = followed
        self._feed.add(key, _source(registration))
        log.info("following %s at %s", _title(key), registration.endpoint)

    def _refuse_shared_topic(self, registration: Registration) -> None:
        """Two streams on one bound address with one topic could not be told apart."""
        if not registration.binds:
            return
        for record in self._writer.streams.values():
            other = record.registration
            shared = (other.endpoint, other.topic) == (registration.endpoint, registration.topic)
            if shared and record.id != (registration.instance, registration.dp_rank):
                raise RegistrationError(
                    f"{_title(record.id)} has the topic {other.topic!r} at {registration.endpoint} already; "
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
        for record in gone:
            self._feed.remove(record.id)
            self._followed.pop(record.id, None)


def _key(stream: StreamId) -> StreamKey:
    assert isinstance(stream, tuple)
    return stream


def _note_form(record: StreamRecord, event: BlockStored) -> None:
    """Remembers how the engine spells its hashes."""
    if record.hash_form is None and event.hashes:
        record.hash_form = "int" if len(event.hashes[0]) == len(canonical_hash(0)) else "bytes"


def _title(stream: StreamId) -> str:
    instance, rank = _key(stream)
    return f"{instance} rank {rank}"


def _source(registration: Registration) -> Source:
    return Source(registration.address, registration.binds, registration.topic, registration.replay_endpoint)


def _same_stream(known: StreamRecord, registration: Registration) -> bool:
    """Whether they differ at most in the names the model goes by, and in saying the block size or not."""
    fits = registration.block_size in (None, known.block_size)
    plain = {"aliases": (), "url": None, "block_size": None, "instance_id": known.registration.instance_id}
    one, other = (msgspec.structs.replace(each, **plain) for each in (known.registration, registration))
    return fits and one == other
