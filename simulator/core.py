"""One engine core: a scheduler in real time, publishing what its steps do to the cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from events.publisher import Publisher
from simulator.pool import BlockPool
from simulator.scheduler import Limits, Outcome, Rates, Request, Scheduler
from simulator.settings import EngineSettings

Sink = Callable[[int, bool], None]


class EngineCore:
    """The core of one data-parallel rank. ``run`` must be going for requests to be served.

    Steps start one after the other on their own time line, so being woken late delays one step's tokens
    and not the steps behind it. A step that only decodes is cut short by a request that can start: the
    decode rate is the pace of a request, not work that a prompt would have to wait for.
    """

    def __init__(
        self,
        rank: int,
        settings: EngineSettings,
        seed: bytes,
        publisher: Publisher | None,
        first_token: Callable[[float], None],
    ) -> None:
        """``first_token`` is told the seconds from arrival to the first token of each request."""
        self.rank = rank
        self.publisher = publisher
        self.scheduler = Scheduler(
            BlockPool(settings.blocks, settings.block_size),
            Rates(settings.prefill_rate, settings.decode_rate),
            Limits(settings.max_batched_tokens, settings.max_seqs),
            seed,
        )
        self._first_token = first_token
        self._sinks: dict[Request, Sink] = {}
        self._work = asyncio.Event()

    def submit(self, request: Request, sink: Sink) -> None:
        """Queues a request; ``sink`` gets each token, and whether it is the last."""
        request.arrived = time.monotonic()
        self._sinks[request] = sink
        if not self.scheduler.waiting:  # Behind others that wait it could not start either.
            self._work.set()
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Forgets a request whose client is gone; nothing happens to one that is finished."""
        if self._sinks.pop(request, None) is not None:
            self.scheduler.abort(request)

    async def run(self) -> None:
        """Serves until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            step = self.scheduler.schedule()
            self._work.clear()
            if step is None:
                await self._work.wait()
                due = loop.time()
                continue
            due += step.duration
            if step.prefill_tokens:
                await asyncio.sleep(max(0.0, due - loop.time()))
            elif await self._work_before(due):
                due = loop.time()
            self._deliver(self.scheduler.complete())

    async def _work_before(self, due: float) -> bool:
        """Waits until ``due``, or until there is a request that can start: True then."""
        try:
            async with asyncio.timeout_at(due):
                await self._work.wait()
        except TimeoutError:
            return False
        return True

    def _deliver(self, outcome: Outcome) -> None:
        """Events first, tokens then: a subscriber can know a block before the client has its first token."""
        if self.publisher is not None and outcome.events:
            self.publisher.publish(outcome.events, time.time())
        for request, token in outcome.sampled:
            if len(request.output) == 1:
                self._first_token(time.monotonic() - request.arrived)
            sink = self._sinks.pop(request) if request.finished else self._sinks[request]
            sink(token, request.finished)
