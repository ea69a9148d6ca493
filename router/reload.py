"""Settings that change while the router runs: which replicas there are, API keys and certificates. A bad new
file changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

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

NOT_TAKEN = "the new settings are not taken, the old ones stay: %s"

Reread = Callable[[], RouterSettings]
"""Makes the settings anew. Raises SettingsError."""

Taker = Callable[[RouterSettings], Callable[[], None]]
"""Looks at new settings, and raises SettingsError for bad ones; what it gives takes them over."""


def as_of_now(settings: RouterSettings, reread: Reread) -> RouterSettings:
    """``settings`` with what a router that runs has taken over since they were read: a worker that is started
    again must not go back behind the others. New ones that cannot be used change nothing.
    """
    try:
        new = reread()
        taken = replace(settings, **{name: getattr(new, name) for name in LIVE})
        if taken != settings:
            _check(new)
    except Exception as error:
        log.error(NOT_TAKEN, _why(error))
        return settings
    return taken


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


def _check(new: RouterSettings) -> None:
    """Raises SettingsError for settings that a running router does not take over."""
    new.check()
    if not (new.replica or sources_of(new)):
        raise SettingsError("they name no replica")


def _why(error: Exception) -> str:
    kind = "" if isinstance(error, SettingsError) else f"{type(error).__name__}: "
    return f"{kind}{error}"


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
        file: WatchedFile | None,
        interval_s: float,
        takers: Sequence[Taker] = (),
    ) -> None:
        self._settings = settings
        self._discovery = discovery
        self._reread = reread
        self._takers = takers
        self._file = file
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
            self.error = _why(error)
            log.error(NOT_TAKEN, self.error)
            return
        self.good += 1
        self.error = None
        self._tell_of(new)

    async def _take(self, new: RouterSettings) -> None:
        _check(new)
        sources = sources_of(new)
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
        log.info("new settings are taken, with %d of --replica", len(new.replica))
