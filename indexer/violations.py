"""What a check of a map finds wrong, and how it names streams and rows for people."""

from __future__ import annotations

import msgspec

from events.schema import display_hash
from indexer.layout import StreamRecord

MAX_TOLD = 100


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


def title_of(record: StreamRecord) -> str:
    """A stream, for people, with its slot in the map."""
    retired = ", retired" if record.retired else ""
    return f"{record.id[0]} rank {record.id[1]} (slot {record.slot}{retired})"


def hash_of(engine_hash: bytes) -> str:
    """An engine's hash, for people."""
    return display_hash(engine_hash) if engine_hash else "nothing"


def words_of(record: StreamRecord, key: bytes) -> str:
    """A key of the tables by slot, for people."""
    return f"{title_of(record)} group {key[2]} block {hash_of(key[3:])}"
