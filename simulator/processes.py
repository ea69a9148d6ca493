"""warmroute's own services as child processes: started, waited for, and always ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from simulator.errors import DemoError

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
POLL_S = 0.02
SETTINGS_PREFIX = "WARMROUTE_"

_LISTENING = re.compile(r"listening on (http://\S+)")


class Service:
    """One running ``warmroute COMMAND``; ``url`` is where it said it listens."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.url = ""
        self.pid = process.pid
        self._process = process
        self._log = log

    async def listening(self) -> None:
        """Waits until the service has logged its address. Raises DemoError with the end of its log."""
        end = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while not (found := _LISTENING.search(self._log.read_text())):
            self.check()
            if asyncio.get_running_loop().time() > end:
                raise DemoError(f"{self.name} does not listen after {START_TIMEOUT_S:.0f} s:\n{self._tail()}")
            await asyncio.sleep(POLL_S)
        self.url = found[1]

    def check(self) -> None:
        """Raises DemoError when the process has ended."""
        if self._process.returncode is not None:
            raise DemoError(f"{self.name} ended with code {self._process.returncode}:\n{self._tail()}")

    def terminate(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()

    async def ended(self) -> None:
        """Waits for the end after :meth:`terminate`, and forces it when it takes too long."""
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def _tail(self) -> str:
        return "\n".join(self._log.read_text().splitlines()[-8:]) or "(it logged nothing)"


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment less what would set up the services other than their flags do."""
    return {name: value for name, value in environment.items() if not name.startswith(SETTINGS_PREFIX)}


class Services:
    """Services that end together, in the reverse of the order they were started in."""

    def __init__(self, folder: Path) -> None:
        """Logs go to ``folder``, one file a service."""
        self._folder = folder
        self._services: list[Service] = []

    async def start(self, name: str, *arguments: str) -> Service:
        """Starts ``python -m warmroute ARGUMENTS``; does not wait for it to listen."""
        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "warmroute", "--log-level", "info", *arguments),
                stdout=output,
                stderr=output,
                env=_without_settings(os.environ),
            )
        service = Service(name, process, log)
        self._services.append(service)
        return service

    async def listening(self, services: Sequence[Service]) -> None:
        await asyncio.gather(*(service.listening() for service in services))

    def check(self) -> None:
        """Raises DemoError when any of the processes has ended."""
        for service in self._services:
            service.check()

    async def __aenter__(self) -> Services:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for service in reversed(self._services):
            service.terminate()
        await asyncio.gather(*(service.ended() for service in self._services))
