"""``warmroute router``: puts the parts together, serves, and goes down cleanly."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import random
import resource
import signal
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import ParamSpec
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web

from events.address import host_and_port, http_url
from events.names import NameResolver
from indexer.client import IndexerClient
from router.admin import Admin
from router.chooser import Chooser
from router.colleagues import Colleagues
from router.decider import Decider
from router.decision import HEADER_PREFIX
from router.decision_log import DecisionLog
from router.discovery import Discovery
from router.doors import Doors, parse_keys
from router.errors import ListenError, RefusedError, SettingsError
from router.feedback import Feedback
from router.fleet import Fleet, model_cards
from router.header_bytes import pass_header_bytes
from router.headers import REQUEST_ID, request_id_of
from router.key_cache import KeyCache
from router.load import Load
from router.local_tokens import LocalTokens, Told
from router.lookup import FirstThatAnswers, HttpLookup, Lookup, MapLookup
from router.marks import MARK_TOKENS
from router.metrics import RouterMetrics
from router.plan import Planner
from router.policies import POLICIES
from router.poller import Poller
from router.pool import PooledUpstream
from router.processes import Worker
from router.refusal import refusal
from router.registrar import Registrar
from router.relay import leave_untyped
from router.reload import Reload, Reread, Taker, sources_of
from router.replicas import parse_replicas
from router.route import Route
from router.rules import Rules
from router.server import Runner, await_body
from router.settings import RouterSettings, parse_tokenizers
from router.shares import BoardShares
from router.tap import Recorder
from router.tls import Renewable, client_context, server_context
from router.token_cache import TokenCache
from router.token_check import TokenCheck
from router.tokens import Tokenizer
from router.tracing import start_tracing
from router.trust import Trust
from router.upstream import AiohttpUpstream, Upstream, upstream_session
from router.waitlist import LOOK_S, WORKERS_LOOK_S, Waitlist

log = logging.getLogger(__name__)

_P = ParamSpec("_P")

INDEXER_TIMEOUT_S = 2.0


class RouterApp:
    """A router that can be served.

    ``app`` is its aiohttp application, ``admin_app`` that of operators, which may be the same one; the other
    parts are there to look at.
    """

    def __init__(self, settings: RouterSettings, fleet: Fleet, load: Load, metrics: RouterMetrics) -> None:
        self.settings = settings
        self.fleet = fleet
        self.load = load
        self.metrics = metrics
        self.trust = Trust()
        self.decisions = DecisionLog(settings.decisions_kept)
        self.draining = False
        self.discovery: Discovery | None = None
        self.reload: Reload | None = None
        self.tokenizers: Callable[[], list[Told]] = list
        tls = _server_context(settings)
        self.tls = None if tls is None else Renewable(tls)
        self.app = web.Application(client_max_size=settings.request_limit_bytes)
        self.app.on_response_prepare.append(leave_untyped)
        self.app.on_response_prepare.append(self._part)
        self.admin_app = self.app if settings.admin_address() is None else web.Application()
        self.admin_url = ""

    async def _part(self, request: web.Request, response: web.StreamResponse) -> None:
        """On the way down, has clients take their next request to another router. After a request for an
        upgrade that is not heeded, too: aiohttp loses what was sent right behind it.
        """
        if self.draining or "Upgrade" in request.headers:
            response.force_close()
            # aiohttp has written this header already, before it asks us.
            response.headers["Connection"] = "close"

    def settings_errors(self) -> list[str]:
        """Why new settings, or the places that replicas come from, are not heeded."""
        found = list(self.discovery.errors.values()) if self.discovery is not None else []
        reload = self.reload.error if self.reload is not None else None
        return found if reload is None else [*found, reload]

    async def models(self, request: web.Request) -> web.Response:
        """``GET /v1/models``: what the healthy replicas serve, together."""
        replicas = self.fleet.usable()
        said = {HEADER_PREFIX + "policy": self.settings.policy, REQUEST_ID: request_id_of(request.headers)}
        if not replicas:
            error = RefusedError(
                503,
                "ServiceUnavailableError",
                "no replica is healthy",
                retry_after=2,
                reason="no healthy replica",
            )
            return refusal(error, self.settings.policy, said)
        said[HEADER_PREFIX + "reason"] = f"the models of {len(replicas)} replicas"
        body = msgspec.json.encode({"object": "list", "data": model_cards(replicas)})
        return web.Response(body=body, content_type="application/json", headers=said)


@asynccontextmanager
async def router_app(
    settings: RouterSettings,
    *,
    recorder: Recorder | None = None,
    upstream: Upstream | None = None,
    lookup: Lookup | None = None,
    reread: Reread | None = None,
    config: Path | None = None,
    worker: Worker | None = None,
) -> AsyncIterator[RouterApp]:
    """A running router without a listening socket: its fleet is watched and its replicas are registered.

    ``reread`` makes the settings anew: when it is asked to, and when the file ``config`` has changed.
    ``worker`` is which of several processes it is.
    ``upstream`` and ``lookup`` take the place of what the settings would make. Raises SettingsError.
    """
    settings.check()
    _check_map(settings.map)
    _check_tokenizers(settings.tokenizer)
    specs, rules = parse_replicas(settings.replica), settings.rules()
    pass_header_bytes()
    tls = Renewable(_client_context(settings))
    if not (specs or settings.dns or settings.replicas_file or settings.kubernetes):
        log.warning(
            "no replica is configured: every request will be answered with 503; give --replica NAME=URL"
        )
    async with AsyncExitStack() as stack:
        probes = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=tls, resolver=NameResolver()))
        )
        session = await stack.enter_async_context(_session(settings, settings.upstream_keepalive_s, tls))
        if upstream is None:
            upstream = await stack.enter_async_context(_upstream(settings, session, tls))
        rng = random.Random(settings.seed)
        fleet = Fleet(
            specs,
            probes,
            health_interval_s=settings.health_interval_s,
            health_timeout_s=settings.health_timeout_s,
            refresh_interval_s=settings.refresh_interval_s,
            outlier_rules=settings.outlier_rules(),
            rng=rng,
        )
        router = RouterApp(settings, fleet, load := _load(worker), metrics := RouterMetrics())
        metrics.watch(fleet, load)
        tracing = start_tracing()
        stack.push_async_callback(asyncio.to_thread, tracing.close)
        map_lookup = _map_lookup(settings)
        if map_lookup is not None:
            stack.push_async_callback(map_lookup.close)
        lookup = lookup or _lookup(settings, map_lookup, probes)
        tokenizer, token_check = await stack.enter_async_context(
            _tokenizing(settings, fleet, metrics, session, rng)
        )
        planner = Planner(
            fleet, tokenizer, lookup, rules, metrics, router.trust, asks_usage=settings.ask_usage
        )
        chooser = Chooser(load, rng, time.monotonic, mark_tokens=MARK_TOKENS)
        _count_out(router, chooser)
        feedback = _feedback(router, map_lookup, probes)
        stack.push_async_callback(feedback.close)
        doors = Doors(
            parse_keys(settings.api_key),
            settings.policy,
            row=None if worker is None else worker.keys(),
            refused=metrics.refused_at_door,
        )
        route = Route(
            fleet,
            planner,
            Decider(
                fleet, chooser, rules.default, POLICIES["least-loaded"], max_inflight=settings.max_inflight
            ),
            upstream,
            metrics,
            tracing,
            router.decisions,
            retries=settings.retry_rules(),
            retry_server_errors=settings.retry_server_errors,
            body_pace=settings.body_pace(),
            client_idle_s=settings.client_idle_timeout_s,
            forwarded=settings.forwarded,
            own_keys=doors.demand_keys,
            recorder=recorder,
            waitlist=_waitlist(router, worker),
            feedback=feedback if lookup is not None else None,
        )
        registrar = _registrar(settings, fleet, map_lookup, probes)
        router.tokenizers = token_check.told
        _add_admin(router, registrar, planner, rules, _colleagues(settings, worker, probes))
        models, handle = doors.guarded(router.models), doors.guarded(route.handle)
        router.app.router.add_get("/v1/models", models)
        router.app.router.add_route("*", "/v1/{path:.*}", handle, expect_handler=await_body)
        if settings.poll_interval_s:
            poller = Poller(fleet, load, probes, metrics, settings.poll_interval_s, chooser.forget)
            fleet.each("poll", poller.follow)
        fleet.start()
        stack.push_async_callback(fleet.close)
        if registrar is not None:
            fleet.changed = _both(token_check.noticed, registrar.wake)
            registrar.start()
            stack.push_async_callback(registrar.close)
        takers = [_doors_taker(doors), _certificates_taker(router, tls), _keys_taker(router)]
        await stack.enter_async_context(_discovering(router, reread, config, takers))
        yield router


def _count_out(router: RouterApp, chooser: Chooser) -> None:
    """Lets the fleet know what a replica still has to do, and all who know of it forget one that is gone."""
    fleet, load = router.fleet, router.load
    fleet.in_flight = lambda name: load.at(name, fleet.replicas[name].streams())
    fleet.forgotten = _both(_both(chooser.gone, router.trust.forget), router.metrics.forget)


@asynccontextmanager
async def _discovering(
    router: RouterApp, reread: Reread | None, config: Path | None, takers: Sequence[Taker]
) -> AsyncIterator[None]:
    """Keeps the fleet as the settings, and the places that they name, say. Raises SettingsError for a file of
    replicas that cannot be used at the start.
    """
    settings, fleet, interval_s = router.settings, router.fleet, router.settings.discovery_interval_s
    specs = parse_replicas(settings.replica)
    router.discovery = Discovery(fleet.update, interval_s, specs)
    try:
        await router.discovery.follow(specs, sources_of(settings))
        if (missing := router.discovery.errors.get(f"--replicas-file {settings.replicas_file}")) is not None:
            raise SettingsError(missing)
        if reread is not None:
            router.reload = Reload(settings, router.discovery, reread, config, interval_s, takers)
            router.reload.start()
        yield
    finally:
        if router.reload is not None:
            await router.reload.close()
        await router.discovery.close()


def _client_context(settings: RouterSettings) -> ssl.SSLContext:
    return client_context(settings.upstream_ca, settings.upstream_cert, settings.upstream_key)


def _server_context(settings: RouterSettings) -> ssl.SSLContext | None:
    return server_context(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def _doors_taker(doors: Doors) -> Taker:
    def look(new: RouterSettings) -> Callable[[], None]:
        keys = parse_keys(new.api_key)

        def take() -> None:
            if doors.demand_keys() and not keys:
                log.warning("no API key is configured any more: everybody may send requests")
            doors.follow(keys)

        return take

    return look


def _certificates_taker(router: RouterApp, upstream: Renewable) -> Taker:
    def look(new: RouterSettings) -> Callable[[], None]:
        client, server = _client_context(new), _server_context(new)
        if (server is None) != (router.tls is None):
            raise SettingsError("--tls-cert: between http and https is a restart")

        def take() -> None:
            upstream.current = client
            if router.tls is not None and server is not None:
                router.tls.current = server

        return take

    return look


def _keys_taker(router: RouterApp) -> Taker:
    def look(new: RouterSettings) -> Callable[[], None]:
        stay = {spec.name for spec in parse_replicas(new.replica)}
        gone = {spec.name for spec in parse_replicas(router.settings.replica)} - stay
        return router.fleet.reread_keys(but=gone)

    return look


def _session(settings: RouterSettings, keepalive_s: float, tls: ssl.SSLContext) -> aiohttp.ClientSession:
    return upstream_session(
        settings.connect_timeout_s,
        settings.idle_timeout_s,
        keepalive_s,
        settings.header_limit_bytes,
        settings.header_limit_count,
        tls,
    )


@asynccontextmanager
async def _upstream(
    settings: RouterSettings, session: aiohttp.ClientSession, tls: ssl.SSLContext
) -> AsyncIterator[Upstream]:
    if settings.upstream_client == "aiohttp":
        async with _session(settings, 0.0, tls) as fresh:
            yield AiohttpUpstream(session, fresh)
        return
    pool = PooledUpstream(
        settings.connect_timeout_s,
        settings.idle_timeout_s,
        settings.upstream_keepalive_s,
        settings.header_limit_bytes,
        settings.header_limit_count,
        tls,
    )
    try:
        yield pool
    finally:
        pool.close()


def _both(first: Callable[_P, None], second: Callable[_P, None]) -> Callable[_P, None]:
    def both(*args: _P.args, **kwargs: _P.kwargs) -> None:
        first(*args, **kwargs)
        second(*args, **kwargs)

    return both


def _check_tokenizers(lines: Sequence[str]) -> None:
    missing = [name for name in ("transformers", "jinja2") if lines and find_spec(name) is None]
    if missing:
        raise SettingsError(
            f"--tokenizer needs {' and '.join(missing)}: install the extra, warmroute[local-tokenizer]"
        )


def _check_map(folder: str | None) -> None:
    if folder is None or not Path(folder).exists():
        return
    if not Path(folder).is_dir():
        raise SettingsError(f"--map {folder} is a file; give the folder that the indexer writes")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise SettingsError(f"--map {folder}: no permission to read the folder; run as the indexer's user")


@asynccontextmanager
async def _tokenizing(
    settings: RouterSettings,
    fleet: Fleet,
    metrics: RouterMetrics,
    session: aiohttp.ClientSession,
    rng: random.Random,
) -> AsyncIterator[tuple[Tokenizer, TokenCheck]]:
    """What makes tokens, and what watches that they are the engines'."""
    timeout_s, cache = settings.tokenize_timeout_s, TokenCache(settings.token_cache_tokens)
    sources = parse_tokenizers(settings.tokenizer)
    local = LocalTokens(sources, cache, threads=settings.tokenizer_threads, timeout_s=timeout_s)
    tokenizer = Tokenizer(session, timeout_s=timeout_s, cache=cache, local=local, rng=rng)
    interval_s = settings.tokenizer_check_interval_s
    check = TokenCheck(fleet, local, cache, metrics, tokenizer.ask, interval_s=interval_s)
    fleet.changed, local.changed = check.noticed, check.wake
    local.start()
    check.start()
    try:
        yield tokenizer, check
    finally:
        await check.close()
        local.close()


