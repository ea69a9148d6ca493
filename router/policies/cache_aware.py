"""``cache-aware``: the stream where a request costs the least time, its own and that of others.

Own time is the predicted time to first token: the work in front of it there, and its own uncached tokens. The
work that it brings is waited for by those that come behind it as well, the more of them the busier the fleet
is; and what its new blocks push out of that cache is computed again when it is wanted back. Both make the
copy that exists cheaper than a second one. Where others wait for the same, the second one is for them as
well, and they bear their part. What it would wait longer than nearly all do counts for more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from router.decision import Ask, Candidate, RandomSource, Ranked
from router.policies import least_loaded
from router.policies.least_loaded import REQUEST_TOKENS
from router.policies.ties import by_cost

SLACK_SHARE = 0.01
SLACK_TOKENS = 16
"""Candidates within one percent of the prompt, or a block, of the best are as good as it."""
TERMS = (*least_loaded.TERMS, "uncached", "behind", "displaced", "shared", "late")
IMPATIENCE = 3.0
"""What a second counts for, besides itself, by which a request waits longer than nearly all do: else a few
would wait without end for the sake of others.
"""


class CacheAware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy with its parameters.

    ``affinity``, 0 to 1, is what the cache weighs against the load: 0 is the load alone, 1 the cache alone,
    and 0.5 is time against time, which needs no tuning. Without ``foresight`` the time of others counts
    nothing: plain lowest predicted time to first token.
    """

    affinity: Annotated[float, Meta(ge=0, le=1)] = 0.5
    foresight: bool = True

    def rank(self, ask: Ask, candidates: Sequence[Candidate], rng: RandomSource) -> list[Ranked]:
        """By cost, seconds. Without tokens, or with no match that can be trusted, this is least-loaded."""
        prompt_tokens = ask.prompt_tokens
        if prompt_tokens is None or all(
            candidate.trusted_tokens is None and not candidate.hinted_tokens for candidate in candidates
        ):
            return least_loaded.rank(ask, candidates, rng)
        why, terms_of = _Why(self, ask), self.terms_of(ask)
        ranked = [Ranked(candidate, sum(terms_of(candidate)), why) for candidate in candidates]
        return by_cost(ranked, rng, max(SLACK_TOKENS, SLACK_SHARE * prompt_tokens))

    def terms_of(self, ask: Ask) -> Callable[[Candidate], tuple[float, ...]]:
        """Gives the ``TERMS`` of a candidate; without ``foresight`` the first four of them."""
        prompt_tokens, worth, foresight = ask.prompt_tokens or 0, ask.worth, self.foresight
        load_weight, cache_weight = 2 * (1 - self.affinity), 2 * self.affinity
        # Only where both count: what is late has waited for the cache's sake.
        patience_s, impatience = ask.patience_s, load_weight * cache_weight * IMPATIENCE

        def terms(candidate: Candidate) -> tuple[float, ...]:
            # Without calls: this runs for every replica and request.
            s_per_token, room_tokens = candidate.s_per_token, candidate.room_tokens
            credited, hinted = candidate.credited_tokens, candidate.hinted_tokens
            new_tokens = prompt_tokens - (credited if credited > hinted else hinted)
            token_s = load_weight * s_per_token
            overhead, queued = load_weight * candidate.overhead_s, token_s * candidate.prefill_tokens
            in_flight = token_s * REQUEST_TOKENS * candidate.requests
            token_s = cache_weight * s_per_token
            uncached = token_s * new_tokens
            if not foresight:
                return overhead, queued, in_flight, uncached
            behind, displaced = candidate.behind, 0.0
            if room_tokens is not None and new_tokens > room_tokens:
                # Tokens that are expected to be computed again for what the new ones push out.
                displaced = token_s * (1 + behind) * (worth * (new_tokens - room_tokens))
            waits_s = candidate.overhead_s + s_per_token * (candidate.prefill_tokens + new_tokens)
            behind_it, shared = token_s * behind * new_tokens, 0.0
            if candidate.shared_tokens:
                shared = -(behind_it + displaced) * candidate.shared_tokens / new_tokens
            late = impatience * (waits_s - patience_s) if waits_s > patience_s else 0.0
            return overhead, queued, in_flight, uncached, behind_it, displaced, shared, late

        return terms


class _Why(msgspec.Struct, frozen=True):
    policy: CacheAware
    ask: Ask

    def terms(self, item: Ranked) -> Mapping[str, float]:
        return dict(zip(TERMS, self.policy.terms_of(self.ask)(item.candidate), strict=False))

    def reason(self, item: Ranked) -> str:
        return _reason(self.ask.prompt_tokens or 0, item.candidate)


def _reason(prompt_tokens: int, candidate: Candidate) -> str:
    soon = ""
    if candidate.hinted_tokens > candidate.credited_tokens:
        soon = f", {candidate.hinted_tokens} soon"
    return (
        f"{candidate.trusted_tokens or 0} of {prompt_tokens} prompt tokens cached{_doubt(candidate)}{soon}, "
        f"{candidate.prefill_tokens} queued, {candidate.requests} requests in flight"
    )


def _doubt(candidate: Candidate) -> str:
    weight = candidate.weight
    return f", trusted {100 * weight:.0f} %" if weight is not None and 0 < weight < 1 else ""
