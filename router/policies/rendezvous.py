"""Rendezvous hashing with a load bound: a key has its own order of streams, and goes to the first with room.

A stream that joins takes over only the keys that have it first, one that leaves gives away only its own.
Bound by load ("consistent hashing with bounded loads", Mirrokni et al. 2016), no key can drown a stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
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


class _Places(msgspec.Struct, frozen=True):
    """Why candidates are in the order of a key. ``policy`` as its reasons name it; of so many candidates each
    gets ``most`` requests, but where all are full.
    """

    policy: str
    candidates: int
    most: int
    seat: StreamId | None

    def _over_bound(self, candidate: Candidate) -> float:
        return float(self.candidates) if candidate.requests >= self.most else 0.0

    def terms(self, item: Ranked) -> Mapping[str, float]:
        over_bound = self._over_bound(item.candidate)
        return {"place": item.cost - over_bound, "over_bound": over_bound}

    def reason(self, item: Ranked) -> str:
        place = int(self.terms(item)["place"]) + 1
        where = (
            "where it was" if item.candidate.stream == self.seat else f"place {place} of {self.candidates}"
        )
        return f"{self.policy}: {where}, {item.candidate.requests} of at most {self.most} requests in flight"


def by_key(
    policy: str,
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
    most, behind_all = most_requests(candidates, bound, spare), float(len(ordered))
    why = _Places(policy, len(ordered), most, seat)
    ranked = [
        Ranked(candidate, place + (behind_all if candidate.requests >= most else 0.0), why)
        for place, candidate in enumerate(ordered)
    ]
    return sorted(ranked, key=lambda item: item.cost)