def _map_lookup(settings: RouterSettings) -> MapLookup | None:
    if not settings.map:
        return None
    keys = KeyCache(settings.key_cache_blocks)
    return MapLookup(Path(settings.map), timeout_s=settings.lookup_timeout_s, keys=keys)


def _lookup(
    settings: RouterSettings, map_lookup: MapLookup | None, session: aiohttp.ClientSession
) -> Lookup | None:
    lookups: list[Lookup] = []
    if map_lookup is not None:
        lookups.append(map_lookup)
    if settings.indexer is not None:
        client = IndexerClient(settings.indexer.rstrip("/"), session, settings.lookup_timeout_s)
        lookups.append(HttpLookup(client, timeout_s=settings.lookup_timeout_s))
    if not lookups:
        return None
    return lookups[0] if len(lookups) == 1 else FirstThatAnswers(lookups)


def _registrar(
    settings: RouterSettings, fleet: Fleet, map_lookup: MapLookup | None, session: aiohttp.ClientSession
) -> Registrar | None:
    if settings.indexer is None and map_lookup is None:
        return None
    return Registrar(
        fleet,
        _address(settings.indexer, map_lookup),
        lambda url: IndexerClient(url, session, INDEXER_TIMEOUT_S),
    )


def _colleagues(
    settings: RouterSettings, worker: Worker | None, session: aiohttp.ClientSession
) -> Colleagues | None:
    admin = settings.admin_address()
    if worker is None or admin is None:
        return None
    # An address that stands for all of the host is none to ask at.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(admin[0], admin[0])

    def urls() -> dict[int, str]:
        return {number: http_url(host, port) for number, port in worker.others_pages().items()}

    return Colleagues(worker.number, worker.workers, urls, session)


