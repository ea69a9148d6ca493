"""Where replicas are found: in the settings, in a watched file, behind a DNS name."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tomllib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from events.logs import Throttled
from events.names import look_up
from router.errors import SettingsError
from router.replicas import ReplicaSpec, parse_replica, parse_replicas, placed_at
from router.watched import WatchedFile

log = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 10.0
"""A router starts once each source was read, or could not be."""

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""A host name's addresses. Raises OSError."""


class Source(Protocol):
    """A place that says which replicas there are."""

    name: str
    """Another one for another place: what was found in one is not taken for what is in the other."""
    changed: Callable[[], None]
    """Called when it is worth looking before the next turn."""

    @property
    def trouble(self) -> str | None:
        """What to tell of, though the replicas could be read."""
        ...

    async def read(self) -> tuple[ReplicaSpec, ...]:
        """The replicas now. Raises SettingsError for what makes no sense, OSError for what cannot be had."""
        ...

    async def close(self) -> None:
        """Ends what it does by itself."""
        ...


class FileSource:
    """A file with a replica in each line, or with ``replica = [...]`` if it is named ``*.toml``. Empty lines,
    and those that begin with ``#``, say nothing.
    """

    trouble = None

    def __init__(self, path: Path) -> None:
        self.name = f"--replicas-file {path}"
        self._path = path
        self.changed: Callable[[], None] = lambda: None
        self._watched = WatchedFile(path)
        self._last: tuple[ReplicaSpec, ...] | None = None

    async def read(self) -> tuple[ReplicaSpec, ...]:
        if self._last is not None and not self._watched.changed():
            return self._last
        try:
            # A small local file: reading it takes less than having a thread do it.
            lines = self._lines(self._path.read_text())
            if not lines:
                raise SettingsError("it names no replica")
            self._last = tuple(parse_replicas(lines))
        except ValueError as error:
            raise SettingsError(str(error)) from error
        return self._last

    @property
    def specs(self) -> tuple[ReplicaSpec, ...]:
        """Those that it named when it last made sense."""
        return self._last or ()

    async def close(self) -> None:
        """It does nothing by itself."""

    def _lines(self, text: str) -> list[str]:
        if self._path.suffix != ".toml":
            lines = (line.strip() for line in text.splitlines())
            return [line for line in lines if line and not line.startswith("#")]
        lines_of = msgspec.convert(tomllib.loads(text), _ReplicasTable)
        return lines_of.replica


class _ReplicasTable(msgspec.Struct, forbid_unknown_fields=True):
    replica: list[str] = []


class DNSSource:
    """Every address behind a name is a replica, called NAME-ADDRESS.

    ``line`` is as for a single replica, with the name as the URL's host; where ``events`` and ``replay`` have
    that host, they get the address too.
    """

    trouble = None

    def __init__(self, line: str, resolve: Resolve) -> None:
        self._spec = parse_replica(line)
        self._resolve = resolve
        self.name = f"--dns {self._spec.name} ({self._spec.host})"
        self.changed: Callable[[], None] = lambda: None

    async def read(self) -> tuple[ReplicaSpec, ...]:
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                addresses = await self._resolve(self._spec.host)
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {LOOKUP_TIMEOUT_S:g} s") from error
        found = sorted(set(addresses))
        return tuple(placed_at(self._spec, address, f"{self._spec.name}-{address}") for address in found)

    async def close(self) -> None:
        """It does nothing by itself."""


async def addresses_of(host: str) -> list[str]:
    """The system's resolver. Raises OSError."""
    return [str(address[0]) for *_, address in await look_up(host, None)]


Found = tuple[ReplicaSpec, ...]


