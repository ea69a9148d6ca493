"""Made-up traffic for the fleet simulation, seeded: half an hour of an ongoing service, as published traces
show it. Lengths, gaps and skews are published ones, with their sources; where quantiles are known, they are
drawn from the lognormal distribution that has them. How much comes follows one rule: a pooled cache would
leave to compute 70 % of what eight replicas of 4,700 tokens/s can do (69 to 71 %, mean of the seeds 0 to 3):
as much as it says here where each caches a million tokens, and where each caches 420,000, which is what GPU
memory alone holds, ``LESS_PER_S``.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from typing import Protocol

from simulator.errors import TraceError
from simulator.trace import BLOCK_TOKENS, Traced

DURATION_S = 1800.0
EARLIER_S = 3600.0
"""Sessions that began so long before are met in the middle."""


class Spread:
    """Lengths or times: half are below ``median``, nine tenths below ``ninth``."""

    def __init__(self, median: float, ninth: float) -> None:
        self._mu = math.log(median)
        self._sigma = math.log(ninth / median) / 1.2816

    def of(self, chance: random.Random) -> float:
        return chance.lognormvariate(self._mu, self._sigma)


# Chats. System prompts with tools of five products (tokenpricing.dev/system-prompts-cost, April 2026).
# WildChat (Zhao et al. 2024, arXiv:2405.01470, table 1) has 2.54 turns on average, 3.7 % of its chats more
# than ten; a user's text has 296 tokens with a deviation of 1,609, an answer 441 with one of 411. The gaps
# are those before the 3,964 requests that go on a session in the Mooncake conversation trace (Qin et al.
# 2024, arXiv:2407.00079).
CHATS_PER_S = 9.8
SYSTEM_TOKENS = (3475, 4523, 6201, 9847, 24_134)
MORE_TURNS = Spread(0.45, 3.98)
USER_TOKENS = Spread(53, 572)
ANSWER_TOKENS = Spread(323, 889)
TURN_S = Spread(123, 474)

# RAG. 3 % of the documents are in 60 % of the requests, Wikipedia's have 3,718 tokens on average, and two go
# into a prompt (RAGCache, Jin et al. 2024, arXiv:2404.12457). RAGPulse (Wang et al. 2025, arXiv:2511.12979)
# has 8,302 passages; its prompts without any have 1,055 to 1,577 tokens.
QUESTIONS_PER_S = 5.4
DOCUMENTS = 8302
ZIPF = 0.97
DOCUMENT_TOKENS = 3718
INSTRUCTION_TOKENS = 1024
QUESTION_TOKENS = 300

# Coding agents: 4,265 sessions of Claude Code and Codex (TraceLab, Zhu et al. 2026, arXiv:2606.30560,
# github.com/uw-syfi/TraceLab). Steps of a session, of which 8.9 in 82.5 are begun by the user; what a step
# appends to its context, the answer before it included; how long the model writes, a tool runs, a user waits.
# Answers are 523 tokens on average. A context that is full is summed up and goes on.
SESSIONS_PER_S = 0.19
TOOLS_TOKENS = 9847
STEPS = Spread(16, 150)
BY_USER = 8.9 / 82.5
APPENDED_TOKENS = Spread(790, 5000)
STEP_TOKENS = 523
WRITING_S = Spread(5.7, 22.2)
TOOL_S = Spread(0.3, 13.6)
HUMAN_S = Spread(84, 1236)
CONTEXT_TOKENS = 200_000
SUMMARY_TOKENS = 8000

NEW_PER_S = 6.6
ALIKE_PER_S = 13.2
"""Requests with nothing shared, and with one prefix common to all; of 4,000 and 2,000 new tokens."""

# A dense model of 70 billion parameters in bf16 on four GPUs of 80 GB: 288 GB that vLLM takes (0.9), less 141
# of weights, would be 449,000 tokens of 327,680 bytes (80 layers, 8 KV heads of 128, keys and values).
# Activations and graphs take some more: LMCache's documentation (getting_started/faq) has 420,208 tokens for
# Llama-3.1-70B on four H100.
GPU_TOKENS = 420_000
LESS_PER_S = {"chats": 6.9, "rag": 4.9, "agents": 0.1192}
"""How much comes where each replica caches ``GPU_TOKENS``, by the same rule."""

MOST_TOKENS = 64_000
"""Nothing that is said at once is longer."""


class _Text:
    """Makes up blocks: each is new, and is named once."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._ids = itertools.count()
        self._sessions = itertools.count()

    def blocks(self, tokens: int) -> list[int]:
        """New whole blocks, so many tokens of them."""
        return [next(self._ids) for _ in range(tokens // BLOCK_TOKENS)]

    def request(
        self, at_s: float, prefix: list[int], new_tokens: int, answer_tokens: int, session: int | None = None
    ) -> Traced:
        """A request whose prompt is ``prefix`` and then something new."""
        tail = [next(self._ids) for _ in range(-(-new_tokens // BLOCK_TOKENS))]
        prompt_tokens = len(prefix) * BLOCK_TOKENS + new_tokens
        return Traced(at_s, prompt_tokens, answer_tokens, (*prefix, *tail), session)

    def session(self) -> int:
        return next(self._sessions)

    def arrivals(self, per_s: float, earlier_s: float = 0.0) -> Iterator[float]:
        """Times of a Poisson process that began ``earlier_s`` before."""
        at_s = self.chance.expovariate(per_s) - earlier_s
        while at_s < DURATION_S:
            yield at_s
            at_s += self.chance.expovariate(per_s)

    def tokens(self, mean: float) -> int:
        """A length around ``mean``, with a long tail."""
        return max(16, int(self.chance.lognormvariate(0, 0.6) * mean / 1.2))

    def draw(self, spread: Spread) -> int:
        """A length of those."""
        return max(1, min(MOST_TOKENS, int(spread.of(self.chance))))


def chats(seed: int, per_s: float = CHATS_PER_S) -> list[Traced]:
    """Many chats of several turns over few system prompts."""
    text = _Text(seed)
    systems = [text.blocks(tokens) for tokens in SYSTEM_TOKENS]
    made = []
    for starts in text.arrivals(per_s, EARLIER_S):
        at_s, session, history, rest = starts, text.session(), text.chance.choice(systems), 0
        for _ in range(1 + int(MORE_TURNS.of(text.chance))):
            answer = text.draw(ANSWER_TOKENS)
            request = text.request(at_s, history, rest + text.draw(USER_TOKENS), answer, session)
            made.append(request)
            # The answer, and what is in no whole block, belongs to the next turn's new tokens.
            history, rest = list(request.full_blocks), request.prompt_tokens % BLOCK_TOKENS + answer
            at_s += TURN_S.of(text.chance)
            if at_s >= DURATION_S:
                break
    return _by_time(made)


def rag(seed: int, per_s: float = QUESTIONS_PER_S) -> list[Traced]:
    """Questions about two documents each, some of them popular (Zipf)."""
    text = _Text(seed)
    instructions = text.blocks(INSTRUCTION_TOKENS)
    lengths = [text.tokens(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    weights = list(accumulate(rank**-ZIPF for rank in range(1, DOCUMENTS + 1)))

    @cache
    def prompt(*documents: int) -> list[int]:
        """The blocks of the instructions and of documents in that order."""
        before = prompt(*documents[:-1]) if documents else instructions
        return before + text.blocks(lengths[documents[-1]]) if documents else before

    made = []
    for at_s in text.arrivals(per_s):
        found = text.chance.choices(range(DOCUMENTS), cum_weights=weights, k=2)
        question, answer = text.tokens(QUESTION_TOKENS), text.tokens(QUESTION_TOKENS)
        made.append(text.request(at_s, prompt(*found), question, answer))
    return made


def agents(seed: int, per_s: float = SESSIONS_PER_S) -> list[Traced]:
    """Coding agents: long sessions that grow with each step, over one prompt of tools."""
    text = _Text(seed)
    tools = text.blocks(TOOLS_TOKENS)
    made = []
    for starts in text.arrivals(per_s, EARLIER_S):
        at_s, session, history, rest = starts, text.session(), tools, 0
        for _ in range(text.draw(STEPS)):
            request = text.request(at_s, history, rest + text.draw(APPENDED_TOKENS), STEP_TOKENS, session)
            made.append(request)
            if request.prompt_tokens < CONTEXT_TOKENS:
                history, rest = list(request.full_blocks), request.prompt_tokens % BLOCK_TOKENS
            else:
                history, rest = tools, SUMMARY_TOKENS
            waits = HUMAN_S if text.chance.random() < BY_USER else TOOL_S
            at_s += WRITING_S.of(text.chance) + waits.of(text.chance)
            if at_s >= DURATION_S:
                break
    return _by_time(made)


def nothing_shared(seed: int, per_s: float = NEW_PER_S) -> list[Traced]:
    """Every prompt is new from its first token on."""
    text = _Text(seed)
    return [text.request(at_s, [], text.tokens(4000), text.tokens(300)) for at_s in text.arrivals(per_s)]


def one_prefix(seed: int, per_s: float = ALIKE_PER_S) -> list[Traced]:
    """One prefix common to all requests, and a tail of each one's own."""
    text = _Text(seed)
    prefix = text.blocks(8192)
    return [text.request(at_s, prefix, text.tokens(2000), text.tokens(300)) for at_s in text.arrivals(per_s)]


class _Maker(Protocol):
    """Makes up the traffic of a seed, of which so many sessions or requests begin in a second."""

    def __call__(self, seed: int, per_s: float = ...) -> list[Traced]: ...


WORKLOADS: dict[str, _Maker] = {
    "chats": chats,
    "rag": rag,
    "agents": agents,
    "nothing-shared": nothing_shared,
    "one-prefix": one_prefix,
}


def workload(name: str, seed: int = 0, per_s: float | None = None) -> list[Traced]:
    """The traffic of that name; of which ``per_s`` sessions or requests begin in a second, instead of as many
    as the rule has for caches of a million tokens. Raises TraceError for a name that is none, and for none
    in a second.
    """
    made = WORKLOADS.get(name)
    if made is None:
        raise TraceError(f"unknown workload {name!r}; choose one of {', '.join(WORKLOADS)}")
    if per_s is None:
        return made(seed)
    if not 0 < per_s < float("inf"):
        raise TraceError(f"{per_s} a second of workload {name}: must be a number above 0")
    return made(seed, per_s)


def _by_time(requests: list[Traced]) -> list[Traced]:
    return sorted((r for r in requests if r.at_s >= 0), key=lambda request: request.at_s)