def _add_admin(
    router: RouterApp,
    registrar: Registrar | None,
    planner: Planner,
    rules: Rules,
    colleagues: Colleagues | None,
) -> None:
    admin = Admin(
        router.fleet,
        router.load,
        router.metrics,
        router.decisions,
        registrar,
        planner.strangers,
        rules,
        lambda: router.draining,
        router.settings_errors,
        router.tokenizers,
        colleagues,
    )
    admin.add_health(router.app)
    if router.admin_app is not router.app:
        admin.add_health(router.admin_app)
    admin.add_routes(router.admin_app)


def _load(worker: Worker | None) -> Load:
    return Load() if worker is None else Load(shares=BoardShares(worker.loads()))


def _waitlist(router: RouterApp, worker: Worker | None) -> Waitlist:
    waitlist = Waitlist(
        router.settings.queue_limit,
        router.settings.queue_timeout_s,
        # Nobody tells of the room that another worker makes.
        look_s=LOOK_S if worker is None else WORKERS_LOOK_S,
    )
    waitlist.waited = router.metrics.queue_seconds.observe
    router.load.released = waitlist.room
    router.metrics.queued.set_function(lambda: len(waitlist))
    return waitlist


def _feedback(router: RouterApp, map_lookup: MapLookup | None, session: aiohttp.ClientSession) -> Feedback:
    """Tells the indexer what engines report; what it cannot be told is ours to judge."""
    feedback = Feedback(
        _address(router.settings.indexer, map_lookup),
        lambda url: IndexerClient(url, session, INDEXER_TIMEOUT_S),
        router.metrics,
        lambda untold: router.trust.learn(untold.stream, untold.predicted_tokens, untold.cached_tokens),
    )
    feedback.start()
    return feedback


