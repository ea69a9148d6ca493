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
    """``rows`` of at most ``records`` records each. A record has a name, and fields as ``shape`` (of struct)
    lists them: ``q`` and ``d`` only.
    """

    def __init__(self, rows: int, records: int, shape: str) -> None:
        if not shape or set(shape) - set("qd"):
            raise ValueError(f"shape {shape!r}: fields are q or d, of {WORD} bytes each")
        self.rows = rows
        self.records = records
        self.fields = struct.Struct("@" + shape)
        self.record_bytes = WORD + self.fields.size
        self.heads = 3 * rows * WORD
        self.row_bytes = records * self.record_bytes
        # Pages that nobody writes to take no memory.
        self.memory = mmap.mmap(-1, self.heads + rows * self.row_bytes)
        self.mutex = Mutex()

    def row(self, number: int) -> Row:
        """A worker's own row, and with it the view of all others."""
        return Row(self, number)

    def clear(self, number: int) -> None:
        """Empties the row of a worker that is no more; whoever follows it begins anew."""
        used = self.head(USED, number) * self.record_bytes
        at = self.heads + number * self.row_bytes
        self.memory[at : at + used] = bytes(used)
        self.set_head(USED, number, 0)
        for count in (NAMES, CHANGES):
            self.set_head(count, number, self.head(count, number) + 1)

    def head(self, which: int, number: int) -> int:
        """One of the counts of a row."""
        count: int = _WORD.unpack_from(self.memory, (which * self.rows + number) * WORD)[0]
        return count

    def set_head(self, which: int, number: int, count: int) -> None:
        _WORD.pack_into(self.memory, (which * self.rows + number) * WORD, count)

    def heads_of(self, which: int) -> bytes:
        """That count of all rows: other bytes each time that one has changed."""
        return self.memory[which * self.rows * WORD : (which + 1) * self.rows * WORD]

    def names(self, number: int) -> dict[int, int]:
        """Where the fields of each name of a row are."""
        used = min(self.records, self.head(USED, number))
        at = self.heads + number * self.row_bytes
        named = (
            (_WORD.unpack_from(self.memory, offset)[0], offset + WORD)
            for offset in range(at, at + used * self.record_bytes, self.record_bytes)
        )
        return {key: fields for key, fields in named if key}


class Row:
    """One worker's place in a table. Names are hashed: two of them in one place would take chance to meet in
    64 bits.
    """

    def __init__(self, table: Table, number: int) -> None:
        self._table = table
        self._number = number
        self._changes, self._names = table.head(CHANGES, number), table.head(NAMES, number)
        self._used = table.head(USED, number)
        self._own: dict[bytes, int] = {}
        self._free: list[int] = []
        self._names_seen = b""
        self._others: list[dict[int, int]] = []
        self._places: dict[bytes, list[int]] = {}
        self._throttled = Throttled(log)

    def alone(self) -> Mutex:
        """While this is held, no other worker of this table holds it."""
        return self._table.mutex

    def put(self, name: bytes, *fields: float) -> None:
        """Writes the record of a name. One for which there is no room is left out: the others then know of
        it what engines say.
        """
        at = self._own.get(name) or self._take(name)
        if at is None:
            self._throttled.warning(
                "full", "the board of the workers is full (%d names): one is left out", self._table.records
            )
            return
        self._table.fields.pack_into(self._table.memory, at, *fields)
        self._note_change()

    def drop(self, name: bytes) -> None:
        """Takes the record of a name away."""
        at = self._own.pop(name, None)
        if at is None:
            return
        _WORD.pack_into(self._table.memory, at - WORD, 0)
        self._free.append(at)
        self._note_name()
        self._note_change()

    def others(self, name: bytes) -> list[tuple[Any, ...]]:
        """The fields that the other workers have under the name."""
        self._look()
        table = self._table
        places = self._places.get(name)
        if places is None:
            key = _key(name)
            places = self._places[name] = [places[key] for places in self._others if key in places]
        unpack, memory = table.fields.unpack_from, table.memory
        return [unpack(memory, at) for at in places]

    def every(self) -> list[tuple[Any, ...]]:
        """The fields that the other workers have under any name."""
        self._look()
        unpack, memory = self._table.fields.unpack_from, self._table.memory
        return [unpack(memory, at) for places in self._others for at in places.values()]

    def _look(self) -> None:
        """Finds the others' records anew where names have come or gone."""
        table = self._table
        names = table.heads_of(NAMES)
        if names != self._names_seen:
            self._names_seen = names
            self._others = [table.names(other) for other in range(table.rows) if other != self._number]
            self._places.clear()

    def version(self) -> bytes:
        """Another one each time that any row has changed."""
        return self._table.heads_of(CHANGES)

    def _take(self, name: bytes) -> int | None:
        table = self._table
        if self._free:
            at = self._free.pop()
        elif self._used < table.records:
            at = table.heads + self._number * table.row_bytes + self._used * table.record_bytes + WORD
            self._used += 1
            table.set_head(USED, self._number, self._used)
        else:
            return None
        table.memory[at : at + table.fields.size] = bytes(table.fields.size)
        _WORD.pack_into(table.memory, at - WORD, _key(name))
        self._own[name] = at
        self._note_name()
        return at

    def _note_name(self) -> None:
        self._names += 1
        self._table.set_head(NAMES, self._number, self._names)

    def _note_change(self) -> None:
        self._changes += 1
        self._table.set_head(CHANGES, self._number, self._changes)


def _key(name: bytes) -> int:
    return xxh3_64_intdigest(name) or 1
