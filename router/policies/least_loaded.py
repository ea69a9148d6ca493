"""``least-loaded``: the stream with the least work in front of it, in tokens."""

from __future__ import annotations

from collections.abc import Sequence

from router.decision import Ask, Candidate, RandomSource, Ranked
from router.policies.ties import by_cost

REQUEST_TOKENS = 16
"""What a request in flight costs its neighbours, in prompt tokens: it takes part in every step that
prefills.
"""


def load_terms(candidate: Candidate) -> dict[str, float]:
    """Prompt tokens queued to prefill, and what the requests in flight cost."""
    return {
        "queued_prefill": float(candidate.prefill_tokens),
        "in_flight": float(REQUEST_TOKENS * candidate.requests),
    }


def rank(ask: Ask, candidates: Sequence[Candidate], rng: RandomSource) -> list[Ranked]:
    """By queued prompt tokens and requests in flight; equals in random order."""
    ranked = []
    for candidate in candidates:
        terms = load_terms(candidate)
        reason = f"least load: {candidate.prefill_tokens} tokens queued, {candidate.requests} in flight"
        ranked.append(Ranked(candidate, sum(terms.values()), terms, reason))
    return by_cost(ranked, rng)
