"""What takes over new settings while the router runs, beside which replicas there are: API keys,
certificates, keys of replicas.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from router.app import RouterApp
from router.doors import Doors, parse_keys
from router.errors import SettingsError
from router.reload import Taker
from router.replicas import parse_replicas
from router.settings import RouterSettings
from router.tls import Renewable, listen_context, upstream_context

log = logging.getLogger(__name__)


def doors_taker(doors: Doors) -> Taker:
    """The API keys that let requests in."""

    def look(new: RouterSettings) -> Callable[[], None]:
        keys = parse_keys(new.api_key)

        def take() -> None:
            if doors.demand_keys() and not keys:
                log.warning("no API key is configured any more: everybody may send requests")
            doors.follow(keys)

        return take

    return look


def certificates_taker(router: RouterApp, upstream: Renewable) -> Taker:
    """The certificates at the router's address, and ``upstream``, those towards replicas."""

    def look(new: RouterSettings) -> Callable[[], None]:
        client, server = upstream_context(new), listen_context(new)
        if (server is None) != (router.tls is None):
            raise SettingsError("--tls-cert: between http and https is a restart")

        def take() -> None:
            upstream.current = client
            if router.tls is not None and server is not None:
                router.tls.current = server

        return take

    return look


def keys_taker(router: RouterApp) -> Taker:
    """The keys that replicas are sent, read anew."""

    def look(new: RouterSettings) -> Callable[[], None]:
        stay = {spec.name for spec in parse_replicas(new.replica)}
        gone = {spec.name for spec in parse_replicas(router.settings.replica)} - stay
        return router.fleet.reread_keys(but=gone)

    return look
