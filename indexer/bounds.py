"""How much the map may hold: what is over a bound goes in small steps, oldest first as ``hand`` has it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from indexer.layout import StreamRecord

EVICT_BELOW = 0.85
EVICT_ABOVE = 0.9
EVICT_STEP = 2_000
EVICT_SHARE = 8
CAP_SLACK = 32
"""A share of a stream's cap that goes at once: else each new block at the cap would cost a commit more."""
GROUP_SHARE = 16
MAX_GROUP_BYTES = 1 << 30


class Bounds(msgspec.Struct, frozen=True):
    """``budget_bytes`` of pages that hold entries, ``stream_blocks`` of any one stream; None is no bound."""

    budget_bytes: int | None = None
    stream_blocks: int | None = None

    @property
    def group_bytes(self) -> int:
        """Payloads of one group: between two looks at the budget the map must not grow by much of it."""
        return MAX_GROUP_BYTES if self.budget_bytes is None else self.budget_bytes // GROUP_SHARE


class Eviction:
    """Decides what goes. Over the budget it goes on until well below it."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._over = False

    def next(
        self, used_bytes: int, records: Iterable[StreamRecord]
    ) -> tuple[int, StreamRecord | None] | None:
        """How many blocks go next, and of which stream (None: of all); None when every bound holds."""
        held = [record for record in records if not record.is_empty]
        most = self._bounds.stream_blocks
        if most is not None:
            for record in held:
                if record.blocks > most:
                    return min(EVICT_STEP, record.blocks - most + most // CAP_SLACK), record
        budget = self._bounds.budget_bytes
        if budget is None or not held:
            return None
        self._over = used_bytes > budget * (EVICT_BELOW if self._over else EVICT_ABOVE)
        return (step(held), None) if self._over else None


def most_waiting(records: Iterable[StreamRecord]) -> StreamRecord | None:
    """The stream with most blocks that wait for their parents; None if none waits.

    They count for no answer, so over the budget they go before all others.
    """
    most = max(records, key=lambda record: record.waiting, default=None)
    return most if most is not None and most.waiting else None


def step(records: Iterable[StreamRecord]) -> int:
    """How many blocks of all streams go at once: of a small map no more than a share."""
    return min(EVICT_STEP, 1 + sum(record.blocks + record.waiting for record in records) // EVICT_SHARE)
