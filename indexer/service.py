"""``warmroute indexer``: the map, the streams that feed it, and the HTTP server that answers from it."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from events.address import AddressError, cannot_listen, host_and_port, http_url
from events.subscriber import Subscriber
from indexer.api import QueryApi, answer, errors_as_json
from indexer.bounds import Bounds
from indexer.debug import DebugApi
from indexer.dump import DumpApi
from indexer.errors import ListenError, SettingsError
from indexer.feedback_api import FeedbackApi
from indexer.ingest import HEARTBEAT_S, Ingest
from indexer.metrics import IndexerMetrics
from indexer.reader import HEARTBEAT_LIMIT_S, MapReader
from indexer.settings import IndexerSettings
from indexer.witness import Witness
from indexer.writer import MapWriter

log = logging.getLogger(__name__)

REQUEST_LIMIT_BYTES = 64 << 20
SHUTDOWN_S = 5.0
GC_THRESHOLDS = (100_000, 20, 20)
SETTLING = frozenset({"connecting", "unverified", "replaying"})


class Readiness:
    """Ready once every stream has proven itself, or a deadline passed; then as long as the map is fed."""

    def __init__(self, reader: MapReader, deadline_s: float, clock: Callable[[], float] = time.monotonic):
        self._reader = reader
        self._clock = clock
        self._until = clock() + deadline_s
        self._settled = False

    def settling(self) -> list[str]:
        """Streams that ``/ready`` waits for."""
        if not self._settled:
            waiting = [
                f"{status.record.id[0]} rank {status.record.id[1]}: {status.record.state}"
                for status in self._reader.streams()
                if status.record.state in SETTLING
            ]
            if waiting and self._clock() < self._until:
                return waiting
            self._settled = True
        return []


class Indexer:
    """All parts of an indexer, open."""

    def __init__(self, settings: IndexerSettings) -> None:
        """Opens the map. Raises MapError."""
        self.writer = MapWriter(Path(settings.map), map_size=settings.map_size)
        self.reader = MapReader(self.writer.env, self.writer.tables)
        self.subscriber = Subscriber()
        bounds = Bounds(settings.budget_bytes, settings.max_blocks)
        self.ingest = Ingest(
            self.writer, self.subscriber, bounds=bounds, partial_ttl_s=settings.partial_ttl_s
        )
        self.witness = Witness(self.ingest, self.reader)
        self.metrics = IndexerMetrics()
        self.readiness = Readiness(self.reader, settings.ready_deadline_s)

    def application(self) -> web.Application:
        """The HTTP application."""
        app = web.Application(middlewares=[errors_as_json], client_max_size=REQUEST_LIMIT_BYTES)
        app.add_routes(QueryApi(self.ingest, self.reader, self.metrics).routes())
        app.add_routes(DebugApi(self.ingest, self.reader, self.subscriber).routes())
        app.add_routes(DumpApi(self.reader).routes())
        app.add_routes(FeedbackApi(self.ingest, self.reader).routes())
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/metrics", self._metrics),
            ]
        )
        return app

    def start(self) -> None:
        """Begins to follow the streams that the map knows."""
        self.metrics.watch(self.ingest, self.reader, self.subscriber, self.witness.silent)
        self.ingest.start()

    def close(self) -> None:
        """Ends the threads and closes the map cleanly."""
        self.ingest.stop()
        self.subscriber.close()
        self.writer.close()

    @property
    def _fed(self) -> bool:
        return self.reader.heartbeat_age() <= max(HEARTBEAT_LIMIT_S, 4 * HEARTBEAT_S)

    async def _health(self, _: web.Request) -> web.Response:
        return answer({"status": "ok"}) if self._fed else answer({"status": "ingesting stands still"}, 503)

    async def _ready(self, _: web.Request) -> web.Response:
        waiting = self.readiness.settling()
        ready = not waiting and self._fed
        return answer({"ready": ready, "waiting_for": waiting}, 200 if ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        body = generate_latest(self.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


@asynccontextmanager
async def listening(app: web.Application, listen: str) -> AsyncIterator[str]:
    """Serves ``app`` at ``listen``; gives its URL. Raises SettingsError, ListenError."""
    try:
        host, port = host_and_port(listen)
    except AddressError as error:
        raise SettingsError(str(error)) from error
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise ListenError(cannot_listen(listen, error)) from error
        url = http_url(host, runner.addresses[0][1])
        log.info("listening on %s", url)
        yield url
    finally:
        await runner.cleanup()


async def serve(settings: IndexerSettings) -> None:
    """Runs an indexer until SIGTERM or SIGINT. Raises IndexerError when it cannot start."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # A group of batches is many small objects without cycles: looked through less often, they cost less.
    gc.set_threshold(*GC_THRESHOLDS)
    indexer = Indexer(settings)
    try:
        async with listening(indexer.application(), settings.listen) as url:
            indexer.writer.set_address(settings.advertise or url)
            indexer.start()
            indexer.witness.start()
            await stop.wait()
            await indexer.witness.close()
    finally:
        indexer.close()
