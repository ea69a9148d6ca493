"""One port that is followed: what its signals do to the map, within the group at hand."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

import lmdb
from cachetools import TTLCache

from events.inbox import StreamId
from events.logs import Throttled
from events.schema import Batch, Decoder, PayloadError
from events.signals import Signal
from events.stream import Action, Apply, AskReplay, Reset, Stream, digest_of
from indexer.errors import IndexerError, MapError
from indexer.layout import PARTIAL_TTL_S, StreamKey, StreamRecord
from indexer.rank import Kept, Rank
from indexer.writer import Group, MapWriter

log = logging.getLogger(__name__)

MAX_POISON = 1_000
POISON_AFTER = 4
MAX_SAID = 4_096
SAY_AGAIN_S = 10.0
MAX_RANK = 4095
MAX_RANKS = 128
PURGED = "it was reset by request: what the engine still holds is not known"


class PoisonError(IndexerError):
    """A batch that cannot be applied, though it could be decoded."""

    def __init__(self, stream: StreamId, payload: bytes, error: Exception) -> None:
        super().__init__(f"a batch of {title(stream)} cannot be applied: {error!r}")
        self.batch = (stream, digest_of(payload))


class UnusableRankError(IndexerError):
    """A batch whose rank can be none."""


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
    """What the streams of one indexer have in common, and what outlives their starting over.

    ``batches`` counts what the group at hand applies; ``most`` is how many it may (None: all), because there
    is no room for more.
    """

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
        self.batches = 0
        self.most: int | None = None
        self._said: TTLCache[str, None] = TTLCache(MAX_SAID, SAY_AGAIN_S, timer=clock)

    def say(self, what: str, why: str) -> None:
        """A change of state; one that flaps is not worth a line each time."""
        if what not in self._said:
            log.info("%s: %s", what, why)
        self._said[what] = None


class Followed:
    """A port that is followed: its state machine, and the ranks whose blocks its batches change.

    Either the group is committed and :meth:`committed` is said, or :meth:`go_back`: then the same signals may
    come again. ``now`` is always on the clock of the state machine, seconds.

    A port is one rank's until its batches name a second one; from then on each number is a rank of its own
    (``ranks`` has those that were not registered). The order of batches is the port's: a restart forgets all
    ranks, a loss is a loss of all.
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
        self._shared = shared
        self._writer = shared.writer
        self._decoder = Decoder()
        self._ask: AskReplay | None = None
        self._before: _Before | None = None
        self._losses = 0
        self.own = self._rank(record)
        self.ranks: dict[int, Rank] = {}

    def _rank(self, record: StreamRecord) -> Rank:
        return Rank(record, self._writer, self._warn)

    @property
    def record(self) -> StreamRecord:
        """The generation of the registered rank as it is now: what is said of the port stands there."""
        return self.own.record

    @property
    def every(self) -> list[Rank]:
        """All ranks of the port."""
        return [self.own, *self.ranks.values()]

    def rank(self, stream: StreamKey) -> Rank:
        """One of the port's ranks, by its stream's id."""
        return next(rank for rank in self.every if rank.key == stream)

    def load(self) -> None:
        """Takes up the ranks that the map has."""
        for record in self._writer.of_port(self.record):
            if record.rank is not None:
                self.ranks[record.rank] = self._rank(record)

    def committed(self) -> AskReplay | None:
        """The group is in the map: gives the replay that is to be asked for now."""
        ask, self._ask, self._before = self._ask, None, None
        return ask

    def go_back(self) -> None:
        """Nothing of the group is in the map: everything is again as it was before."""
        if self._before is not None:
            self.machine, self._losses, self.own, self.ranks, ranks = self._before
            for rank, kept in ranks:
                rank.restore(kept)
        for rank in self.every:
            rank.forget_corrections()
        self._ask = self._before = None

    def _keep(self) -> None:
        if self._before is None:
            ranks = [(rank, rank.kept()) for rank in self.every]
            self._before = (self.machine.copy(), self._losses, self.own, self.ranks.copy(), ranks)

    # what may happen to it

    def on(self, group: Group, signal: Signal, now: float) -> None:
        """What follows from a signal. Say :meth:`note_state` after the last of them."""
        self._keep()
        self._perform(group, self.machine.on(signal, now))

    def tick(self, group: Group, now: float) -> None:
        """What follows from time alone for the state machine."""
        if self.machine.is_due(now):
            self._keep()
            self._perform(group, self.machine.tick(now))
            self.note_state(group)

    def outlive(self, group: Group) -> None:
        """Ends corrections that are due, and what was known before a loss that is long ago."""
        for rank in self.every:
            rank.expire(group)
            record = rank.record
            if record.lost_at is None:
                continue
            since_loss = self._shared.wall() - record.lost_at
            if (
                since_loss < 0
            ):  # the host's clock was set back; the bound must not wait until it is there again
                record.lost_at += since_loss
                group.touch(record)
            if since_loss < self._shared.partial_ttl_s:
                continue
            self._warn(
                "outdated",
                "forgetting %d blocks: batches were lost %.0f s ago (--partial-ttl-s)",
                record.blocks,
                self._shared.partial_ttl_s,
            )
            self._writer.renew(group, record)
            self.note_state(group)

    def purge(self, group: Group, stream: StreamKey, lora_name: str | None = None) -> None:
        """Forgets what a rank holds of an adapter, or all of it, by request."""
        self._keep()
        rank = self.rank(stream)
        if lora_name is not None:
            last = self.machine.last
            if rank.purge_adapter(group, lora_name, -1 if last is None else last):
                return
        self._warn("purge", "forgetting all: reset by request")
        self._writer.renew(group, rank.record)
        self.machine.damaged(PURGED)
        self._note_loss(group)
        self.note_state(group)

    def process_started(self, group: Group, at: float, now: float, asked: float) -> None:
        """The engine's process started ``at`` (unix seconds), by its answer to a question of ``asked``."""
        self._keep()
        self._perform(group, self.machine.process_started(at, now, asked))
        self.note_state(group)

    def note_state(self, group: Group) -> None:
        """Writes what the state machine says, if it says something new."""
        record, machine = self.record, self.machine
        if record.started_at != machine.started_at:
            record.started_at = machine.started_at
            group.touch(record)
        if machine.state != record.state:
            self._shared.say(f"{title(self.stream)} is {machine.state}", machine.reason)
        if (machine.last, machine.digest) != (record.sequence, record.digest):
            record.sequence, record.digest = machine.last, machine.digest
            group.touch(record)
        now = (machine.state, machine.reason, machine.lost)
        for each in (rank.record for rank in self.every):
            if now != (each.state, each.reason, each.lost):
                each.state, each.reason, each.lost = now
                if not each.lost:
                    each.lost_at = None
                group.touch(each)

    # what the state machine wants

    def _perform(self, group: Group, actions: list[Action]) -> None:
        self._note_loss(group, actions)
        for action in actions:
            match action:
                case Apply():
                    self._apply(group, action)
                case AskReplay():
                    self._ask = action
                case Reset():
                    self._reset(group, action)

    def _note_loss(self, group: Group, actions: Sequence[Action] = ()) -> None:
        """Notes since when what the port's ranks hold may be outdated; what comes after a reset is not."""
        if self._losses == self.machine.losses:
            return
        self._losses = self.machine.losses
        if not any(isinstance(each, Reset) for each in actions):
            for rank in self.every:
                rank.note_loss(group, self._shared.wall())

    def _reset(self, group: Group, action: Reset) -> None:
        """Ranks that only events named go with the process that sent them."""
        record = self.record
        blocks = sum(rank.record.blocks for rank in self.every)
        self._warn("reset", "forgetting %d blocks: %s", blocks, action.reason)
        for rank in self.ranks.values():
            self._writer.close_stream(group, rank.record)
        self.ranks.clear()
        renewed = self._writer.renew(group, record)
        renewed.block_size = record.registration.block_size  # another process may have another
        renewed.batch_rank = None
        if not action.same_process:
            renewed.purged = {}

    # batches

    def _apply(self, group: Group, action: Apply) -> None:
        rank = self.own
        shared = self._shared
        try:
            batch = self._decoder.decode(action.payload)
            rank = self._rank_of(group, batch)
        except PayloadError as error:
            self._leave_out(group, "payload", action)
            self._warn("payload", "a batch cannot be used: %s", error)
        except UnusableRankError as error:
            self._leave_out(group, "rank", action)
            self._warn("rank", "a batch is left out: %s", error)
        else:
            if shared.poison.has(self.stream, action.payload):
                self._leave_out(group, "poison", action)
            elif shared.most is not None and shared.batches >= shared.most:
                self._leave_out(group, "no_room", action)
                self._warn("no room", "there is no room for its batches: some are left out")
            else:
                shared.batches += 1
                self._apply_or_raise(group, rank, batch, action)
        rank.applied(group, action.sequence, shared.wall())

    def _leave_out(self, group: Group, reason: str, action: Apply) -> None:
        """A batch is missing in the map from here on."""
        self.record.counters.skip(reason)
        self.machine.damaged(f"the batch with sequence {action.sequence} could not be used")
        self._note_loss(group)

    def _apply_or_raise(self, group: Group, rank: Rank, batch: Batch, action: Apply) -> None:
        """Applies a batch. Raises PoisonError for a fault that would come back whenever it is tried again."""
        try:
            rank.apply(group, batch, action.sequence)
        except (lmdb.Error, MapError):
            raise
        except Exception as error:
            raise PoisonError(self.stream, action.payload, error) from error
        cleared = [each.cleared for each in self.every]
        if rank.cleared == action.sequence and None not in cleared:  # what was lost may be any rank's
            self.machine.cleared(min(sequence for sequence in cleared if sequence is not None))

    # ranks that only events name

    def _rank_of(self, group: Group, batch: Batch) -> Rank:
        """Whose batch it is. Raises UnusableRankError."""
        number, record = batch.rank, self.record
        if number is None or number == record.batch_rank:
            return self.own
        if number in self.ranks:
            return self.ranks[number]
        if not 0 <= number <= MAX_RANK:
            raise UnusableRankError(f"it says that it is of rank {number} (expected 0 to {MAX_RANK})")
        if record.batch_rank is None:
            record.batch_rank = number
            return self.own
        return self._share(group, number)

    def _share(self, group: Group, number: int) -> Rank:
        """The port has one more rank. Raises UnusableRankError where it cannot be one."""
        registered = self.stream[1]
        first = self.record.batch_rank
        assert first is not None
        if first != registered:
            self._open(group, first, self.own)
        return self.own if number == registered else self._open(group, number)

    def _open(self, group: Group, number: int, rank: Rank | None = None) -> Rank:
        """A stream for a rank; of ``rank``, if it is the one that was taken for the registered one."""
        writer, key = self._writer, (self.stream[0], number)
        if key in writer.streams:
            raise UnusableRankError(f"it is of rank {number}, which is registered with a port of its own")
        if len(self.ranks) >= MAX_RANKS or not writer.has_slots:
            raise UnusableRankError(f"it is of rank {number}, and there is no room for more ranks")
        if rank is None:
            rank = self._rank(writer.open_rank(group, self.record, number))
        else:
            self.own = self._rank(writer.hand_over(group, self.record, number))
            rank.key = key
        self.ranks[number] = rank
        log.info("%s: its port has batches of rank %d too", title(self.stream), number)
        return rank

    def _warn(self, subject: str, message: str, *args: object) -> None:
        name = title(self.stream)
        self._shared.warn.warning(f"{subject} {name}", f"%s: {message}", name, *args)


_Before = tuple[Stream, int, Rank, dict[int, Rank], list[tuple[Rank, Kept]]]


def title(stream: StreamId) -> str:
    """How a stream is called in messages."""
    instance, rank = stream_key(stream)
    return f"{instance} rank {rank}"


def stream_key(stream: StreamId) -> StreamKey:
    """A stream's id, as the map has it."""
    assert isinstance(stream, tuple)
    return stream
