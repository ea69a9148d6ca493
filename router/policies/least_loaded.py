"""``least-loaded``: the stream that would be done with the work in front of it first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from router.decision import Ask, Candidate, RandomSource, Ranked
from router.policies.ties import by_cost

REQUEST_TOKENS = 16
"""What a request in flight costs its neighbours, in prompt tokens: it takes part in every step that
prefills.
"""
TERMS = ("overhead", "queued", "in_flight")


def _terms(candidate: Candidate) -> tuple[float, float, float]:
    """The ``TERMS``: seconds for the prompt tokens queued to prefill, and for what the requests in flight
    cost.
    """
    token_s = candidate.s_per_token
    return (
        candidate.overhead_s,
        token_s * candidate.prefill_tokens,
        token_s * REQUEST_TOKENS * candidate.requests,
    )


class _Why(msgspec.Struct, frozen=True):
    def terms(self, item: Ranked) -> Mapping[str, float]:
        return dict(zip(TERMS, _terms(item.candidate), strict=True))

    def reason(self, item: Ranked) -> str:
        candidate = item.candidate
        return f"least load: {candidate.prefill_tokens} tokens queued, {candidate.requests} in flight"


WHY = _Why()


def rank(ask: Ask, candidates: Sequence[Candidate], rng: RandomSource) -> list[Ranked]:
    """By the time for queued prompt tokens and requests in flight; equals in random order."""
    ranked = [Ranked(candidate, sum(_terms(candidate)), WHY) for candidate in candidates]
    return by_cost(ranked, rng, REQUEST_TOKENS / 2)
