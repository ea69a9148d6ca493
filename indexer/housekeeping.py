"""What is due beside the signals: garbage, bounds, readers that died, blocks that have waited too long."""

from __future__ import annotations

import time
from collections.abc import Callable

from events.logs import Throttled
from indexer.bounds import Bounds, Eviction, step
from indexer.errors import MapError
from indexer.followed import title
from indexer.layout import WAITING_TTL_S
from indexer.room import SHRINK
from indexer.writer import MapWriter

COLLECT_SHARE = 16
EVICT_STEPS = 16
READERS_CHECK_S = 60.0


class Housekeeping:
    """Keeps the map within its bounds and free of what is over, a little at a time, between groups."""

    def __init__(
        self,
        writer: MapWriter,
        bounds: Bounds,
        warn: Throttled,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writer = writer
        self.eviction = Eviction(bounds)
        self._warn = warn
        self._clock = clock
        self._check_readers_at = clock() + READERS_CHECK_S
        self._sweeping = False

    def keep(self) -> None:
        """Collects, evicts and forgets dead readers as far as it is due. Raises MapError."""
        now = self._clock()
        for _ in range(1 + self._writer.garbage // COLLECT_SHARE if self._writer.garbage else 0):
            self._writer.collect()
        self._keep_bounds()
        if now >= self._check_readers_at:
            self._writer.forget_dead_readers()
            self._check_readers_at = now + READERS_CHECK_S
            self._sweeping = any(record.waiting for record in self._writer.streams.values())
        if self._sweeping:
            self._sweeping = self._writer.sweep_waiting(self._writer.now() - WAITING_TTL_S)

    def make_room(self) -> bool:
        """Frees entries, whatever the bounds say. False when not even that can be written."""
        count = step(self._writer.streams.values())
        while count:
            try:
                self._writer.make_room(count)
            except MapError:
                count //= SHRINK  # changing less takes less room
            else:
                return True
        return False

    def _keep_bounds(self) -> None:
        for _ in range(EVICT_STEPS):
            found = self.eviction.next(self._writer.used_bytes(), self._writer.streams.values())
            if found is None:
                return
            count, record = found
            whose = "all streams" if record is None else title(record.id)
            self._warn.warning(
                f"evict {whose}",
                "at a bound (--map-budget, --max-blocks): forgetting the oldest conversations of %s",
                whose,
            )
            if record is None:
                self._writer.forget(count)
            else:
                self._writer.evict(count, record)
