"""Asks every replica for its load now and then: it alone knows what other routers and direct clients send."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import aiohttp

from events.logs import Throttled
from events.unreachable import why
from router.fleet import Fleet
from router.load import Load
from router.metrics import RouterMetrics
from router.replicas import Health, Replica, StreamId
from router.reported import Report, Reported, UnreadableReportError, read_report

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 4 << 20
SILENT_PAUSE = 10
"""An engine without such metrics is asked again after so many intervals."""


class Poller:
    """Reads the ``/metrics`` of replicas every ``interval_s`` seconds into the load.

    What fails is counted and said; the load then goes on with what it knows. ``restarted`` is told of each
    stream whose engine is another process now.
    """

    def __init__(
        self,
        fleet: Fleet,
        load: Load,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
        interval_s: float,
        restarted: Callable[[StreamId], None] = lambda stream: None,
    ) -> None:
        self._fleet = fleet
        self._load = load
        self._session = session
        self._metrics = metrics
        self._interval_s = interval_s
        self._restarted = restarted
        self._timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        self._throttled = Throttled(log)

    async def follow(self, replica: Replica) -> None:
        """Asks one replica for ever."""
        while True:
            pause = self._interval_s
            if replica.health is not Health.DOWN and not await self.poll(replica):
                pause *= SILENT_PAUSE
            await asyncio.sleep(pause)

    async def poll(self, replica: Replica) -> bool:
        """One look. Returns whether the replica said its load, or may the next time."""
        before = {stream: self._load.together(stream).requests for stream in replica.streams()}
        try:
            report = read_report(await self._read(replica))
        except UnreadableReportError as error:
            self._failed(replica, "unreadable", error)
            return False
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._failed(replica, "unreachable", error)
            return True
        if replica.process_started is not None and report.started not in (None, replica.process_started):
            for stream in replica.streams():
                self._restarted(stream)
        replica.process_started = report.started or replica.process_started
        for stream, reported in by_stream(replica.streams(), report):
            in_flight = max(before.get(stream, 0), self._load.together(stream).requests)
            self._load.report(stream, reported, in_flight)
        return True

    def _failed(self, replica: Replica, reason: str, error: Exception) -> None:
        self._metrics.polls_failed.labels(replica.name, reason).inc()
        self._throttled.warning(
            replica.name, "replica %s does not say its load: %s", replica.name, why(error)
        )

    async def _read(self, replica: Replica) -> bytes:
        url = replica.url + "/metrics"
        async with self._session.get(url, timeout=self._timeout, allow_redirects=False) as answer:
            if answer.status != 200:
                raise UnreadableReportError(f"/metrics answered {answer.status}")
            body = bytearray()
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise UnreadableReportError(f"/metrics is larger than {MAX_ANSWER_BYTES} bytes")
        return bytes(body)


def by_stream(streams: Iterable[StreamId], report: Report) -> list[tuple[StreamId, Reported]]:
    """The report's ranks by stream. An engine of one rank may call it by its place in a larger deployment
    (vLLM ``--data-parallel-rank``): alone here and alone there, they are the same.
    """
    ours = list(streams)
    if len(ours) == 1 and len(report.ranks) == 1:
        return [(ours[0], next(iter(report.ranks.values())))]
    return [(stream, report.ranks[stream[1]]) for stream in ours if stream[1] in report.ranks]
