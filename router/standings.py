"""How each replica has done lately: what one worker keeps of it, or all workers of a router together."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import msgspec
from msgspec.structs import astuple, replace

from router.ledger import Ledger

SHAPE = "qqqdqd"
"""On the workers' ledger, of each replica: the fields of a record."""
MOST_REPLICAS = 4096
NOBODY = 0


class Record(msgspec.Struct, frozen=True):
    """``failures`` in a row; ``ejections`` so far, for the length of the next one; whether it is ``ejected``,
    and ``until`` when, before one request tries it; the number of the worker that is ``trying`` it since
    then; when it was last ``back_at``, after such a trial or from being down. Times are in seconds of a clock
    that all workers have in common.
    """

    failures: int = 0
    ejections: int = 0
    ejected: bool = False
    until: float = float("-inf")
    trying: int = NOBODY
    back_at: float = float("-inf")


class Standings(Protocol):
    """The records by the name of the replica, of those that there is something to say of; ``worker`` is the
    number of who asks, from 1. A record is changed under ``alone``.
    """

    worker: int

    def alone(self) -> AbstractContextManager[None]: ...

    def __len__(self) -> int: ...

    def get(self, name: str) -> Record | None: ...

    def each(self) -> Iterable[Record]: ...

    def put(self, name: str, record: Record) -> None: ...

    def drop(self, name: str) -> None: ...


class OwnStandings:
    """Those of a router of one process."""

    worker = 1

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self.get = self._records.get

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __len__(self) -> int:
        return len(self._records)

    def each(self) -> Iterable[Record]:
        return self._records.values()

    def put(self, name: str, record: Record) -> None:
        self._records[name] = record

    def drop(self, name: str) -> None:
        self._records.pop(name, None)


class SharedStandings:
    """Those of all workers. ``number`` is that of this one, from 0."""

    def __init__(self, ledger: Ledger, number: int) -> None:
        self._ledger = ledger
        self.worker = number + 1

    def alone(self) -> AbstractContextManager[None]:
        return self._ledger.alone()

    def __len__(self) -> int:
        return len(self._ledger)

    def get(self, name: str) -> Record | None:
        fields = self._ledger.get(_named(name))
        return None if fields is None else _record(fields)

    def each(self) -> Iterable[Record]:
        return [_record(fields) for fields in self._ledger.each()]

    def put(self, name: str, record: Record) -> None:
        self._ledger.put(_named(name), *astuple(record))

    def drop(self, name: str) -> None:
        self._ledger.drop(_named(name))


def let_go(ledger: Ledger, number: int) -> None:
    """The worker is no more: whatever it was trying, another one may try."""

    def freed(fields: tuple[Any, ...]) -> tuple[Any, ...]:
        record = _record(fields)
        if record.trying == number + 1:
            record = replace(record, trying=NOBODY)
        return astuple(record)

    with ledger.alone():
        ledger.change(freed)


def _record(fields: tuple[Any, ...]) -> Record:
    failures, ejections, ejected, until, trying, back_at = fields
    return Record(failures, ejections, bool(ejected), until, trying, back_at)


def _named(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")
