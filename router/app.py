"""A router that can be served: its pages, and what operators look at."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from router.decision import HEADER_PREFIX
from router.decision_log import DecisionLog
from router.discovery import Discovery
from router.errors import RefusedError
from router.fleet import Fleet
from router.headers import REQUEST_ID, request_id_of
from router.introduction import model_cards
from router.load import Load
from router.local_tokens import Told
from router.metrics import RouterMetrics
from router.pages import Pages
from router.refusal import refusal
from router.reload import Reload
from router.settings import RouterSettings
from router.tls import Renewable, listen_context
from router.trust import Trust


class RouterApp:
    """A router that can be served.

    ``pages`` are for its clients, ``admin_pages`` for operators and for other workers; the other parts are
    there to look at.
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
        tls = listen_context(settings)
        self.tls = None if tls is None else Renewable(tls)
        self.pages = Pages(settings.request_limit_bytes)
        self.admin_pages = Pages()
        self.admin_url = ""

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
