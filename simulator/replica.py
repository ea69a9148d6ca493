"""A replica on virtual time: a prefix cache that evicts the least recently used block, and a line of prompts.

Prompts are computed first come, first served, one after the other: vLLM gives its token budget to the
requests that run, in order, before it admits another, so chunks of two prompts share a step at most where one
ends and the next begins. Decoding is given its own time (it hardly slows prefill down as long as a step is
compute-bound); with a decode rate, requests hold their blocks until their answer is done, and the answer's
tokens take blocks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec

from simulator.trace import BLOCK_TOKENS, Traced


class Job:
    """One request at a replica, that came at ``came_s``. ``lost`` when the replica went down under it."""

    def __init__(self, request: Traced, came_s: float | None = None) -> None:
        self.request = request
        self.came_s = request.at_s if came_s is None else came_s
        self.cached_tokens = 0
        self.blocks: list[int] = []
        self.lost = False


class CacheChange(msgspec.Struct, frozen=True):
    """Blocks that came into a cache and that went, as its events say."""

    stored: Sequence[int]
    removed: Sequence[int]


class Cache:
    """Blocks by id; those that no running request holds are evicted, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free: OrderedDict[int, None] = OrderedDict()
        self._held: dict[int, int] = {}

    def leading(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are there."""
        for number, block in enumerate(blocks):
            if block not in self._free and block not in self._held:
                return number
        return len(blocks)

    def fits(self, blocks: Sequence[int]) -> bool:
        """Whether they can all be held now."""
        return len(self._held) + sum(block not in self._held for block in blocks) <= self.capacity

    def hold(self, blocks: Sequence[int]) -> CacheChange:
        """Takes blocks for a request, evicting others for those that are not there."""
        stored = []
        for block in blocks:
            if block in self._held:
                self._held[block] += 1
                continue
            if block in self._free:
                del self._free[block]
            else:
                stored.append(block)
            self._held[block] = 1
        excess = max(0, len(self._held) + len(self._free) - self.capacity)
        return CacheChange(stored, [self._free.popitem(last=False)[0] for _ in range(excess)])

    def release(self, blocks: Sequence[int]) -> None:
        """Gives them back; the last of them will be evicted first."""
        for block in reversed(blocks):
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
                self._free[block] = None

    def clear(self) -> None:
        self._free.clear()
        self._held.clear()


class Replica:
    """One engine. ``prefill_rate`` is in tokens/s; ``decodes``: requests stay until their answer is done.

    ``computed_s`` is for how long it has computed prompts, ``admitted_tokens`` what it had to compute of all
    that it has begun with.
    """

    def __init__(self, name: str, cache: Cache, prefill_rate: float, *, decodes: bool) -> None:
        self.name = name
        self.cache = cache
        self.up = True
        self.computed_s = 0.0
        self.admitted_tokens = 0
        self.waiting: deque[Job] = deque()
        self.prefilling: Job | None = None
        self.decoding: set[Job] = set()
        self._prefill_rate = prefill_rate
        self._decodes = decodes
        self._answer_block = 0

    def begin(self) -> tuple[Job, CacheChange, float] | None:
        """Takes the next prompt, if none is being computed and its blocks have room: the job, what that does
        to the cache, and the seconds until its first token.
        """
        if self.prefilling is not None or not self.waiting:
            return None
        job = self.waiting[0]
        request = job.request
        blocks = [*request.full_blocks, *self._answer_blocks(request)]
        if not self.cache.fits(blocks):
            return None
        self.prefilling = self.waiting.popleft()
        # The last token of a prompt is always computed.
        usable = request.blocks[: (request.prompt_tokens - 1) // BLOCK_TOKENS]
        job.cached_tokens = self.cache.leading(usable) * BLOCK_TOKENS
        job.blocks = blocks
        change = self.cache.hold(blocks)
        new_tokens = request.prompt_tokens - job.cached_tokens
        self.admitted_tokens += new_tokens
        seconds = new_tokens / self._prefill_rate
        self.computed_s += seconds
        return job, change, seconds

    def prefilled(self) -> None:
        """The first token of the prompt that is being computed is out."""
        assert self.prefilling is not None
        self.decoding.add(self.prefilling)
        self.prefilling = None

    def end(self, job: Job) -> None:
        """The last token of a request is out."""
        self.decoding.remove(job)
        self.cache.release(job.blocks)

    def go_down(self) -> list[Job]:
        """Loses its cache and all requests; returns them."""
        jobs = [*([self.prefilling] if self.prefilling else []), *self.waiting, *self.decoding]
        for job in jobs:
            job.lost = True
        self.up, self.prefilling = False, None
        self.waiting.clear()
        self.decoding.clear()
        self.cache.clear()
        return jobs

    def _answer_blocks(self, request: Traced) -> range:
        """Blocks for the prompt's last tokens and the answer, which no other prompt of a trace begins
        with.
        """
        if not self._decodes:
            return range(0)
        tokens = request.prompt_tokens % BLOCK_TOKENS + request.answer_tokens
        first = self._answer_block - 1
        self._answer_block -= -(-tokens // BLOCK_TOKENS)
        return range(first, self._answer_block - 1, -1)
