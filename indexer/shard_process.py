"""One shard as the indexer sees it: a process that is started, watched, and started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from indexer.errors import IndexerError
from indexer.settings import IndexerSettings

log = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s shard {number} %(name)s: %(message)s"
COMMAND = (sys.executable, "-P", "-m", "indexer.shard")
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
STEADY_S = 30.0
STOP_TIMEOUT_S = 20.0


class Order(msgspec.Struct, frozen=True):
    """What a shard's process is told."""

    number: int
    settings: IndexerSettings
    log_level: int


class Said(msgspec.Struct, frozen=True):
    """What it says: where it listens, or why it cannot start (``busy``: another process has its map)."""

    url: str | None = None
    error: str | None = None
    busy: bool = False


class ShardStartError(IndexerError):
    """A shard that cannot start, and never could."""


class ShardProcess:
    """The process of one shard. ``url`` and ``pid`` are None while it does not run."""

    def __init__(self, number: int, settings: IndexerSettings) -> None:
        self.number = number
        self.url: str | None = None
        self.pid: int | None = None
        self.restarts = 0
        self._listens = asyncio.Event()
        self._settings = settings
        self._ran = False

    async def listens(self, patience_s: float) -> bool:
        """Waits until it listens, if it only starts; False when it does not within ``patience_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._listens.wait()
        return self._listens.is_set()

    async def run(self, clock: Callable[[], float]) -> None:
        """Keeps it running until cancelled. Raises ShardStartError when its first start can never succeed.

        The pause before a start grows with each death, and is short again after a while without one.
        """
        pause = FIRST_PAUSE_S
        while True:
            begun = clock()
            how = await self._live()
            if clock() - begun >= STEADY_S:
                pause = FIRST_PAUSE_S
            log.warning("shard %d ended: %s; starting it again in %.2f s", self.number, how, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            self.restarts += 1

    async def _live(self) -> str:
        """One life of the process: how it ended. Ends it when cancelled."""
        process = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=_environment()
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self.pid = process.pid
        try:
            order = Order(self.number, self._settings, logging.getLogger().getEffectiveLevel())
            with contextlib.suppress(ConnectionError):  # it died already, as its end will tell
                process.stdin.write(msgspec.json.encode(order) + b"\n")
                await process.stdin.drain()
            line = await process.stdout.readline()
            said = msgspec.json.decode(line, type=Said) if line else Said()
            self.url = said.url
            self._ran = self._ran or said.url is not None
            if said.url is not None:
                self._listens.set()
            if said.error is not None and not said.busy and not self._ran:
                raise ShardStartError(f"shard {self.number}: {said.error}")
            code = await process.wait()
            return said.error or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")
        finally:
            self.url = None
            self._listens.clear()
            await _end(process)
            self.pid = None


async def _end(process: asyncio.subprocess.Process) -> None:
    """Lets the process close its map, and forces it when it takes too long."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        log.warning("process %d did not end in %.0f s and is killed", process.pid, STOP_TIMEOUT_S)
        process.kill()
        await process.wait()


def _environment() -> dict[str, str]:
    """So that it imports this very package, wherever we were started."""
    here = str(Path(__file__).resolve().parent.parent)
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}
