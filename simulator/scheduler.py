"""Continuous batching as vLLM's scheduler does it: what runs in a step, and how long that takes.

Facts from ``vllm/v1/core/sched/scheduler.py`` and ``kv_cache_manager.py`` (0.32): first come first served,
running requests before waiting ones, one token budget per step for prefill chunks and decodes, blocks are
stored when they are scheduled, and the last request is preempted when blocks run out. Pure: the caller
sleeps for a step's duration between ``schedule`` and ``complete``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from events.schema import Event
from simulator.pool import Block, BlockPool, Prefix


class Request:
    """One prompt on its way through the scheduler.

    ``generate`` gives the token of a position of the answer, 0 first. ``cached_tokens`` is None until the
    request was first admitted. ``arrived`` is in seconds of the caller's clock.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        generate: Callable[[int], int],
        *,
        salt: str | None = None,
        reads_cache: bool = True,
        arrived: float = 0.0,
    ) -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.generate = generate
        self.salt = salt
        self.reads_cache = reads_cache
        self.arrived = arrived
        self.output: list[int] = []
        self.cached_tokens: int | None = None
        self.finished = False
        self.aborted = False
        self.preemptions = 0
        self.prefix: Prefix
        self.blocks: list[Block] = []
        self.computed = 0
        self.stored = 0

    @property
    def length(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prefix.tokens)

    @property
    def prefilling(self) -> bool:
        """Whether more than the last sampled token has yet to be computed."""
        return self.computed < max(len(self.prompt), self.length - 1)


class Rates(msgspec.Struct, frozen=True):
    """The simulated accelerator: ``prefill`` tokens/s in all, ``decode`` tokens/s of each request."""

    prefill: float
    decode: float


class Limits(msgspec.Struct, frozen=True):
    """``batched_tokens`` computed in one step at most, ``requests`` running at a time at most."""

    batched_tokens: int
    requests: int


class Counts(msgspec.Struct):
    """Totals since the start, in tokens unless the name says otherwise."""

    queried: int = 0
    hit: int = 0
    prompt: int = 0
    prompt_cached: int = 0
    prefilled: int = 0
    generated: int = 0
    preemptions: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0


class Step(msgspec.Struct):
    """What one step computes: tokens per request, ``duration`` in seconds, and what it did to the cache."""

    scheduled: list[tuple[Request, int]]
    prefill_tokens: int
    decodes: int
    duration: float


class Outcome(msgspec.Struct):
    """What a step gave: events first, then a sampled token for each request whose prompt is computed."""

    events: list[Event]
    sampled: list[tuple[Request, int]]


