"""The replicas: who is there, who may get requests, and who is on the way out."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence, Set
from typing import Any

import aiohttp

from events.logs import Throttled
from router.credential import credential
from router.outliers import OutlierRules, Outliers, RandomSource
from router.replicas import Health, Replica, ReplicaSpec, StreamId
from router.serving import Serving
from router.standings import Standings
from router.watcher import Watcher, WatchPace

log = logging.getLogger(__name__)

REFRESH_COOL_DOWN_S = 1.0
DRAIN_POLL_S = 0.1
USUAL_PACE = WatchPace()
MOST_MODELS = 256
"""Models of which it is kept who serves them: clients may ask for any name."""

Duty = Callable[[Replica], Coroutine[Any, Any, None]]


class Fleet:
    """All replicas, and a task for each that watches it. ``changed`` is called when something was learned.

    A replica that is taken out of the settings gets no more requests, and is forgotten when those that it has
    are over: ``in_flight`` tells how many that are, ``forgotten`` is called with its name, ``renewed`` with
    that of one that has become another, as with another URL.
    """

    def __init__(
        self,
        specs: Iterable[ReplicaSpec],
        session: aiohttp.ClientSession,
        *,
        pace: WatchPace = USUAL_PACE,
        outlier_rules: OutlierRules | None = None,
        rng: RandomSource | None = None,
        clock: Callable[[], float] = time.monotonic,
        standings: Standings | None = None,
    ) -> None:
        self.replicas: dict[str, Replica] = {spec.name: Replica(spec) for spec in specs}
        self._session = session
        self._pace = pace
        self._clock = clock
        self.watchers: dict[str, Watcher] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._drains: dict[str, asyncio.Task[None]] = {}
        self._duties: list[tuple[str, Duty]] = [("watch", self._watch)]
        self._refreshed_at = float("-inf")
        self._version = (-1, 0)
        self._serving: dict[str | None, Serving] = {}
        self._streams: Set[StreamId] = frozenset()
        self._throttled = Throttled(log, clock)
        self.changed: Callable[[], None] = lambda: None
        self.in_flight: Callable[[str], int] = lambda name: 0
        self.forgotten: Callable[[str], None] = lambda name: None
        self.renewed: Callable[[str], None] = lambda name: None
        self.outliers = Outliers(
            outlier_rules or OutlierRules(),
            lambda: len(self.usable()),
            rng or random.Random(),
            ejected=self._note_ejection,
            clock=clock,
            standings=standings,
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
            if replica.name in before:
                self.outliers.came_back(replica.name)
                self.renewed(replica.name)
            else:
                # One that is new here may be known to other workers: this one was started again.
                self.outliers.came(replica.name)
        self.replicas = {name: made.get(name) or before[name] for name in wanted}
        self._version = (-1, 0)
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
        self._begin(replica)

    def _begin(self, replica: Replica) -> None:
        self._tasks[replica.name] = [
            asyncio.create_task(duty(replica), name=f"{what} {replica.name}") for what, duty in self._duties
        ]

    def _end(self, name: str) -> None:
        for task in self._tasks.pop(name, ()):
            task.cancel()

    async def _watch(self, replica: Replica) -> None:
        watcher = self.watchers[replica.name] = Watcher(
            replica,
            self._session,
            self._pace,
            judged=self._set_health,
            changed=self._note_change,
            unread=self._complain,
            clock=self._clock,
        )
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
        self.watchers.pop(name, None)
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

    def serving(self, model: str | None) -> Serving:
        """Who serves ``model`` now. Found once, until something changes."""
        self._look_again()
        serving = self._serving.get(model)
        if serving is None:
            if len(self._serving) >= MOST_MODELS:
                self._serving.clear()
            serving = self._serving[model] = Serving.of(model, self.replicas.values())
        return serving

    @property
    def streams(self) -> Set[StreamId]:
        """The streams of all replicas."""
        self._look_again()
        return self._streams

    def _look_again(self) -> None:
        version = (Replica.changes, len(self.replicas))
        if version != self._version:
            self._version = version
            self._serving.clear()
            self._streams = {stream for replica in self.replicas.values() for stream in replica.streams()}

    def admitted(self, streams: Sequence[StreamId]) -> list[StreamId]:
        """The streams of replicas that are not kept from requests now; all where that would leave none."""
        if self.outliers.doubts_nobody:
            return list(streams)
        admitted = set(self.outliers.admit(list(dict.fromkeys(name for name, _ in streams))))
        return [stream for stream in streams if stream[0] in admitted]

    def knows(self, model: str | None) -> bool:
        """Whether some replica serves ``model`` or might, healthy or not."""
        return self.serving(model).known

    def ranks(self, model: str | None) -> set[int]:
        """The data-parallel ranks of all replicas that serve ``model`` or might, healthy or not."""
        return {
            rank
            for replica in self.replicas.values()
            if replica.may_serve(model)
            for rank in replica.all_ranks
        }

    def failed(self, name: str, error: str, *, unreachable: bool) -> None:
        """A request to the replica failed. ``unreachable`` takes it out now; else it is checked at once."""
        replica = self.replicas.get(name)
        if replica is None:
            return
        replica.last_error = error
        if unreachable:
            self._set_health(replica, Health.DOWN, error)
        if name in self.watchers:
            self.watchers[name].wake()

    async def refresh(self) -> None:
        """Looks at every usable replica's models now, at most once a second."""
        now = self._clock()
        if now - self._refreshed_at < REFRESH_COOL_DOWN_S:
            return
        self._refreshed_at = now
        known = [self.watchers[replica.name] for replica in self.usable() if replica.name in self.watchers]
        await asyncio.gather(*(watcher.discover_models() for watcher in known))

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

    def _note_change(self) -> None:
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
            self.replicas[name].last_error or "an error of its own, passed on to the client",
        )

    def _complain(self, replica: Replica, error: Exception) -> None:
        replica.last_error = str(error) or type(error).__name__
        self._throttled.warning(replica.name, "replica %s: %s", replica.name, replica.last_error)
