"""Reads a divided map as if it were one.

Each stream is in one shard, so an answer is those of the shards one after the other. A shard whose map cannot
be read is left out of the answers, and opened again now and then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import lmdb

from events.logs import Throttled
from indexer.errors import MapError
from indexer.keys import keys_behind
from indexer.layout import Name, StreamRecord, Tables
from indexer.reader import (
    KeysOf,
    MapReader,
    Matched,
    PromptKeys,
    StreamStatus,
    keys_of_locals,
    keys_of_prompt,
)
from indexer.sharding import count_shards, map_folders

log = logging.getLogger(__name__)

REOPEN_S = 0.5

T = TypeVar("T")
Snapshot = tuple[lmdb.Transaction, Tables, list[StreamRecord]]


class Part(Protocol):
    """A map of its own, of which short looks can be taken; raises MapError."""

    def snapshot(self) -> AbstractContextManager[Snapshot]: ...


class View(Protocol):
    """What can be asked of a map, divided or not. Every method raises MapError."""

    @property
    def parts(self) -> Sequence[Part]: ...

    def streams(self) -> list[StreamStatus]: ...

    def query(
        self,
        model: str,
        tokens: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        keys: PromptKeys = keys_behind,
    ) -> list[Matched]: ...

    def query_local(
        self, model: str, locals_: Sequence[bytes], *, lora_name: str | None = None
    ) -> list[Matched]: ...

    def holders(self, key: bytes) -> list[tuple[StreamRecord, list[str]]]: ...

    def name(self, instance: str, rank: int, group: int, engine_hash: bytes) -> Name | None: ...

    def heartbeat_age(self) -> float: ...

    def indexer_address(self) -> str | None: ...

    def used_bytes(self) -> int: ...

    def close(self) -> None: ...


def open_map(path: Path) -> View:
    """The map of an indexer in another process, divided or not. Raises MapError."""
    if count_shards(path) is None:
        return MapReader.open(path)
    reader = ShardReader(path)
    try:
        reader.streams()
    except MapError:
        reader.close()
        raise
    return reader


class Shard:
    """The map of one shard, opened when it is asked; after a failure, in half a second at the soonest.

    From any thread: a map is closed once nobody is in it.
    """

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._reader: MapReader | None = None
        self._failure: MapError | None = None
        self._retry_at = float("-inf")
        self._users = 0

    @contextmanager
    def open(self) -> Iterator[MapReader]:
        """Its reader. Raises MapError."""
        with self._lock:
            reader = self._opened()
            self._users += 1
        failure: MapError | None = None
        try:
            yield reader
        except MapError as error:
            failure = error
            raise
        finally:
            with self._lock:
                self._users -= 1
                if failure is not None:
                    self._fail(failure)
                if self._failure is not None and not self._users:
                    self._close()

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """As :meth:`MapReader.snapshot`."""
        with self.open() as reader, reader.snapshot() as found:
            yield found

    def close(self) -> None:
        """Lets go of the map; nobody may be in it."""
        with self._lock:
            self._close()

    def _opened(self) -> MapReader:
        if self._failure is not None and (self._users or self._clock() < self._retry_at):
            raise self._failure
        if self._reader is None:
            try:
                self._reader = MapReader.open(self._folder)
            except MapError as error:
                self._fail(error)
                raise
        self._failure = None
        return self._reader

    def _fail(self, error: MapError) -> None:
        self._failure = error
        self._retry_at = self._clock() + REOPEN_S

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class ShardReader:
    """All shards of the map in a folder. Raises MapError where no shard can be read."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.shards = [Shard(folder, clock) for folder in map_folders(path)]
        self._warn = Throttled(log, clock)

    @property
    def parts(self) -> Sequence[Part]:
        return self.shards

    def close(self) -> None:
        for shard in self.shards:
            shard.close()

    def _each(self, ask: Callable[[MapReader], T]) -> list[T]:
        """The answers of the shards that can be read."""
        answers: list[T] = []
        failure: MapError | None = None
        for number, shard in enumerate(self.shards):
            try:
                with shard.open() as reader:
                    answers.append(ask(reader))
            except MapError as error:
                failure = failure or error
                self._warn.warning(f"shard {number}", "answering without shard %d: %s", number, error)
        if failure is not None and not answers:
            raise failure
        return answers

    def streams(self) -> list[StreamStatus]:
        """All streams, by shard; their slots are the shard's own."""
        return [status for found in self._each(lambda reader: reader.streams()) for status in found]

    def query(
        self,
        model: str,
        tokens: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        keys: PromptKeys = keys_behind,
    ) -> list[Matched]:
        """As :meth:`MapReader.query`. The prompt is hashed once for all shards."""
        return self._match(model, keys_of_prompt(tokens, lora_name, cache_salt, keys), lora_name)

    def query_local(
        self, model: str, locals_: Sequence[bytes], *, lora_name: str | None = None
    ) -> list[Matched]:
        """As :meth:`MapReader.query_local`."""
        return self._match(model, keys_of_locals(locals_, lora_name), lora_name)

    def _match(self, model: str, keys_of: KeysOf, lora_name: str | None) -> list[Matched]:
        return [
            one
            for found in self._each(lambda reader: reader.query_keys(model, keys_of, lora_name))
            for one in found
        ]

    def holders(self, key: bytes) -> list[tuple[StreamRecord, list[str]]]:
        """As :meth:`MapReader.holders`."""
        return [holder for found in self._each(lambda reader: reader.holders(key)) for holder in found]

    def name(self, instance: str, rank: int, group: int, engine_hash: bytes) -> Name | None:
        """As :meth:`MapReader.name`."""
        found = self._each(lambda reader: reader.name(instance, rank, group, engine_hash))
        return next((name for name in found if name is not None), None)

    def heartbeat_age(self) -> float:
        """Seconds since the shard that was heard of last said that it lives."""
        return min(self._each(lambda reader: reader.heartbeat_age()))

    def indexer_address(self) -> str | None:
        """As :meth:`MapReader.indexer_address`."""
        addresses = self._each(lambda reader: reader.indexer_address())
        return next((address for address in addresses if address is not None), None)

    def used_bytes(self) -> int:
        """Bytes of the pages that hold entries, of all shards."""
        return sum(self._each(lambda reader: reader.used_bytes()))
