"""``warmroute doctor``: why nothing comes of a replica, or that all is well.

It looks at a replica as a router and an indexer do: its HTTP API, its metrics, the addresses of its events,
the events themselves, and what an indexer says of it. Each finding that is no good says what to do.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from events.curve import Curve
from events.engine_metrics import EngineMetrics, read_engine_metrics
from events.inbox import StreamId
from events.names import look_up
from events.schema import BlockStored, PayloadError, decode
from events.stream import Frame, Replayed, ReplayEnded
from events.subscriber import Source, Subscriber
from events.unreachable import why
from indexer.errors import IndexerError
from indexer.reader import HEARTBEAT_LIMIT_S
from indexer.shard_reader import open_map
from router.introduction import DiscoveryError, read_event_sources, read_models
from router.replicas import BIND, EventSource, ReplicaSpec, configured_sources

HTTP_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 2.0
REPLAY_TIMEOUT_S = 5.0
LISTEN_STEP_S = 0.1
ANSWER_LIMIT_BYTES = 8 << 20
SWITCH_ON = (
    "start the engine with --kv-events-config "
    '\'{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",'
    '"replay_endpoint":"tcp://*:5558"}\''
)

Level = Literal["ok", "warning", "bad"]


class Finding(msgspec.Struct, frozen=True):
    """One check of one replica (or of the indexer): what was found, and what to do if that is no good."""

    of: str
    check: str
    level: Level
    found: str
    fix: str = ""


class Heard(msgspec.Struct):
    """What came of one rank's port: batches now, batches in its replay (None: it did not answer).

    ``refused`` says why there was no handshake at all.
    """

    batches: int = 0
    refused: str | None = None
    replayed: int | None = None
    block_sizes: set[int] = msgspec.field(default_factory=set)
    unreadable: int = 0

    def take(self, payload: bytes) -> None:
        try:
            events = decode(payload).events
        except PayloadError:
            self.unreadable += 1
            return
        self.block_sizes |= {each.block_size for each in events if isinstance(each, BlockStored)}


class _Web:
    """Answers of one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._timeout = aiohttp.ClientTimeout(total=HTTP_TIMEOUT_S)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises aiohttp.ClientError, OSError, TimeoutError."""
        async with self._session.get(self._url + path, timeout=self._timeout) as response:
            return response.status, await response.content.read(ANSWER_LIMIT_BYTES)


_UNREACHABLE = (aiohttp.ClientError, OSError, TimeoutError)


async def examine(
    specs: Sequence[ReplicaSpec],
    indexer: str | None,
    session: aiohttp.ClientSession,
    *,
    wait_s: float = 5.0,
    curve: Curve | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Finding]:
    """Looks at the replicas at the same time, then at the indexer. Waits ``wait_s`` seconds for events.

    ``curve`` are the keys for events, with servers by the names of the replicas.
    """
    for finding in _shared_addresses(specs):
        yield finding
    looks = [_Examination(spec, session, wait_s, curve, clock).findings() for spec in specs]
    for findings in await asyncio.gather(*looks):
        for finding in findings:
            yield finding
    if indexer is not None:
        for finding in await _of_indexer(_Web(session, indexer.rstrip("/")), indexer, specs):
            yield finding


def _shared_addresses(specs: Sequence[ReplicaSpec]) -> list[Finding]:
    """Replicas that are one and the same, or whose events are: each of them would be credited with what
    another holds. An address of ours that engines connect to (``bind:``) may be shared.
    """
    first: dict[str, str] = {}
    findings = []
    for spec in specs:
        sources = configured_sources(spec)
        endpoints = [each for source in sources for each in (source.endpoint, source.replay_endpoint)]
        for address in (spec.url, *(each for each in endpoints if each and not each.startswith(BIND))):
            other = first.setdefault(address, spec.name)
            if other != spec.name:
                found, fix = (
                    f"{address} is that of {other} too",
                    "give each replica its own URL, events= and replay=",
                )
                findings.append(Finding(spec.name, "address", "bad", found, fix))
    return findings


class _Examination:
    """One replica, check by check; what the first checks find decides what the later ones can."""

    def __init__(
        self,
        spec: ReplicaSpec,
        session: aiohttp.ClientSession,
        wait_s: float,
        curve: Curve | None,
        clock: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._web = _Web(session, spec.url)
        self._wait_s = wait_s
        self._curve = curve
        self._clock = clock
        self._findings: list[Finding] = []

    def _say(self, check: str, level: Level, found: str, fix: str = "") -> None:
        self._findings.append(Finding(self._spec.name, check, level, found, fix))

    async def findings(self) -> list[Finding]:
        if not await self._is_reachable():
            return self._findings
        await self._look_at_models()
        before = await self._metrics()
        self._look_at_metrics(before)
        sources = configured_sources(self._spec)
        if sources:
            await self._compare_with_told(sources)
        else:
            sources = await self._told_sources()
        there = [source for source in sources if await self._has_port(source)]
        if there:
            heard = await _Ear(self._spec.name, there, self._wait_s, self._curve, self._clock).listen()
            after = await self._metrics()
            done = (after.requests or 0) - (before.requests or 0)
            for source in there:
                self._look_at_events(source, heard[source.rank], done, before)
        return self._findings

    async def _is_reachable(self) -> bool:
        try:
            status, _ = await self._web.get("/health")
        except _UNREACHABLE as error:
            found = f"no answer at {self._spec.url}: {why(error)}"
            plain = isinstance(error, aiohttp.ClientSSLError)
            fix = "write http://, if it serves no TLS; else its certificate is not trusted here"
            self._say("http", "bad", found, fix if plain else "start it, or correct its URL")
            return False
        if status >= 500:
            self._say("http", "bad", f"/health answered {status}", "the engine is ill: see its log")
            return False
        self._say("http", "ok", f"{self._spec.url} answers")
        return True

    async def _look_at_models(self) -> None:
        try:
            status, body = await self._web.get("/v1/models")
            if status != 200:
                raise DiscoveryError(f"/v1/models answered {status}")
            models = read_models(body)
        except (DiscoveryError, *_UNREACHABLE) as error:
            fix = "the router cannot know what it serves: give model=NAME"
            self._say("models", "bad", why(error), fix)
            return
        served = (models.model, *models.aliases)
        if self._spec.model not in (None, *served):
            fix = "leave model= out, or give a name that it serves: others get 404 from it"
            found = f"serves {', '.join(served)}; {self._spec.model} is configured"
            self._say("models", "bad", found, fix)
            return
        adapters = f", adapters {', '.join(sorted(models.adapters))}" if models.adapters else ""
        self._say("models", "ok", f"serves {self._spec.model or models.model}{adapters}")

    async def _metrics(self) -> EngineMetrics:
        try:
            status, body = await self._web.get("/metrics")
        except _UNREACHABLE:
            return EngineMetrics()
        return read_engine_metrics(body) if status == 200 else EngineMetrics()

    def _look_at_metrics(self, said: EngineMetrics) -> None:
        if said.prefix_caching is False:
            fix = "start the engine with --enable-prefix-caching: it keeps nothing to route to"
            self._say("prefix caching", "bad", "off", fix)
        elif said.prefix_caching:
            self._say("prefix caching", "ok", "on")
        else:
            self._say("prefix caching", "warning", "the engine's /metrics do not say", "see its start-up log")
        if said.started_at is None:
            found = "no process_start_time_seconds in /metrics: one witness of restarts less"
            self._say("start time", "warning", found, "give a replay endpoint; it proves more")

    async def _told_sources(self) -> tuple[EventSource, ...]:
        try:
            status, body = await self._web.get("/kv_event_sources")
            sources = read_event_sources(body, self._spec.host) if status == 200 else ()
        except DiscoveryError as error:
            self._say("event source", "bad", str(error), 'write "endpoint":"tcp://*:5557" on the engine')
            return ()
        except _UNREACHABLE as error:
            self._say("event source", "bad", why(error), "try again")
            return ()
        if not sources and status == 200:
            self._say("event source", "bad", "KV events are switched off", SWITCH_ON)
        elif not sources:
            found = f"/kv_event_sources answered {status} (vLLM has it from 0.32)"
            self._say(
                "event source", "bad", found, f"give events=tcp://HOST:PORT; if it has none: {SWITCH_ON}"
            )
        return sources

    async def _compare_with_told(self, sources: Sequence[EventSource]) -> None:
        """Ports that are those of another engine are as good as their own to all other checks."""
        try:
            status, body = await self._web.get("/kv_event_sources")
            told = read_event_sources(body, self._spec.host) if status == 200 else ()
        except (DiscoveryError, *_UNREACHABLE):
            return
        by_rank = {source.rank: source for source in told}
        for source in sources:
            its = by_rank.get(source.rank)
            if its is None or source.endpoint.startswith(BIND):
                continue
            for key, here, there in (
                ("events", source.endpoint, its.endpoint),
                ("replay", source.replay_endpoint, its.replay_endpoint),
            ):
                if here and there and _port_of(here) != _port_of(there):
                    found = f"{key}={here} is configured, and the engine says port {_port_of(there)}"
                    fix = f"right behind a port mapping alone; else it is another engine's: correct {key}="
                    self._say(f"rank {source.rank} {key} port", "warning", found, fix)

    async def _has_port(self, source: EventSource) -> bool:
        """Whether the ports of a rank can be connected to."""
        check = f"rank {source.rank} port"
        if source.endpoint.startswith(BIND):
            found = f"the engine connects to {source.endpoint}: only the indexer can hear it"
            self._say(check, "warning", found, "ask the indexer: give --indexer URL")
            return False
        for endpoint in (source.endpoint, source.replay_endpoint):
            failure = await _connect(endpoint) if endpoint else None
            if failure is not None:
                fix = (
                    "the engine binds only where its endpoint has a *: write tcp://*:PORT there; "
                    "else open the port, or correct events= and replay="
                )
                self._say(check, "bad", f"{endpoint}: {failure}", fix)
                return False
        self._say(check, "ok", source.endpoint)
        return True

    def _look_at_events(self, source: EventSource, heard: Heard, done: int, said: EngineMetrics) -> None:
        check = f"rank {source.rank} events"
        if heard.refused is not None:
            self._say(check, "bad", heard.refused, self._key_fix())
            return
        if heard.unreadable:
            found = f"{heard.unreadable} batches that are none"
            self._say(
                f"rank {source.rank} payloads",
                "bad",
                found,
                "is this the engine's event port, and the engine a vLLM or SGLang?",
            )
        if heard.batches:
            self._say(check, "ok", f"{heard.batches} batches in {self._wait_s:g} s")
        elif heard.replayed:
            self._say(check, "ok", f"none in {self._wait_s:g} s, {heard.replayed} before, in its replay")
        elif done:
            found = f"none in {self._wait_s:g} s, while {done} requests completed"
            fix = "prompts shorter than a block, or all cached, store nothing; else: " + SWITCH_ON
            self._say(check, "bad", found, fix)
        else:
            found = f"none in {self._wait_s:g} s, and no request completed"
            self._say(check, "warning", found, "send a prompt longer than a block, and look again")
        self._look_at_replay(source, heard)
        self._look_at_block_size(source, heard, said)

    def _key_fix(self) -> str:
        name = self._spec.name
        if self._curve is None or self._curve.server_of(name) is None:
            return (
                f"give --curve-key FILE, and --curve-server {name}=FILE: the public key of what serves it; "
                "if nothing there has keys, see whether events= and replay= are in each other's place"
            )
        return f"compare --curve-server {name}=FILE (or *=FILE) with its key, and have it let our own in"

    def _look_at_replay(self, source: EventSource, heard: Heard) -> None:
        check = f"rank {source.rank} replay"
        if source.replay_endpoint is None:
            fix = 'add "replay_endpoint":"tcp://*:5558" on the engine, and replay= here'
            self._say(check, "warning", "none: after a reconnect nothing counts until the next batch", fix)
        elif heard.replayed is None:
            found = f"{source.replay_endpoint} does not answer in {REPLAY_TIMEOUT_S:g} s"
            self._say(check, "bad", found, "is this the replay port of this rank, with its keys?")
        else:
            self._say(check, "ok", f"answers with {heard.replayed} batches")

    def _look_at_block_size(self, source: EventSource, heard: Heard, said: EngineMetrics) -> None:
        sizes = {self._spec.block_size, *heard.block_sizes, *([said.block_size] * (not heard.block_sizes))}
        sizes.discard(None)
        told = ", ".join(str(size) for size in sorted(size for size in sizes if size is not None))
        check = f"rank {source.rank} block size"
        if self._spec.block_size is not None and len(sizes) > 1:
            fix = "leave block-size= out: the events tell"
            self._say(check, "bad", f"{told}: {self._spec.block_size} is configured", fix)
        elif sizes:
            self._say(check, "ok", f"{told} tokens")


def _port_of(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]


async def _connect(endpoint: str) -> str | None:
    """Why a TCP connection cannot be made; None if it can, or where there is none to make."""
    found = re.fullmatch(r"tcp://\[?([^\]]+)\]?:(\d+)", endpoint)
    if found is None:
        return None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await _reach(found[1], int(found[2]))
    except TimeoutError:
        return f"no connection in {CONNECT_TIMEOUT_S:g} s"
    except OSError as error:
        return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    return None


async def _reach(host: str, port: int) -> None:
    """Connects once. Raises OSError: what the last of the host's addresses answered."""
    failure = OSError(f"{host} has no address")
    for *_, address in await look_up(host, port):
        try:
            _, writer = await asyncio.open_connection(*address[:2])
        except OSError as error:
            failure = error
        else:
            writer.close()
            return
    raise failure


