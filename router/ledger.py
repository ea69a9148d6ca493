"""Records in shared memory that all worker processes of one router write, one at a time.

Beside the board, where each writes a row of its own: for what has one value for all, such as how far a
replica is trusted.
"""

from __future__ import annotations

import logging
import mmap
import struct
from collections.abc import Callable, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from events.logs import Throttled
from router.mutex import Mutex

log = logging.getLogger(__name__)

WORD = 8
_WORD = struct.Struct("@Q")
NAMES, USED, COUNT, CHANGES = range(4)
"""The head: another number each time that a name comes or goes, places ever used, records there are, another
number each time that anything changes.
"""


class Ledger:
    """Made before the workers are forked, for at most ``records`` records. A record has a name, of which the
    hash is kept, and fields as ``shape`` (of struct) lists them: ``q`` and ``d`` only.

    Who changes a record from what it was holds ``mutex`` for it. Who only looks needs not: each field is
    whole.
    """

    def __init__(self, records: int, shape: str) -> None:
        if not shape or set(shape) - set("qd"):
            raise ValueError(f"shape {shape!r}: fields are q or d, of {WORD} bytes each")
        self.records = records
        self.mutex = Mutex()
        self._fields = struct.Struct("@" + shape)
        self._names_at = 4 * WORD
        self._fields_at = self._names_at + records * WORD
        # Pages that nobody writes to take no memory.
        self._memory = mmap.mmap(-1, self._fields_at + records * self._fields.size)
        self._seen = 0
        self._places: dict[int, int] = {}
        self._throttled = Throttled(log)

    def __len__(self) -> int:
        return self._head(COUNT)

    def version(self) -> int:
        """Another one each time that a record has changed."""
        return self._head(CHANGES)

    def get(self, name: bytes) -> tuple[Any, ...] | None:
        """The fields of a record; None where there is none."""
        at = self._look().get(_key(name))
        return None if at is None else self._fields.unpack_from(self._memory, self._offset(at))

    def each(self) -> list[tuple[Any, ...]]:
        """The fields of all records."""
        unpack, memory = self._fields.unpack_from, self._memory
        return [unpack(memory, self._offset(at)) for at in self._look().values()]

    def put(self, name: bytes, *fields: float) -> None:
        """Writes a record. One for which there is no room is left out."""
        key = _key(name)
        at = self._look().get(key)
        if at is not None:
            self._write(at, fields)
            return
        at = self._free_place()
        if at is None:
            self._throttled.warning(
                "full", "the ledger of the workers is full (%d names): one is left out", self.records
            )
            return
        self._write(at, fields)
        self._name(at, key, 1)

    def drop(self, name: bytes) -> None:
        """Takes a record away."""
        at = self._look().get(_key(name))
        if at is not None:
            self._name(at, 0, -1)

    def change(self, how: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
        """Makes each record what ``how`` gives for it."""
        for at in self._look().values():
            fields = self._fields.unpack_from(self._memory, self._offset(at))
            self._write(at, how(fields))

    def _write(self, at: int, fields: Sequence[float]) -> None:
        self._fields.pack_into(self._memory, self._offset(at), *fields)
        self._set_head(CHANGES, self._head(CHANGES) + 1)

    def _look(self) -> dict[int, int]:
        """The place of each name."""
        names = self._head(NAMES)
        if names != self._seen:
            self._seen = names
            used = self._head(USED)
            keys = struct.unpack_from(f"@{used}Q", self._memory, self._names_at)
            self._places = {key: at for at, key in enumerate(keys) if key}
        return self._places

    def _free_place(self) -> int | None:
        used, taken = self._head(USED), set(self._places.values())
        if len(taken) < used:
            return next(at for at in range(used) if at not in taken)
        if used == self.records:
            return None
        self._set_head(USED, used + 1)
        return used

    def _name(self, at: int, key: int, more: int) -> None:
        _WORD.pack_into(self._memory, self._names_at + at * WORD, key)
        self._set_head(COUNT, self._head(COUNT) + more)
        for count in (NAMES, CHANGES):
            self._set_head(count, self._head(count) + 1)

    def _offset(self, at: int) -> int:
        return self._fields_at + at * self._fields.size

    def _head(self, which: int) -> int:
        count: int = _WORD.unpack_from(self._memory, which * WORD)[0]
        return count

    def _set_head(self, which: int, count: int) -> None:
        _WORD.pack_into(self._memory, which * WORD, count)


def _key(name: bytes) -> int:
    return xxh3_64_intdigest(name) or 1
