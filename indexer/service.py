"""``warmroute indexer``: the map, the streams that feed it, and the HTTP server that answers from it."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from events.subscriber import Subscriber
from indexer.api import QueryApi, RegisterApi, answer, errors_as_json
from indexer.bounds import Bounds
from indexer.debug import DebugApi, ReplicasApi
from indexer.dump import DumpApi
from indexer.feedback_api import FeedbackApi
from indexer.front import serve_shards
from indexer.ingest import Ingest
from indexer.listening import REQUEST_LIMIT_BYTES, listening
from indexer.metrics import IndexerMetrics
from indexer.reader import MapReader
from indexer.readiness import HEALTHY_S, Readiness
from indexer.settings import IndexerSettings
from indexer.sharding import check_division
from indexer.witness import Witness
from indexer.writer import MapWriter

log = logging.getLogger(__name__)

GC_THRESHOLDS = (100_000, 20, 20)


class Indexer:
    """All parts of an indexer, open."""

    def __init__(self, settings: IndexerSettings) -> None:
        """Opens the map. Raises MapError, SettingsError."""
        curve = settings.curve()
        self.writer = MapWriter(Path(settings.map), map_size=settings.map_size)
        self.reader = MapReader(self.writer.env, self.writer.tables)
        self.subscriber = Subscriber(max_message_bytes=settings.max_message_bytes, curve=curve)
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
        app.add_routes(RegisterApi(self.ingest).routes())
        app.add_routes(QueryApi(self.reader, self.metrics).routes())
        app.add_routes(ReplicasApi(self.ingest, self.reader, self.subscriber).routes())
        app.add_routes(DebugApi(self.reader).routes())
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
        return self.reader.heartbeat_age() <= HEALTHY_S

    async def _health(self, _: web.Request) -> web.Response:
        if self._fed:
            return answer({"status": "ok"})
        return answer({"status": "ingesting stands still", "trouble": self.ingest.trouble}, 503)

    async def _ready(self, _: web.Request) -> web.Response:
        waiting = self.readiness.settling()
        ready = not waiting and self._fed
        body = {"ready": ready, "waiting_for": waiting, "trouble": self.ingest.trouble}
        return answer(body, 200 if ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        body = generate_latest(self.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def serve(settings: IndexerSettings) -> None:
    """Runs an indexer until SIGTERM or SIGINT; SIGHUP changes nothing.

    Raises IndexerError when it cannot start.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # A router reads its settings anew then, and whoever tells all services at once should not end this one.
    loop.add_signal_handler(
        signal.SIGHUP, lambda: log.info("SIGHUP changes nothing: an indexer reads its settings at the start")
    )
    check_division(Path(settings.map), settings.shards)
    if settings.shards > 1:
        await serve_shards(settings, stop)
    else:
        await run(settings, stop)


async def run(
    settings: IndexerSettings, stop: asyncio.Event, listens: Callable[[str], None] | None = None
) -> None:
    """Runs one writer with its map and server until ``stop``; ``listens`` is told the URL.

    Raises IndexerError.
    """
    # A group of batches is many small objects without cycles: looked through less often, they cost less.
    gc.set_threshold(*GC_THRESHOLDS)
    indexer = Indexer(settings)
    try:
        async with listening(indexer.application(), settings.listen, quiet=listens is not None) as url:
            indexer.writer.set_address(settings.advertise or url)
            indexer.start()
            indexer.witness.start()
            if listens is not None:
                listens(url)
            await stop.wait()
            await indexer.witness.close()
    finally:
        indexer.close()
