"""The indexer that runs several writers: it answers from their maps, and passes on what changes them.

Each shard is a process of its own, an indexer as any other. What is asked of the map is answered here, from
the maps of all shards at once; what concerns a stream goes to the shard that follows it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import aiohttp
import msgspec
from aiohttp import web
from msgspec import Raw
from prometheus_client import CONTENT_TYPE_LATEST

from events.unreachable import why
from indexer.api import QueryApi, answer, errors_as_json, parse
from indexer.debug import DebugApi, recorded
from indexer.dump import DumpApi
from indexer.errors import IndexerError, MapError, MapMissingError, ShardDownError
from indexer.families import serves
from indexer.feedback_api import is_list
from indexer.folder import lock_to_write, sign
from indexer.layout import StreamRecord
from indexer.listening import REQUEST_LIMIT_BYTES, listening
from indexer.metrics import IndexerMetrics
from indexer.outcome import refused
from indexer.readiness import HEALTHY_S, Readiness
from indexer.registration import Registration
from indexer.settings import IndexerSettings
from indexer.shard_metrics import of_shards
from indexer.shard_process import ShardProcess
from indexer.shard_reader import ShardReader
from indexer.sharding import divide, home_of, shard_of, share_of

ANSWER_TIMEOUT_S = 15.0
LOOK_TIMEOUT_S = 2.0
HEALTH_TIMEOUT_S = 0.5
"""For those who ask whether we are well, and wait no longer than a second themselves."""
START_PATIENCE_S = 10.0
"""A shard takes seconds to start, and replicas are registered as soon as anything listens."""


class Named(msgspec.Struct, frozen=True):
    """What every body that concerns streams names; without ``dp_rank`` all ranks, without ``instance_id`` all
    instances of the model.
    """

    instance_id: str | int | None = None
    model_name: str = ""
    dp_rank: int | None = None


class Ready(msgspec.Struct, frozen=True):
    """What is looked at of a shard's own answer at ``/ready``."""

    trouble: str | None = None


