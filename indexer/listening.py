"""The HTTP server of the indexer: where it listens."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from events.address import AddressError, cannot_listen, host_and_port, http_url, not_only
from indexer.errors import ListenError, SettingsError

log = logging.getLogger(__name__)

REQUEST_LIMIT_BYTES = 64 << 20
SHUTDOWN_S = 5.0


@asynccontextmanager
async def listening(app: web.Application, listen: str, *, quiet: bool = False) -> AsyncIterator[str]:
    """Serves ``app`` at ``listen``; gives its URL. Raises SettingsError, ListenError."""
    try:
        host, port = host_and_port(listen)
    except AddressError as error:
        raise SettingsError(str(error)) from error
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise ListenError(cannot_listen(listen, error)) from error
        url = http_url(host, runner.addresses[0][1])
        log.log(logging.DEBUG if quiet else logging.INFO, "listening on %s%s", url, not_only(host))
        yield url
    finally:
        await runner.cleanup()
