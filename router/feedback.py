"""Tells the indexer what engines said was cached, off the path of requests."""

from __future__ import annotations

import asyncio
import logging
import struct
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from events.logs import Throttled
from indexer.errors import IndexerClientError
from indexer.keys import local_hashes
from indexer.outcome import Outcome
from indexer.told import Told
from router.metrics import RouterMetrics
from router.replicas import StreamId

log = logging.getLogger(__name__)

BATCH = 64
"""Answers told in one call: the indexer commits them together."""
GATHER_S = 0.05
"""How long the first answer of a batch waits for others."""
NOT_HEARD = frozenset({"unknown", "shard_down"})
"""Refusals of an indexer that does not follow the stream now."""
LARGE_TOKENS = 8192
"""More than these are hashed and written off the loop."""
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
    block_size: int = 0

    @property
    def told_tokens(self) -> int:
        """How many of the prompt's tokens the indexer has to know: to the end of the first block that was not
        cached. All of them where the block size is not known.
        """
        if self.block_size < 1:
            return len(self.ids)
        blocks = min(len(self.ids), self.cached_tokens) // self.block_size + 1
        return min(len(self.ids), blocks * self.block_size)

    def told(self) -> Told:
        """As the indexer takes it: by hashes of blocks, which are a fifth of the bytes of tokens."""
        ids = self.ids[: self.told_tokens]
        hashes: list[int] | None = None
        if self.block_size >= 1:
            locals_ = local_hashes(ids, self.block_size)
            hashes = list(struct.unpack(f">{len(locals_)}Q", b"".join(locals_)))
        return Told(
            instance_id=self.stream[0],
            dp_rank=self.stream[1],
            model_name=self.model,
            lora_name=self.lora_name,
            cache_salt=self.cache_salt,
            generation=self.generation,
            sequence=self.sequence,
            token_ids=ids.tolist() if hashes is None else None,
            block_hashes=hashes,
            prompt_tokens=len(self.ids),
            block_size=self.block_size or None,
            cached_tokens=self.cached_tokens,
            predicted_tokens=self.predicted_tokens,
        )


def _encoded(batch: Sequence[Learned]) -> bytes:
    return msgspec.json.encode([learned.told() for learned in batch])


class FeedbackClient(Protocol):
    """What is asked of an indexer; raises IndexerClientError."""

    async def feedback_all(self, told: bytes, count: int) -> list[Outcome]: ...


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
            await asyncio.sleep(GATHER_S)
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
        large = sum(learned.told_tokens for learned in batch) > LARGE_TOKENS
        told = await asyncio.to_thread(_encoded, batch) if large else _encoded(batch)
        try:
            outcomes = await self._client(url).feedback_all(told, len(batch))
        except IndexerClientError as error:
            for learned in batch:
                self._count("failed")
                self._untold(learned)
            self._throttled.warning("failed", "the indexer takes no feedback: %s", error)
            return
        for learned, outcome in zip(batch, outcomes, strict=True):
            refused = outcome.reason or "refused" if outcome.status == "refused" else None
            self._count(refused or "taken")
            if refused in NOT_HEARD:
                self._untold(learned)

    def _count(self, outcome: str) -> None:
        self._metrics.feedback.labels(outcome).inc()
