"""How busy the streams are, as requests find them, and what that makes a computed token cost."""

from __future__ import annotations

import msgspec

SHARE = 0.02
"""What one request counts for: the average is over about the last fifty."""
MOST = 0.92
"""Beyond this the average says "saturated", and how much beyond is chance."""


class Crowding(msgspec.Struct):
    """The average share of streams that requests find with prefill in front of them: the utilisation, 0 to 1.

    Work that is given to a busy stream is waited for by this request, and by those that come while the stream
    stays busy. In a queue with utilisation u each unit of work is so waited for 1 / (1 - u) times in all.
    """

    utilisation: float = 0.0

    def found(self, busy: int, streams: int) -> None:
        """A request came and found ``busy`` of ``streams`` with work in front of it."""
        self.utilisation += SHARE * (busy / streams - self.utilisation)

    @property
    def behind(self) -> float:
        """How many requests behind this one wait for each unit of work that it brings, on average."""
        utilisation = min(MOST, self.utilisation)
        return utilisation / (1.0 - utilisation)
