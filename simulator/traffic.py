"""Made-up traffic for the fleet simulation: seeded, and sized for eight replicas of 4,700 tokens/s that cache
a million tokens each.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from itertools import accumulate

from simulator.errors import TraceError
from simulator.trace import BLOCK_TOKENS, Traced

DURATION_S = 1200.0


class _Text:
    """Makes up blocks: each is new, and is named once."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._ids = itertools.count()

    def blocks(self, tokens: int) -> list[int]:
        """New whole blocks, so many tokens of them."""
        return [next(self._ids) for _ in range(tokens // BLOCK_TOKENS)]

    def request(self, at_s: float, prefix: list[int], new_tokens: int, answer_tokens: int) -> Traced:
        """A request whose prompt is ``prefix`` and then something new."""
        tail = [next(self._ids) for _ in range(-(-new_tokens // BLOCK_TOKENS))]
        return Traced(at_s, len(prefix) * BLOCK_TOKENS + new_tokens, answer_tokens, (*prefix, *tail))

    def arrivals(self, per_s: float) -> Iterator[float]:
        """Times of a Poisson process."""
        at_s = self.chance.expovariate(per_s)
        while at_s < DURATION_S:
            yield at_s
            at_s += self.chance.expovariate(per_s)

    def tokens(self, mean: float) -> int:
        """A length around ``mean``, with a long tail."""
        return max(16, int(self.chance.lognormvariate(0, 0.6) * mean / 1.2))


def chats(seed: int) -> list[Traced]:
    """Many chats of several turns over few system prompts."""
    text = _Text(seed)
    systems = [text.blocks(text.chance.choice((2048, 4096, 8192))) for _ in range(12)]
    made = []
    for starts in text.arrivals(1.9):
        history, at_s = list(text.chance.choice(systems)), starts
        while True:
            answer = text.tokens(400)
            request = text.request(at_s, history, text.tokens(1800), answer)
            made.append(request)
            if text.chance.random() < 0.15:
                break
            # The answer's tokens belong to the next turn's prompt, and are in no whole block of this one.
            history = [*request.full_blocks, *text.blocks(answer)]
            at_s += 5 + text.chance.expovariate(1 / 40)
    return _by_time(made)


def rag(seed: int) -> list[Traced]:
    """Questions about documents, some of them popular (Zipf)."""
    text = _Text(seed)
    system = text.blocks(1024)
    documents = [text.blocks(text.tokens(12_000)) for _ in range(3000)]
    weights = list(accumulate(1 / rank for rank in range(1, len(documents) + 1)))
    return [
        text.request(
            at_s,
            system + text.chance.choices(documents, cum_weights=weights)[0],
            text.tokens(300),
            text.tokens(300),
        )
        for at_s in text.arrivals(6.5)
    ]


def agents(seed: int) -> list[Traced]:
    """Coding agents: long sessions that grow with each step, over one prompt of tools."""
    text = _Text(seed)
    tools = text.blocks(8192)
    made = []
    for starts in text.arrivals(0.3):
        history, at_s = tools + text.blocks(text.tokens(10_000)), starts
        for _ in range(text.chance.randrange(10, 40)):
            answer = text.tokens(300)
            request = text.request(at_s, history, text.tokens(2500), answer)
            made.append(request)
            history = [*request.full_blocks, *text.blocks(answer)]
            at_s += 3 + text.chance.expovariate(1 / 6)
    return _by_time(made)


def nothing_shared(seed: int) -> list[Traced]:
    """Every prompt is new from its first token on."""
    text = _Text(seed)
    return [text.request(at_s, [], text.tokens(4000), text.tokens(300)) for at_s in text.arrivals(7.5)]


def one_prefix(seed: int) -> list[Traced]:
    """One prefix common to all requests, and a tail of each one's own."""
    text = _Text(seed)
    prefix = text.blocks(8192)
    return [text.request(at_s, prefix, text.tokens(2000), text.tokens(300)) for at_s in text.arrivals(15.0)]


WORKLOADS: dict[str, Callable[[int], list[Traced]]] = {
    "chats": chats,
    "rag": rag,
    "agents": agents,
    "nothing-shared": nothing_shared,
    "one-prefix": one_prefix,
}


def workload(name: str, seed: int = 0) -> list[Traced]:
    """The traffic of that name. Raises TraceError for a name that is none."""
    try:
        return WORKLOADS[name](seed)
    except KeyError:
        raise TraceError(f"unknown workload {name!r}; choose one of {', '.join(WORKLOADS)}") from None


def _by_time(requests: list[Traced]) -> list[Traced]:
    return sorted((r for r in requests if r.at_s < DURATION_S), key=lambda request: request.at_s)
