"""Verifies a map: every invariant between its tables, from one snapshot.

Streams are looked at one by one: memory is needed for the names of one stream, not of all. The snapshot is of
one commit; beside a running indexer it keeps old pages from being used again while the check runs.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import lmdb
import msgspec

from events.schema import display_hash
from indexer.folder import as_map_error, open_to_read
from indexer.keys import KEY_BYTES
from indexer.layout import (
    AGE_BYTES,
    GPU,
    MAX_SLOTS,
    META_GENERATION,
    META_SCHEMA,
    NO_COPIES,
    SCHEMA_VERSION,
    TIERS,
    Copies,
    Holders,
    Name,
    StreamKey,
    StreamRecord,
    Tables,
    Waiting,
    age_key,
    decode_holders,
    decode_record,
    decode_shared,
    decode_until,
    decode_waiting,
    holders_key,
    slot_key,
)
from indexer.sharding import whole_map

MAX_TOLD = 100
_SHORTEST_NAME = 3 + KEY_BYTES
_CORRECTION = 2 + KEY_BYTES
_UNREADABLE = (msgspec.MsgspecError, struct.error, ValueError, IndexError)


class Violation(msgspec.Struct, frozen=True):
    """What is wrong, and with which entry of which table."""

    table: str
    key: str
    problem: str


class Report(msgspec.Struct):
    """What a check found.

    ``violations`` are the first :data:`MAX_TOLD` of ``found``; ``entries`` counts rows by table.
    ``commits_behind`` is how many commits a running indexer made while the check looked at its snapshot.
    """

    streams: int = 0
    entries: dict[str, int] = {}
    found: int = 0
    violations: list[Violation] = []
    commits_behind: int = 0

    @property
    def clean(self) -> bool:
        return not self.found

    def add(self, name: str, other: Report) -> None:
        """Adds what was found in the map of a shard."""
        self.streams += other.streams
        self.commits_behind += other.commits_behind
        self.entries = {table: self.entries.get(table, 0) + count for table, count in other.entries.items()}
        self.found += other.found
        told = [Violation(each.table, f"{name} {each.key}", each.problem) for each in other.violations]
        self.violations = (self.violations + told)[:MAX_TOLD]

    def tell(self, table: str, key: str, problem: str) -> None:
        """Notes a violation."""
        self.found += 1
        if len(self.violations) < MAX_TOLD:
            self.violations.append(Violation(table, key, problem))


def check_folder(path: Path) -> Report:
    """Checks the map in a folder, closed or beside its indexer. Raises MapError when it cannot be read.

    Of a divided map all shards are looked at, and that no stream is in two of them.
    """
    folders = whole_map(path)
    if folders == [path]:
        return _check_one(path)
    whole, homes = Report(), Counter[StreamKey]()
    for folder in folders:
        report = _check_one(folder, homes)
        whole.add(folder.name, report)
    for (instance, rank), count in homes.items():
        if count > 1:
            whole.tell("streams", f"{instance} rank {rank}", f"is in {count} shards")
    return whole


def _check_one(path: Path, homes: Counter[StreamKey] | None = None) -> Report:
    """Checks one map; counts its current streams in ``homes``."""
    env, tables = open_to_read(path)
    try:
        with as_map_error("read", path):
            report = check(env, tables)
            if homes is not None:
                homes.update(_streams(env, tables))
            return report
    finally:
        env.close()


def _streams(env: lmdb.Environment, tables: Tables) -> Iterator[StreamKey]:
    """Those that are not retired; records that cannot be read are a violation already."""
    with env.begin() as txn:
        for _, value in txn.cursor(tables.streams):
            with suppress(msgspec.MsgspecError):
                record = decode_record(bytes(value))
                if not record.retired:
                    yield record.id


def check(env: lmdb.Environment, tables: Tables) -> Report:
    """Checks an open map. Raises lmdb.Error when a page of it cannot be read."""
    with env.begin() as txn:
        report = _Check(txn, tables).run()
        report.commits_behind = env.info()["last_txnid"] - txn.id()
    return report


class _Held(NamedTuple):
    """The tables' rows of one stream, by key."""

    names: dict[bytes, Name]
    shared: dict[bytes, Copies]
    waiting: dict[bytes, Waiting]
    links: list[tuple[bytes, bytes]]


