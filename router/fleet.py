"""The replicas, kept up to date: who is there, who is healthy, what they serve and where they publish
events.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any

import aiohttp
import msgspec

from events.logs import Throttled
from router.credential import credential
from router.errors import RouterError
from router.outliers import OutlierRules, Outliers, RandomSource
from router.replicas import EventSource, Health, Models, Replica, ReplicaSpec, StreamId, at_host

log = logging.getLogger(__name__)

TIMEOUTS_TO_DOWN = 3
"""Health checks in a row that must time out: a busy engine answers late, a dead one refuses at once."""
REFRESH_COOL_DOWN_S = 1.0
DRAIN_POLL_S = 0.1
DISCOVERY_TIMEOUT_S = 5.0


Duty = Callable[[Replica], Coroutine[Any, Any, None]]


class _ModelCard(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _KVEventsConfig(msgspec.Struct):
    endpoint: str
    enable_kv_cache_events: bool = True
    replay_endpoint: str | None = None
    topic: str | None = None


class DiscoveryError(RouterError):
    """A replica's answer about itself that makes no sense."""


def read_models(payload: bytes, configured: str | None = None) -> Models:
    """The models in an answer of ``GET /v1/models``. ``configured`` wins over the first id.

    Raises DiscoveryError.
    """
    try:
        raw = msgspec.json.decode(payload)["data"]
        cards = msgspec.convert(raw, list[_ModelCard])
    except (msgspec.MsgspecError, TypeError, KeyError) as error:
        raise DiscoveryError(f"/v1/models makes no sense: {error}") from error
    bases = [card for card in cards if card.parent is None]
    if not bases:
        raise DiscoveryError("/v1/models names no base model")
    model = configured or bases[0].id
    return Models(
        model=model,
        aliases=tuple(card.id for card in bases if card.id != model),
        adapters=frozenset(card.id for card in cards if card.parent is not None),
        max_model_len=bases[0].max_model_len,
        cards=tuple(raw),
    )


def read_event_sources(payload: bytes, host: str) -> tuple[EventSource, ...]:
    """The sources in an answer of ``GET /kv_event_sources`` (vLLM 0.32), ``*`` replaced by ``host``.

    Endpoints there are of each rank already. vLLM binds a wildcard; other hosts it connects to, but for the
    one that it writes in place of ``tcp://*:0``, so those are taken at their word. Raises DiscoveryError.
    """
    try:
        configs = msgspec.json.decode(payload, type=dict[str, _KVEventsConfig])
        ranks = sorted(
            (int(rank), config) for rank, config in configs.items() if config.enable_kv_cache_events
        )
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise DiscoveryError(f"/kv_event_sources makes no sense: {error}") from error
    sources = []
    for rank, config in ranks:
        if config.endpoint.startswith("tcp://0.0.0.0:"):
            raise DiscoveryError(
                f"the engine connects its events to {config.endpoint} instead of binding;"
                " publish on tcp://*:PORT there, or configure events=bind:tcp://0.0.0.0:PORT here"
            )
        replay = config.replay_endpoint and at_host(config.replay_endpoint, host)
        sources.append(
            EventSource(rank, at_host(config.endpoint, host), replay or None, config.topic or None)
        )
    return tuple(sources)


