"""What the worker processes of one router tell each other: a board in shared memory, a row for each.

It is made before they are forked, and has no name: nothing is left of it when they are gone. Nobody waits to
say or to read something: a worker writes its own row only, and sums up those of the others. Every field is
eight bytes, aligned, so none is ever read half written; fields of one record may be of two moments for an
instant, which puts a load wrong by one request. Where a limit is kept, who looks at the sum and adds to it
does both alone (``Row.alone``).
"""

from __future__ import annotations

import logging
import mmap
import struct
from typing import Any

from xxhash import xxh3_64_intdigest

from events.logs import Throttled
from router.mutex import Mutex

log = logging.getLogger(__name__)

WORD = 8
_WORD = struct.Struct("@Q")
CHANGES, NAMES, USED = range(3)
"""The heads of all rows, a word for each: its changes, those of its names, how many records it ever used."""


class Table:
    """``rows`` of at most ``records`` records each. A record has a name, of which the hash is kept (two in
    one place would take chance to meet in 64 bits), and fields as ``shape`` (of struct) lists them: ``q`` and
    ``d`` only. ``of`` says for people what the names are.
    """

    def __init__(self, rows: int, records: int, shape: str, of: str = "names") -> None:
        if not shape or set(shape) - set("qd"):
            raise ValueError(f"shape {shape!r}: fields are q or d, of {WORD} bytes each")
        self.rows = rows
        self.records = records
        self.of = of
        self.fields = struct.Struct("@" + shape)
        self.record_bytes = WORD + self.fields.size
        self._name = struct.Struct(f"@Q{self.fields.size}x")
        self._heads = 3 * rows * WORD
        # Pages that nobody writes to take no memory.
        self.memory = mmap.mmap(-1, self._heads + rows * records * self.record_bytes)
        self.mutex = Mutex()

    def row(self, number: int) -> Row:
        """A worker's own row, and with it the view of all others."""
        return Row(self, number)

    def clear(self, number: int) -> None:
        """Empties the row of a worker that is no more; whoever follows it begins anew."""
        used = self.head(USED, number) * self.record_bytes
        at = self.start(number)
        self.memory[at : at + used] = bytes(used)
        self.set_head(USED, number, 0)
        for count in (NAMES, CHANGES):
            self.count(count, number)

    def start(self, number: int) -> int:
        """Where a row begins."""
        return self._heads + number * self.records * self.record_bytes

    def head(self, which: int, number: int) -> int:
        """One of the counts of a row."""
        count: int = _WORD.unpack_from(self.memory, (which * self.rows + number) * WORD)[0]
        return count

    def set_head(self, which: int, number: int, count: int) -> None:
        _WORD.pack_into(self.memory, (which * self.rows + number) * WORD, count)

    def count(self, which: int, number: int) -> None:
        """One more."""
        self.set_head(which, number, self.head(which, number) + 1)

    def heads_of(self, which: int) -> bytes:
        """That count of all rows: other bytes each time that one has changed."""
        return self.memory[which * self.rows * WORD : (which + 1) * self.rows * WORD]

    def names(self, number: int) -> dict[int, int]:
        """Where the fields of each name of a row are."""
        start, each = self.start(number), self.record_bytes
        records = self.memory[start : start + self.head(USED, number) * each]
        at = range(start + WORD, start + WORD + len(records), each)
        return {key: at for at, (key,) in zip(at, self._name.iter_unpack(records), strict=True) if key}

    def name(self, number: int, at: int, key: int) -> None:
        """Gives a name to the record whose fields are there, 0 for none."""
        _WORD.pack_into(self.memory, at - WORD, key)
        for count in (NAMES, CHANGES):
            self.count(count, number)


class Row:
    """One worker's place in a table."""

    def __init__(self, table: Table, number: int) -> None:
        self.table = table
        self._number = number
        self._own_seen = -1
        self._own: dict[int, int] = {}
        self._names_seen = b""
        self._others: list[dict[int, int]] = []
        self._places: dict[bytes, list[int]] = {}
        self._throttled = Throttled(log)

    def alone(self) -> Mutex:
        """While this is held, no other worker of this table holds it."""
        return self.table.mutex

    def version(self) -> bytes:
        """Another one each time that any row has changed."""
        return self.table.heads_of(CHANGES)

    def __len__(self) -> int:
        """The records of this row."""
        return len(self._look())

    def get(self, name: bytes) -> tuple[Any, ...] | None:
        """The fields of a record of this row; None where there is none."""
        at = self._look().get(_key(name))
        return None if at is None else self.table.fields.unpack_from(self.table.memory, at)

    def each(self) -> list[tuple[Any, ...]]:
        """The fields of all records of this row."""
        unpack, memory = self.table.fields.unpack_from, self.table.memory
        return [unpack(memory, at) for at in self._look().values()]

    def put(self, name: bytes, *fields: float) -> None:
        """Writes the record of a name. One for which there is no room is left out: the others then know of
        it what engines say.
        """
        table, number, key = self.table, self._number, _key(name)
        at = self._look().get(key)
        if at is not None:
            table.fields.pack_into(table.memory, at, *fields)
            table.count(CHANGES, number)
            return
        at = self._free_place()
        if at is None:
            self._throttled.warning(
                "full",
                "workers share what they know of %d %s at most: of one more each has its own count; "
                "with --workers 1 there is no such limit",
                table.records,
                table.of,
            )
            return
        table.fields.pack_into(table.memory, at, *fields)
        table.name(number, at, key)

    def drop(self, name: bytes) -> None:
        """Takes the record of a name away."""
        at = self._look().get(_key(name))
        if at is not None:
            self.table.name(self._number, at, 0)

    def others(self, name: bytes) -> list[tuple[Any, ...]]:
        """The fields that the other workers have under the name."""
        self._look_at_others()
        table = self.table
        places = self._places.get(name)
        if places is None:
            key = _key(name)
            places = self._places[name] = [places[key] for places in self._others if key in places]
        unpack, memory = table.fields.unpack_from, table.memory
        return [unpack(memory, at) for at in places]

    def every(self) -> list[tuple[Any, ...]]:
        """The fields that the other workers have under any name."""
        self._look_at_others()
        unpack, memory = self.table.fields.unpack_from, self.table.memory
        return [unpack(memory, at) for places in self._others for at in places.values()]

    def _look(self) -> dict[int, int]:
        """Where the fields of each name of this row are."""
        names = self.table.head(NAMES, self._number)
        if names != self._own_seen:
            self._own_seen, self._own = names, self.table.names(self._number)
        return self._own

    def _look_at_others(self) -> None:
        """Finds the others' records anew where names have come or gone."""
        table = self.table
        names = table.heads_of(NAMES)
        if names != self._names_seen:
            self._names_seen = names
            self._others = [table.names(other) for other in range(table.rows) if other != self._number]
            self._places.clear()

    def _free_place(self) -> int | None:
        table, number = self.table, self._number
        used, start = table.head(USED, number), table.start(number) + WORD
        if len(self._own) < used:
            taken = set(self._own.values())
            places = range(start, start + used * table.record_bytes, table.record_bytes)
            return next(at for at in places if at not in taken)
        if used == table.records:
            return None
        table.set_head(USED, number, used + 1)
        return start + used * table.record_bytes


def _key(name: bytes) -> int:
    return xxh3_64_intdigest(name) or 1