class _Check:
    def __init__(self, txn: lmdb.Transaction, tables: Tables) -> None:
        self._txn = txn
        self._tables = tables
        self._by_slot = {
            "names": tables.names,
            "shared": tables.shared,
            "waiting": tables.waiting,
            "children": tables.children,
            "denied": tables.denied,
            "believed": tables.believed,
        }
        self._report = Report()
        self._records: dict[bytes, StreamRecord] = {}
        self._suspects: set[int] = set()  # slots whose bits in ``blocks`` have to be looked at one by one
        self._held: Counter[tuple[int, int]] = Counter()  # blocks that names hold, by slot and tier

    def run(self) -> Report:
        tables = self._tables
        every = {**self._by_slot, "ages": tables.ages, "blocks": tables.blocks, "streams": tables.streams}
        self._report.entries = {name: self._txn.stat(table)["entries"] for name, table in every.items()}
        self._check_meta()
        self._read_records()
        for name in self._by_slot:
            self._check_slots(name)
        for record in self._records.values():
            if not record.retired:
                self._check_stream(record)
        self._check_ages()
        self._check_blocks()
        self._check_suspects()
        return self._report

    def _check_meta(self) -> None:
        schema = self._txn.get(META_SCHEMA, db=self._tables.meta)
        if schema is None or bytes(schema) != str(SCHEMA_VERSION).encode():
            self._report.tell("meta", "schema", f"it is {schema!r}, not {SCHEMA_VERSION}")

    def _read_records(self) -> None:
        last = int(bytes(self._txn.get(META_GENERATION, db=self._tables.meta) or b"0"))
        generations: Counter[int] = Counter()
        current: Counter[tuple[str, int]] = Counter()
        for key, value in self._rows(self._tables.streams, b""):
            title = f"slot {key.hex()}"
            try:
                record = decode_record(value)
            except _UNREADABLE as error:
                self._report.tell("streams", title, f"cannot be read: {error}")
                continue
            if not 0 <= record.slot < MAX_SLOTS or key != slot_key(record.slot):
                self._report.tell("streams", title, f"holds the record of slot {record.slot}")
                continue
            self._records[key] = record
            generations[record.generation] += 1
            current[record.id] += not record.retired
            if generations[record.generation] > 1 or record.generation > last:
                problem = f"generation {record.generation} is used twice, or will be: the last is {last}"
                self._report.tell("streams", _title(record), problem)
            if current[record.id] > 1:
                self._report.tell("streams", _title(record), "has two current generations")
        self._report.streams = sum(not record.retired for record in self._records.values())

    def _rows(self, table: lmdb._Database, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The rows whose keys start with ``prefix``, in order."""
        with self._txn.cursor(table) as cursor:
            found = cursor.set_range(prefix) if prefix else cursor.first()
            if found:
                for key, value in cursor.iternext():
                    row = (bytes(key), bytes(value))
                    if not row[0].startswith(prefix):
                        return
                    yield row

    def _check_slots(self, name: str) -> None:
        """No rows of slots that no stream has: the slot's next stream would be credited for them."""
        with self._txn.cursor(self._by_slot[name]) as cursor:
            found = cursor.first()
            while found:
                key = bytes(cursor.key())
                if len(key) < 2:
                    self._report.tell(name, key.hex(), "the key is too short")
                    found = cursor.next_nodup()
                    continue
                slot = int.from_bytes(key[:2], "big")
                if key[:2] not in self._records:
                    self._report.tell(name, f"slot {slot}", "there are entries of a slot that no stream has")
                found = slot < 0xFFFF and cursor.set_range(slot_key(slot + 1))

    # one stream

    def _check_stream(self, record: StreamRecord) -> None:
        held = self._read(record)
        _Stream(self._report, record, held).check()
        for key, name in held.names.items():
            age = self._txn.get(age_key(name.age), db=self._tables.ages) if name.held else key
            if age is None or bytes(age) != key:
                self._report.tell("names", _words(record, key), f"its age {name.age} leads elsewhere")
        expected = self._expected(record, held.names)
        for key, names in expected.items():
            self._check_holder(record, key, names)
            for tier, count in enumerate(names):
                self._held[record.slot, tier] += bool(count)
        self._check_shared(record, expected, held.shared)

    def _check_shared(
        self, record: StreamRecord, expected: dict[bytes, Copies], shared: dict[bytes, Copies]
    ) -> None:
        """Names more than one of a block are counted, wherever there are some."""
        slot = slot_key(record.slot)
        more: dict[bytes, Copies] = {}
        for key, (gpu, cpu, disk) in expected.items():
            counts = (max(0, gpu - 1), max(0, cpu - 1), max(0, disk - 1))
            if any(counts):
                more[slot + key] = counts
        for key in sorted(more.keys() | shared.keys()):
            if more.get(key) != shared.get(key):
                true, told = more.get(key, NO_COPIES), shared.get(key)
                problem = f"{_title(record)} counts {told} names more than one, there are {true}"
                self._report.tell("shared", key.hex(), problem)
        if record.shared != len(more):
            problem = f"counts {record.shared} blocks that several names hold, there are {len(more)}"
            self._report.tell("streams", _title(record), problem)

    def _read(self, record: StreamRecord) -> _Held:
        held = _Held({}, {}, {}, [])
        for key, value in self._readable(record, "names"):
            held.names[key] = Name.decode(value)
        for key, value in self._readable(record, "shared"):
            held.shared[key] = decode_shared(value)
        for key, value in self._readable(record, "waiting"):
            held.waiting[key] = decode_waiting(value)
        held.links.extend(self._readable(record, "children"))
        for name, told in (("denied", record.denied), ("believed", record.believed)):
            found = sum(1 for _ in self._readable(record, name))
            if found != told:
                self._report.tell("streams", _title(record), f"counts {told} {name}, there are {found}")
        return held

    def _readable(self, record: StreamRecord, name: str) -> Iterator[tuple[bytes, bytes]]:
        """A stream's rows of a table; those that make no sense are told."""
        for key, value in self._rows(self._by_slot[name], slot_key(record.slot)):
            try:
                _READ[name](key, value)
            except _UNREADABLE as error:
                self._report.tell(name, f"{_title(record)} {key[2:].hex()}", f"cannot be read: {error}")
            else:
                yield key, value

    def _expected(self, record: StreamRecord, names: dict[bytes, Name]) -> dict[bytes, Copies]:
        """How many of a stream's names hold a block, per tier, by key in ``blocks``."""
        expected: dict[bytes, Copies] = {}
        for key, name in names.items():
            if name.held:
                block = holders_key(key, name.key, record.main_group)
                gpu, cpu, disk = (bool(copies) for copies in name.copies)
                before = expected.get(block, NO_COPIES)
                expected[block] = (before[0] + gpu, before[1] + cpu, before[2] + disk)
        return expected

    def _check_holder(self, record: StreamRecord, key: bytes, names: Copies) -> None:
        value = self._txn.get(key, db=self._tables.blocks)
        holders = None if value is None else _holders(bytes(value))
        if holders is None:
            self._report.tell("blocks", key.hex(), f"is not there, though {_title(record)} holds it")
            self._suspects.add(record.slot)
            return
        for tier, bits in enumerate(holders):
            if names[tier] and not bits >> record.slot & 1:
                who = f"{_title(record)} has a name for it and is not among its holders"
                self._report.tell("blocks", key.hex(), f"{who} ({TIERS[tier]})")
                self._suspects.add(record.slot)

    # all streams

    def _check_ages(self) -> None:
        """Each age leads to a block that is held, and knows it; blocks look for their ages themselves."""
        for age, key in self._rows(self._tables.ages, b""):
            record = self._records.get(key[:2])
            if len(age) != AGE_BYTES or record is None or len(key) < _SHORTEST_NAME:
                self._report.tell("ages", age.hex(), f"is of {key.hex() or 'nothing'}, which is no stream's")
            elif not record.retired:
                name = self._name(key)
                if name is None or not name.held or age_key(name.age) != age:
                    self._report.tell("ages", age.hex(), f"is not the age of {_words(record, key)}")

    def _name(self, key: bytes) -> Name | None:
        value = self._txn.get(key, db=self._tables.names)
        try:
            return None if value is None else Name.decode(bytes(value))
        except _UNREADABLE:  # told when the stream was checked
            return None

    def _check_blocks(self) -> None:
        """Values repeat a lot: each is looked at once, and bits are counted by value."""
        values: Counter[bytes] = Counter()
        problems: dict[bytes, str | None] = {}
        known = sum(1 << record.slot for record in self._records.values())
        for key, value in self._rows(self._tables.blocks, b""):
            if len(key) not in (KEY_BYTES, KEY_BYTES + 1):  # a block, or a block and an attention group
                self._report.tell("blocks", key.hex(), f"the key has {len(key)} bytes, not {KEY_BYTES}")
            if value not in problems:
                problems[value] = _problem(value, known)
            problem = problems[value]
            if problem is not None:
                self._report.tell("blocks", key.hex(), problem)
            values[value] += 1
        found: Counter[tuple[int, int]] = Counter()
        for value, count in values.items():
            for tier, bits in enumerate(_holders(value) or ()):
                for slot in _bits(bits):
                    found[slot, tier] += count
        for slot, tier in found.keys() | self._held.keys():
            if found[slot, tier] != self._held[slot, tier]:
                self._suspects.add(slot)

    def _check_suspects(self) -> None:
        """Slots whose bits are not as many as their names, and retired ones: each bit needs a name."""
        by_slot = {record.slot: record for record in self._records.values()}
        suspects = {slot: by_slot[slot] for slot in self._suspects if slot in by_slot}
        expected = {slot: self._expected_again(record) for slot, record in suspects.items()}
        mask = sum(1 << slot for slot in suspects)
        for key, value in self._rows(self._tables.blocks, b"") if suspects else ():
            for tier, bits in enumerate(_holders(value) or ()):
                for slot in _bits(bits & mask):
                    if not expected[slot].get(key, NO_COPIES)[tier]:
                        who = f"{_title(suspects[slot])} is a holder ({TIERS[tier]}) that has no name for it"
                        self._report.tell("blocks", key.hex(), who)

    def _expected_again(self, record: StreamRecord) -> dict[bytes, Copies]:
        names = {key: self._name(key) for key, _ in self._rows(self._tables.names, slot_key(record.slot))}
        return self._expected(record, {key: name for key, name in names.items() if name is not None})


class _Stream:
    """One stream's own tables against each other, and against its record."""

    def __init__(self, report: Report, record: StreamRecord, held: _Held) -> None:
        self._report = report
        self._record = record
        self._names = held.names
        self._waiting = held.waiting
        self._links = held.links

    def check(self) -> None:
        self._check_chain()
        self._check_waiting()
        self._check_record()

    def _tell(self, table: str, key: bytes, problem: str) -> None:
        self._report.tell(table, _words(self._record, key), problem)

    def _check_chain(self) -> None:
        children: Counter[bytes] = Counter()
        ghosts: Counter[bytes] = Counter()
        for key, name in self._names.items():
            if name.parent:
                parent = key[:3] + name.parent
                (children if name.held else ghosts)[parent] += 1
                if parent not in self._names:
                    self._tell("names", key, f"its parent {_hash(name.parent)} has no name")
        for key, name in self._names.items():
            if name.children != children[key]:
                self._tell("names", key, f"counts {name.children} held children, there are {children[key]}")
            if name.ghosts != ghosts[key]:
                self._tell("names", key, f"counts {name.ghosts} ghosts behind it, there are {ghosts[key]}")
            if not (name.held or children[key] or ghosts[key]):
                self._tell("names", key, "is a ghost on which nothing hangs")
            if name.again >= max(1, name.copies[GPU]):
                self._tell("names", key, f"doubts {name.again} of {name.copies[GPU]} copies on the GPU")
            if key[2] != self._record.main_group and name.parent:
                self._tell("names", key, "is in a chain, but not of the main attention group")

    def _check_waiting(self) -> None:
        expected = {(waiting.awaits(key), key) for key, waiting in self._waiting.items()}
        links = set(self._links)
        for parent, child in sorted(links - expected):
            self._tell("children", parent, f"{_words(self._record, child)} does not wait for it")
        for parent, child in sorted(expected - links):
            self._tell("waiting", child, f"nothing leads to it from its parent {_hash(parent[3:])}")
        for key, waiting in self._waiting.items():
            if not any(waiting.copies):
                self._tell("waiting", key, "a block without copies waits")
            if key in self._names:
                self._tell("waiting", key, "both waits and is known")
            if self._awaited(key, waiting) in self._names:
                self._tell("waiting", key, f"waits for {_hash(waiting.awaits(key)[3:])}, which is known")

    def _awaited(self, key: bytes, waiting: Waiting) -> bytes:
        """The names key of what a block waits for."""
        awaited, main = waiting.awaits(key), self._record.main_group
        return awaited if waiting.local or main is None else awaited[:2] + bytes([main]) + awaited[3:]

    def _check_record(self) -> None:
        record = self._record
        held = {key for key, name in self._names.items() if name.held}
        behind = [
            key for key in held if self._names[key].parent and key[:3] + self._names[key].parent not in held
        ]
        spread = any(any(self._names[key].copies[1:]) for key in held)
        counts = (
            ("blocks", record.blocks, len(held)),
            ("orphans", record.orphans, len(behind)),
            ("waiting", record.waiting, len(self._waiting)),
        )
        for what, told, true in counts:
            if told != true:
                self._report.tell("streams", _title(record), f"counts {told} {what}, there are {true}")
        if spread and not record.lower_tiers:
            self._report.tell("streams", _title(record), "does not know of its blocks in lower tiers")


def _check_name(key: bytes, value: bytes) -> None:
    _check_width(key)
    Name.decode(value)


def _check_shared(key: bytes, value: bytes) -> None:
    if len(key) not in (_CORRECTION, _CORRECTION + 1):
        raise ValueError(f"the key has {len(key)} bytes, not {_CORRECTION}")
    decode_shared(value)


def _check_waiting(key: bytes, value: bytes) -> None:
    _check_width(key)
    _check_width(decode_waiting(value).awaits(key))


def _check_link(key: bytes, value: bytes) -> None:
    _check_width(key)
    _check_width(value)


def _check_correction(key: bytes, value: bytes) -> None:
    if len(key) != _CORRECTION:
        raise ValueError(f"the key has {len(key)} bytes, not {_CORRECTION}")
    decode_until(value)


def _check_width(key: bytes) -> None:
    if len(key) < _SHORTEST_NAME:
        raise ValueError(f"the key has {len(key)} bytes, less than {_SHORTEST_NAME}")


_READ: dict[str, Callable[[bytes, bytes], None]] = {
    "names": _check_name,
    "shared": _check_shared,
    "waiting": _check_waiting,
    "children": _check_link,
    "denied": _check_correction,
    "believed": _check_correction,
}


def _holders(value: bytes) -> Holders | None:
    """The bitmaps of a ``blocks`` value, None for one that makes no sense."""
    width = value[0] if value else 0
    if not width or len(value) - 1 not in (width, 2 * width, 3 * width):
        return None
    return decode_holders(value)


def _problem(value: bytes, known: int) -> str | None:
    holders = _holders(value)
    if holders is None:
        return f"cannot be read: {value[:40].hex() or 'nothing'}"
    everyone = holders[0] | holders[1] | holders[2]
    if not everyone:
        return "nobody holds it"
    strangers = everyone & ~known
    return f"its holder slot {next(_bits(strangers))} is no stream" if strangers else None


def _bits(bitmap: int) -> Iterator[int]:
    while bitmap:
        low = bitmap & -bitmap
        yield low.bit_length() - 1
        bitmap ^= low


def _title(record: StreamRecord) -> str:
    retired = ", retired" if record.retired else ""
    return f"{record.id[0]} rank {record.id[1]} (slot {record.slot}{retired})"


def _hash(engine_hash: bytes) -> str:
    return display_hash(engine_hash) if engine_hash else "nothing"


def _words(record: StreamRecord, key: bytes) -> str:
    """A key of the tables by slot, for people."""
    return f"{_title(record)} group {key[2]} block {_hash(key[3:])}"
