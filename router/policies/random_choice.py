"""``random``: any stream, to compare others with."""

from __future__ import annotations

from collections.abc import Sequence

from router.decision import Ask, Candidate, RandomSource, Ranked, Said

WHY = Said("draw", "drawn at random")


def rank(ask: Ask, candidates: Sequence[Candidate], rng: RandomSource) -> list[Ranked]:
    """The candidates in random order; the cost is what was drawn."""
    drawn = [(rng.random(), candidate) for candidate in candidates]
    drawn.sort(key=lambda pair: pair[0])
    return [Ranked(candidate, draw, WHY) for draw, candidate in drawn]
