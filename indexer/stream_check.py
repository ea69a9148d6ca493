"""Verifies one stream of a map: rows make sense, its tables agree with each other and with its record."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from indexer.keys import KEY_BYTES
from indexer.layout import (
    GPU,
    NO_COPIES,
    Copies,
    Name,
    StreamRecord,
    Waiting,
    decode_shared,
    decode_until,
    decode_waiting,
    holders_key,
    slot_key,
)
from indexer.violations import Report, hash_of, title_of, words_of

UNREADABLE = (msgspec.MsgspecError, struct.error, ValueError, IndexError)
"""What a row that makes no sense raises."""
SHORTEST_NAME = 3 + KEY_BYTES
_CORRECTION = 2 + KEY_BYTES


class Held(NamedTuple):
    """The tables' rows of one stream, by key."""

    names: dict[bytes, Name]
    shared: dict[bytes, Copies]
    waiting: dict[bytes, Waiting]
    links: list[tuple[bytes, bytes]]


class StreamCheck:
    """One stream's own tables against each other, and against its record.

    ``copies`` is how many of its names hold a block, per tier, by key in ``blocks``.
    """

    def __init__(self, report: Report, record: StreamRecord, held: Held) -> None:
        self._report = report
        self._record = record
        self._names = held.names
        self._waiting = held.waiting
        self._links = held.links
        self._shared = held.shared
        self.copies = copies_by_block(record, held.names)

    def check(self) -> None:
        self._check_chain()
        self._check_waiting()
        self._check_record()
        self._check_shared()

    def _tell(self, table: str, key: bytes, problem: str) -> None:
        self._report.tell(table, words_of(self._record, key), problem)

    def _check_chain(self) -> None:
        children: Counter[bytes] = Counter()
        ghosts: Counter[bytes] = Counter()
        for key, name in self._names.items():
            if name.parent:
                parent = key[:3] + name.parent
                (children if name.held else ghosts)[parent] += 1
                if parent not in self._names:
                    self._tell("names", key, f"its parent {hash_of(name.parent)} has no name")
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
            self._tell("children", parent, f"{words_of(self._record, child)} does not wait for it")
        for parent, child in sorted(expected - links):
            self._tell("waiting", child, f"nothing leads to it from its parent {hash_of(parent[3:])}")
        for key, waiting in self._waiting.items():
            if not any(waiting.copies):
                self._tell("waiting", key, "a block without copies waits")
            if key in self._names:
                self._tell("waiting", key, "both waits and is known")
            if self._awaited(key, waiting) in self._names:
                self._tell("waiting", key, f"waits for {hash_of(waiting.awaits(key)[3:])}, which is known")

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
                self._report.tell("streams", title_of(record), f"counts {told} {what}, there are {true}")
        if spread and not record.lower_tiers:
            self._report.tell("streams", title_of(record), "does not know of its blocks in lower tiers")

    def _check_shared(self) -> None:
        """Names more than one of a block are counted, wherever there are some."""
        record, shared = self._record, self._shared
        slot = slot_key(record.slot)
        more: dict[bytes, Copies] = {}
        for key, (gpu, cpu, disk) in self.copies.items():
            counts = (max(0, gpu - 1), max(0, cpu - 1), max(0, disk - 1))
            if any(counts):
                more[slot + key] = counts
        for key in sorted(more.keys() | shared.keys()):
            if more.get(key) != shared.get(key):
                true, told = more.get(key, NO_COPIES), shared.get(key)
                problem = f"{title_of(record)} counts {told} names more than one, there are {true}"
                self._report.tell("shared", key.hex(), problem)
        if record.shared != len(more):
            problem = f"counts {record.shared} blocks that several names hold, there are {len(more)}"
            self._report.tell("streams", title_of(record), problem)


def copies_by_block(record: StreamRecord, names: dict[bytes, Name]) -> dict[bytes, Copies]:
    """How many of a stream's names hold a block, per tier, by key in ``blocks``."""
    expected: dict[bytes, Copies] = {}
    for key, name in names.items():
        if name.held:
            block = holders_key(key, name.key, record.main_group)
            gpu, cpu, disk = (bool(copies) for copies in name.copies)
            before = expected.get(block, NO_COPIES)
            expected[block] = (before[0] + gpu, before[1] + cpu, before[2] + disk)
    return expected


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
    if len(key) < SHORTEST_NAME:
        raise ValueError(f"the key has {len(key)} bytes, less than {SHORTEST_NAME}")


ROW_CHECKS: dict[str, Callable[[bytes, bytes], None]] = {
    "names": _check_name,
    "shared": _check_shared,
    "waiting": _check_waiting,
    "children": _check_link,
    "denied": _check_correction,
    "believed": _check_correction,
}
"""What looks at a row of a table by itself: key and value; raises one of :data:`UNREADABLE`."""