def _address(configured: str | None, map_lookup: MapLookup | None) -> Callable[[], Awaitable[str | None]]:
    async def address() -> str | None:
        if configured is not None:
            return configured.rstrip("/")
        return await map_lookup.indexer_address() if map_lookup is not None else None

    return address


@asynccontextmanager
async def listening(router: RouterApp, worker: Worker | None = None) -> AsyncIterator[str]:
    """Serves the router at its address, which ``worker`` shares with others; gives the URL. On leaving, open
    answers get their grace.

    Raises ListenError, SettingsError.
    """
    settings = router.settings
    async with AsyncExitStack() as stack:
        admin = settings.admin_address()
        if admin is not None:
            # Cleaned up last: operators can look on while open answers have their grace.
            host, port = admin
            port += worker.number if worker is not None and port else 0
            router.admin_url = await _open(stack, router, router.admin_app, "--admin-listen", host, port)
            if worker is not None:
                worker.pages_at(urlsplit(router.admin_url).port or 0)
            log.info("metrics and debug pages on %s", router.admin_url)
        host, port = host_and_port(settings.listen)
        port = port if worker is None else worker.port
        shared = worker is not None
        url = await _open(stack, router, router.app, "--listen", host, port, tls=router.tls, shared=shared)
        log.info("listening on %s", url)
        router.admin_url = router.admin_url or url
        yield url
        router.draining = True
        await asyncio.sleep(settings.shutdown_delay_s)


