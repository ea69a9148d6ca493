"""Writes the map. One thread of one process owns it, and groups what it changes into transactions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import lmdb
import msgspec

from indexer.blocks import StreamBlocks
from indexer.bounds import most_waiting
from indexer.changes import Changes
from indexer.errors import MapError, MapFullError, SlotsTakenError, TooLargeError
from indexer.folder import ANOTHER_FOLDER, as_map_error, lock_to_write, open_to_write, sign
from indexer.hand import Hand
from indexer.layout import (
    CPU,
    DEFAULT_MAP_SIZE,
    DISK,
    GPU,
    MAX_SLOTS,
    META_ADDRESS,
    META_BOOT,
    META_CLEAN,
    META_GENERATION,
    META_HEARTBEAT,
    META_SCHEMA,
    MOST_STREAMS,
    SCHEMA_VERSION,
    Counters,
    Name,
    StreamKey,
    StreamRecord,
    Waiting,
    boot_clock,
    boot_id,
    decode_record,
    encode_record,
    holders_key,
    slot_key,
    used_bytes,
)
from indexer.registration import Registration

log = logging.getLogger(__name__)

COLLECT_STEP = 2_000
MOST_USED = 0.6


class Group:
    """One write transaction: what a group of batches changes, and the records of their streams."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        self._blocks: dict[int, StreamBlocks] = {}
        self._touched: dict[int, StreamRecord] = {}

    def blocks(self, record: StreamRecord) -> StreamBlocks:
        """The stream's blocks, to be changed; its record is written with them."""
        self.touch(record)
        found = self._blocks.get(record.slot)
        if found is None:
            found = self._blocks[record.slot] = StreamBlocks(self.changes, record)
        return found

    def touch(self, record: StreamRecord) -> None:
        """Notes that ``record`` has to be written."""
        self._touched[record.slot] = record

    @property
    def touched(self) -> list[StreamRecord]:
        return list(self._touched.values())


