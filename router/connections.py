"""The connections to replicas, by the client that the settings choose."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from router.pool import PooledUpstream
from router.settings import RouterSettings
from router.upstream import AiohttpUpstream, Upstream, upstream_session


def replica_session(
    settings: RouterSettings, tls: ssl.SSLContext, *, keeps: bool = True
) -> aiohttp.ClientSession:
    """A session under the limits of the settings, which keeps connections open between requests or not."""
    return upstream_session(
        settings.connect_timeout_s,
        settings.idle_timeout_s,
        settings.upstream_keepalive_s if keeps else 0.0,
        settings.header_limit_bytes,
        settings.header_limit_count,
        tls,
    )


@asynccontextmanager
async def configured_upstream(
    settings: RouterSettings, session: aiohttp.ClientSession, tls: ssl.SSLContext
) -> AsyncIterator[Upstream]:
    """The upstream that requests go through: ``session`` and another one, or a pool of its own."""
    if settings.upstream_client == "aiohttp":
        async with replica_session(settings, tls, keeps=False) as fresh:
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
