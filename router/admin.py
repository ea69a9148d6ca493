"""What the router says of itself: health, readiness, metrics, replicas, decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from router.colleagues import OWN, Colleagues, together
from router.decision_log import DecisionLog
from router.errors import RefusedError
from router.fleet import Fleet
from router.headers import REQUEST_ID, request_id_of
from router.load import Load
from router.local_tokens import Told
from router.metrics import RouterMetrics
from router.pages import Pages
from router.refusal import refusal
from router.registrar import Registrar
from router.replicas import Health, Replica, StreamId
from router.rules import Rules

Handler = Callable[[web.Request], Awaitable[web.Response]]

_encode = msgspec.json.Encoder().encode


class Admin:
    """The handlers. ``strangers`` gives the replicas of the index that are none of ours, ``draining`` tells
    whether we are going down, ``settings_errors`` why new settings or places of replicas are not heeded,
    ``tokenizers`` gives the local tokenizers. Where there are other workers, ``colleagues``, each page shows
    all of them where it can, and ``?worker=N`` asks for that of one.
    """

    def __init__(
        self,
        fleet: Fleet,
        load: Load,
        metrics: RouterMetrics,
        decisions: DecisionLog,
        registrar: Registrar | None,
        strangers: Callable[[], list[str]],
        rules: Rules,
        draining: Callable[[], bool],
        settings_errors: Callable[[], list[str]],
        tokenizers: Callable[[], list[Told]],
        colleagues: Colleagues | None = None,
    ) -> None:
        self._colleagues = colleagues
        self._fleet = fleet
        self._load = load
        self._metrics = metrics
        self._decisions = decisions
        self._registrar = registrar
        self._strangers = strangers
        self._rules = rules
        self._draining = draining
        self._settings_errors = settings_errors
        self._tokenizers = tokenizers

    def add_health(self, pages: Pages) -> None:
        """What balancers and orchestrators ask."""
        pages.add("/health", self.health)
        pages.add("/ready", self.ready)

    def add_pages(self, pages: Pages) -> None:
        """What only operators may see."""
        for path, handler in (
            ("/metrics", self.metrics),
            ("/debug/replicas", self.replicas),
            ("/debug/decisions", self.decisions),
            ("/debug/rules", self.rules),
            ("/debug/tokenizers", self.tokenizers),
        ):
            pages.add(path, self._of_worker(handler))

    def _of_worker(self, handler: Handler) -> Handler:
        """The handler, but for requests that are for the page of another worker."""
        colleagues = self._colleagues
        if colleagues is None:
            return handler

        async def handle(request: web.Request) -> web.Response:
            asked = request.query.get("worker", OWN)
            if asked in (OWN, str(colleagues.number)):
                return await handler(request)
            if asked not in map(str, range(colleagues.workers)):
                last = colleagues.workers - 1
                return self._missing(request, f"there is no worker {asked[:20]!r}; they are 0 to {last}")
            page = await colleagues.page(int(asked), request.path, request.query)
            if page is None:
                return self._missing(
                    request, f"worker {asked} does not answer; if it does not soon, see the log"
                )
            kind = CONTENT_TYPE_LATEST if request.path == "/metrics" else "application/json"
            return web.Response(body=page, headers={"Content-Type": kind})

        return handle

    def add_rest(self, pages: Pages) -> None:
        """Says of a page that is not there which there are."""

        async def missing(request: web.Request) -> web.Response:
            return self._missing(request, f"Not Found: the pages here are {', '.join(pages.paths)}")

        pages.add_rest(missing)

    def _missing(self, request: web.Request, message: str) -> web.Response:
        error = RefusedError(404, "Not Found", message, reason="not found")
        said = {REQUEST_ID: request_id_of(request.headers)}
        return refusal(error, self._rules.default.name, said)

    async def _others(self, request: web.Request) -> dict[int, bytes | None]:
        """The other workers' pages, where the request is not for that of one."""
        if self._colleagues is None or "worker" in request.query:
            return {}
        return await self._colleagues.pages(request.path, request.query)

    async def health(self, request: web.Request) -> web.Response:
        """200 as long as the process serves."""
        return _json({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """200 when some replica can take requests and we are not going down; the index is not needed to
        serve.
        """
        up = [replica.name for replica in self._fleet.replicas.values() if replica.health is Health.UP]
        ready = bool(up) and not self._draining()
        why = None if ready else "shutting down" if self._draining() else "no replica is healthy"
        return _json({"ready": ready, "reason": why, "replicas_up": up}, status=200 if ready else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """Those of all workers, each with its number as a label, where there are several."""
        others, own = await self._others(request), self._metrics.render()
        if self._colleagues is not None and others:
            own = await asyncio.to_thread(together, {self._colleagues.number: own, **others})
        return web.Response(body=own, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def replicas(self, request: web.Request) -> web.Response:
        """Every replica with its state, models, streams, load and last error, the indexer they are registered
        at, and the replicas that only the index knows.
        """
        return _json(
            {
                **({} if self._colleagues is None else {"worker": self._colleagues.number}),
                "replicas": [self._replica(replica) for replica in self._fleet.replicas.values()],
                "indexer": self._registrar.indexer() if self._registrar else None,
                "unknown_in_index": self._strangers(),
                "settings_errors": self._settings_errors(),
            }
        )

    async def rules(self, request: web.Request) -> web.Response:
        """The rules in their order and the policy of all others, with how many requests took each."""
        shown = self._rules.shown()
        for page in (await self._others(request)).values():
            if page is not None:
                theirs = msgspec.json.decode(page)
                counts = {rule["name"]: rule["requests"] for rule in theirs["rules"]}
                for rule in shown["rules"]:
                    rule["requests"] += counts.get(rule["name"], 0)
                shown["default_requests"] += theirs["default_requests"]
        return _json(shown)

    def _registered(self, stream: StreamId) -> bool | str:
        registered = self._registrar.registered(stream) if self._registrar else False
        return "unknown" if registered is None else registered

    def _replica(self, replica: Replica) -> dict[str, Any]:
        sources = {source.rank: source for source in replica.sources}
        models = replica.models
        return {
            "name": replica.name,
            "url": replica.url,
            "health": replica.health,
            "draining": replica.draining,
            "standing": self._fleet.outliers.standing(replica.name),
            "last_error": replica.last_error,
            "process_started": replica.process_started,
            "model": models.model if models else None,
            "aliases": models.aliases if models else (),
            "adapters": sorted(models.adapters) if models else (),
            "max_model_len": models.max_model_len if models else None,
            "streams": [
                {
                    "rank": rank,
                    "events": sources[rank].endpoint if rank in sources else None,
                    "replay": sources[rank].replay_endpoint if rank in sources else None,
                    "registered": self._registered((name, rank)),
                    "load": self._load.ours((name, rank)),
                    "workers": self._load.workers((name, rank)),
                    "others": self._load.others((name, rank)),
                    "reported": self._load.reported((name, rank)),
                    "reported_s_ago": self._load.report_age_s((name, rank)),
                }
                for name, rank in replica.streams()
            ],
        }

    async def tokenizers(self, request: web.Request) -> web.Response:
        """The local tokenizers, and whether each is used."""
        return _json({"tokenizers": self._tokenizers()})

    async def decisions(self, request: web.Request) -> web.Response:
        """The last decisions, newest first; ``?limit=N`` and ``?request_id=ID`` narrow them."""
        limit = request.query.get("limit", "")
        most = int(limit) if limit.isdecimal() and len(limit) < 10 else None
        shown = self._decisions.shown(most, request.query.get("request_id"))
        if self._colleagues is not None:
            shown = [{"worker": self._colleagues.number, **decision} for decision in shown]
        others = await self._others(request)
        if others:
            shown += [decision for page in others.values() for decision in _decisions(page)]
            shown = sorted(shown, key=lambda decision: -decision["at"])[:most]
        return _json({"decisions": shown})


def _decisions(page: bytes | None) -> list[dict[str, Any]]:
    """Those on another worker's page; none of one that does not answer."""
    if page is None:
        return []
    found: list[dict[str, Any]] = msgspec.json.decode(page)["decisions"]
    return found


def _json(value: Any, status: int = 200) -> web.Response:
    # The line ends, for those who read it in a terminal.
    return web.Response(body=_encode(value) + b"\n", status=status, content_type="application/json")
