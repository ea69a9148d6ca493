"""``cache-aware``: the stream where the fewest prompt tokens must be computed before the first token can
come.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.decision import Ask, Candidate, RandomSource, Ranked
from router.policies import least_loaded
from router.policies.ties import by_cost

SLACK_SHARE = 0.01
SLACK_TOKENS = 16
"""Candidates within one percent of the prompt, or a block, of the best are as good as it."""


def rank(ask: Ask, candidates: Sequence[Candidate], rng: RandomSource) -> list[Ranked]:
    """By the load plus this request's own uncached tokens.

    Without tokens, or with no match that can be trusted, this is least-loaded.
    """
    prompt_tokens = ask.prompt_tokens
    if prompt_tokens is None or all(candidate.trusted_tokens is None for candidate in candidates):
        return least_loaded.rank(ask, candidates, rng)
    ranked = []
    for candidate in candidates:
        terms = least_loaded.load_terms(candidate)
        terms["uncached"] = float(prompt_tokens - candidate.credited_tokens)
        reason = (
            f"{candidate.trusted_tokens or 0} of {prompt_tokens} prompt tokens cached{_doubt(candidate)}, "
            f"{candidate.prefill_tokens} queued, {candidate.requests} requests in flight"
        )
        ranked.append(Ranked(candidate, sum(terms.values()), terms, reason))
    return by_cost(ranked, rng, max(SLACK_TOKENS, SLACK_SHARE * prompt_tokens))


def _doubt(candidate: Candidate) -> str:
    weight = candidate.weight
    return f", trusted {100 * weight:.0f} %" if weight is not None and 0 < weight < 1 else ""