class Scheduler:
    """One engine core. ``seed`` starts the chain of block hashes."""

    def __init__(self, pool: BlockPool, rates: Rates, limits: Limits, seed: bytes) -> None:
        self.pool = pool
        self.counts = Counts()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._rates = rates
        self._limits = limits
        self._seed = seed
        self._step: Step | None = None
        self._aborted: list[Request] = []

    def add(self, request: Request) -> None:
        request.prefix = Prefix(request.prompt, self.pool.block_size, self._seed, request.salt)
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Ends a request without an event; its blocks come free, when it is in a step, after that step."""
        if request.finished or request.aborted:
            return
        request.aborted = True
        self._aborted.append(request)
        if self._step is None:
            self._drop_aborted()

    def reset_prefix_cache(self) -> bool:
        """False while requests hold blocks. The event goes out with the next working step."""
        return self.pool.reset()

    def schedule(self) -> Step | None:
        """Chooses what the next step computes and takes its blocks; None when there is nothing to do."""
        scheduled: list[tuple[Request, int]] = []
        budget, preempted = self._schedule_running(scheduled, self._limits.batched_tokens)
        if not preempted:
            self._schedule_waiting(scheduled, budget)
        if not scheduled:
            return None
        prefill = sum(tokens for request, tokens in scheduled if request.prefilling)
        decodes = sum(1 for request, _ in scheduled if not request.prefilling)
        duration = max(prefill / self._rates.prefill, 1 / self._rates.decode if decodes else 0.0)
        self._step = Step(scheduled, prefill, decodes, duration)
        return self._step

    def complete(self) -> Outcome:
        """Ends the step that was scheduled: samples, frees what is finished, and takes the events."""
        assert self._step is not None, "complete() without schedule()"
        step, self._step = self._step, None
        self.counts.prefilled += step.prefill_tokens
        sampled = []
        for request, tokens in step.scheduled:
            request.computed += tokens
            if request.aborted or request.computed < request.length:
                continue
            token = request.generate(len(request.output))
            request.output.append(token)
            request.prefix.append(token)
            self.counts.generated += 1
            sampled.append((request, token))
            if len(request.output) >= request.max_tokens:
                self._finish(request)
        self._drop_aborted()
        return Outcome(self.pool.take_events(), sampled)

    def _schedule_running(self, scheduled: list[tuple[Request, int]], budget: int) -> tuple[int, bool]:
        """Continues running requests in order; those at the end give way when blocks run out."""
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            tokens = min(request.length - request.computed, budget)
            while (needed := self._missing_blocks(request, tokens)) > self.pool.free_count:
                victim = self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is request:
                    return budget, preempted
            self._take_slots(request, tokens, needed)
            scheduled.append((request, tokens))
            budget -= tokens
            index += 1
        return budget, preempted

    def _schedule_waiting(self, scheduled: list[tuple[Request, int]], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self._limits.requests:
            request = self.waiting[0]
            # The last token is always computed, or there would be nothing to sample from.
            limit = (request.length - 1) // self.pool.block_size if request.reads_cache else 0
            hits = self.pool.match(request.prefix.hashes, limit)
            if not self._whole_prompt_fits(request, hits):
                return
            self.waiting.popleft()
            self.running.append(request)
            self._admit(request, hits)
            tokens = min(request.length - request.computed, budget)
            self._take_slots(request, tokens, self._missing_blocks(request, tokens))
            scheduled.append((request, tokens))
            budget -= tokens

    def _whole_prompt_fits(self, request: Request, hits: Sequence[Block]) -> bool:
        """Whether all of it has room now, counting that hits which are free stop being free."""
        needed = -(-request.length // self.pool.block_size) - len(hits)
        return needed + sum(1 for block in hits if block.references == 0) <= self.pool.free_count

    def _admit(self, request: Request, hits: list[Block]) -> None:
        self.pool.touch(hits)
        request.blocks = hits
        request.stored = len(hits)
        request.computed = len(hits) * self.pool.block_size
        if request.preemptions:
            return  # Prompts that start over are counted apart in vLLM's metrics.
        request.cached_tokens = request.computed
        self.counts.prompt += len(request.prompt)
        self.counts.prompt_cached += request.computed
        if request.reads_cache:
            self.counts.queried += request.length
            self.counts.hit += request.computed

    def _missing_blocks(self, request: Request, tokens: int) -> int:
        return -(-(request.computed + tokens) // self.pool.block_size) - len(request.blocks)

    def _take_slots(self, request: Request, tokens: int, blocks: int) -> None:
        """Gets the blocks for the tokens of this step, and stores those that the step fills."""
        request.blocks.extend(self.pool.allocate(blocks))
        full = min(request.computed + tokens, request.length) // self.pool.block_size
        self.pool.store(request.prefix, request.blocks, request.stored, full)
        request.stored = max(request.stored, full)

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.computed = 0
        request.preemptions += 1
        self.counts.preemptions += 1
        self.waiting.appendleft(request)

    def _finish(self, request: Request) -> None:
        request.finished = True
        self.counts.finished_requests += 1
        self.running.remove(request)
        self._release(request)

    def _drop_aborted(self) -> None:
        for request in self._aborted:
            if request in self.running:
                self.running.remove(request)
                self._release(request)
            else:
                self.waiting.remove(request)
            self.counts.aborted_requests += 1
        self._aborted.clear()

    def _release(self, request: Request) -> None:
        self.pool.free(request.blocks)
        request.blocks = []
        request.stored = 0
