"""One stream that is followed: what its signals do to the map, within the group at hand."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

import lmdb
from cachetools import TTLCache

from events.inbox import StreamId
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
from indexer.blocks import PREFIX_KINDS
from indexer.corrections import Corrections
from indexer.errors import IndexerError
from indexer.feedback import Answered, learn
from indexer.layout import PARTIAL_TTL_S, StreamKey, StreamRecord
from indexer.outcome import Outcome
from indexer.writer import Group, MapWriter

log = logging.getLogger(__name__)

MAX_POISON = 1_000
POISON_AFTER = 4
MAX_SAID = 4_096
SAY_AGAIN_S = 10.0
RELEARN_AFTER = 8
PURGED = "it was reset by request: what the engine still holds is not known"


class PoisonError(IndexerError):
    """A batch that cannot be applied, though it could be decoded."""

    def __init__(self, stream: StreamId, payload: bytes, error: Exception) -> None:
        super().__init__(f"a batch of {title(stream)} cannot be applied: {error!r}")
        self.batch = (stream, digest_of(payload))


class Poison:
    """How often batches failed. What failed once may go well the next time; again and again is too often."""

    def __init__(self) -> None:
        self._failed: Counter[tuple[StreamId, bytes]] = Counter()

    def note(self, error: PoisonError) -> None:
        if len(self._failed) >= MAX_POISON:
            self._failed.clear()
        self._failed[error.batch] += 1

    def has(self, stream: StreamId, payload: bytes) -> bool:
        """Whether a batch is to be left out."""
        return bool(self._failed) and self._failed[stream, digest_of(payload)] >= POISON_AFTER


class Shared:
    """What the streams of one indexer have in common, and what outlives their starting over."""

    def __init__(
        self,
        writer: MapWriter,
        *,
        partial_ttl_s: float = PARTIAL_TTL_S,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.writer = writer
        self.partial_ttl_s = partial_ttl_s
        self.wall = wall
        self.warn = Throttled(log)
        self.poison = Poison()
        self._said: TTLCache[str, None] = TTLCache(MAX_SAID, SAY_AGAIN_S, timer=clock)

    def say(self, what: str, why: str) -> None:
        """A change of state; one that flaps is not worth a line each time."""
        if what not in self._said:
            log.info("%s: %s", what, why)
        self._said[what] = None


class Followed:
    """A stream's state machine, decoder and corrections, and what they change in the map.

    ``ask`` is the replay to be asked for once the group is committed. ``now`` is always on the clock of the
    state machine, seconds.
    """

    def __init__(self, record: StreamRecord, shared: Shared) -> None:
        self.stream = record.id
        self.machine = Stream(
            has_replay=record.registration.replay_endpoint is not None,
            last=record.sequence,
            digest=record.digest,
            lost=record.lost,
            started_at=record.started_at,
        )
        self.ask: AskReplay | None = None
        self._shared = shared
        self._writer = shared.writer
        self._corrections = Corrections(record.generation, -1 if record.sequence is None else record.sequence)
        self._decoder = Decoder()
        self._losses = 0
        self._strays = 0

    @property
    def record(self) -> StreamRecord:
        """The stream's generation as it is now."""
        return self._writer.streams[self.stream]

    @property
    def corrections(self) -> Corrections:
        """The corrections of the stream's generation."""
        if self._corrections.generation != self.record.generation:
            self._corrections = Corrections(self.record.generation)
        return self._corrections

    def load(self, group: Group) -> None:
        """Takes up what the map has, and notes that nothing of it is proven yet."""
        self.corrections.load(group.changes, self.record)
        self.note_state(group)

    # what may happen to it

    def on(self, group: Group, signal: Signal, now: float) -> None:
        """What follows from a signal. Say :meth:`note_state` after the last of them."""
        self._perform(group, self.machine.on(signal, now))

    def tick(self, group: Group, now: float) -> None:
        """What follows from time alone for the state machine."""
        machine = self.machine
        before = (machine.state, machine.reason, machine.lost)
        actions = machine.tick(now)
        self._perform(group, actions)
        if actions or before != (machine.state, machine.reason, machine.lost):
            self.note_state(group)

    def outlive(self, group: Group) -> None:
        """Ends corrections that are due, and what was known before a loss that is long ago."""
        record = self.record
        if (record.denied or record.believed) and self.corrections.expire(
            group.changes, record, self._writer.now()
        ):
            group.touch(record)
        if record.lost_at is not None and self._shared.wall() - record.lost_at >= self._shared.partial_ttl_s:
            self._warn(
                "outdated",
                "forgetting %d blocks: batches were lost %.0f s ago (--partial-ttl-s)",
                record.blocks,
                self._shared.partial_ttl_s,
            )
            self._writer.renew(group, record)
            self.note_state(group)

    def purge(self, group: Group) -> None:
        """Forgets all, by request."""
        self._warn("purge", "forgetting all: reset by request")
        self._writer.renew(group, self.record)
        self.machine.damaged(PURGED)
        self._note_loss()
        self.note_state(group)

    def learn(self, group: Group, answered: Answered) -> Outcome:
        """Corrects what is known by what the engine answered."""
        record = self.record
        before = (record.corrected, record.wrong)
        outcome = learn(group.changes, record, self.corrections, answered, self._writer.now())
        if before != (record.corrected, record.wrong):
            group.touch(record)
        return outcome

    def process_started(self, group: Group, at: float, now: float, asked: float) -> None:
        """The engine's process started ``at`` (unix seconds), by its answer to a question of ``asked``."""
        self._perform(group, self.machine.process_started(at, now, asked))
        self.note_state(group)

    def note_state(self, group: Group) -> None:
        """Writes what the state machine says, if it says something new."""
        record, machine = self.record, self.machine
        if record.started_at != machine.started_at:
            record.started_at = machine.started_at
            group.touch(record)
        now = (machine.state, machine.reason, machine.lost, machine.last, machine.digest)
        if now != (record.state, record.reason, record.lost, record.sequence, record.digest):
            if machine.state != record.state:
                self._shared.say(f"{title(self.stream)} is {machine.state}", machine.reason)
            record.state, record.reason, record.lost, record.sequence, record.digest = now
            if not record.lost:
                record.lost_at = None
            group.touch(record)

    # what the state machine wants

    def _perform(self, group: Group, actions: list[Action]) -> None:
        if self._note_loss(actions):
            group.touch(self.record)
        for action in actions:
            match action:
                case Apply():
                    self._apply(group, action)
                case AskReplay():
                    self.ask = action
                case Reset():
                    self._reset(group, action)

    def _note_loss(self, actions: Sequence[Action] = ()) -> bool:
        """Notes since when what a stream holds may be outdated; what comes after a reset is not."""
        if self._losses == self.machine.losses:
            return False
        self._losses = self.machine.losses
        record = self.record
        if record.is_empty or record.lost_at is not None or any(isinstance(each, Reset) for each in actions):
            return False
        record.lost_at = self._shared.wall()
        return True

    def _reset(self, group: Group, action: Reset) -> None:
        record = self.record
        self._warn("reset", "forgetting %d blocks: %s", record.blocks, action.reason)
        renewed = self._writer.renew(group, record)
        renewed.block_size = record.registration.block_size  # another process may have another

    # batches

    def _apply(self, group: Group, action: Apply) -> None:
        try:
            batch = self._decoder.decode(action.payload)
        except PayloadError as error:
            self._leave_out("payload", action)
            self._warn("payload", "a batch cannot be used: %s", error)
        else:
            if self._shared.poison.has(self.stream, action.payload):
                self._leave_out("poison", action)
            else:
                self._apply_or_raise(group, batch, action)
        record = self.record
        self._note_touched(group, record, action.sequence)
        record.sequence = action.sequence
        record.event_at = self._shared.wall()
        record.counters.batches += 1
        group.touch(record)

    def _leave_out(self, reason: str, action: Apply) -> None:
        """A batch is missing in the map from here on."""
        self.record.counters.skip(reason)
        self.machine.damaged(f"the batch with sequence {action.sequence} could not be used")
        self._note_loss()

    def _note_touched(self, group: Group, record: StreamRecord, sequence: int) -> None:
        """What an answer says of a block from before this batch no longer counts; a stored block is there."""
        stored, removed = group.blocks(record).take_touched()
        if stored or removed:
            corrections = self.corrections
            corrections.touched.note(stored + removed, sequence)
            corrections.end(group.changes, record, stored)

    def _apply_or_raise(self, group: Group, batch: Batch, action: Apply) -> None:
        """Applies a batch. Raises PoisonError for a fault that would come back whenever it is tried again."""
        try:
            self._apply_batch(group, batch, action.sequence)
        except lmdb.Error:
            raise
        except Exception as error:
            raise PoisonError(self.stream, action.payload, error) from error

    def _apply_batch(self, group: Group, batch: Batch, sequence: int) -> None:
        record = self.record
        for event in batch.events:
            if isinstance(event, BlockStored):
                _note_form(record, event)
                record = self._fit_block_size(group, record, event)
                group.blocks(record).store(event)
            elif isinstance(event, BlockRemoved):
                group.blocks(record).remove(event)
            elif isinstance(event, AllBlocksCleared):
                if not record.is_empty:
                    record = self._writer.renew(group, record)
                record.counters.cleared += 1
                self.machine.cleared(sequence)
        for rejected in batch.rejected:
            record.counters.skip(rejected.reason)
            self._warn("event", "an event is skipped: %s", rejected.detail)

    def _fit_block_size(self, group: Group, record: StreamRecord, event: BlockStored) -> StreamRecord:
        """A learned block size that event after event contradicts was learned from a stray one."""
        if event.group_kind not in PREFIX_KINDS or not event.tokens:
            return record
        if record.block_size in (None, event.block_size):
            self._strays = 0
            return record
        self._strays += 1
        registered = record.registration.block_size is not None
        self._warn(
            "block size",
            "it stores blocks of %d tokens, %d are %s; they are skipped",
            event.block_size,
            record.block_size,
            "registered (register the right block_size, or none)" if registered else "what it stored first",
        )
        if registered or self._strays < RELEARN_AFTER:
            return record
        self._strays = 0
        renewed = self._writer.renew(group, record)
        renewed.block_size = event.block_size
        return renewed

    def _warn(self, subject: str, message: str, *args: object) -> None:
        name = title(self.stream)
        self._shared.warn.warning(f"{subject} {name}", f"%s: {message}", name, *args)


def title(stream: StreamId) -> str:
    """How a stream is called in messages."""
    instance, rank = stream_key(stream)
    return f"{instance} rank {rank}"


def stream_key(stream: StreamId) -> StreamKey:
    """A stream's id, as the map has it."""
    assert isinstance(stream, tuple)
    return stream


def _note_form(record: StreamRecord, event: BlockStored) -> None:
    """Remembers how the engine spells its hashes."""
    if record.hash_form is None and event.hashes:
        record.hash_form = "int" if len(event.hashes[0]) == len(canonical_hash(0)) else "bytes"
