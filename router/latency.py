"""How long a stream takes to its first token: learned from what was observed, robustly.

TTFT = overhead + seconds per token x (prompt tokens ahead + own uncached tokens).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

import msgspec

from router.replicas import StreamId

WINDOW = 24
"""Observations kept of a stream: enough for a line that a third of outliers cannot bend, few enough to follow
an engine that has become slower within a dozen requests.
"""
LINE_FROM = 6
"""Fewer observations give no line; until then the overhead is taken as known."""
FEWEST_TOKENS = 64
"""With fewer tokens to compute, a time to a first token says nothing about the speed of prefill."""
LEAST_S = 1e-6
"""No engine is so fast: a clock was read wrongly."""
ALIKE = 0.25
"""Speeds that differ by less than this share are one speed: else the one that chance made look fastest would
get every request of an idle fleet.
"""
COLD_OVERHEAD_S = 0.01
COLD_S_PER_TOKEN = 1e-4
"""Taken for a fleet of which nothing is known: 10,000 tokens/s. Any value gives the same choices as long as
it is the same for all.
"""


class Speed(msgspec.Struct, frozen=True):
    """A line: seconds to a first token, by the tokens that are computed before it."""

    overhead_s: float = COLD_OVERHEAD_S
    s_per_token: float = COLD_S_PER_TOKEN

    def seconds(self, tokens: float) -> float:
        """Predicted time to first token with so many tokens to compute, the own uncached ones included."""
        return self.overhead_s + self.s_per_token * tokens


class Latency:
    """What is known of each stream's speed. A stream without observations is as fast as the middle of the
    others.
    """

    def __init__(self) -> None:
        self._seen: dict[StreamId, deque[tuple[int, float]]] = {}
        self._speeds: dict[StreamId, Speed] = {}
        self._typical = Speed()

    def of(self, stream: StreamId) -> Speed:
        """The speed of one stream; the typical one where it is like that."""
        own, typical = self._speeds.get(stream), self._typical
        if own is None or abs(own.s_per_token - typical.s_per_token) <= ALIKE * typical.s_per_token:
            return typical
        return own

    def observe(self, stream: StreamId, tokens: int, seconds: float) -> None:
        """A first token came ``seconds`` after its request was sent, with ``tokens`` to compute before it."""
        if tokens < FEWEST_TOKENS or not LEAST_S <= seconds < float("inf"):
            return
        seen = self._seen.setdefault(stream, deque(maxlen=WINDOW))
        seen.append((tokens, seconds))
        self._speeds[stream] = _line(seen, self._typical.overhead_s)
        self._typical = _middle(self._speeds.values())

    def forget(self, stream: StreamId) -> None:
        """The stream's engine is another process now, or gone."""
        self._seen.pop(stream, None)
        if self._speeds.pop(stream, None) is not None and self._speeds:
            self._typical = _middle(self._speeds.values())


def _line(seen: Iterable[tuple[int, float]], overhead_s: float) -> Speed:
    """Tukey's resistant line: through the medians of the lower and of the upper third."""
    ordered = sorted(seen)
    third = len(ordered) // 3
    if len(ordered) >= LINE_FROM:
        low, high = ordered[:third], ordered[-third:]
        run = median(tokens for tokens, _ in high) - median(tokens for tokens, _ in low)
        rise = median(seconds for _, seconds in high) - median(seconds for _, seconds in low)
        # Without much between small and large, the slope would be noise.
        if run >= median(tokens for tokens, _ in ordered) / 2 and rise > 0:
            slope = rise / run
            rest = median(seconds - slope * tokens for tokens, seconds in ordered)
            if rest >= 0:
                return Speed(rest, slope)
            overhead_s = 0.0
    slope = median(max(seconds - overhead_s, seconds / 2) / tokens for tokens, seconds in ordered)
    return Speed(overhead_s, slope)


def _middle(speeds: Iterable[Speed]) -> Speed:
    known = list(speeds)
    return Speed(median(s.overhead_s for s in known), median(s.s_per_token for s in known))
