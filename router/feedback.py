"""Tells the indexer what engines said was cached, off the path of requests."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from events.logs import Throttled
from indexer.errors import IndexerClientError
from indexer.outcome import Outcome
from router.metrics import RouterMetrics
from router.replicas import StreamId

log = logging.getLogger(__name__)

BATCH = 32
"""Answers told at once: the indexer commits them together."""
MAX_ANSWERS = 1024
MAX_TOKENS = 8_000_000
"""Bounds the prompts that wait to be told (4 bytes a token)."""


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """One answer: what ``stream`` had cached of the prompt ``ids``, against what was predicted as of its
    ``generation`` and ``sequence``. Never shown: it holds a prompt.
    """

    stream: StreamId
    model: str
    lora_name: str | None
    cache_salt: str | None
    ids: array[int]
    generation: int
    sequence: int | None
    predicted_tokens: int
    cached_tokens: int


class FeedbackClient(Protocol):
    """What is asked of an indexer; raises IndexerClientError."""

    async def feedback(
        self,
        instance_id: str,
        model: str,
        tokens: Sequence[int],
        *,
        generation: int,
        sequence: int | None,
        cached_tokens: int,
        predicted_tokens: int | None = None,
        rank: int = 0,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> Outcome: ...


class Feedback:
    """A bounded queue of answers, and the task that tells them.

    ``address`` gives the indexer's URL, or None while nobody knows it; ``client`` makes a client for a URL.
    ``untold`` gets the answers that no indexer took.
    """

    def __init__(
        self,
        address: Callable[[], Awaitable[str | None]],
        client: Callable[[str], FeedbackClient],
        metrics: RouterMetrics,
        untold: Callable[[Learned], None],
    ) -> None:
        self._address = address
        self._client = client
        self._metrics = metrics
        self._untold = untold
        self._throttled = Throttled(log)
        self._waiting: deque[Learned] = deque()
        self._tokens = 0
        self._came = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to tell, on the running loop."""
        self._task = asyncio.create_task(self._run(), name="feedback")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def offer(self, learned: Learned) -> None:
        """Queues an answer. When too much waits, it is dropped and counted: the next one says the same."""
        if len(self._waiting) >= MAX_ANSWERS or self._tokens + len(learned.ids) > MAX_TOKENS:
            self._count("dropped")
            self._untold(learned)
            return
        self._waiting.append(learned)
        self._tokens += len(learned.ids)
        self._came.set()

    async def _run(self) -> None:
        while True:
            await self._came.wait()
            self._came.clear()
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                self._tokens -= sum(len(learned.ids) for learned in batch)
                try:
                    await self._tell_all(batch)
                except Exception as error:
                    # The task must outlive any surprise. The message could quote a prompt.
                    self._throttled.warning(
                        "feedback", "telling the indexer failed: %s", type(error).__name__
                    )

    async def _tell_all(self, batch: list[Learned]) -> None:
        url = await self._address()
        if url is None:
            for learned in batch:
                self._count("no_indexer")
                self._untold(learned)
            return
        client = self._client(url)
        await asyncio.gather(*(self._tell(client, learned) for learned in batch))

    async def _tell(self, client: FeedbackClient, learned: Learned) -> None:
        instance, rank = learned.stream
        try:
            outcome = await client.feedback(
                instance,
                learned.model,
                learned.ids,
                generation=learned.generation,
                sequence=learned.sequence,
                cached_tokens=learned.cached_tokens,
                predicted_tokens=learned.predicted_tokens,
                rank=rank,
                lora_name=learned.lora_name,
                cache_salt=learned.cache_salt,
            )
        except IndexerClientError as error:
            self._count("failed")
            self._untold(learned)
            self._throttled.warning("failed", "the indexer takes no feedback: %s", error)
            return
        self._count(outcome.reason or "refused" if outcome.status == "refused" else "taken")

    def _count(self, outcome: str) -> None:
        self._metrics.feedback.labels(outcome).inc()
