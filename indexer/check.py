"""Verifies a map: every invariant between its streams and the tables that they share, from one snapshot.

Streams are looked at one by one: memory is needed for the names of one stream, not of all. The snapshot is of
one commit; beside a running indexer it keeps old pages from being used again while the check runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import lmdb
import msgspec

from indexer.folder import as_map_error, open_to_read
from indexer.keys import KEY_BYTES
from indexer.layout import (
    AGE_BYTES,
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
    age_key,
    decode_holders,
    decode_record,
    decode_shared,
    decode_waiting,
    slot_key,
)
from indexer.sharding import whole_map
from indexer.stream_check import ROW_CHECKS, SHORTEST_NAME, UNREADABLE, Held, StreamCheck, copies_by_block
from indexer.violations import Report, title_of, words_of


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
            except UNREADABLE as error:
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
                self._report.tell("streams", title_of(record), problem)
            if current[record.id] > 1:
                self._report.tell("streams", title_of(record), "has two current generations")
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
        stream = StreamCheck(self._report, record, held)
        stream.check()
        for key, name in held.names.items():
            age = self._txn.get(age_key(name.age), db=self._tables.ages) if name.held else key
            if age is None or bytes(age) != key:
                self._report.tell("names", words_of(record, key), f"its age {name.age} leads elsewhere")
        for key, names in stream.copies.items():
            self._check_holder(record, key, names)
            for tier, count in enumerate(names):
                self._held[record.slot, tier] += bool(count)

    def _read(self, record: StreamRecord) -> Held:
        held = Held({}, {}, {}, [])
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
                self._report.tell("streams", title_of(record), f"counts {told} {name}, there are {found}")
        return held

    def _readable(self, record: StreamRecord, name: str) -> Iterator[tuple[bytes, bytes]]:
        """A stream's rows of a table; those that make no sense are told."""
        for key, value in self._rows(self._by_slot[name], slot_key(record.slot)):
            try:
                ROW_CHECKS[name](key, value)
            except UNREADABLE as error:
                self._report.tell(name, f"{title_of(record)} {key[2:].hex()}", f"cannot be read: {error}")
            else:
                yield key, value

    def _check_holder(self, record: StreamRecord, key: bytes, names: Copies) -> None:
        value = self._txn.get(key, db=self._tables.blocks)
        holders = None if value is None else _holders(bytes(value))
        if holders is None:
            self._report.tell("blocks", key.hex(), f"is not there, though {title_of(record)} holds it")
            self._suspects.add(record.slot)
            return
        for tier, bits in enumerate(holders):
            if names[tier] and not bits >> record.slot & 1:
                who = f"{title_of(record)} has a name for it and is not among its holders"
                self._report.tell("blocks", key.hex(), f"{who} ({TIERS[tier]})")
                self._suspects.add(record.slot)

    # all streams

    def _check_ages(self) -> None:
        """Each age leads to a block that is held, and knows it; blocks look for their ages themselves."""
        for age, key in self._rows(self._tables.ages, b""):
            record = self._records.get(key[:2])
            if len(age) != AGE_BYTES or record is None or len(key) < SHORTEST_NAME:
                self._report.tell("ages", age.hex(), f"is of {key.hex() or 'nothing'}, which is no stream's")
            elif not record.retired:
                name = self._name(key)
                if name is None or not name.held or age_key(name.age) != age:
                    self._report.tell("ages", age.hex(), f"is not the age of {words_of(record, key)}")

    def _name(self, key: bytes) -> Name | None:
        value = self._txn.get(key, db=self._tables.names)
        try:
            return None if value is None else Name.decode(bytes(value))
        except UNREADABLE:  # told when the stream was checked
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
                        who = f"is a holder ({TIERS[tier]}) that has no name for it"
                        self._report.tell("blocks", key.hex(), f"{title_of(suspects[slot])} {who}")

    def _expected_again(self, record: StreamRecord) -> dict[bytes, Copies]:
        names = {key: self._name(key) for key, _ in self._rows(self._tables.names, slot_key(record.slot))}
        return copies_by_block(record, {key: name for key, name in names.items() if name is not None})


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
