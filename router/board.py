"""What the worker processes of one router tell each other: a board in shared memory, a row for each.

It is made before they are forked, and has no name: nothing is left of it when they are gone. Nobody waits for
anybody: a worker writes its own row only, and sums up those of the others. Every field is eight bytes,
aligned, so none is ever read half written; fields of one record may be of two moments for an instant, which
puts a load wrong by one request.
"""

from __future__ import annotations

import logging
import mmap
import struct
from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from events.logs import Throttled

log = logging.getLogger(__name__)

WORD = 8
_KEY = struct.Struct("@Q")
_HEAD = struct.Struct("@QQQ")
"""Of a row: a count of its changes, a count of the changes of its names, how many records were ever used."""


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
        self.heads = rows * _HEAD.size
        self.row_bytes = records * self.record_bytes
        # Pages that nobody writes to take no memory.
        self.memory = mmap.mmap(-1, self.heads + rows * self.row_bytes)

    def row(self, number: int) -> Row:
        """A worker's own row, and with it the view of all others."""
        return Row(self, number)

    def clear(self, number: int) -> None:
        """Empties the row of a worker that is no more; whoever follows it begins anew."""
        changes, names, used = self.head(number)
        at = self.heads + number * self.row_bytes
        self.memory[at : at + used * self.record_bytes] = bytes(used * self.record_bytes)
        _HEAD.pack_into(self.memory, number * _HEAD.size, changes + 1, names + 1, 0)

    def head(self, number: int) -> tuple[int, int, int]:
        """A row's counts of changes and of changes of names, and how many of its records were ever used."""
        changes, names, used = _HEAD.unpack_from(self.memory, number * _HEAD.size)
        return changes, names, min(used, self.records)

    def names(self, number: int) -> dict[int, int]:
        """Where the fields of each name of a row are."""
        _, _, used = self.head(number)
        at = self.heads + number * self.row_bytes
        named = (
            (_KEY.unpack_from(self.memory, offset)[0], offset + WORD)
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
        self._head_at = number * _HEAD.size
        self._changes, self._names, self._used = table.head(number)
        self._own: dict[bytes, int] = {}
        self._free: list[int] = []
        self._others = [other for other in range(table.rows) if other != number]
        self._seen: dict[int, tuple[int, dict[int, int]]] = {other: (-1, {}) for other in self._others}
        self._throttled = Throttled(log)

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
        self._changed()

    def drop(self, name: bytes) -> None:
        """Takes the record of a name away."""
        at = self._own.pop(name, None)
        if at is None:
            return
        _KEY.pack_into(self._table.memory, at - WORD, 0)
        self._free.append(at)
        self._names += 1
        self._changed()

    def others(self, name: bytes) -> Iterator[tuple[float, ...]]:
        """The fields that the other workers have under the name."""
        key = _key(name)
        table = self._table
        for other in self._others:
            _, names, _ = table.head(other)
            seen, places = self._seen[other]
            if seen != names:
                places = table.names(other)
                self._seen[other] = names, places
            at = places.get(key)
            if at is not None:
                yield table.fields.unpack_from(table.memory, at)

    def version(self) -> bytes:
        """Another one each time that any row has changed."""
        return self._table.memory[: self._table.heads]

    def _take(self, name: bytes) -> int | None:
        table = self._table
        if self._free:
            at = self._free.pop()
        elif self._used < table.records:
            at = table.heads + self._number * table.row_bytes + self._used * table.record_bytes + WORD
            self._used += 1
        else:
            return None
        table.memory[at : at + table.fields.size] = bytes(table.fields.size)
        _KEY.pack_into(table.memory, at - WORD, _key(name))
        self._own[name] = at
        self._names += 1
        return at

    def _changed(self) -> None:
        self._changes += 1
        _HEAD.pack_into(self._table.memory, self._head_at, self._changes, self._names, self._used)


def _key(name: bytes) -> int:
    return xxh3_64_intdigest(name) or 1
