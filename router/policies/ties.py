"""Who goes first among candidates that cost nearly the same: chance, or every router would pick the same
one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from operator import attrgetter

from router.decision import RandomSource, Ranked

_cost = attrgetter("cost")


def by_cost(ranked: Iterable[Ranked], rng: RandomSource, slack_tokens: float = 0.0) -> list[Ranked]:
    """Best first; in random order those that are not dearer than the best by more than ``slack_tokens`` take
    to compute there.
    """
    ordered = sorted(ranked, key=_cost)
    limit = ordered[0].cost + slack_tokens * ordered[0].candidate.s_per_token
    near = bisect_right(ordered, limit, key=_cost)
    ordered[:near] = sorted(ordered[:near], key=lambda _: rng.random())
    return ordered