class _Ear:
    """Listens to some ranks of a replica, live and to their replays."""

    def __init__(
        self,
        replica: str,
        sources: Sequence[EventSource],
        wait_s: float,
        curve: Curve | None,
        clock: Callable[[], float],
    ) -> None:
        self._replica = replica
        self._sources = sources
        self._curve = curve
        self._wait_s = wait_s
        self._clock = clock
        self._heard = {source.rank: Heard() for source in sources}
        self._counts: dict[StreamId, int] = {}

    async def listen(self) -> dict[int, Heard]:
        """What was heard, by rank, in the time to wait; a replay that is under way may take longer."""
        subscriber = Subscriber(curve=self._curve)
        try:
            for source in self._sources:
                address = Source(source.endpoint, replay=source.replay_endpoint, peer=self._replica)
                subscriber.add(source.rank, address)
                subscriber.ask_replay(source.rank, 1, 0)
            begun = self._clock()
            while self._clock() < begun + self._wait_s or (
                self._clock() < begun + REPLAY_TIMEOUT_S and self._awaits_replay(subscriber)
            ):
                await asyncio.to_thread(self._take, subscriber)
            for rank, heard in self._heard.items():
                heard.refused = subscriber.faults.broken.get(rank)
        finally:
            await asyncio.to_thread(subscriber.close)
        return self._heard

    def _awaits_replay(self, subscriber: Subscriber) -> bool:
        """Of a rank that refuses its events no replay is looked at."""
        refused = subscriber.faults.broken
        asked = [source.rank for source in self._sources if source.replay_endpoint]
        return any(self._heard[rank].replayed is None for rank in asked if rank not in refused)

    def _take(self, subscriber: Subscriber) -> None:
        for rank, signal in subscriber.inbox.take(1_000, LISTEN_STEP_S):
            assert isinstance(rank, int)
            heard = self._heard[rank]
            if isinstance(signal, Frame):
                heard.batches += 1
                heard.take(signal.payload)
            elif isinstance(signal, Replayed):
                self._counts[rank] = self._counts.get(rank, 0) + 1
                heard.take(signal.payload)
            elif isinstance(signal, ReplayEnded):
                heard.replayed = self._counts.get(rank, 0)


