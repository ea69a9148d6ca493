"""What others have left to compute at a stream, from what its engine says of it and from what is ours there.

An engine says how many requests it has, and of what it has begun also the tokens: what it looked up in its
cache less what it found. Pure: times come in as arguments, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.reported import Reported


class Own(msgspec.Struct, frozen=True):
    """What is ours at a stream: ``requests``, those whose prefill is not over, ``waiting``, and their
    ``tokens``, of which some are ``computed`` by now. The first has ``first_tokens``. ``sent`` tokens were
    ever sent there.
    """

    requests: int = 0
    waiting: int = 0
    tokens: int = 0
    computed: int = 0
    first_tokens: int = 0
    sent: int = 0


class Backlog(msgspec.Struct, frozen=True):
    """As of a report: ``begun`` tokens of prompts that the engine had begun with, others' or ours, None where
    it does not say; ``others`` tokens of others, begun or not; and what was ours then.
    """

    begun: float | None = None
    others: float = 0.0
    own: Own = Own()

    def others_now(self, own_left: int, own_sent: int, computed_since: float) -> float:
        """Others' tokens by now, if the engine has computed so many since, ``own_left`` of ours are not
        computed, and so many were ever sent there.
        """
        then = self.own
        own_computed = (then.tokens - then.computed) + (own_sent - then.sent) - own_left
        if own_computed > 0:
            computed_since -= own_computed
        if computed_since <= 0.0:
            return self.others
        return self.others - computed_since if self.others > computed_since else 0.0


def begun_tokens(
    before: Reported, begun: float | None, reported: Reported, computed_since: float
) -> float | None:
    """Tokens of prompts that an engine has begun with and not yet computed. ``before`` and ``begun`` are
    those of the report before; an engine that is never idle computed ``computed_since`` since.
    """
    if before.admitted_tokens is None or reported.admitted_tokens is None:
        return None
    new = reported.admitted_tokens - before.admitted_tokens
    if new < 0:
        return None
    left = begun or 0.0
    if not new:
        return max(0.0, left - computed_since)
    gap = max(0.0, computed_since - left)
    # Prompts that waited were begun with as soon as there was room; others came somewhen in between.
    return max(0.0, new - (gap if before.waiting else gap / 2))


def others_tokens(reported: Reported, begun: float, own: Own, request_tokens: float) -> float:
    """Others' tokens at an engine that says how much it has begun with."""
    own_begun = own.waiting > reported.waiting or (own.computed > 0 and begun <= own.first_tokens)
    own_waiting = max(0, own.waiting - own_begun)
    total = begun + request_tokens * max(0, reported.waiting - own_waiting)
    total += own.tokens - (own.first_tokens if own_begun else 0)
    return max(0.0, total - (own.tokens - own.computed))


def level(streams: Sequence[tuple[float, float]], work: float) -> float:
    """The level, seconds, to which ``work`` tokens fill up streams when each of them goes where least waits.

    ``streams`` are (seconds of work that wait, tokens/s).
    """
    reached, rate = 0.0, 0.0
    for seconds, tokens_per_s in sorted(streams):
        needed = (seconds - reached) * rate
        if needed > work:
            break
        work -= needed
        reached = seconds
        rate += tokens_per_s
    return reached + work / rate
