"""What nearly all requests wait for their first token: beyond that, waiting counts for more."""

from __future__ import annotations

import math

FEW = 0.05
"""The share of the requests that are expected to wait longer."""
KNOWN_FROM = 100
"""Fewer requests do not say what few of them are."""
STEP = 0.05
"""How much one request that waits longer moves it, as a share: some hundred of them make it another."""


class Patience:
    """A time that ``FEW`` of the requests are predicted to wait longer than, seconds.

    Every request moves it: up by a step if it waits longer, down by as much less as those are more. So it
    follows the traffic with no unit of its own.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._count = 0

    @property
    def seconds(self) -> float:
        """Without end as long as too few have come."""
        return self._seconds if self._count >= KNOWN_FROM else math.inf

    def sent(self, predicted_s: float) -> None:
        """A request was sent to where it is predicted to wait so long."""
        self._count += 1
        if self._count == 1:
            self._seconds = predicted_s
        self._seconds *= math.exp(STEP * ((predicted_s > self._seconds) - FEW))
