"""What each replica's own metrics say beside the event stream: when its process started, which tells
restarts, its block size, and how many requests it completed, which tells that its events do not come.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import aiohttp
import msgspec

from events.engine_metrics import EngineMetrics, read_engine_metrics
from events.inbox import StreamId
from events.logs import Throttled
from events.names import NameResolver
from events.unreachable import why
from indexer.errors import IndexerError
from indexer.ingest import Ingest
from indexer.reader import MapReader
from indexer.silence import SILENT_AFTER_S, Silence

log = logging.getLogger(__name__)

LOOK_S = 0.25
ASK_EVERY_S = 10.0
RETRY_S = 1.0
ANSWER_TIMEOUT_S = 2.0
COMMIT_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 4 << 20
MAX_BLOCK_SIZE = 1 << 20


class _Turn(msgspec.Struct):
    """When a stream's replica is asked next, and since when it was connected when it was asked last."""

    connected_at: float | None
    due: float = 0.0


class Witness:
    """A task that asks the replicas whose URL is registered: when a stream (re)connects, and then regularly.

    ``clock`` must be the ingest's. ``silent`` says for how long, in seconds, the replica at a URL has
    completed requests without an event.
    """

    def __init__(
        self,
        ingest: Ingest,
        reader: MapReader,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ingest = ingest
        self._reader = reader
        self._clock = clock
        self._turns: dict[StreamId, _Turn] = {}
        self._silences: dict[str, Silence] = {}
        self.silent: dict[str, float] = {}
        self._throttled = Throttled(log, clock)
        self._task: asyncio.Task[None] | None = None
        self.failures = 0

    def start(self) -> None:
        """Begins to ask, on the running loop."""
        self._task = asyncio.create_task(self._run(), name="witness")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        connector = aiohttp.TCPConnector(resolver=NameResolver())
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            while True:
                try:
                    await self.look(session)
                except Exception as error:
                    # The witness is one of three; it must outlive any answer, and any state of the map.
                    self._throttled.warning("look", "no replica was asked when it started: %r", error)
                await asyncio.sleep(LOOK_S)

    async def look(self, session: aiohttp.ClientSession) -> None:
        """Asks those that are due, each URL once. Raises MapError."""
        due: dict[str, list[StreamId]] = {}
        for stream, url in self._due(self._clock()):
            due.setdefault(url, []).append(stream)
        registered = {status.record.registration.url for status in self._reader.streams()}
        for url in self._silences.keys() - registered:
            self._silences.pop(url)
            self.silent.pop(url, None)
        await asyncio.gather(*(self._ask(session, url, streams) for url, streams in due.items()))

    def _due(self, now: float) -> Iterable[tuple[StreamId, str]]:
        turns: dict[StreamId, _Turn] = {}
        for status in self._reader.streams():
            stream, url = status.record.id, status.record.registration.url
            machine = self._ingest.machine(stream)
            connected_at = machine.connected_at if machine else None
            if url is None or machine is None or status.record.rank is not None:
                continue
            turn = self._turns.get(stream)
            if turn is None or turn.connected_at != connected_at:
                turn = _Turn(connected_at)
            turns[stream] = turn
            if now >= turn.due:
                yield stream, url
        self._turns = turns

    async def _ask(self, session: aiohttp.ClientSession, url: str, streams: list[StreamId]) -> None:
        asked = self._clock()
        said = EngineMetrics()
        pause = RETRY_S
        try:
            said = read_engine_metrics(await _read(session, url.rstrip("/") + "/metrics"))
            pause = ASK_EVERY_S
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self.failures += 1
            self._throttled.warning(url, "%s does not say when it started: %s", url, why(error))
        for stream in streams:
            if stream in self._turns:
                self._turns[stream].due = asked + pause
            if said.started_at is not None:
                await self._tell(self._ingest.process_started(stream, said.started_at, asked))
        await self._tell_block_size(url, said.block_size)
        self._listen(url, said, asked)

    async def _tell_block_size(self, url: str, block_size: int | None) -> None:
        """Of streams that have none yet: an engine whose prompts are all cached announces nothing."""
        if block_size is not None and 0 < block_size <= MAX_BLOCK_SIZE:
            for record in [s.record for s in self._reader.streams() if s.record.registration.url == url]:
                if record.rank is None and record.block_size is None:
                    await self._tell(self._ingest.block_size_told(record.id, block_size))

    def _listen(self, url: str, said: EngineMetrics, now: float) -> None:
        """Warns of an engine whose events do not come, or that keeps nothing to tell of."""
        records = [s.record for s in self._reader.streams() if s.record.registration.url == url]
        if not records:
            return
        name = records[0].registration.instance
        if said.prefix_caching is False:
            self._throttled.warning(
                f"caching {url}", "%s at %s has prefix caching off: it caches nothing, and says so", name, url
            )
        if said.requests is None:
            return
        silence = self._silences.setdefault(url, Silence())
        batches = sum(record.counters.batches for record in records)
        self.silent[url] = silence.look(batches, said.requests, now)
        if self.silent[url] >= SILENT_AFTER_S:
            self._throttled.warning(
                f"silent {url}",
                "no events of %s for %.0f s while %d requests completed at %s: `warmroute doctor` says why",
                name,
                self.silent[url],
                silence.completed,
                url,
            )

    async def _tell(self, told: Future[None]) -> None:
        try:
            await asyncio.wait_for(asyncio.wrap_future(told), timeout=COMMIT_TIMEOUT_S)
        except (IndexerError, TimeoutError) as error:
            self._throttled.warning("tell", "what a replica says of itself could not be used: %s", error)


async def _read(session: aiohttp.ClientSession, url: str) -> bytes:
    """The body of an answer, bounded. Raises aiohttp.ClientError."""
    async with session.get(url, allow_redirects=False) as response:
        response.raise_for_status()
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                raise aiohttp.ClientPayloadError(f"its metrics are larger than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)
