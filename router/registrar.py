"""Tells the indexer which streams to follow, and tells it again when it has forgotten them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from events.logs import Throttled
from indexer.errors import IndexerAnswerError, IndexerClientError
from indexer.registration import Registration
from router.fleet import Fleet
from router.replicas import Health, Replica, StreamId

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0


class RegistrationClient(Protocol):
    """What the registrar asks of an indexer; raises IndexerClientError."""

    async def register(self, registration: Registration) -> None: ...

    async def unregister(self, instance_id: str, model_name: str) -> None: ...

    async def workers(self) -> list[dict[str, Any]]: ...


def registrations(replica: Replica) -> list[Registration]:
    """One for each rank that has events; none before the replica's model is known."""
    if replica.models is None:
        return []
    return [
        Registration(
            instance_id=replica.name,
            endpoint=source.endpoint,
            replay_endpoint=source.replay_endpoint,
            model_name=replica.models.model,
            aliases=replica.models.aliases,
            dp_rank=source.rank,
            topic=source.topic if source.endpoint.startswith("bind:") else None,
            block_size=replica.spec.block_size,
            url=replica.url,
        )
        for source in replica.sources
    ]


def streams_of(workers: list[dict[str, Any]]) -> set[StreamId]:
    """The streams in an answer of ``GET /workers``."""
    return {
        (str(worker.get("instance_id")), int(rank))
        for worker in workers
        for rank in worker.get("endpoints") or {}
        if str(rank).isdecimal()
    }


def port_ranks(replica: Replica, workers: list[dict[str, Any]]) -> tuple[int, ...]:
    """The ranks of a replica that only the events of a shared port name, in an answer of ``GET /workers``.

    Where the number of ranks is configured, those beyond it are none.
    """
    found = {
        int(rank)
        for worker in workers
        if str(worker.get("instance_id")) == replica.name
        for rank, listener in (worker.get("listeners") or {}).items()
        if str(rank).isdecimal() and listener.get("registered") is False
    }
    most = replica.spec.ranks
    return tuple(sorted(rank for rank in found if most is None or rank < most))


class Registrar:
    """A task that keeps the indexer's registrations as the fleet is.

    ``address`` gives the indexer's URL, or None while nobody knows it; ``client`` makes a client for a URL.
    """

    def __init__(
        self,
        fleet: Fleet,
        address: Callable[[], Awaitable[str | None]],
        client: Callable[[str], RegistrationClient],
        *,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = WATCH_INTERVAL_S,
    ) -> None:
        self._fleet = fleet
        self._address = address
        self._client = client
        self._interval_s = interval_s
        self._throttled = Throttled(log, clock)
        self._taken: dict[StreamId, Registration] = {}
        self._taken_by: str | None = None
        self._clock = clock
        self._answered_at: float | None = None
        self._answers = False
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.last_error: str | None = None

    def start(self) -> None:
        """Starts registering. The fleet wakes the task when it has learned something."""
        self._task = asyncio.create_task(self._run(), name="registrar")

    def wake(self) -> None:
        """Looks now instead of at the next turn."""
        self._woken.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def registered(self, stream: StreamId) -> bool | None:
        """Whether the indexer follows the stream; None while the indexer cannot be asked."""
        return stream in self._taken if self._answers else None

    def indexer(self) -> dict[str, Any]:
        """The indexer as it is seen from here; how long ago it last answered, in seconds."""
        ago = None if self._answered_at is None else round(self._clock() - self._answered_at, 1)
        return {
            "url": self._taken_by,
            "answers": self._answers,
            "last_answer_s": ago,
            "error": self.last_error,
        }

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            try:
                await self.reconcile()
            except Exception as error:
                # Serving does not need the registrar, and the registrar must outlive any answer.
                self._complain("registrar", f"registering failed: {error or type(error).__name__}")
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def reconcile(self) -> None:
        """One look at what the indexer follows, and what is missing registered."""
        url = await self._address()
        if url is None:
            self._answers = False
            self._complain(
                "address", "the indexer's address is not known yet: give --indexer, or start it on the map"
            )
            return
        if url != self._taken_by:
            self._taken, self._taken_by = {}, url
        client = self._client(url)
        try:
            workers = await client.workers()
        except IndexerClientError as error:
            self._answers = False
            self._complain("workers", f"the indexer at {url} cannot be asked: {error}")
            return
        self._answers, self._answered_at = True, self._clock()
        there = streams_of(workers)
        for replica in self._fleet.replicas.values():
            replica.port_ranks = port_ranks(replica, workers)
        self._taken = {stream: said for stream, said in self._taken.items() if stream in there}
        for replica in self._fleet.replicas.values():
            self._miss_events(replica)
        wanted = [r for replica in self._fleet.replicas.values() for r in registrations(replica)]
        failures = [await self._register(client, registration) for registration in wanted]
        gone = {
            said.instance_id: said.model_name
            for stream, said in self._taken.items()
            if stream[0] not in self._fleet.replicas
        }
        failures += [await self._unregister(client, str(name), model) for name, model in gone.items()]
        self.last_error = next((failure for failure in failures if failure is not None), None)

    def _miss_events(self, replica: Replica) -> None:
        """A replica that is there and has no source of events is served by load alone."""
        if replica.health is Health.UP and replica.sources_asked and not replica.sources:
            self._throttled.warning(
                f"events {replica.name}",
                "replica %s has no source of KV events: nothing of its cache is known. Start it with "
                "--kv-events-config, or give events= for it; `warmroute doctor` says more",
                replica.name,
            )

    async def _register(self, client: RegistrationClient, registration: Registration) -> str | None:
        stream = (str(registration.instance_id), registration.dp_rank)
        if self._taken.get(stream) == registration:
            return None
        try:
            await client.register(registration)
        except IndexerClientError as error:
            message = f"the indexer did not take {stream[0]} rank {stream[1]}: {error}"
            self._complain(stream[0], message)
            return message
        self._taken[stream] = registration
        log.info("registered %s rank %d at the indexer: %s", stream[0], stream[1], registration.endpoint)
        return None

    async def _unregister(self, client: RegistrationClient, name: str, model: str) -> str | None:
        """Has a replica forgotten that is none of ours any more."""
        try:
            await client.unregister(name, model)
            log.info("unregistered %s at the indexer", name)
        except IndexerClientError as error:
            # Another worker, or another router, may have been first.
            if not (isinstance(error, IndexerAnswerError) and error.unknown):
                message = f"the indexer did not forget {name}: {error}"
                self._complain(name, message)
                return message
        self._taken = {stream: said for stream, said in self._taken.items() if stream[0] != name}
        return None

    def _complain(self, subject: str, message: str) -> None:
        self.last_error = message
        self._throttled.warning(subject, "%s", message)
