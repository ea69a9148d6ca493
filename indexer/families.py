"""Streams whose block keys for one prompt are the same, and what a match of them needs of their records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from indexer.layout import StreamRecord

MOST_ASKED = 256
"""Models, with adapters, whose families are kept: anybody may ask for any name."""


class Family:
    """``members`` of one family. ``slots``, ``orphaned`` (those that hold blocks without their parents) and
    ``spread`` (those with blocks in lower tiers) are bitmaps of slots; of ``hybrids`` more attention groups
    than one have a say; ``corrected`` says whether answers have corrected what is known of any.
    """

    def __init__(self, members: Sequence[StreamRecord]) -> None:
        self.members = members
        self.block_size = members[0].block_size
        self.slots = _bitmap(members)
        self.orphaned = _bitmap(record for record in members if record.orphans)
        self.spread = _bitmap(record for record in members if record.lower_tiers)
        self.hybrids = [record for record in members if record.restrictions]
        self.corrected = any(record.denied or record.believed for record in members)
        self.rows = [
            (record.slot, *record.id, (record.state, record.wrong), record.generation, record.sequence)
            for record in members
        ]
        """What an answer says of each, whatever the prompt: slot, instance, rank, what its trust goes by,
        generation, sequence.
        """


class Families:
    """The families of some records, found once for each model and adapter that is asked for."""

    def __init__(self, records: list[StreamRecord]) -> None:
        self.records = records
        self._found: dict[tuple[str, str | None], list[Family]] = {}

    def of(self, model: str, lora_name: str | None) -> list[Family]:
        """The families of the streams that serve ``model``, by its registered name or an alias."""
        found = self._found.get((model, lora_name))
        if found is None:
            members: dict[tuple[Any, ...], list[StreamRecord]] = {}
            for record in self.records:
                if serves(record, model):
                    members.setdefault(family_of(record, lora_name), []).append(record)
            if len(self._found) >= MOST_ASKED:
                self._found.clear()
            found = self._found[model, lora_name] = [Family(each) for each in members.values()]
        return found


def serves(record: StreamRecord, model: str) -> bool:
    """Whether the stream is of ``model``, by its registered name or an alias."""
    return record.registration.model_name == model or model in record.registration.aliases


def family_of(record: StreamRecord, lora_name: str | None) -> tuple[Any, ...]:
    """What the keys of a prompt depend on besides its tokens."""
    registered = record.registration
    return (
        registered.model_name,
        registered.additional_salt,
        record.block_size,
        record.epoch(lora_name),
    )


def _bitmap(records: Iterable[StreamRecord]) -> int:
    return sum(1 << record.slot for record in records)
