"""``least-loaded``: the stream that would be done with the work in front of it first."""

from __future__ import annotations

from collections.abc import Sequence

from router.decision import Ask, Candidate, RandomSource, Ranked
from router.policies.ties import by_cost

REQUEST_TOKENS = 16
"""What a request in flight costs its neighbours, in prompt tokens: it takes part in every step that
prefills.
"""


def load_terms(candidate: Candidate, weight: float = 1.0) -> dict[str, float]:
    """Seconds for the prompt tokens queued to prefill, and for what the requests in flight cost."""
    token_s = weight * candidate.s_per_token
    return {
        "overhead": weight * candidate.overhead_s,
        "queued": token_s * candidate.prefill_tokens,
        "in_flight": token_s * REQUEST_TOKENS * candidate.requests,
    }


def rank(ask: Ask, candidates: Sequence[Candidate], rng: RandomSource) -> list[Ranked]:
    """By the time for queued prompt tokens and requests in flight; equals in random order."""
    ranked = []
    for candidate in candidates:
        terms = load_terms(candidate)
        reason = f"least load: {candidate.prefill_tokens} tokens queued, {candidate.requests} in flight"
        ranked.append(Ranked(candidate, sum(terms.values()), terms, reason))
    return by_cost(ranked, rng, REQUEST_TOKENS / 2)
