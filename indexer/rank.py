"""What one data-parallel rank holds: its generation in the map, and what batches and answers do to it."""

from __future__ import annotations

from collections.abc import Callable

from events.schema import AllBlocksCleared, Batch, BlockRemoved, BlockStored, canonical_hash
from indexer.corrections import Corrections
from indexer.feedback import Answered, learn
from indexer.groups import PREFIX_KINDS
from indexer.layout import SMALL_BLOCK_TOKENS, Purge, StreamKey, StreamRecord, small_blocks
from indexer.outcome import Outcome
from indexer.writer import Group, MapWriter

RELEARN_AFTER = 8
MAX_PURGED = 256

Warn = Callable[..., None]
"""Called with a subject, a message and its arguments."""


Kept = tuple[StreamKey, int, int | None]


class Rank:
    """The blocks of one rank. Where its events come from, and in which order, is its port's to know.

    ``cleared`` is the sequence of the last batch that cleared its cache, None if none did since a loss.
    """

    def __init__(self, record: StreamRecord, writer: MapWriter, warn: Warn) -> None:
        self.key: StreamKey = record.id
        self._writer = writer
        self._warn = warn
        self._corrections: Corrections | None = None
        self._strays = 0
        self.cleared: int | None = None

    @property
    def record(self) -> StreamRecord:
        """The rank's generation as it is now."""
        return self._writer.streams[self.key]

    def corrections(self, group: Group) -> Corrections:
        """The corrections of the rank's generation; those of the map where nothing is known of them."""
        record, known = self.record, self._corrections
        if known is None:
            known = Corrections(record.generation, -1 if record.sequence is None else record.sequence)
            known.load(group.changes, record)
        elif known.generation != record.generation:
            known = Corrections(record.generation)
        self._corrections = known
        return known

    def kept(self) -> Kept:
        """What a batch changes here besides the map, for :meth:`restore`."""
        return self.key, self._strays, self.cleared

    def restore(self, kept: Kept) -> None:
        """Goes back to what was :meth:`kept`: the group was not committed."""
        self.key, self._strays, self.cleared = kept

    def forget_corrections(self) -> None:
        """They are read from the map again."""
        self._corrections = None

    def expire(self, group: Group) -> None:
        """Ends corrections that are due."""
        record = self.record
        if record.denied or record.believed:
            ended = self.corrections(group).expire(group.changes, record, self._writer.now())
            if ended:
                group.touch(record)

    def note_loss(self, group: Group, at: float) -> None:
        """What it holds may be outdated from ``at`` on, unix seconds."""
        record = self.record
        self.cleared = None
        if not record.is_empty and record.lost_at is None:
            record.lost_at = at
            group.touch(record)

    def learn(self, group: Group, answered: Answered) -> Outcome:
        """Corrects what is known by what the engine answered."""
        record = self.record
        before = (record.corrected, record.wrong)
        outcome = learn(group.changes, record, self.corrections(group), answered, self._writer.now())
        if before != (record.corrected, record.wrong):
            group.touch(record)
        return outcome

    def purge_adapter(self, group: Group, lora_name: str, sequence: int) -> bool:
        """What was stored of an adapter up to batch ``sequence`` no longer matches; False if that cannot be.

        Blocks that wait for their parent have no adapter yet.
        """
        record = self.record
        before = record.purged.get(lora_name)
        if record.waiting or (before is None and len(record.purged) >= MAX_PURGED):
            return False
        record.purged[lora_name] = Purge(1 if before is None else before.epoch + 1, sequence)
        group.touch(record)
        return True

    def applied(self, group: Group, sequence: int, at: float) -> None:
        """A batch of this rank is in the map, or left out of it; ``at`` in unix seconds."""
        record = self.record
        self._note_touched(group, record, sequence)
        record.sequence = sequence
        record.event_at = at
        record.counters.batches += 1
        group.touch(record)

    def _note_touched(self, group: Group, record: StreamRecord, sequence: int) -> None:
        """What an answer says of a block from before this batch no longer counts; a stored block is there."""
        stored, removed = group.blocks(record).take_touched()
        if stored or removed:
            corrections = self.corrections(group)
            corrections.touched.note(stored + removed, sequence)
            corrections.end(group.changes, record, stored)

    def apply(self, group: Group, batch: Batch, sequence: int) -> None:
        """What a batch does to the rank's blocks."""
        record = self.record
        for event in batch.events:
            if isinstance(event, BlockStored):
                _note_form(record, event)
                record = self._fit_block_size(group, record, event)
                group.blocks(record).store(event, sequence)
            elif isinstance(event, BlockRemoved):
                group.blocks(record).remove(event)
            elif isinstance(event, AllBlocksCleared):
                if not record.is_empty:
                    record = self._writer.renew(group, record)
                record.counters.cleared += 1
                self.cleared = sequence
        for rejected in batch.rejected:
            record.counters.skip(rejected.reason)
            self._warn("event", "an event is skipped: %s", rejected.detail)

    def take_block_size(self, group: Group, block_size: int) -> None:
        """Until an event says it: what answers teach of prompts that are never announced needs one."""
        record = self.record
        if record.block_size is None:
            record.block_size = block_size
            group.touch(record)

    def _fit_block_size(self, group: Group, record: StreamRecord, event: BlockStored) -> StreamRecord:
        """A learned block size that event after event contradicts was learned from a stray one.

        One of which no block is held was only told, and gives way at once.
        """
        beside = record.main_group not in (None, event.group)
        if event.group_kind not in PREFIX_KINDS or not event.tokens or beside:
            return record
        if record.block_size in (None, event.block_size):
            self._strays = 0
            if record.is_empty and 0 < event.block_size < SMALL_BLOCK_TOKENS:
                self._warn("small blocks", small_blocks(event.block_size))
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
        if registered or (self._strays < RELEARN_AFTER and not record.is_empty):
            return record
        self._strays = 0
        renewed = self._writer.renew(group, record)
        renewed.block_size = event.block_size
        return renewed


def _note_form(record: StreamRecord, event: BlockStored) -> None:
    """Remembers how the engine spells its hashes."""
    if record.hash_form is None and event.hashes:
        record.hash_form = "int" if len(event.hashes[0]) == len(canonical_hash(0)) else "bytes"