async def _open(
    stack: AsyncExitStack,
    router: RouterApp,
    app: web.Application,
    flag: str,
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None = None,
    shared: bool = False,
) -> str:
    """Serves ``app``, as long as the stack is open; gives the URL. ``shared``: others have the port too.

    Raises ListenError.
    """
    settings = router.settings
    runner = Runner(app, settings.policy, settings.limits(), grace_s=settings.grace_s)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(
        runner,
        host,
        port,
        reuse_address=True,
        reuse_port=shared or None,
        backlog=settings.backlog,
        ssl_context=tls,
    )
    try:
        await site.start()
    except OSError as error:
        why = "address already in use" if error.errno == errno.EADDRINUSE else (error.strerror or str(error))
        listen = http_url(host, port).removeprefix("http://")
        raise ListenError(f"cannot listen on {listen}: {why}; choose another {flag}") from error
    url = http_url(host, runner.addresses[0][1])
    return url if tls is None else url.replace("http://", "https://", 1)


def _raise_file_limit() -> None:
    """Each request takes two sockets; the usual soft limit of 1,024 files is there for ``select``."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _collect_garbage_seldom() -> None:
    """What is there by now stays. A request makes hundreds of objects, hardly any in cycles: looking through
    them every 700 took 4 % of all CPU, and a look through everything holds the loop.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


async def serve(
    settings: RouterSettings,
    recorder: Recorder | None = None,
    *,
    reread: Reread | None = None,
    config: Path | None = None,
    worker: Worker | None = None,
) -> None:
    """Runs the router until SIGTERM or SIGINT. ``reread`` makes the settings anew, at SIGHUP and when
    ``config`` changes. Raises RouterError when it cannot start.
    """
    _raise_file_limit()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with (
            router_app(settings, recorder=recorder, reread=reread, config=config, worker=worker) as router,
            listening(router, worker),
        ):
            if router.reload is not None:
                loop.add_signal_handler(signal.SIGHUP, router.reload.now)
            _collect_garbage_seldom()
            await stop.wait()
            log.info(
                "shutting down: not ready any more, the door closes in %g s, open answers get %g s then",
                settings.shutdown_delay_s,
                settings.grace_s,
            )
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)
