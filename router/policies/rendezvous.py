"""Rendezvous hashing with a load bound: a key has its own order of streams, and goes to the first with room.

A stream that joins takes over only the keys that have it first, one that leaves gives away only its own.
Bound by load ("consistent hashing with bounded loads", Mirrokni et al. 2016), no key can drown a stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from router.decision import Candidate, Ranked
from router.replicas import StreamId

BOUND = 1.25
SPARE_REQUESTS = 4


def in_order(key: bytes, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates in the order of the key, which is the same in every router."""
    seed = xxh3_64_intdigest(key)
    return sorted(
        candidates, key=lambda c: xxh3_64_intdigest(f"{c.replica}/{c.rank}".encode(), seed), reverse=True
    )


def most_requests(candidates: Sequence[Candidate], bound: float, spare: int) -> int:
    """How many requests a stream may have, with the next one: ``bound`` times the mean, and never below
    ``spare``, as a few requests at once are no load. Some stream always has room.
    """
    total = sum(candidate.requests for candidate in candidates) + 1
    return max(spare, math.ceil(bound * total / len(candidates)))


def by_key(
    key: bytes,
    candidates: Sequence[Candidate],
    *,
    bound: float,
    spare: int,
    seat: StreamId | None = None,
) -> list[Ranked]:
    """The candidates with room in the order of the key, ``seat`` before all, then those without.

    The cost of a candidate is its place in that order; one without room waits behind all that have some.
    """
    ordered = in_order(key, candidates)
    ordered.sort(key=lambda candidate: candidate.stream != seat)
    most = most_requests(candidates, bound, spare)
    ranked = []
    for place, candidate in enumerate(ordered):
        full = candidate.requests >= most
        terms = {"place": float(place), "over_bound": float(len(ordered)) if full else 0.0}
        where = "where it was" if candidate.stream == seat else f"place {place + 1} of {len(ordered)}"
        room = f"{candidate.requests} of at most {most} requests in flight"
        ranked.append(Ranked(candidate, sum(terms.values()), terms, f"{where}, {room}"))
    return sorted(ranked, key=lambda item: item.cost)