class Fleet:
    """All replicas, and a task for each that watches it. ``changed`` is called when something was learned.

    A replica that is taken out of the settings gets no more requests, and is forgotten when those that it has
    are over: ``in_flight`` tells how many that are, ``forgotten`` is called with its name.
    """

    def __init__(
        self,
        specs: Iterable[ReplicaSpec],
        session: aiohttp.ClientSession,
        *,
        health_interval_s: float = 2.0,
        health_timeout_s: float = 2.0,
        refresh_interval_s: float = 30.0,
        outlier_rules: OutlierRules | None = None,
        rng: RandomSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replicas: dict[str, Replica] = {spec.name: Replica(spec) for spec in specs}
        self._session = session
        self._health_interval_s = health_interval_s
        self._health_timeout = aiohttp.ClientTimeout(total=health_timeout_s)
        self._refresh_interval_s = refresh_interval_s
        self._clock = clock
        self._watchers: dict[str, _Watcher] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._drains: dict[str, asyncio.Task[None]] = {}
        self._duties: list[tuple[str, Duty]] = [("watch", self._watch)]
        self._refreshed_at = float("-inf")
        self._throttled = Throttled(log, clock)
        self.changed: Callable[[], None] = lambda: None
        self.in_flight: Callable[[str], int] = lambda name: 0
        self.forgotten: Callable[[str], None] = lambda name: None
        self.outliers = Outliers(
            outlier_rules or OutlierRules(),
            lambda: len(self.usable()),
            rng or random.Random(),
            ejected=self._note_ejection,
            clock=clock,
        )
        self.ejections: Counter[str] = Counter()

    def each(self, name: str, duty: Duty) -> None:
        """Has ``duty`` run for each replica, as a task of its own that ends with the replica. Before
        ``start``.
        """
        self._duties.append((name, duty))

    def start(self) -> None:
        """Starts watching."""
        for replica in self.replicas.values():
            self._begin(replica)

    async def close(self) -> None:
        """Ends all tasks."""
        tasks = [*self._drains.values(), *(task for tasks in self._tasks.values() for task in tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def update(self, specs: Iterable[ReplicaSpec]) -> None:
        """Makes the fleet that of ``specs``: new ones are watched, and let in gently once they are known;
        those with another specification begin anew; those that are gone drain. Raises SettingsError, and
        changes nothing, for one that cannot be used.
        """
        wanted = {spec.name: spec for spec in specs}
        before = self.replicas
        same = {name for name, spec in wanted.items() if name in before and before[name].spec == spec}
        made = {name: Replica(spec) for name, spec in wanted.items() if name not in same}
        for name in wanted:
            self._stop_drain(name)
        for replica in made.values():
            self._renew(replica)
        self.replicas = {name: made.get(name) or before[name] for name in wanted}
        for name, replica in before.items():
            if name not in wanted:
                self.replicas[name] = replica
                self._drain(replica)
        self.changed()

    def reread_keys(self, but: Collection[str] = ()) -> Callable[[], None]:
        """Reads the keys of all replicas anew, ``but`` of these; what it gives puts them in place. Raises
        SettingsError for one that cannot be used.
        """
        keys = {
            name: credential(f"--replica {name}", replica.spec.key)
            for name, replica in self.replicas.items()
            if name not in but and not replica.draining
        }

        def take() -> None:
            for name, key in keys.items():
                if name in self.replicas:
                    self.replicas[name].key = key

        return take

    def _stop_drain(self, name: str) -> None:
        if (drain := self._drains.pop(name, None)) is not None:
            drain.cancel()
            self.replicas[name].draining = False

    def _renew(self, replica: Replica) -> None:
        self._end(replica.name)
        log.info("replica %s is new: %s", replica.name, replica.url)
        self.outliers.came_back(replica.name)
        self._begin(replica)

    def _begin(self, replica: Replica) -> None:
        self._tasks[replica.name] = [
            asyncio.create_task(duty(replica), name=f"{what} {replica.name}") for what, duty in self._duties
        ]

    def _end(self, name: str) -> None:
        for task in self._tasks.pop(name, ()):
            task.cancel()

    async def _watch(self, replica: Replica) -> None:
        watcher = self._watchers[replica.name] = _Watcher(replica, self)
        await watcher.run()

    def _drain(self, replica: Replica) -> None:
        if replica.name not in self._drains:
            replica.draining = True
            log.info("replica %s is taken out: no new requests, those that it has may finish", replica.name)
            drain = asyncio.create_task(self._drained(replica), name=f"drain {replica.name}")
            self._drains[replica.name] = drain

    async def _drained(self, replica: Replica) -> None:
        # No bell rings when the last request of one replica is over.
        while self.in_flight(replica.name):  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_S)
        name = replica.name
        self._end(name)
        del self._drains[name], self.replicas[name], self.ejections[name]
        self._watchers.pop(name, None)
        self.outliers.forget(name)
        log.info("replica %s is gone", name)
        self.forgotten(name)
        self.changed()

    def usable(self) -> list[Replica]:
        """The replicas that requests may be sent to."""
        return [replica for replica in self.replicas.values() if replica.usable]

    def meant(self, model: str | None) -> str | None:
        """The model that a request is for: ``model``, or for a request that names none the base model of the
        first configured replica that has said its own, be it up or down.

        An engine answers such a request for its own model. A fleet of several must not let chance pick one,
        and the first is what a client got before a second one was added. ``model=`` in the first replica's
        line settles it from the start. None while nothing is known.
        """
        return model or next((r.models.model for r in self.replicas.values() if r.models), None)

    def serving(self, model: str | None) -> list[Replica]:
        """The usable replicas that serve ``model``; one that has not said its models yet may serve any."""
        usable = self.usable()
        known = [replica for replica in usable if replica.resolve(model) is not None]
        return known or [replica for replica in usable if replica.models is None]

    def admitted(self, streams: Sequence[StreamId]) -> list[StreamId]:
        """The streams of replicas that are not kept from requests now; all where that would leave none."""
        if self.outliers.doubts_nobody:
            return list(streams)
        admitted = set(self.outliers.admit(list(dict.fromkeys(name for name, _ in streams))))
        return [stream for stream in streams if stream[0] in admitted]

    def knows(self, model: str | None) -> bool:
        """Whether some replica serves ``model`` or might, healthy or not."""
        return any(r.models is None or r.resolve(model) is not None for r in self.replicas.values())

    def ranks(self, model: str | None) -> set[int]:
        """The data-parallel ranks of all replicas that serve ``model`` or might, healthy or not."""
        return {rank for replica in self._may_serve(model) for rank in replica.all_ranks}

    def _may_serve(self, model: str | None) -> list[Replica]:
        return [r for r in self.replicas.values() if r.models is None or r.resolve(model) is not None]

    def has(self, stream: StreamId) -> bool:
        """Whether it is of one of the replicas."""
        name, rank = stream
        replica = self.replicas.get(name)
        return replica is not None and rank in replica.all_ranks

    def failed(self, name: str, error: str, *, unreachable: bool) -> None:
        """A request to the replica failed. ``unreachable`` takes it out now; else it is checked at once."""
        replica = self.replicas.get(name)
        if replica is None:
            return
        replica.last_error = error
        if unreachable:
            self._set_health(replica, Health.DOWN, error)
        if name in self._watchers:
            self._watchers[name].wake()

    async def refresh(self) -> None:
        """Looks at every usable replica's models now, at most once a second."""
        now = self._clock()
        if now - self._refreshed_at < REFRESH_COOL_DOWN_S:
            return
        self._refreshed_at = now
        await asyncio.gather(*(self._discover_models(replica) for replica in self.usable()))

    def _set_health(self, replica: Replica, health: Health, error: str | None) -> None:
        if error is not None:
            replica.last_error = error
        if replica.health is health:
            return
        before, replica.health = replica.health, health
        if health is Health.UP:
            if before is Health.DOWN:
                self.outliers.came_back(replica.name)
            replica.last_error = None
            log.info("replica %s is up", replica.name)
        else:
            log.warning("replica %s is down: %s", replica.name, error)
        self.changed()

    async def _get(self, replica: Replica, path: str, limit: aiohttp.ClientTimeout) -> tuple[int, bytes]:
        async with self._session.get(
            replica.url + path, timeout=limit, allow_redirects=False, headers=replica.headers()
        ) as answer:
            return answer.status, await answer.read()

    async def check_health(self, replica: Replica, timeouts: int) -> int:
        """One health check. Returns how many in a row have timed out by now."""
        try:
            status, _ = await self._get(replica, "/health", self._health_timeout)
        except TimeoutError:
            if timeouts + 1 >= TIMEOUTS_TO_DOWN:
                self._set_health(
                    replica, Health.DOWN, f"/health did not answer {timeouts + 1} times in a row"
                )
            return timeouts + 1
        except (aiohttp.ClientError, OSError) as error:
            self._set_health(replica, Health.DOWN, f"/health: {error or type(error).__name__}")
            return 0
        # An engine without /health answers 404: it is there.
        if status < 500:
            self._set_health(replica, Health.UP, None)
        else:
            self._set_health(replica, Health.DOWN, f"/health answered {status}")
        return 0

    async def discover(self, replica: Replica) -> bool:
        """Asks a replica for its models and event sources. Returns whether its models are known now."""
        await self._discover_models(replica)
        if replica.spec.events is None:
            await self._discover_sources(replica)
        return replica.models is not None

    async def _discover_models(self, replica: Replica) -> None:
        try:
            status, payload = await self._get(
                replica, "/v1/models", aiohttp.ClientTimeout(total=DISCOVERY_TIMEOUT_S)
            )
            if status != 200:
                raise DiscoveryError(f"/v1/models answered {status}")
            models = read_models(payload, replica.spec.model)
        except (DiscoveryError, aiohttp.ClientError, OSError) as error:
            self._complain(replica, error)
            return
        if models != replica.models:
            replica.models = models
            self.changed()

    async def _discover_sources(self, replica: Replica) -> None:
        try:
            status, payload = await self._get(
                replica, "/kv_event_sources", aiohttp.ClientTimeout(total=DISCOVERY_TIMEOUT_S)
            )
            sources = read_event_sources(payload, replica.spec.host) if status == 200 else ()
        except (DiscoveryError, aiohttp.ClientError, OSError) as error:
            self._complain(replica, error)
            return
        asked_before, replica.sources_asked = replica.sources_asked, True
        if replica.spec.ranks is not None:
            sources = tuple(source for source in sources if source.rank in replica.ranks)
        elif sources:
            replica.ranks = tuple(source.rank for source in sources)
        if sources != replica.sources or not asked_before:
            replica.sources = sources
            self.changed()

    def _note_ejection(self, name: str, seconds: float) -> None:
        if name not in self.replicas:
            return
        self.ejections[name] += 1
        self._throttled.warning(
            f"{name} ejected",
            "replica %s is kept from requests for %g s: too many in a row failed, the last one: %s",
            name,
            seconds,
            self.replicas[name].last_error,
        )

    def _complain(self, replica: Replica, error: Exception) -> None:
        replica.last_error = str(error) or type(error).__name__
        self._throttled.warning(replica.name, "replica %s: %s", replica.name, replica.last_error)

    @property
    def health_interval_s(self) -> float:
        return self._health_interval_s

    @property
    def refresh_interval_s(self) -> float:
        return self._refresh_interval_s

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock()


class _Watcher:
    """The task that watches one replica."""

    def __init__(self, replica: Replica, fleet: Fleet) -> None:
        self._replica = replica
        self._fleet = fleet
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Checks now instead of at the next turn."""
        self._woken.set()

    async def run(self) -> None:
        timeouts = 0
        discover_at = float("-inf")
        while True:
            self._woken.clear()
            before = self._replica.health
            try:
                timeouts = await self._fleet.check_health(self._replica, timeouts)
                came_up = self._replica.health is Health.UP and before is not Health.UP
                if self._replica.health is Health.UP and (came_up or self._fleet.now() >= discover_at):
                    known = await self._fleet.discover(self._replica)
                    pause = self._fleet.refresh_interval_s if known else self._fleet.health_interval_s
                    discover_at = self._fleet.now() + pause
            except Exception:
                # The watcher must outlive any surprise: without it the replica could never come back.
                log.exception("watching replica %s failed", self._replica.name)
            await self._pause()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._fleet.health_interval_s):
                await self._woken.wait()
        except TimeoutError:
            return


def model_cards(replicas: Iterable[Replica]) -> list[dict[str, Any]]:
    """The union of what the replicas answer at ``/v1/models``, first seen first, every field kept."""
    cards: dict[str, dict[str, Any]] = {}
    for replica in replicas:
        if replica.models is None:
            continue
        for card in replica.models.cards or (
            {"id": replica.models.model, "object": "model", "owned_by": "warmroute"},
        ):
            cards.setdefault(card["id"], dict(card))
    return list(cards.values())
