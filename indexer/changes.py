"""The changes of one write transaction: staged in memory over the map, then flushed in key order.

A group of batches touches the same names and holders again and again; staged, each is read once and written
once, and sorted writes go through the tree from left to right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from operator import itemgetter
from typing import TypeVar, cast

import lmdb

from indexer.layout import (
    AGE_BYTES,
    CPU,
    GPU,
    META_AGE,
    NO_COPIES,
    NOBODY,
    Copies,
    Holders,
    Name,
    Tables,
    Waiting,
    age_key,
    decode_holders,
    decode_shared,
    decode_waiting,
    encode_holders,
    encode_shared,
    encode_until,
    encode_waiting,
    read_untils,
)

Value = TypeVar("Value")
Pairs = list[tuple[bytes, bytes]]
MAX_AGES_READ = 20_000


class Changes:
    """Reads through to the map; nothing is written before :meth:`flush`. ``now`` is on the boot clock."""

    def __init__(self, txn: lmdb.Transaction, tables: Tables, now: float = 0.0) -> None:
        self._txn = txn
        self._now = now
        self._get = cast(Callable[..., bytes | None], txn.get)
        self._tables = tables
        self._names: dict[bytes, Name | bytes | None] = {}  # bytes: not looked at since it was encoded
        self._changed_names: dict[bytes, Name | bytes | None] = {}
        self._holders: dict[bytes, Holders] = {}
        self._changed_holders: dict[bytes, Holders] = {}
        self._shared: dict[bytes, Copies] = {}
        self._changed_shared: set[bytes] = set()
        self._waiting: dict[bytes, Waiting | None] = {}
        self._changed_waiting: set[bytes] = set()
        self._came: dict[int, bytes] = {}
        self._went: list[int] = []
        self._age = int(self.meta(META_AGE) or 0)

    def fetch(self, names: list[bytes], blocks: list[bytes]) -> None:
        """Reads names and holders that are about to be asked for, all at once."""
        wanted = [key for key in names if key not in self._names]
        self._names.update(dict.fromkeys(wanted))
        with self._txn.cursor(self._tables.names) as cursor:
            for key, value in cast(Pairs, cursor.getmulti(wanted)):
                self._names[key] = value
        wanted = [key for key in blocks if key not in self._holders]
        self._holders.update(dict.fromkeys(wanted, NOBODY))
        with self._txn.cursor(self._tables.blocks) as cursor:
            for key, value in cast(Pairs, cursor.getmulti(wanted)):
                self._holders[key] = decode_holders(value)

    def name(self, key: bytes) -> Name | None:
        """The name with this names key. Say :meth:`save` after changing it."""
        try:
            name = self._names[key]
        except KeyError:
            name = self._get(key, db=self._tables.names)
        if isinstance(name, bytes):
            name = Name.decode(name)
        self._names[key] = name
        return name

    def all_new(self, keys: list[bytes]) -> bool:
        """Whether none of these names keys, just fetched, has a name, and none is there twice."""
        return len(set(keys)) == len(keys) and not any(map(self._names.__getitem__, keys))

    def append(self, keys: list[bytes], blocks: list[bytes], parents: list[bytes], copies: Copies) -> None:
        """Stages a chain of new names."""
        first = self._age + 1
        self._age += len(keys)
        self._came.update(zip(range(first, first + len(keys)), keys, strict=True))
        rows = dict(zip(keys, Name.encode_chain(blocks, parents, copies, first), strict=True))
        self._names.update(rows)
        self._changed_names.update(rows)

    def save(self, key: bytes, name: Name | None) -> None:
        """Stages a changed name, or its removal."""
        self._names[key] = self._changed_names[key] = name

    def holders(self, key: bytes) -> Holders:
        """Who holds the block with this block key."""
        found = self._holders.get(key)
        if found is None:
            value = self._get(key, db=self._tables.blocks)
            found = self._holders[key] = NOBODY if value is None else decode_holders(value)
        return found

    def hold(self, key: bytes, tier: int, slots: int) -> bool:
        """Stages that the ``slots`` (a bitmap) hold a block in ``tier``; gives whether they did already."""
        gpu, cpu, disk = before = self._holders.get(key) or self.holders(key)
        if before[tier] & slots:
            return True
        if tier == GPU:
            held = (gpu | slots, cpu, disk)
        elif tier == CPU:
            held = (gpu, cpu | slots, disk)
        else:
            held = (gpu, cpu, disk | slots)
        self._holders[key] = self._changed_holders[key] = held
        return False

    def hold_all(self, keys: list[bytes], tier: int, slots: int) -> list[bytes]:
        """As :meth:`hold`, of many blocks; gives those that the ``slots`` held already."""
        if tier != GPU:
            return [key for key in keys if self.hold(key, tier, slots)]
        staged, changed, before = self._holders, self._changed_holders, []
        for key in keys:
            gpu, cpu, disk = staged.get(key) or self.holders(key)
            if gpu & slots == slots:
                before.append(key)
            else:
                staged[key] = changed[key] = (gpu | slots, cpu, disk)
        return before

    def unhold(self, key: bytes, tier: int, slots: int) -> None:
        """Stages that the ``slots`` (a bitmap) no longer hold a block in ``tier``."""
        holders = list(self._holders.get(key) or self.holders(key))
        holders[tier] &= ~slots
        self._holders[key] = self._changed_holders[key] = (holders[0], holders[1], holders[2])

    def shared(self, key: bytes) -> Copies:
        """How many names more than one hold a block, per tier; by slot and key in ``blocks``."""
        found = self._shared.get(key)
        if found is None:
            value = self._get(key, db=self._tables.shared)
            found = self._shared[key] = NO_COPIES if value is None else decode_shared(value)
        return found

    def share(self, key: bytes, tier: int, names: int) -> int:
        """Stages that so many more names hold a block, or fewer; gives how many rows more there are."""
        before = self.shared(key)
        counts = list(before)
        counts[tier] += names
        after = self._shared[key] = (counts[0], counts[1], counts[2])
        self._changed_shared.add(key)
        return (after != NO_COPIES) - (before != NO_COPIES)

    def waiting(self, key: bytes) -> Waiting | None:
        """The block with this names key that waits for its parent."""
        if key not in self._waiting:
            value = self._get(key, db=self._tables.waiting)
            self._waiting[key] = None if value is None else decode_waiting(value)
        return self._waiting[key]

    def wait(self, key: bytes, waiting: Waiting) -> None:
        """Stages a block that waits, from now on if it did not before."""
        waiting.since = waiting.since or self._now
        self._waiting[key] = waiting
        self._changed_waiting.add(key)

    def waiting_from(self, start: bytes, limit: int) -> list[tuple[bytes, Waiting]]:
        """The first ``limit`` blocks that wait, by names key from ``start`` on; of what is committed."""
        with self._txn.cursor(self._tables.waiting) as cursor:
            if not cursor.set_range(start):
                return []
            rows = itertools.islice(cursor.iternext(), limit)
            return [(bytes(key), decode_waiting(bytes(value))) for key, value in rows]

    def came(self, name: bytes) -> int:
        """Stages that the block with this names key came just now; gives its age."""
        self._age += 1
        self._came[self._age] = name
        return self._age

    def went(self, age: int) -> None:
        """Stages that the block of this age is gone."""
        if self._came.pop(age, None) is None:
            self._went.append(age)

    def ages(self, start: int) -> Generator[tuple[int, bytes], None, None]:
        """Ages from ``start`` on with the names keys of their blocks, of all slots; of what is committed.

        No more than :data:`MAX_AGES_READ`.
        """
        with self._txn.cursor(self._tables.ages) as cursor:
            if cursor.set_range(age_key(start)):
                for age, key in itertools.islice(cursor, MAX_AGES_READ):
                    yield int.from_bytes(age, "big"), bytes(key)

    def corrections(self, slot: bytes) -> tuple[dict[bytes, float], dict[bytes, float]]:
        """What is denied and what is believed of a slot: block key -> until when."""
        return read_untils(self._txn, self._tables.denied, slot), read_untils(
            self._txn, self._tables.believed, slot
        )

    def deny(self, key: bytes, until: float | None) -> None:
        """Writes until when a block of a slot (both in the key) is denied; None ends it."""
        self._correct(self._tables.denied, key, until)

    def believe(self, key: bytes, until: float | None) -> None:
        """Writes until when a block of a slot (both in the key) is believed; None ends it."""
        self._correct(self._tables.believed, key, until)

    def _correct(self, table: lmdb._Database, key: bytes, until: float | None) -> None:
        if until is None:
            self._txn.delete(key, db=table)
        else:
            self._txn.put(key, encode_until(until), db=table)

    def link(self, parent: bytes, child: bytes) -> None:
        """Notes that ``child`` waits for ``parent`` (names keys both)."""
        self._txn.put(parent, child, db=self._tables.children)

    def stop_waiting(self, key: bytes, parent: bytes) -> None:
        """Stages the end of a block's waiting for ``parent``."""
        self._waiting[key] = None
        self._changed_waiting.add(key)
        self._txn.delete(parent, key, db=self._tables.children)

    def waiting_for(self, parent: bytes) -> list[bytes]:
        """The names keys of the blocks that wait for ``parent``."""
        with self._txn.cursor(self._tables.children) as cursor:
            return [bytes(child) for child in cursor.iternext_dup()] if cursor.set_key(parent) else []

    def meta(self, key: bytes) -> bytes | None:
        """A value of the meta table."""
        return self._get(key, db=self._tables.meta)

    def put_meta(self, key: bytes, value: bytes) -> None:
        """Writes a value of the meta table."""
        self._txn.put(key, value, db=self._tables.meta)

    def flush(self) -> None:
        """Writes everything. Raises lmdb.MapFullError."""
        self._write(self._tables.names, self._changed_names, _encode_name)
        self._write(self._tables.blocks, self._changed_holders, _encode_holders)
        shared = {key: self._shared[key] for key in self._changed_shared}
        self._write(self._tables.shared, shared, _encode_counts)
        waiting = {key: self._waiting[key] for key in self._changed_waiting}
        self._write(self._tables.waiting, waiting, _encode_waiting)
        self._write_ages()

    def _write_ages(self) -> None:
        """New rows go to the end of the table, in order: its pages are full."""
        for age in self._went:
            self._txn.delete(age_key(age), db=self._tables.ages)
        if self._came:
            with self._txn.cursor(self._tables.ages) as cursor:
                cursor.putmulti(
                    [(age.to_bytes(AGE_BYTES, "big"), name) for age, name in self._came.items()], append=True
                )
            self.put_meta(META_AGE, str(self._age).encode())

    def _write(
        self, table: lmdb._Database, staged: dict[bytes, Value], encode: Callable[[Value], bytes | None]
    ) -> None:
        """Writes rows in key order; a value of which nothing is left is deleted."""
        rows = [(key, encode(value)) for key, value in staged.items()]
        rows.sort(key=itemgetter(0))
        gone = [key for key, value in rows if value is None]
        for key in gone:
            self._txn.delete(key, db=table)
        puts = [row for row in rows if row[1] is not None] if gone else rows
        if puts:
            with self._txn.cursor(table) as cursor:
                cursor.putmulti(cast(Pairs, puts))


def _encode_name(name: Name | bytes | None) -> bytes | None:
    return name.encode() if isinstance(name, Name) else name


def _encode_holders(holders: Holders) -> bytes | None:
    return None if holders == NOBODY else encode_holders(holders)


def _encode_counts(counts: Copies) -> bytes | None:
    return None if counts == NO_COPIES else encode_shared(*counts)


def _encode_waiting(waiting: Waiting | None) -> bytes | None:
    return None if waiting is None else encode_waiting(waiting)
