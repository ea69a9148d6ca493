"""A routing decision: what was known of each candidate, what each would cost, which was taken and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, Protocol

import msgspec
from multidict import istr

from router.latency import COLD_OVERHEAD_S, COLD_S_PER_TOKEN
from router.replicas import StreamId

HEADER_PREFIX = "x-warmroute-"
MAX_REASON_CHARS = 300
_REPLICA, _POLICY, _REASON, _RULE, _PROMPT_TOKENS, _MATCHED_TOKENS = (
    istr(HEADER_PREFIX + name)
    for name in ("replica", "policy", "reason", "rule", "prompt-tokens", "matched-tokens")
)


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A stream that could take the request.

    ``matched_tokens`` is what the index says that it holds of the prompt and an engine can use; None where
    the index did not say. ``credited_tokens`` is that weighed by tier and by ``weight``, the trust in the
    stream's ``state``. ``hinted_tokens`` it will hold soon, as a prompt that begins alike is on its way
    there. ``requests``, ``prefill_tokens`` (still to be computed) and ``decoding`` are its load;
    ``overhead_s`` and ``s_per_token`` its speed; ``behind`` is how many requests behind this one would wait
    for the work that it brings, by the stream's utilisation; ``shared_tokens`` of it are for others to bear,
    who wait for the same elsewhere; ``room_tokens`` fit in its cache before it pushes something out, None
    where nobody knows.
    """

    replica: str
    rank: int
    matched_tokens: int | None = None
    credited_tokens: int = 0
    hinted_tokens: int = 0
    block_size: int = 0
    state: str | None = None
    weight: float | None = None
    requests: int = 0
    prefill_tokens: int = 0
    decoding: int = 0
    overhead_s: float = COLD_OVERHEAD_S
    s_per_token: float = COLD_S_PER_TOKEN
    behind: float = 0.0
    shared_tokens: float = 0.0
    room_tokens: int | None = None

    @property
    def stream(self) -> StreamId:
        return self.replica, self.rank

    @property
    def reused_tokens(self) -> int:
        """What of the prompt it will not have to compute."""
        credited, hinted = self.credited_tokens, self.hinted_tokens
        return credited if credited > hinted else hinted

    @property
    def trusted_tokens(self) -> int | None:
        """The match as it is told; None where the index did not say, or cannot be trusted at all now."""
        return None if self.weight is not None and self.weight <= 0 else self.matched_tokens


class Ask(msgspec.Struct, frozen=True):
    """What a policy is told of the request and of the time it comes at.

    Its prompt's tokens, if known, and its number among those of its model; how much of what its tokens
    displace is wanted back, 0 to 1; its routing ``key``, and the ``seat`` that the key has. Few requests wait
    longer than ``patience_s`` for their first token.
    """

    prompt_tokens: int | None
    turn: int = 0
    worth: float = 0.0
    key: bytes | None = None
    seat: StreamId | None = None
    patience_s: float = float("inf")


class Why(Protocol):
    """How a policy came to its costs. Asked when somebody reads them: nobody does of most candidates."""

    def terms(self, item: Ranked) -> Mapping[str, float]:
        """What adds up to the candidate's cost."""

    def reason(self, item: Ranked) -> str:
        """Why it costs that, in words."""


class Ranked(msgspec.Struct, frozen=True, gc=False):
    """A candidate with its cost (lower is better), and why it is that: the terms that add up to it, and the
    reason in words.
    """

    candidate: Candidate
    cost: float
    why: Why

    @property
    def terms(self) -> Mapping[str, float]:
        return self.why.terms(self)

    @property
    def reason(self) -> str:
        return self.why.reason(self)

    def shown(self) -> dict[str, Any]:
        """As JSON shows it."""
        return {
            "candidate": msgspec.to_builtins(self.candidate),
            "cost": self.cost,
            "terms": self.terms,
            "reason": self.reason,
        }


class Said(msgspec.Struct, frozen=True):
    """Of a policy that has few words: the same reason for all, and a cost of one term."""

    term: str
    text: str

    def terms(self, item: Ranked) -> Mapping[str, float]:
        return {self.term: item.cost}

    def reason(self, item: Ranked) -> str:
        return self.text


class RandomSource(Protocol):
    """What policies need of ``random.Random``."""

    def random(self) -> float: ...


class RankFunction(Protocol):
    """A policy: candidates in, ranked candidates out, best first.

    Pure but for the tie-break's random source.
    """

    def __call__(self, ask: Ask, candidates: Sequence[Candidate], rng: RandomSource) -> list[Ranked]: ...


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided for one attempt of a request. Holds nothing of the prompt but its length.

    ``matched_tokens`` is what the index holds for the chosen stream, before trust is weighed in: 0 where it
    is not trusted at all, None without tokens. ``best_available_tokens`` is the longest match among the
    candidates; ``hinted_tokens`` what the chosen one was expected to have soon; ``fallback`` the code of what
    failed in front of the decision, if something did; ``rule`` the one that chose the policy.
    """

    request_id: str
    at: float
    model: str | None
    policy: str
    chosen: StreamId
    reason: str
    prompt_tokens: int | None
    matched_tokens: int | None
    best_available_tokens: int | None
    hinted_tokens: int = 0
    prefill_tokens: int
    ranked: list[Ranked]
    fallback: str | None = None
    rule: str | None = None
    attempt: int = 1

    @property
    def mode(self) -> Literal["policy", "fallback"]:
        return "fallback" if self.fallback else "policy"

    def shown(self) -> dict[str, Any]:
        """As JSON shows it."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return {**fields, "ranked": [item.shown() for item in self.ranked], "mode": self.mode}

    def headers(self) -> dict[str, str]:
        """The response headers that say it. Without tokens there are no counts."""
        said: dict[str, str] = {
            _REPLICA: _name_value(self.chosen[0]),
            _POLICY: _name_value(self.policy),
            _REASON: header_value(self.reason),
        }
        if self.rule is not None:
            said[_RULE] = _name_value(self.rule)
        if self.prompt_tokens is not None:
            said[_PROMPT_TOKENS] = str(self.prompt_tokens)
            if self.matched_tokens is not None:
                said[_MATCHED_TOKENS] = str(self.matched_tokens)
        return said


def header_value(text: str) -> str:
    """``text`` as a header may carry it: one line of printable ASCII."""
    line = " ".join(text.split())[:MAX_REASON_CHARS]
    if line.isascii() and line.isprintable():
        return line
    return "".join(char if " " <= char <= "~" else "?" for char in line)


_name_value = lru_cache(1024)(header_value)
"""The same for names, of which there are few."""
