"""What answers said, over what events said: in lookups, denied blocks are missing and believed ones held."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import lmdb
import msgspec

from indexer.layout import StreamRecord, Tables, read_untils, slot_key
from indexer.match import Lookup

FEW = 1_000
REST_S = 1e-4
"""For each row above :data:`FEW`: ten thousand take 35 to 50 ms, and are read about once a second at most."""


class _Slot(msgspec.Struct, frozen=True):
    """The corrections of a slot, of which state of its record they are, and until when they may do."""

    version: tuple[int, int]
    denied: frozenset[bytes]
    believed: frozenset[bytes]
    rests_until: float = 0.0


class Corrected:
    """The corrections of some streams; ``slots`` is the bitmap of those that have any.

    An answer does not tell the tier: what is believed counts as on the GPU.
    """

    def __init__(self, found: dict[int, _Slot]) -> None:
        self.slots = sum(1 << slot for slot in found)
        self._denied: dict[bytes, int] = {}
        self._believed: dict[bytes, int] = {}
        for number, slot in found.items():
            for bitmaps, blocks in ((self._denied, slot.denied), (self._believed, slot.believed)):
                for block in blocks:
                    bitmaps[block] = bitmaps.get(block, 0) | 1 << number

    def believes(self, key: bytes) -> int:
        """Bitmap of the slots that are believed to hold a block."""
        return self._believed.get(key, 0)

    def over(self, lookup: Lookup) -> Lookup:
        """``lookup``, corrected."""
        if not self.slots:
            return lookup
        denied, believed = self._denied.get, self._believed.get

        def corrected(key: bytes) -> int:
            return lookup(key) & ~denied(key, 0) | believed(key, 0)

        return corrected


NOTHING = Corrected({})


class CorrectionReader:
    """Reads corrections, and keeps those of a slot until its record says that they changed.

    Many are kept for up to a second longer, but never those of another generation: each answer may change
    one, and all would be read again for it.
    """

    def __init__(self, tables: Tables, clock: Callable[[], float]) -> None:
        self._tables = tables
        self._clock = clock
        self._slots: dict[int, _Slot] = {}
        self._merged: dict[int, tuple[tuple[tuple[int, int, int], ...], Corrected]] = {}

    def of(self, txn: lmdb.Transaction, members: Sequence[StreamRecord]) -> Corrected:
        """The corrections of ``members``, merged; the same ones are not merged again."""
        found = [record for record in members if record.denied or record.believed]
        if not found:
            return NOTHING
        slots = {record.slot: self._slot(txn, record) for record in found}
        wanted = tuple((number, *slot.version) for number, slot in slots.items())
        first = members[0].slot  # streams of one model are asked about together
        known, merged = self._merged.get(first, ((), NOTHING))
        if known != wanted:
            merged = Corrected(slots)
            self._merged[first] = (wanted, merged)
        return merged

    def _slot(self, txn: lmdb.Transaction, record: StreamRecord) -> _Slot:
        version = (record.generation, record.corrected)
        slot = self._slots.get(record.slot)
        if slot is None or slot.version != version:
            now = self._clock()
            if slot is None or slot.version[0] != record.generation or now >= slot.rests_until:
                slot = self._slots[record.slot] = self._read(txn, record, now)
        return slot

    def _read(self, txn: lmdb.Transaction, record: StreamRecord, now: float) -> _Slot:
        denied, believed = (
            frozenset(
                block
                for block, until in read_untils(txn, table, slot_key(record.slot)).items()
                if until > now
            )
            for table in (self._tables.denied, self._tables.believed)
        )
        rest = REST_S * max(0, record.denied + record.believed - FEW)
        return _Slot((record.generation, record.corrected), denied, believed, now + rest)