class MapWriter:
    """The open map. All methods are for the one writer thread, after construction.

    ``streams`` are the current generations by (instance, rank); retired ones are collected step by step.
    """

    def __init__(
        self,
        path: Path,
        *,
        map_size: int = DEFAULT_MAP_SIZE,
        clock: Callable[[], float] = boot_clock,
        boot: bytes | None = None,
    ) -> None:
        """Opens or makes the map in the folder ``path``; ``map_size`` in bytes.

        Raises MapBusyError when another indexer has it, MapSchemaError for one of another version, MapError
        when the folder cannot be used.
        """
        self.path = path
        self._clock = clock
        self._unread = False
        self._swept = b""
        self._hands: dict[int, Hand] = {}  # by generation; 0: of all streams
        with ExitStack() as undo, as_map_error("use", path):
            self._lock, ours = lock_to_write(path)
            undo.callback(self._lock.close)
            self.env, self.tables = open_to_write(path, map_size, ours=ours)
            undo.callback(self.env.close)
            sign(self._lock)
            self._most_bytes = int(self.env.info()["map_size"] * MOST_USED)
            registered = self._start(boot or boot_id())
            self.streams: dict[StreamKey, StreamRecord] = {}
            self._retired: dict[int, StreamRecord] = {}
            self._load()
            if registered:
                with self.group() as group:
                    for registration in registered:
                        self._open(group, registration)
            undo.pop_all()

    def _start(self, boot: bytes) -> list[Registration]:
        """Takes the map over; one that an unclean end of another boot left behind is emptied in place.

        Gives the registrations of what was emptied: they are no belief about engines, and nobody may be there
        to register again.
        """
        registered: list[Registration] = []
        with self.env.begin() as txn:
            meta = {bytes(key): bytes(value) for key, value in txn.cursor(self.tables.meta)}
        if meta and meta.get(META_CLEAN) != b"1" and meta.get(META_BOOT) != boot:
            log.warning(
                "the map in %s was not closed before this host's last boot: starting without its blocks",
                self.path,
            )
            registered = self._registrations()
            with self.env.begin(write=True) as txn:
                for table in self.tables.every:
                    txn.drop(table, delete=False)
        with self.env.begin(write=True) as txn:
            txn.put(META_SCHEMA, str(SCHEMA_VERSION).encode(), db=self.tables.meta)
            if meta.get(META_BOOT) != boot:  # their times are of another clock
                txn.drop(self.tables.denied, delete=False)
                txn.drop(self.tables.believed, delete=False)
                txn.delete(META_HEARTBEAT, db=self.tables.meta)
            txn.put(META_BOOT, boot, db=self.tables.meta)
            txn.put(META_CLEAN, b"0", db=self.tables.meta)
            txn.delete(META_ADDRESS, db=self.tables.meta)
        if (meta.get(META_BOOT), meta.get(META_CLEAN)) != (boot, b"0"):  # else the disk says so already
            self.env.sync(True)
        return registered

    def _registrations(self) -> list[Registration]:
        """What was registered, as far as it can be read: the disk need not have had all of the map."""
        try:
            with self.env.begin() as txn:
                records = [decode_record(bytes(value)) for _, value in txn.cursor(self.tables.streams)]
        except (msgspec.MsgspecError, lmdb.Error) as error:
            log.warning("its registrations cannot be read: %s; register again", error)
            return []
        return [each.registration for each in records if not each.retired and each.rank is None]

    def _load(self) -> None:
        """Reads the records of the last commit."""
        with as_map_error("read", self.path), self.env.begin() as txn:
            rows = [bytes(value) for _, value in txn.cursor(self.tables.streams)]
        try:
            records = [decode_record(row) for row in rows]
        except msgspec.MsgspecError as error:
            raise MapError(
                f"a stream in the map in {self.path} cannot be read: {error}; {ANOTHER_FOLDER}"
            ) from error
        self._unread = False
        self.streams = {record.id: record for record in records if not record.retired}
        self._retired = {record.slot: record for record in records if record.retired}

    @contextmanager
    def group(self) -> Iterator[Group]:
        """One transaction: commits at the end, with a heartbeat.

        On an error nothing of it is applied, and ``streams`` are again those of the last commit. Raises
        MapFullError when the map has no room, TooLargeError when it would have none after it.
        """
        if self._unread:
            self._load()
        try:
            with as_map_error("write", self.path), self.env.begin(write=True) as txn:
                group = Group(Changes(txn, self.tables, self._clock()))
                yield group
                group.changes.flush()
                self._leave_room(used_bytes(txn, self.tables))
                for record in group.touched:
                    txn.put(slot_key(record.slot), encode_record(record), db=self.tables.streams)
                txn.put(META_HEARTBEAT, repr(self._clock()).encode(), db=self.tables.meta)
        except BaseException:
            self._load_later()
            raise

    def _leave_room(self, after: int) -> None:
        """Whatever is changed takes new pages first: in a map that is too full nothing can be evicted.

        A group that takes no more than is taken already may go in all the same.
        """
        if after > self._most_bytes and after > self.used_bytes():
            raise TooLargeError(
                f"{after} bytes of entries would leave no room to work in the map in {self.path}; "
                "give a larger --map-size"
            )

    def _load_later(self) -> None:
        """Goes back to the records of the last commit; before the next group, if they cannot be read now."""
        self._unread = True
        try:
            self._load()
        except MapError as error:
            log.debug("the records of the last commit cannot be read now: %s", error)

    def now(self) -> float:
        """Seconds since boot: the clock of the map's heartbeat and of its corrections."""
        return self._clock()

    def set_address(self, url: str) -> None:
        """Notes where the indexer listens, for routers that know only the map. Raises MapError."""
        with as_map_error("write", self.path), self.env.begin(write=True) as txn:
            txn.put(META_ADDRESS, url.encode(), db=self.tables.meta)

    # streams

    def open_stream(self, group: Group, registration: Registration) -> StreamRecord:
        """A first generation for a stream that is new or was removed.

        Raises MapFullError where too few slots would be left to begin a generation of any stream anew.
        """
        if len(self.streams) >= MOST_STREAMS:
            raise MapFullError(
                f"the map in {self.path} has {len(self.streams)} streams, as many as it can; "
                "unregister some, or divide the replicas among several indexers"
            )
        return self._open(group, registration)

    def _open(self, group: Group, registration: Registration, rank: int | None = None) -> StreamRecord:
        record = StreamRecord(
            slot=self._free_slot(),
            generation=self._next_generation(group),
            registration=registration,
            rank=rank,
            block_size=registration.block_size,
        )
        self.streams[record.id] = record
        group.touch(record)
        return record

    def open_rank(self, group: Group, port: StreamRecord, rank: int) -> StreamRecord:
        """A stream for a rank that only the events of a port name."""
        record = self._open(group, port.registration, rank)
        record.block_size = port.block_size
        record.state, record.reason, record.lost = port.state, port.reason, port.lost
        return record

    def hand_over(self, group: Group, port: StreamRecord, rank: int) -> StreamRecord:
        """What a port's stream holds becomes that of ``rank``; gives the port's stream, empty."""
        fresh = self.open_rank(group, port, rank)
        fresh.rank, port.rank = None, rank
        fresh.batch_rank, port.batch_rank = port.registration.dp_rank, None
        fresh.sequence, fresh.digest, fresh.started_at = port.sequence, port.digest, port.started_at
        fresh.lost_at, fresh.purged = None, dict(port.purged)
        group.touch(port)
        self.streams[fresh.id], self.streams[port.id] = fresh, port
        return fresh

    def of_port(self, record: StreamRecord) -> list[StreamRecord]:
        """The streams that come from one port: the registered one first."""
        found = [each for each in self.streams.values() if each.port == record.port]
        return sorted(found, key=lambda each: each.rank is not None)

    @property
    def has_slots(self) -> bool:
        """Whether ranks that only events name may have slots: half of all are kept for what is registered."""
        return (len(self.streams) + len(self._retired)) * 2 < MAX_SLOTS

    def renew(self, group: Group, record: StreamRecord) -> StreamRecord:
        """The next generation of a stream, empty; its slot is retired in one write.

        Raises SlotsTakenError when all slots are in use.
        """
        self._retire(group, record)
        renewed = self._open(group, record.registration, record.rank)
        renewed.batch_rank = record.batch_rank
        renewed.purged = dict(record.purged)
        renewed.block_size = record.block_size
        renewed.event_at = record.event_at
        renewed.counters = msgspec.convert(msgspec.to_builtins(record.counters), Counters)
        return renewed

    def close_stream(self, group: Group, record: StreamRecord) -> None:
        """Removes a stream: no answer names it from this commit on."""
        self._retire(group, record)
        del self.streams[record.id]

    def _retire(self, group: Group, record: StreamRecord) -> None:
        record.retired = True
        self._retired[record.slot] = record
        group.touch(record)

    def _free_slot(self) -> int:
        used = self._retired.keys() | {record.slot for record in self.streams.values()}
        slot = next(slot for slot in range(len(used) + 1) if slot not in used)
        if slot >= MAX_SLOTS:
            raise SlotsTakenError(f"all {MAX_SLOTS} slots of the map in {self.path} are in use")
        return slot

    def _next_generation(self, group: Group) -> int:
        generation = int(group.changes.meta(META_GENERATION) or 0) + 1
        group.changes.put_meta(META_GENERATION, str(generation).encode())
        return generation

    # collecting

    @property
    def garbage(self) -> int:
        """How many retired slots are not collected yet."""
        return len(self._retired)

    def collect(self, step: int = COLLECT_STEP) -> None:
        """Deletes up to ``step`` entries of retired slots in one short transaction. Raises MapError."""
        slot, record = next(iter(self._retired.items()))
        with as_map_error("write", self.path), self.env.begin(write=True) as txn:
            changes = Changes(txn, self.tables)
            left = step
            for table in self.tables.by_slot:
                left -= self._sweep(txn, changes, table, record, left)
            changes.flush()
            if left > 0:
                txn.delete(slot_key(record.slot), db=self.tables.streams)
        if left > 0:
            del self._retired[slot]

    def _sweep(
        self, txn: lmdb.Transaction, changes: Changes, table: lmdb._Database, record: StreamRecord, limit: int
    ) -> int:
        prefix, bit, swept = slot_key(record.slot), 1 << record.slot, 0
        with txn.cursor(table) as cursor:
            found = cursor.set_range(prefix)
            while found and swept < limit and bytes(cursor.key()).startswith(prefix):
                if table is self.tables.names:
                    name = Name.decode(bytes(cursor.value()))
                    block = holders_key(bytes(cursor.key()), name.key, record.main_group)
                    for tier in (GPU, CPU, DISK):
                        changes.unhold(block, tier, bit)
                    if name.held:
                        changes.went(name.age)
                found = cursor.delete()
                swept += 1
        return swept

    # bounds

    def used_bytes(self) -> int:
        """Bytes of the pages that hold entries. Raises MapError."""
        with as_map_error("read", self.path), self.env.begin() as txn:
            return used_bytes(txn, self.tables)

    def evict(self, count: int, record: StreamRecord | None = None) -> None:
        """Forgets ``count`` blocks, of all streams or of one, oldest conversation first. Raises MapError.

        Fewer may go, where many others have to be passed; the next time it goes on from there.
        """
        whose = 0 if record is None else record.generation
        hand = self._hands.get(whose, Hand())
        records = {slot_key(each.slot): each for each in self.streams.values()}
        with self.group() as group:

            def blocks_of(key: bytes) -> StreamBlocks | None:
                found = records.get(key[:2])
                return None if found is None else group.blocks(found)

            slot = b"" if record is None else slot_key(record.slot)
            hand = hand.turn(group.changes, blocks_of, count, slot)
        current = {0, *(each.generation for each in self.streams.values())}
        self._hands = {each: at for each, at in self._hands.items() if each in current}
        self._hands[whose] = hand

    def sweep_waiting(self, before: float) -> bool:
        """Looks at the next rows of ``waiting``, and forgets the blocks that waited already at ``before``.

        ``before`` is on the clock of :meth:`now`. False once all rows were looked at. Raises MapError.
        """
        with self.group() as group:
            rows = group.changes.waiting_from(self._swept, COLLECT_STEP)
            due = [(key, row) for key, row in rows if not before < row.since <= self.now()]
            self._give_up(group, due, "parent_unknown")
        self._swept = rows[-1][0] + b"\0" if len(rows) == COLLECT_STEP else b""
        return bool(self._swept)

    def forget(self, count: int) -> None:
        """Forgets ``count`` entries that count for no answer, or if there are none the oldest conversations.

        Those of retired slots go before blocks that wait for their parents. Raises MapError.
        """
        waiting = most_waiting(self.streams.values())
        if self._retired:
            self.collect(count)
        elif waiting is not None:
            self._drop_waiting(count, waiting)
        else:
            self.evict(count)

    def _drop_waiting(self, count: int, record: StreamRecord) -> None:
        with self.group() as group:
            rows = group.changes.waiting_from(slot_key(record.slot), count)
            self._give_up(group, [row for row in rows if row[0].startswith(slot_key(record.slot))], "no_room")

    def _give_up(self, group: Group, rows: list[tuple[bytes, Waiting]], reason: str) -> None:
        """Retired slots are collected anyway."""
        records = {record.slot: record for record in self.streams.values()}
        for key, waiting in rows:
            record = records.get(int.from_bytes(key[:2], "big"))
            if record is not None:
                group.blocks(record).give_up(key, waiting)
                record.counters.skip(reason)

    def make_room(self, count: int) -> None:
        """As :meth:`forget`, and forgets readers too that died in the middle of a query. Raises MapError.

        They keep old pages from being reused.
        """
        self.forget_dead_readers()
        self.forget(count)

    def forget_dead_readers(self) -> None:
        """Those that died in the middle of a query keep old pages from being reused. Raises MapError."""
        with as_map_error("write", self.path):
            self.env.reader_check()

    # the end

    def close(self) -> None:
        """Closes the map, cleanly if it has room to say so."""
        try:
            self.env.sync(True)
            with self.env.begin(write=True) as txn:
                txn.put(META_CLEAN, b"1", db=self.tables.meta)
            self.env.sync(True)
        except lmdb.Error as error:
            log.warning("the map in %s could not be closed cleanly: %s", self.path, error)
        finally:
            self.env.close()
            self._lock.close()
