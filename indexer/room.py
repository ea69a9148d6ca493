"""How much goes into one transaction: less and less while there is no room, at last without a batch."""

from __future__ import annotations

GROUP_SIGNALS = 512
SHRINK = 16
WAITS = 3


class Room:
    """``signals`` go into the next group; of a single one ``batches`` are applied (None: all), the rest is
    left out.

    A group that does not go in is tried again with a sixteenth of it. A single signal is worth a few waits: a
    reader may pin the pages that it needs. It may bring many batches, after a replay: then of those a
    sixteenth is tried, and in the end none, so that a batch for which there is no room is tried a few times
    and never for ever.
    """

    def __init__(self) -> None:
        self.signals = GROUP_SIGNALS
        self.batches: int | None = None
        self._waits = 0

    def had(self) -> None:
        """The group went in: the next may be larger. Until one goes in whole, waiting is no use."""
        if self.batches is None:
            self._waits = 0
        self.batches = None
        self.signals = min(GROUP_SIGNALS, self.signals + 1 + self.signals // SHRINK)

    def lacked(self, signals: int, batches: int, *, may_pass: bool = True) -> bool:
        """A group of ``signals``, with ``batches``, did not go in. Gives whether to try less, else to wait.

        ``may_pass``: whether it might go in after a while.
        """
        if signals > 1:
            self.signals = signals // SHRINK or 1
        elif signals and may_pass and self._waits < WAITS:
            self._waits += 1
            return False
        elif signals and batches and self.batches != 0:
            self.batches = batches // SHRINK
        else:
            self.batches = None
            return False
        return True
