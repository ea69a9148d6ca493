"""Settings that change while the router runs: which replicas there are, API keys and certificates. A bad new
file changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from router.discovery import Discovery, DNSSource, FileSource, Source, addresses_of
from router.errors import SettingsError
from router.kubernetes import KubernetesSource
from router.replicas import ReplicaSpec, parse_replicas
from router.settings import RouterSettings
from router.watched import WatchedFile

log = logging.getLogger(__name__)

CERTIFICATES = ("tls_cert", "tls_key", "tls_client_ca", "upstream_ca", "upstream_cert", "upstream_key")
LIVE = (
    *("replica", "replicas_file", "dns", "kubernetes", "kubernetes_selector", "kubernetes_namespace"),
    *("api_key", *CERTIFICATES),
)
"""The settings that are taken over at once; the others need a restart."""

Reread = Callable[[], RouterSettings]
"""Makes the settings anew. Raises SettingsError."""

Taker = Callable[[RouterSettings], Callable[[], None]]
"""Looks at new settings, and raises SettingsError for bad ones; what it gives takes them over."""


def sources_of(settings: RouterSettings) -> list[Source]:
    """The places beside the settings themselves that say which replicas there are."""
    sources: list[Source] = [DNSSource(line, addresses_of) for line in settings.dns]
    if settings.replicas_file is not None:
        sources.append(FileSource(Path(settings.replicas_file)))
    if settings.kubernetes is not None:
        selector, namespace = settings.kubernetes_selector, settings.kubernetes_namespace
        sources.append(KubernetesSource(settings.kubernetes, selector or "", namespace))
    return sources


def _named(settings: RouterSettings) -> list[WatchedFile]:
    """The certificates, and the files with keys of replicas. Those of lines that are none are left out."""
    paths = (getattr(settings, name) for name in CERTIFICATES)
    files = [WatchedFile(Path(path)) for path in paths if path is not None]
    with contextlib.suppress(SettingsError):
        files += _keys(parse_replicas(settings.replica))
    return files


def _keys(specs: Iterable[ReplicaSpec]) -> list[WatchedFile]:
    kept = (spec.key for spec in specs if spec.key is not None and spec.key.startswith("file:"))
    return [WatchedFile(Path(key.removeprefix("file:"))) for key in kept]


class Reload:
    """Takes over new settings when it is told to, and when the file that they came from, or a certificate or
    key that they name, has changed; those that were refused also when a file of replicas that they name, or a
    key that is named there, has. ``takers`` take over what is not about which replicas there are.

    ``good`` and ``bad`` count; ``error`` is why the last new settings were not taken.
    """

    def __init__(
        self,
        settings: RouterSettings,
        discovery: Discovery,
        reread: Reread,
        file: Path | None,
        interval_s: float,
        takers: Sequence[Taker] = (),
    ) -> None:
        self._settings = settings
        self._discovery = discovery
        self._reread = reread
        self._takers = takers
        self._file = None if file is None else WatchedFile(file)
        self._named = _named(settings)
        self._interval_s = interval_s
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.good = self.bad = 0
        self.error: str | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="reload")

    def now(self) -> None:
        """Asks for a reload. Safe in a signal handler of the loop."""
        self._wanted.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._wanted.wait()
            except TimeoutError:
                if not self._changed():
                    continue
            self._wanted.clear()
            await self.reload()

    def _changed(self) -> bool:
        files = self._named if self._file is None else [self._file, *self._named]
        return any([file.changed() for file in files])

    async def reload(self) -> None:
        """Reads the settings anew and takes them over, or says why not."""
        try:
            new = self._reread()
            # Before they are read: what is written meanwhile is another file then.
            self._named = _named(new)
            await self._take(new)
        except Exception as error:
            # Whatever is wrong with the new settings, the old ones are good.
            self.bad += 1
            kind = "" if isinstance(error, SettingsError) else f"{type(error).__name__}: "
            self.error = f"{kind}{error}"
            log.error("the new settings are not taken, the old ones stay: %s", self.error)
            return
        self.good += 1
        self.error = None
        self._tell_of(new)

    async def _take(self, new: RouterSettings) -> None:
        new.check()
        sources = sources_of(new)
        if not (new.replica or sources):
            raise SettingsError("they name no replica")
        # Noted before it is read, too. Of settings that are taken its source watches it.
        files = [] if new.replicas_file is None else [WatchedFile(Path(new.replicas_file))]
        try:
            taken = [taker(new) for taker in self._takers]
            await self._discovery.follow(parse_replicas(new.replica), sources)
        except SettingsError:
            found = [source.specs for source in sources if isinstance(source, FileSource)]
            self._named += [*files, *(key for specs in found for key in _keys(specs))]
            raise
        for take in taken:
            take()

    def _tell_of(self, new: RouterSettings) -> None:
        others = [
            f"--{name.replace('_', '-')}"
            for name in new.__struct_fields__
            if name not in LIVE and getattr(new, name) != getattr(self._settings, name)
        ]
        if others:
            log.warning("new settings that need a restart to count: %s", ", ".join(others))
        log.info("new settings are taken: %d replicas in them", len(new.replica))
