"""Looks at one engine as a router and an indexer do: its HTTP API, its metrics, the ports of its events,
and the events themselves.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence

import aiohttp

from events.curve import Curve
from events.engine_metrics import EngineMetrics, read_engine_metrics
from events.names import look_up
from events.unreachable import why
from router.ear import REPLAY_TIMEOUT_S, Ear, Heard
from router.finding import Finding, Level
from router.inquiry import UNREACHABLE, ask
from router.introduction import DiscoveryError, read_event_sources, read_models
from router.replicas import BIND, EventSource, ReplicaSpec, configured_sources

CONNECT_TIMEOUT_S = 2.0
SWITCH_ON = (
    "start the engine with --kv-events-config "
    '\'{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",'
    '"replay_endpoint":"tcp://*:5558"}\''
)


class EngineCheck:
    """One replica, check by check; what the first checks find decides what the later ones can.

    Events are waited for ``wait_s`` seconds; ``curve`` are the keys for them, if any.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        session: aiohttp.ClientSession,
        wait_s: float,
        curve: Curve | None,
        clock: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._session = session
        self._wait_s = wait_s
        self._curve = curve
        self._clock = clock
        self._findings: list[Finding] = []

    def _say(self, check: str, level: Level, found: str, fix: str = "") -> None:
        self._findings.append(Finding(self._spec.name, check, level, found, fix))

    async def _ask(self, path: str) -> tuple[int, bytes]:
        return await ask(self._session, self._spec.url + path)

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
            heard = await Ear(self._spec.name, there, self._wait_s, self._curve, self._clock).listen()
            after = await self._metrics()
            done = (after.requests or 0) - (before.requests or 0)
            for source in there:
                self._look_at_events(source, heard[source.rank], done, before)
        return self._findings

    async def _is_reachable(self) -> bool:
        try:
            status, _ = await self._ask("/health")
        except UNREACHABLE as error:
            found = f"no answer at {self._spec.url}: {why(error)}"
            fix = "start it, or correct its URL"
            if isinstance(error, aiohttp.ClientSSLError):
                fix = "write http://, if it serves no TLS; else its certificate is not trusted here"
            self._say("http", "bad", found, fix)
            return False
        if status >= 500:
            self._say("http", "bad", f"/health answered {status}", "the engine is ill: see its log")
            return False
        self._say("http", "ok", f"{self._spec.url} answers")
        return True

    async def _look_at_models(self) -> None:
        try:
            status, body = await self._ask("/v1/models")
            if status != 200:
                raise DiscoveryError(f"/v1/models answered {status}")
            models = read_models(body)
        except (DiscoveryError, *UNREACHABLE) as error:
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
            status, body = await self._ask("/metrics")
        except UNREACHABLE:
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

    async def _ask_sources(self) -> tuple[int, tuple[EventSource, ...]]:
        """The status of what the engine says of its event ports, and they. Raises DiscoveryError."""
        status, body = await self._ask("/kv_event_sources")
        return status, read_event_sources(body, self._spec.host) if status == 200 else ()

    async def _told_sources(self) -> tuple[EventSource, ...]:
        try:
            status, sources = await self._ask_sources()
        except DiscoveryError as error:
            self._say("event source", "bad", str(error), 'write "endpoint":"tcp://*:5557" on the engine')
            return ()
        except UNREACHABLE as error:
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
            _, told = await self._ask_sources()
        except (DiscoveryError, *UNREACHABLE):
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
        known = (self._spec.block_size, *(heard.block_sizes or (said.block_size,)))
        sizes = sorted({size for size in known if size is not None})
        told = ", ".join(map(str, sizes))
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
