"""Events that do not come: an engine that answers requests and says nothing of its cache."""

from __future__ import annotations

import msgspec

SILENT_AFTER_S = 60.0
SILENT_REQUESTS = 10


class Silence(msgspec.Struct):
    """One replica: what was counted when an event of it came last, and since when requests complete without.

    A request that is all cached stores no block, so a few of them say nothing.
    """

    batches: int = -1
    requests: int = 0
    since: float | None = None
    completed: int = 0

    def look(self, batches: int, requests: int, now: float) -> float:
        """For how long, in seconds, requests have completed without an event; 0 while that is no wonder.

        ``batches`` are those applied of all its streams, ``requests`` those that its engine has completed
        since it started.
        """
        if batches != self.batches or requests < self.requests:
            self.batches, self.requests, self.since = batches, requests, None
        self.completed = requests - self.requests
        if self.since is None and self.completed:
            self.since = now
        if self.since is None or self.completed < SILENT_REQUESTS:
            return 0.0
        return now - self.since
