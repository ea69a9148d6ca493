"""How much may be tried again: an outage must not be multiplied, nor a prompt that kills engines be handed
round.
"""

from __future__ import annotations

import msgspec


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
    request must not fail that such a replica could have served.
    """

    def __init__(self, rules: RetryRules) -> None:
        self.rules = rules
        self.requests = 0
        self.retries = 0

    @property
    def has_room(self) -> bool:
        """Whether one more retry may go to a replica that fails."""
        return self.retries < max(self.rules.least, self.rules.share * self.requests)
