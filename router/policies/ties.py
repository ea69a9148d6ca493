"""Who goes first among candidates that cost nearly the same: chance, or every router would pick the same
one.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.decision import RandomSource, Ranked


def by_cost(ranked: Iterable[Ranked], rng: RandomSource, slack: float = 0.0) -> list[Ranked]:
    """Best first; those within ``slack`` of the lowest cost are in random order."""
    ordered = sorted(ranked, key=lambda item: item.cost)
    near = sum(item.cost <= ordered[0].cost + slack for item in ordered)
    ordered[:near] = sorted(ordered[:near], key=lambda _: rng.random())
    return ordered