class Discovery:
    """Keeps a fleet as its sources say. One that fails counts as it was when it last made sense.

    ``update`` takes all replicas, whenever they are others than before, at first others than ``known``.
    """

    def __init__(
        self,
        update: Callable[[Sequence[ReplicaSpec]], None],
        interval_s: float,
        known: Sequence[ReplicaSpec] = (),
    ) -> None:
        self._update = update
        self._interval_s = interval_s
        self._static: tuple[ReplicaSpec, ...] = ()
        self._sources: tuple[Source, ...] = ()
        self._found: dict[str, Found] = {}
        self._follows = False
        self._known = list(known)
        self._throttled = Throttled(log)
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self.errors: dict[str, str] = {}

    async def follow(self, static: Sequence[ReplicaSpec], sources: Iterable[Source]) -> None:
        """Goes by these replicas and sources from now on; returns when each source was read once.

        Raises SettingsError, and goes on as before, for replicas that cannot be used, and when others were
        followed until now and a new source cannot be read: its replicas may be all that there are; or when no
        replica would be left. At the start there is nothing to lose.
        """
        new, found, errors = tuple(sources), dict[str, Found](), dict[str, str]()
        for source in new:
            source.changed = self._woken.set
        await asyncio.gather(*(self._read(source, found, errors) for source in new))
        known = {source.name: self._found.get(source.name) for source in new} | found
        said, self.errors = self.errors, errors
        try:
            unread = [name for name, specs in known.items() if specs is None]
            if unread and self._follows:
                raise SettingsError(errors[unread[0]])
            good = {name: specs for name, specs in known.items() if specs is not None}
            if self._follows and self._known and not (static or any(good.values())):
                raise SettingsError(f"no replica would be left: {'; '.join(errors.values())}")
            self._tell(static, good)
        except SettingsError:
            self.errors = said
            for source in new:
                await source.close()
            raise
        before, self._sources, self._follows = self._sources, new, True
        self._static, self._found = tuple(static), good
        for source in before:
            await source.close()
        if self._task is None and self._sources:
            self._task = asyncio.create_task(self._run(), name="discovery")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for source in self._sources:
            await source.close()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._woken.wait()
            self._woken.clear()
            try:
                await self.look()
                self.errors.pop("discovery", None)
            except Exception as error:
                # The fleet stays as it is, and the next look may go well.
                self._complain("discovery", f"discovery failed: {error or type(error).__name__}")

    async def look(self) -> None:
        """Reads every source, and tells the fleet of what is new."""
        sources = self._sources
        found, errors = dict[str, Found](), dict[str, str]()
        await asyncio.gather(*(self._read(source, found, errors) for source in sources))
        if sources is not self._sources:
            return
        now = self._found | found
        self._found = {source.name: now[source.name] for source in sources if source.name in now}
        self.errors = {name: why for name, why in self.errors.items() if name not in found} | errors
        self._tell(self._static, self._found)

    async def _read(self, source: Source, into: dict[str, Found], errors: dict[str, str]) -> None:
        try:
            found = await source.read()
        except (SettingsError, OSError) as error:
            kept = len(self._found.get(source.name, ()))
            why = error if isinstance(error, SettingsError) or error.strerror is None else error.strerror
            stays = f"; its {kept} replicas stay as they are" if kept else ""
            self._note(source, f"{why}{stays}", errors)
            return
        into[source.name] = found
        if source.trouble is not None:
            self._note(source, source.trouble, errors)

    def _note(self, source: Source, why: str, errors: dict[str, str]) -> None:
        errors[source.name] = f"{source.name}: {why}"
        self._throttled.warning(source.name, "%s", errors[source.name])

    def _tell(self, static: Sequence[ReplicaSpec], found: Mapping[str, Found]) -> None:
        specs = [*static, *(spec for specs in found.values() for spec in specs)]
        names = [spec.name for spec in specs]
        unique: dict[str, ReplicaSpec] = {}
        for spec in specs:
            unique.setdefault(spec.name, spec)
        if len(unique) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            self._complain("names", f"replicas of one name: {', '.join(twice)}; the first one counts")
            specs = list(unique.values())
        else:
            self.errors.pop("names", None)
        if specs != self._known:
            self._update(specs)
            self._known = specs

    def _complain(self, subject: str, message: str) -> None:
        self.errors[subject] = message
        self._throttled.warning(subject, "%s", message)
