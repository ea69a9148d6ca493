"""The addresses of a router: the clients' and, where it is another one, the operators'."""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

from aiohttp import web

from events.address import host_and_port, http_url, not_only
from router.app import RouterApp
from router.errors import ListenError
from router.pages import Pages
from router.processes import Worker
from router.server import Server
from router.settings import AMONG_WORKERS

log = logging.getLogger(__name__)

LAST_LOOKS = 3
"""Steps of the loop before the door closes: in them it takes in all connections that the kernel has made for
it, which closing would reset.
"""


@asynccontextmanager
async def listening(router: RouterApp, worker: Worker | None = None) -> AsyncIterator[str]:
    """Serves the router at its address, which ``worker`` shares with others; gives the URL. On leaving, open
    answers get their grace.

    Raises ListenError, SettingsError.
    """
    settings = router.settings
    async with AsyncExitStack() as stack:
        admin = settings.admin_address()
        # Cleaned up last: operators can look on while open answers have their grace.
        if admin is not None:
            host, port = admin
            port += worker.number if worker is not None and port else 0
            router.admin_url = await _open(stack, router, router.admin_pages, "--admin-listen", host, port)
            log.info("metrics and debug pages on %s%s", router.admin_url, not_only(host))
        if worker is not None:
            # At a port that all share, nobody can choose whom to ask.
            beside = router.admin_url or await _open(
                stack, router, router.admin_pages, "--admin-listen", *AMONG_WORKERS
            )
            worker.pages_at(urlsplit(beside).port or 0)
        host, port = host_and_port(settings.listen)
        port = port if worker is None else worker.port
        shared = worker is not None
        url = await _open(stack, router, router.pages, "--listen", host, port, tls=router.tls, shared=shared)
        log.info("listening on %s%s", url, not_only(host))
        router.admin_url = router.admin_url or url
        yield url
        router.draining = True
        await asyncio.sleep(settings.shutdown_delay_s)
        for _ in range(LAST_LOOKS):
            await asyncio.sleep(0)


async def _open(
    stack: AsyncExitStack,
    router: RouterApp,
    pages: Pages,
    flag: str,
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None = None,
    shared: bool = False,
) -> str:
    """Serves ``pages``, as long as the stack is open; gives the URL. ``shared``: others have the port too.

    Raises ListenError.
    """
    settings = router.settings
    server = Server(pages, settings.policy, settings.limits(), parting=lambda: router.draining)
    runner = web.ServerRunner(server, shutdown_timeout=settings.grace_s)
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