def of_map(folder: Path) -> tuple[Finding, str | None]:
    """What a router would find at the map in ``folder``: whether it can be read, and its indexer's URL."""
    try:
        with closing(open_map(folder)) as reader:
            url = reader.indexer_address()
            silent_s = reader.heartbeat_age()
    except IndexerError as error:
        fix = "a router needs the indexer's folder, its uid and a writable mount; or give it --indexer alone"
        return Finding("map", "reading", "bad", str(error), fix), None
    if silent_s > HEARTBEAT_LIMIT_S:
        since = f"for {silent_s:.0f} s" if silent_s < float("inf") else "since this host started"
        fix = f"start `warmroute indexer --map {folder}`; if it runs, its log says why it cannot write"
        return Finding("map", "reading", "bad", f"{folder}: no sign of its indexer {since}", fix), url
    return Finding("map", "reading", "ok", f"{folder} is kept by {url}"), url


async def _of_indexer(web: _Web, url: str, specs: Sequence[ReplicaSpec]) -> list[Finding]:
    """What an indexer says of the replicas."""
    try:
        status, body = await web.get("/debug/replicas")
        if status != 200:
            raise DiscoveryError(f"/debug/replicas answered {status}")
        told = msgspec.json.decode(body)
        replicas: list[dict[str, Any]] = told["replicas"]
        unmatched: dict[str, int] = told["unmatched_topics"]
        states = [_of_stream(each) for each in replicas]
    except (DiscoveryError, msgspec.DecodeError, KeyError, TypeError, *_UNREACHABLE) as error:
        fix = "start `warmroute indexer`, or give its URL"
        return [Finding("indexer", "http", "bad", f"{url}: {why(error)}", fix)]
    findings = [Finding("indexer", "http", "ok", f"{url} follows {len(replicas)} streams"), *states]
    known = {each["instance"] for each in replicas}
    findings += [
        Finding(
            spec.name, "indexer", "bad", "it does not follow it", "is a router running that registers it?"
        )
        for spec in specs
        if spec.name not in known
    ]
    if unmatched:
        found = (
            f"{sum(unmatched.values())} messages of no registered topic: {', '.join(sorted(unmatched)[:5])}"
        )
        findings.append(
            Finding("indexer", "topics", "bad", found, "register the topic that the engine sends")
        )
    return findings


def _of_stream(told: dict[str, Any]) -> Finding:
    """A stream as ``/debug/replicas`` has it."""
    state, skipped = told["state"], told["skipped"]
    left_out = f"; left out: {', '.join(f'{count} {name}' for name, count in skipped.items())}" * bool(
        skipped
    )
    level: Level = "ok" if state == "live" else "warning" if state in ("partial", "replaying") else "bad"
    found = f"{state}: {told['reason']}; {told['blocks']} blocks{left_out}"
    fix = "" if level == "ok" else "see `reason`, and the checks of its port and events"
    return Finding(told["instance"], f"rank {told['rank']} in the indexer", level, found, fix)
