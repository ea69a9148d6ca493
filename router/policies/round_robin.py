"""``round-robin``: each stream in turn."""

from __future__ import annotations

from collections.abc import Sequence

from router.decision import Ask, Candidate, RandomSource, Ranked, Said

WHY = Said("turns", "its turn")


def rank(ask: Ask, candidates: Sequence[Candidate], rng: RandomSource) -> list[Ranked]:
    """The candidates from the one whose turn it is on; the cost is how many turns it has to wait."""
    first = ask.turn % len(candidates) if candidates else 0
    in_turn = [*candidates[first:], *candidates[:first]]
    return [Ranked(candidate, float(wait), WHY) for wait, candidate in enumerate(in_turn)]
