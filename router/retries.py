"""How much may be tried again: an outage must not be multiplied, nor a prompt that kills engines be handed
round.
"""

from __future__ import annotations

import msgspec

from router.board import Row

SHAPE = "qq"
"""On the workers' board: requests in flight, and retries."""


class RetryRules(msgspec.Struct, frozen=True, kw_only=True):
    """``attempts`` replicas are tried for one request at most, ``deaths`` of which may break off while they
    work on it. Retries in flight at replicas that fail themselves may be ``share`` of all requests in flight,
    but always ``least`` (Envoy's retry budget, where it counts all retries).
    """

    attempts: int = 3
    deaths: int = 2
    share: float = 0.2
    least: int = 3


class RetryBudget:
    """Counts what is in flight. A retry at a replica that works is free: nothing is multiplied by it, and a
    request must not fail that such a replica could have served. ``row`` is this worker's of the board, where
    there are several: what all of them have in flight counts.
    """

    def __init__(self, rules: RetryRules, row: Row | None = None) -> None:
        self.rules = rules
        self._row = row
        self._requests = 0
        self._retries = 0

    def begin(self) -> None:
        """A request came."""
        self._requests += 1
        self._tell()

    def end(self) -> None:
        """It is over."""
        self._requests -= 1
        self._tell()

    def retry(self, begins: bool) -> None:
        """A retry at a replica that fails begins, or is over."""
        self._retries += 1 if begins else -1
        self._tell()

    @property
    def has_room(self) -> bool:
        """Whether one more retry may go to a replica that fails."""
        requests, retries = self._requests, self._retries
        if self._row is not None:
            for others_requests, others_retries in self._row.others(b""):
                requests += others_requests
                retries += others_retries
        return retries < max(self.rules.least, self.rules.share * requests)

    def _tell(self) -> None:
        if self._row is not None:
            self._row.put(b"", self._requests, self._retries)
