"""``warmroute router``: serves until it is told to end, and goes down cleanly."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
from pathlib import Path

from router.assembly import router_app
from router.listening import listening
from router.processes import Worker
from router.reload import Reread, as_of_now
from router.settings import RouterSettings
from router.tap import Recorder
from router.watched import WatchedFile

log = logging.getLogger(__name__)


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
    """Runs the router until SIGTERM or SIGINT. ``reread`` makes the settings anew, at the start, at SIGHUP
    and when ``config`` changes. Raises RouterError when it cannot start.
    """
    _raise_file_limit()
    stop, hangup = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    watched = None if config is None else WatchedFile(config)
    if reread is not None:
        # From here on no change is missed: neither of the file nor of those who say that there is one.
        loop.add_signal_handler(signal.SIGHUP, hangup.set)
        settings = as_of_now(settings, reread)
    try:
        async with (
            router_app(settings, recorder=recorder, reread=reread, config=watched, worker=worker) as router,
            listening(router, worker),
        ):
            if router.reload is not None:
                loop.add_signal_handler(signal.SIGHUP, router.reload.now)
                if hangup.is_set():
                    router.reload.now()
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
