"""A router's parts, put together as the settings say."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import ParamSpec

import aiohttp

from events.address import http_url
from events.names import NameResolver
from router.admin import Admin
from router.aiohttp_parts import check_aiohttp
from router.app import RouterApp
from router.chooser import Chooser
from router.colleagues import Colleagues
from router.connections import configured_upstream, replica_session
from router.decider import Decider
from router.discovery import Discovery
from router.doors import Doors, parse_keys
from router.errors import SettingsError
from router.feedback import Feedback
from router.fleet import Fleet
from router.header_bytes import pass_header_bytes
from router.hints import Hints
from router.indexer_link import IndexerLink, check_map
from router.load import Load
from router.lookup import Lookup
from router.marks import MARK_TOKENS
from router.metrics import RouterMetrics
from router.plan import Planner
from router.policies import POLICIES
from router.poller import Poller
from router.processes import Worker
from router.registrar import Registrar
from router.reload import Reload, Reread, Taker, sources_of
from router.replicas import parse_replicas
from router.retries import RetryBudget
from router.route import Route
from router.rules import Rules
from router.settings import AMONG_WORKERS, RouterSettings
from router.shares import BoardShares
from router.takers import certificates_taker, doors_taker, keys_taker
from router.tap import Recorder
from router.tls import Renewable, upstream_context
from router.token_check import TokenCheck
from router.tokenizing import check_tokenizers, tokenizing
from router.tracing import Tracing, start_tracing
from router.upstream import Upstream
from router.waitlist import Waitlist
from router.watched import WatchedFile
from router.watcher import WatchPace

log = logging.getLogger(__name__)

_P = ParamSpec("_P")


@asynccontextmanager
async def router_app(
    settings: RouterSettings,
    *,
    recorder: Recorder | None = None,
    upstream: Upstream | None = None,
    lookup: Lookup | None = None,
    reread: Reread | None = None,
    config: WatchedFile | None = None,
    worker: Worker | None = None,
) -> AsyncIterator[RouterApp]:
    """A running router without a listening socket: its fleet is watched and its replicas are registered.

    ``reread`` makes the settings anew: when it is asked to, and when the file ``config`` has changed.
    ``worker`` is which of several processes it is.
    ``upstream`` and ``lookup`` take the place of what the settings would make. Raises SettingsError.
    """
    _check(settings)
    if recorder is None and lookup is None:
        _warn_of_no_index(settings)
    pass_header_bytes()
    tls, rng = Renewable(upstream_context(settings)), random.Random(settings.seed)
    async with AsyncExitStack() as stack:
        probes = await stack.enter_async_context(_probes(tls))
        session = await stack.enter_async_context(replica_session(settings, tls))
        if upstream is None:
            upstream = await stack.enter_async_context(configured_upstream(settings, session, tls))
        fleet = _fleet(settings, probes, rng, worker)
        router = RouterApp(settings, fleet, load := _load(worker), metrics := RouterMetrics())
        metrics.watch(fleet, load)
        tracing = start_tracing()
        stack.push_async_callback(asyncio.to_thread, tracing.close)
        indexer = IndexerLink(settings, probes)
        stack.push_async_callback(indexer.close)
        lookup = lookup or indexer.lookup
        tokenizer, token_check = await stack.enter_async_context(
            tokenizing(settings, fleet, metrics, session, rng)
        )
        rules = settings.rules()
        planner = Planner(
            fleet,
            tokenizer,
            lookup,
            rules,
            metrics,
            router.trust,
            asks_usage=settings.ask_usage,
            for_record=recorder is not None,
        )
        chooser = Chooser(load, rng, time.monotonic, mark_tokens=MARK_TOKENS, hints=_hints(worker))
        _count_out(router, chooser)
        feedback = indexer.feedback(metrics, router.trust)
        feedback.start()
        stack.push_async_callback(feedback.close)
        doors, waitlist = _doors(router, worker), _waitlist(router, worker)
        if worker is not None:
            stack.enter_context(worker.bell(waitlist.rung))
        route = _route(
            router,
            planner,
            Decider(
                fleet,
                chooser,
                rules.default,
                POLICIES["least-loaded"],
                max_inflight=settings.max_inflight,
                seats=None if worker is None else worker.seats(lambda: fleet.streams),
            ),
            upstream,
            tracing,
            doors,
            retries=RetryBudget(settings.retry_rules(), None if worker is None else worker.retries()),
            waitlist=waitlist,
            recorder=recorder,
            feedback=feedback if lookup is not None else None,
        )
        registrar = indexer.registrar(fleet)
        router.tokenizers = token_check.told
        _add_admin(router, registrar, planner, rules, _colleagues(settings, worker, probes))
        _add_models_and_route(router, doors, route)
        if settings.poll_interval_s:
            restarted = _both(chooser.forget, token_check.restarted)
            poller = Poller(fleet, load, probes, metrics, settings.poll_interval_s, restarted)
            fleet.each("poll", poller.follow)
        await stack.enter_async_context(_watched(fleet, registrar, token_check))
        takers = [doors_taker(doors), certificates_taker(router, tls), keys_taker(router)]
        await stack.enter_async_context(_discovering(router, reread, config, takers))
        yield router


def _check(settings: RouterSettings) -> None:
    """Raises SettingsError for what no router can run with, here and now."""
    check_aiohttp()
    settings.check()
    check_map(settings.map)
    check_tokenizers(settings.tokenizer)
    if not (settings.replica or settings.dns or settings.replicas_file or settings.kubernetes):
        log.warning(
            "no replica is configured: every request will be answered with 503; give --replica NAME=URL"
        )


def _warn_of_no_index(settings: RouterSettings) -> None:
    """Nothing else says it at the start: each request is served, by load."""
    if POLICIES[settings.policy].uses_matches and settings.map is None and settings.indexer is None:
        log.warning(
            "--policy %s has no index to go by: requests will be routed by load; give --map or --indexer",
            settings.policy,
        )


def _probes(tls: Renewable) -> aiohttp.ClientSession:
    """For all that is asked beside requests: health, metrics, the indexer, colleagues."""
    connector = aiohttp.TCPConnector(limit=0, ssl=tls, resolver=NameResolver())
    return aiohttp.ClientSession(connector=connector)


def _fleet(
    settings: RouterSettings, probes: aiohttp.ClientSession, rng: random.Random, worker: Worker | None
) -> Fleet:
    return Fleet(
        parse_replicas(settings.replica),
        probes,
        pace=WatchPace(settings.health_interval_s, settings.health_timeout_s, settings.refresh_interval_s),
        outlier_rules=settings.outlier_rules(),
        rng=rng,
        standings=None if worker is None else worker.standings(),
    )


def _load(worker: Worker | None) -> Load:
    if worker is None:
        return Load()
    return Load(shares=BoardShares(worker.loads()), latency=worker.speeds())


def _hints(worker: Worker | None) -> Hints:
    return Hints() if worker is None else worker.hints()


def _count_out(router: RouterApp, chooser: Chooser) -> None:
    """Lets the fleet know what a replica still has to do, and all who know of it forget one that is gone, or
    another one.
    """
    fleet, load = router.fleet, router.load
    fleet.in_flight = lambda name: load.at(name, fleet.replicas[name].streams())
    fleet.renewed = _both(chooser.renewed, router.trust.forget)
    fleet.forgotten = _both(_both(chooser.gone, router.trust.forget), router.metrics.forget)


def _both(first: Callable[_P, None], second: Callable[_P, None]) -> Callable[_P, None]:
    def both(*args: _P.args, **kwargs: _P.kwargs) -> None:
        first(*args, **kwargs)
        second(*args, **kwargs)

    return both


def _doors(router: RouterApp, worker: Worker | None) -> Doors:
    return Doors(
        parse_keys(router.settings.api_key),
        router.settings.policy,
        row=None if worker is None else worker.keys(),
        refused=router.metrics.refused_at_door,
    )


def _route(
    router: RouterApp,
    planner: Planner,
    decider: Decider,
    upstream: Upstream,
    tracing: Tracing,
    doors: Doors,
    *,
    retries: RetryBudget,
    waitlist: Waitlist,
    recorder: Recorder | None,
    feedback: Feedback | None,
) -> Route:
    settings = router.settings
    return Route(
        router.fleet,
        planner,
        decider,
        upstream,
        router.metrics,
        tracing,
        router.decisions,
        retries=retries,
        retry_server_errors=settings.retry_server_errors,
        body_pace=settings.body_pace(),
        client_idle_s=settings.client_idle_timeout_s,
        forwarded=settings.forwarded,
        own_keys=doors.demand_keys,
        recorder=recorder,
        waitlist=waitlist,
        feedback=feedback,
    )


def _waitlist(router: RouterApp, worker: Worker | None) -> Waitlist:
    waitlist = Waitlist(
        router.settings.queue_limit,
        router.settings.queue_timeout_s,
        elsewhere=None if worker is None else worker.queue(),
    )
    waitlist.waited = router.metrics.queue_seconds.observe
    router.load.released = waitlist.room
    router.metrics.queued.set_function(lambda: len(waitlist))
    return waitlist


def _add_models_and_route(router: RouterApp, doors: Doors, route: Route) -> None:
    router.pages.add("/v1/models", doors.guarded(router.models))
    router.pages.add_all_below("/v1/", doors.guarded(route.handle))


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
    for pages in (router.pages, router.admin_pages):
        admin.add_health(pages)
    admin.add_pages(router.admin_pages)
    admin.add_rest(router.admin_pages)
    if router.settings.admin_address() is None:
        admin.add_pages(router.pages)


def _colleagues(
    settings: RouterSettings, worker: Worker | None, session: aiohttp.ClientSession
) -> Colleagues | None:
    if worker is None:
        return None
    host, _ = settings.admin_address() or AMONG_WORKERS
    # An address that stands for all of the host is none to ask at.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)

    def urls() -> dict[int, str]:
        return {number: http_url(host, port) for number, port in worker.others_pages().items()}

    return Colleagues(worker.number, worker.workers, urls, session)


@asynccontextmanager
async def _watched(fleet: Fleet, registrar: Registrar | None, token_check: TokenCheck) -> AsyncIterator[None]:
    """Watches the fleet, and has the indexer follow its streams."""
    async with AsyncExitStack() as stack:
        fleet.start()
        stack.push_async_callback(fleet.close)
        if registrar is not None:
            fleet.changed = _both(token_check.noticed, registrar.wake)
            registrar.start()
            stack.push_async_callback(registrar.close)
        yield


@asynccontextmanager
async def _discovering(
    router: RouterApp, reread: Reread | None, config: WatchedFile | None, takers: Sequence[Taker]
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
