"""Whether an indexer that has just started can be asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from indexer.ingest import HEARTBEAT_S
from indexer.reader import HEARTBEAT_LIMIT_S, StreamStatus

HEALTHY_S = max(HEARTBEAT_LIMIT_S, 4 * HEARTBEAT_S)
"""Age of the heartbeat above which ingesting stands still."""
SETTLING = frozenset({"connecting", "unverified", "replaying"})


class Streams(Protocol):
    """Where the states of streams are read."""

    def streams(self) -> list[StreamStatus]: ...


class Readiness:
    """Ready once every stream has proven itself, or a deadline passed; then as long as the map is fed."""

    def __init__(self, reader: Streams, deadline_s: float, clock: Callable[[], float] = time.monotonic):
        self._reader = reader
        self._clock = clock
        self._until = clock() + deadline_s
        self._settled = False

    def settling(self, others: Sequence[str] = ()) -> list[str]:
        """What ``/ready`` waits for: streams, and ``others`` that are not there yet."""
        if not self._settled:
            waiting = [*others] + [
                f"{status.record.id[0]} rank {status.record.id[1]}: {status.record.state}"
                for status in self._reader.streams()
                if status.record.state in SETTLING
            ]
            if waiting and self._clock() < self._until:
                return waiting
            self._settled = True
        return []
