"""Who goes first among candidates that cost nearly the same: chance, or every router would pick the same
one.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.decision import RandomSource, Ranked


def by_cost(ranked: Iterable[Ranked], rng: RandomSource, slack_tokens: float = 0.0) -> list[Ranked]:
    """Best first; in random order those that are not dearer than the best by more than ``slack_tokens`` take
    to compute there.
    """
    ordered = sorted(ranked, key=lambda item: item.cost)
    limit = ordered[0].cost + slack_tokens * ordered[0].candidate.s_per_token
    near = sum(item.cost <= limit for item in ordered)
    ordered[:near] = sorted(ordered[:near], key=lambda _: rng.random())
    return ordered
