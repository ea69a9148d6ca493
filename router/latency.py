"""How long a stream takes to its first token: learned from what was observed, robustly.

TTFT = overhead + seconds per token x (prompt tokens ahead + own uncached tokens).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import msgspec

from router.replicas import StreamId

WINDOW = 24
"""Observations kept of a stream: enough that a third of outliers cannot bend the line, few enough to follow
an engine that has become slower within a dozen requests.
"""
TRUSTED_FROM = 4
"""Fewer observations may all be chance."""
FRESH_S = 60.0
"""After so long without an observation a stream is taken for a typical one again: one that looked slow gets
no requests, and could never show that it is not.
"""
FEWEST_TOKENS = 64
"""With fewer tokens to compute, a time to a first token says nothing about the speed of prefill."""
LEAST_S = 1e-6
"""No engine is so fast: a clock was read wrongly."""
ALIKE = 1.75
"""Speeds that differ by less than this factor are one speed: else the one that chance made look fastest would
get every request of an idle fleet, and work of other routers that nobody can see would look like slowness.
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


class Learned(msgspec.Struct, frozen=True):
    """What is known of a stream: its ``speed``, by so many observations, the last of them made ``at``."""

    speed: Speed
    observations: int
    at: float


class Latency:
    """What is known of each stream's speed. A stream that little is known of is as fast as the middle of all.

    ``clock`` is in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[StreamId, deque[tuple[int, float]]] = {}
        self._learned: dict[StreamId, Learned] = {}
        self._typical = Speed()
        self._unlike: dict[StreamId, Speed] = {}

    def of(self, stream: StreamId) -> Speed:
        """The speed of one stream; the typical one where it is like that, or not known well enough."""
        own = self._unlike.get(stream)
        if own is None or self._clock() - self._learned[stream].at > FRESH_S:
            return self._typical
        return own

    def each(self, streams: Sequence[StreamId]) -> list[Speed]:
        """The speed of each of the streams, as :meth:`of` gives it."""
        return [self.of(stream) for stream in streams] if self._unlike else [self._typical] * len(streams)

    def observe(self, stream: StreamId, tokens: int, seconds: float) -> None:
        """A first token came ``seconds`` after its request was sent, with ``tokens`` to compute before it."""
        if not says_something(tokens, seconds):
            return
        seen = self._seen.setdefault(stream, deque(maxlen=WINDOW))
        seen.append((tokens, seconds))
        speed = line(seen, self._typical.overhead_s)
        self._learned[stream] = Learned(speed, len(seen), self._clock())
        self._compare()

    def forget(self, stream: StreamId) -> None:
        """The stream's engine is another process now, or gone."""
        self._seen.pop(stream, None)
        if self._learned.pop(stream, None) is not None and self._learned:
            self._compare()
        self._unlike.pop(stream, None)

    def _compare(self) -> None:
        """Finds the typical speed, and whose is known well enough and not like it."""
        typical = self._typical = _middle([learned.speed for learned in self._learned.values()])
        self._unlike = {
            stream: own.speed
            for stream, own in self._learned.items()
            if not 1 / ALIKE <= own.speed.s_per_token / typical.s_per_token <= ALIKE
            and own.observations >= TRUSTED_FROM
        }


def says_something(tokens: int, seconds: float) -> bool:
    """Whether a time to a first token tells of the speed of prefill."""
    return tokens >= FEWEST_TOKENS and LEAST_S <= seconds < float("inf")


def line(seen: Iterable[tuple[int, float]], overhead_s: float) -> Speed:
    """A robust line: its slope by the median of all, each weighed by its tokens, as what disturbs a small one
    says nothing of the speed; its overhead by the lower quartile of the third with the fewest tokens, as what
    disturbs only adds.
    """
    ordered = sorted(seen)
    slope = _slope(ordered, overhead_s)
    smallest = ordered[: max(1, len(ordered) // 3)]
    rests = sorted(max(0.0, seconds - slope * tokens) for tokens, seconds in smallest)
    overhead_s = rests[len(rests) // 4]
    return Speed(overhead_s, _slope(ordered, overhead_s))


def _slope(seen: Sequence[tuple[int, float]], overhead_s: float) -> float:
    """Seconds per token: the median, weighed by tokens."""
    ratios = sorted(
        [
            ((seconds - overhead_s if 2 * overhead_s < seconds else seconds / 2) / tokens, tokens)
            for tokens, seconds in seen
        ]
    )
    half = sum([tokens for tokens, _ in seen]) / 2
    for ratio, tokens in ratios:
        half -= tokens
        if half <= 0:
            return ratio
    raise AssertionError("no observations")


def _middle(known: Sequence[Speed]) -> Speed:
    return Speed(median(s.overhead_s for s in known), median(s.s_per_token for s in known))