class Front:
    """The HTTP application over all shards."""

    def __init__(
        self, settings: IndexerSettings, shards: Sequence[ShardProcess], session: aiohttp.ClientSession
    ) -> None:
        self._shards = shards
        self._session = session
        self._registering: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.reader = ShardReader(Path(settings.map))
        self.metrics = IndexerMetrics()
        self.readiness = Readiness(self, settings.ready_deadline_s)

    def application(self) -> web.Application:
        """The HTTP application."""
        app = web.Application(middlewares=[errors_as_json], client_max_size=REQUEST_LIMIT_BYTES)
        app.add_routes(QueryApi(self.reader, self.metrics).routes())
        app.add_routes(DebugApi(self.reader).routes())
        app.add_routes(DumpApi(self.reader).routes())
        app.add_routes(
            [
                web.post("/register", self._register),
                *(web.post(path, self._pass_on) for path in ("/unregister", "/reset")),
                web.post("/feedback", self._feedback),
                web.get("/debug/replicas", self._replicas),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/metrics", self._metrics),
            ]
        )
        return app

    # what concerns a stream

    async def _register(self, request: web.Request) -> web.Response:
        """To the stream's home, once that listens; a stream of another shard is forgotten there before."""
        body = await request.read()
        registration = parse(body, Registration).checked()
        lock = self._registering.setdefault(registration.instance, asyncio.Lock())
        async with lock:
            home = home_of(registration, len(self._shards))
            await self._shards[home].listens(START_PATIENCE_S)
            for number, record in self._following(registration.instance, registration.dp_rank):
                if number != home and record.rank is None:
                    gone = {
                        "instance_id": record.registration.instance_id,
                        "model_name": record.registration.model_name,
                        "dp_rank": record.registration.dp_rank,
                    }
                    await self._ask(number, "/unregister", msgspec.json.encode(gone))
            return await self._ask(home, "/register", body)

    async def _feedback(self, request: web.Request) -> web.Response:
        """One answer to the shard of its stream; of a list, to each shard those that concern it."""
        body = await request.read()
        if not is_list(body):
            return await self._pass_on(request)
        told = parse(body, list[Raw])
        parts: dict[int, list[int]] = {}
        for place, one in enumerate(told):
            named = parse(one, Named)
            instance = str(named.instance_id)
            following = self._following(instance, 0 if named.dp_rank is None else named.dp_rank)
            home = following[0][0] if following else shard_of(instance, len(self._shards))
            parts.setdefault(home, []).append(place)
        outcomes: list[Any] = [refused("shard_down")] * len(told)

        async def tell(number: int, places: list[int]) -> web.Response | None:
            try:
                status, said = await self._call(
                    number,
                    "POST",
                    "/feedback",
                    msgspec.json.encode([told[place] for place in places]),
                    ANSWER_TIMEOUT_S,
                )
            except ShardDownError:
                return None
            if status >= 400:
                return web.Response(body=said, status=status, content_type="application/json")
            for place, outcome in zip(places, msgspec.json.decode(said, type=list[Raw]), strict=True):
                outcomes[place] = outcome
            return None

        answers = await asyncio.gather(*(tell(number, places) for number, places in parts.items()))
        return next((error for error in answers if error is not None), None) or answer(outcomes)

    async def _pass_on(self, request: web.Request) -> web.Response:
        """To all shards that follow the instance; the answer is the first that is an error, or the last."""
        body = await request.read()
        named = parse(body, Named)
        instance = None if named.instance_id is None else str(named.instance_id)
        rank = 0 if request.path == "/feedback" and named.dp_rank is None else named.dp_rank
        following = self._following(instance, rank)
        if instance is None:
            following = [each for each in following if serves(each[1], named.model_name)]
        last = answer({"status": "ok"})
        home = shard_of(instance or "", len(self._shards))
        for number in sorted({number for number, _ in following}) or [home]:
            last = await self._ask(number, request.path, body)
            if last.status >= 400:
                break
        return last

    def _following(self, instance: str | None, rank: int | None) -> list[tuple[int, StreamRecord]]:
        """Streams of an instance (None: of all), each with its shard's number.

        Raises MapError when that cannot be said.
        """
        found: list[tuple[int, StreamRecord]] = []
        for number, shard in enumerate(self.reader.shards):
            with suppress(MapMissingError), shard.snapshot() as (_, _, records):
                found += [
                    (number, record)
                    for record in records
                    if instance in (None, record.id[0]) and rank in (None, record.id[1])
                ]
        return found

    async def _ask(self, number: int, path: str, body: bytes) -> web.Response:
        """A shard's own answer. Raises ShardDownError."""
        status, told = await self._call(number, "POST", path, body, ANSWER_TIMEOUT_S)
        return web.Response(body=told, status=status, content_type="application/json")

    async def _call(
        self, number: int, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        url = self._shards[number].url
        if url is None:
            raise ShardDownError(f"shard {number} is not running; it is being started, try again")
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, url + path, data=body, timeout=timeout) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ShardDownError(f"shard {number} does not answer: {why(error)}") from error

    # what concerns all

    def streams(self) -> list[Any]:
        """As the reader's; none while no shard has a map yet."""
        try:
            return self.reader.streams()
        except MapError:
            return []

    async def _look(self, path: str) -> list[bytes | None]:
        """What every shard answers; None from those that do not."""

        async def ask(number: int) -> bytes | None:
            try:
                status, body = await self._call(number, "GET", path, None, LOOK_TIMEOUT_S)
            except ShardDownError:
                return None
            return body if status < 400 else None

        return await asyncio.gather(*(ask(number) for number in range(len(self._shards))))

    async def _replicas(self, _: web.Request) -> web.Response:
        """As of one indexer; of a shard that does not answer, what its map knows."""
        told: dict[str, Any] = {"replicas": [], "unmatched_topics": {}, "map": {}, "shards": []}
        for shard, body in zip(self._shards, await self._look("/debug/replicas"), strict=True):
            line = {"shard": shard.number, "pid": shard.pid, "restarts": shard.restarts}
            if body is None:
                told["replicas"] += self._remembered(shard.number)
                told["shards"].append(line | {"answers": False})
                continue
            own = msgspec.json.decode(body)
            told["replicas"] += own["replicas"]
            told["shards"].append(line | {"answers": True} | own["map"])
            for topic, count in own["unmatched_topics"].items():
                told["unmatched_topics"][topic] = told["unmatched_topics"].get(topic, 0) + count
            for name in ("used_bytes", "groups", "failures"):
                told["map"][name] = told["map"].get(name, 0) + own["map"][name]
        told["map"]["heartbeat_age_s"] = max(self._heartbeat_ages())
        return answer(told)

    def _remembered(self, number: int) -> list[dict[str, Any]]:
        try:
            with self.reader.shards[number].open() as reader:
                return [recorded(status) for status in reader.streams()]
        except MapError:
            return []

    def _heartbeat_ages(self) -> list[float]:
        ages: list[float] = []
        for shard in self.reader.shards:
            try:
                with shard.open() as reader:
                    ages.append(reader.heartbeat_age())
            except MapError:
                ages.append(float("inf"))
        return ages

    def _standing(self) -> list[str]:
        """The shards that are not fed."""
        return [f"shard {number}" for number, age in enumerate(self._heartbeat_ages()) if age > HEALTHY_S]

    async def _troubles(self) -> dict[str, str]:
        """Why shards cannot write, as they say themselves; by name."""

        async def ask(number: int) -> str | None:
            try:
                _, body = await self._call(number, "GET", "/ready", None, HEALTH_TIMEOUT_S)
                return msgspec.json.decode(body, type=Ready).trouble
            except (ShardDownError, msgspec.MsgspecError):
                return None

        told = await asyncio.gather(*(ask(number) for number in range(len(self._shards))))
        return {f"shard {number}": trouble for number, trouble in enumerate(told) if trouble is not None}

    async def _health(self, _: web.Request) -> web.Response:
        standing = self._standing()
        down = len(standing) == len(self._shards)
        status = "ingesting stands still" if down else "ok"
        body = {"status": status, "standing_still": standing, "trouble": await self._troubles()}
        return answer(body, 503 if down else 200)

    async def _ready(self, _: web.Request) -> web.Response:
        """Waits for all shards; once it was ready, one that is fed is enough."""
        standing = self._standing()
        waiting = self.readiness.settling(standing)
        ready = not waiting and len(standing) < len(self._shards)
        body = {"ready": ready, "waiting_for": waiting, "standing_still": standing}
        return answer(body | {"trouble": await self._troubles()}, 200 if ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        body = of_shards(self.metrics.registry, self._shards, await self._look("/metrics"))
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


@asynccontextmanager
async def _locked(path: Path, shards: int) -> AsyncIterator[None]:
    """Holds the folder's lock, with the division noted. Raises MapError."""
    lock, _ = lock_to_write(path)
    with lock:
        sign(lock)
        divide(path, shards)
        yield


async def serve_shards(
    settings: IndexerSettings, stop: asyncio.Event, clock: Callable[[], float] = time.monotonic
) -> None:
    """Runs all shards and the server over them until ``stop``. Raises IndexerError when it cannot start."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(_locked(Path(settings.map), settings.shards))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        shards: list[ShardProcess] = []
        front = Front(settings, shards, session)
        stack.callback(front.reader.close)
        url = await stack.enter_async_context(listening(front.application(), settings.listen))
        own = msgspec.structs.replace(settings, advertise=settings.advertise or url)
        shards += [ShardProcess(number, share_of(own, number)) for number in range(settings.shards)]
        await _keep_running(shards, stop, clock)


async def _keep_running(
    shards: Sequence[ShardProcess], stop: asyncio.Event, clock: Callable[[], float]
) -> None:
    """Runs the shards until ``stop``; ends all of them. Raises what the first that cannot start says."""
    tasks = [asyncio.create_task(shard.run(clock), name=f"shard {shard.number}") for shard in shards]
    stopped = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (stopped, *tasks):
            task.cancel()
        await asyncio.gather(stopped, *tasks, return_exceptions=True)
    for task in done - {stopped}:
        failure = task.exception()
        raise failure if isinstance(failure, IndexerError) else IndexerError(f"a shard failed: {failure!r}")
