"""Watches one replica: whether it is healthy, what it serves and where it publishes events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import aiohttp
import msgspec

from events.unreachable import why
from router.introduction import DiscoveryError, read_event_sources, read_models
from router.replicas import Health, Replica

log = logging.getLogger(__name__)

TIMEOUTS_TO_DOWN = 3
"""Health checks in a row that must time out: a busy engine answers late, a dead one refuses at once."""
DISCOVERY_TIMEOUT_S = 5.0


class WatchPace(msgspec.Struct, frozen=True):
    """Seconds between health checks, that one may take, and between looks at models and event sources."""

    health_interval_s: float = 2.0
    health_timeout_s: float = 2.0
    refresh_interval_s: float = 30.0


class Watcher:
    """The watch over one replica; :meth:`run` is its task.

    ``judged`` is told the replica's health, and why it is down; ``changed`` is called when its models or
    sources are others; ``unread`` is told of an answer that says nothing.
    """

    def __init__(
        self,
        replica: Replica,
        session: aiohttp.ClientSession,
        pace: WatchPace,
        *,
        judged: Callable[[Replica, Health, str | None], None],
        changed: Callable[[], None],
        unread: Callable[[Replica, Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replica = replica
        self._session = session
        self._pace = pace
        self._judged = judged
        self._changed = changed
        self._unread = unread
        self._clock = clock
        self._woken = asyncio.Event()
        self._timeouts = 0

    def wake(self) -> None:
        """Checks now instead of at the next turn."""
        self._woken.set()

    async def run(self) -> None:
        discover_at = float("-inf")
        while True:
            self._woken.clear()
            before = self._replica.health
            try:
                await self.check_health()
                came_up = self._replica.health is Health.UP and before is not Health.UP
                if self._replica.health is Health.UP and (came_up or self._clock() >= discover_at):
                    await self.discover()
                    known = self._replica.models is not None
                    pause = self._pace.refresh_interval_s if known else self._pace.health_interval_s
                    discover_at = self._clock() + pause
            except Exception:
                # The watcher must outlive any surprise: without it the replica could never come back.
                log.exception("watching replica %s failed", self._replica.name)
            await self._rest()

    async def _rest(self) -> None:
        try:
            async with asyncio.timeout(self._pace.health_interval_s):
                await self._woken.wait()
        except TimeoutError:
            return

    async def check_health(self) -> None:
        """One health check."""
        before, self._timeouts = self._timeouts, 0
        try:
            status, _ = await self._get("/health", self._pace.health_timeout_s)
        except TimeoutError:
            self._timeouts = before + 1
            if self._timeouts >= TIMEOUTS_TO_DOWN:
                self._judge(Health.DOWN, f"/health did not answer {self._timeouts} times in a row")
            return
        except (aiohttp.ClientError, OSError) as error:
            self._judge(Health.DOWN, f"/health: {why(error)}")
            return
        # An engine without /health answers 404: it is there.
        if status < 500:
            self._judge(Health.UP, None)
        else:
            self._judge(Health.DOWN, f"/health answered {status}")

    def _judge(self, health: Health, why: str | None) -> None:
        self._judged(self._replica, health, why)

    async def discover(self) -> None:
        """Asks for models and event sources."""
        await self.discover_models()
        if self._replica.spec.events is None:
            await self._discover_sources()

    async def discover_models(self) -> None:
        """Asks for models alone."""
        replica = self._replica
        try:
            status, payload = await self._get("/v1/models", DISCOVERY_TIMEOUT_S)
            if status != 200:
                raise DiscoveryError(f"/v1/models answered {status}")
            models = read_models(payload, replica.spec.model)
        except (DiscoveryError, aiohttp.ClientError, OSError) as error:
            self._unread(replica, error)
            return
        if models != replica.models:
            replica.models = models
            self._changed()

    async def _discover_sources(self) -> None:
        replica = self._replica
        try:
            status, payload = await self._get("/kv_event_sources", DISCOVERY_TIMEOUT_S)
            sources = read_event_sources(payload, replica.spec.host) if status == 200 else ()
        except (DiscoveryError, aiohttp.ClientError, OSError) as error:
            self._unread(replica, error)
            return
        asked_before, replica.sources_asked = replica.sources_asked, True
        if replica.spec.ranks is not None:
            sources = tuple(source for source in sources if source.rank in replica.ranks)
        elif sources:
            replica.ranks = tuple(source.rank for source in sources)
        if sources != replica.sources or not asked_before:
            replica.sources = sources
            self._changed()

    async def _get(self, path: str, limit_s: float) -> tuple[int, bytes]:
        replica = self._replica
        async with self._session.get(
            replica.url + path,
            timeout=aiohttp.ClientTimeout(total=limit_s),
            allow_redirects=False,
            headers=replica.headers(),
        ) as answer:
            return answer.status, await answer.read()
