"""How far the index is right about each stream, by what engines answered that no indexer was told of."""

from __future__ import annotations

import time
from collections.abc import Callable, Set

import msgspec

from indexer.reader import credit
from router.replicas import StreamId

WRONG_STEP = 0.2
"""What one answer counts for in the moving average."""
HALF_LIFE_S = 60.0
"""A stream that lost its advantage gets few requests to be right with: time gives it another try."""


class _Wrong(msgspec.Struct):
    share: float
    at: float


class Trust:
    """The share of predicted tokens that were not there, averaged for each stream.

    As the indexer does with the answers that it is told of: a replica that keeps being wrong loses its
    advantage, until it is right again. ``clock`` is in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong: dict[StreamId, _Wrong] = {}

    def learn(self, stream: StreamId, predicted_tokens: int, cached_tokens: int) -> None:
        """Takes an answer. Nothing predicted is nothing to be wrong about."""
        if predicted_tokens <= 0:
            return
        over = max(0, predicted_tokens - cached_tokens) / predicted_tokens
        before = self._share(stream)
        self._wrong[stream] = _Wrong(before + WRONG_STEP * (over - before), self._clock())

    def forget(self, replica: str) -> None:
        """The replica is none of ours any more."""
        for stream in [stream for stream in self._wrong if stream[0] == replica]:
            del self._wrong[stream]

    def doubted(self) -> Set[StreamId]:
        """The streams whose weight may be less than 1."""
        return self._wrong.keys()

    def weight(self, stream: StreamId) -> float:
        """1 for a stream that is right, down to 0.1 for one that keeps being wrong."""
        return credit(self._share(stream)) if stream in self._wrong else 1.0

    def _share(self, stream: StreamId) -> float:
        wrong = self._wrong.get(stream)
        if wrong is None:
            return 0.0
        return float(wrong.share * 0.5 ** ((self._clock() - wrong.at) / HALF_LIFE_S))
