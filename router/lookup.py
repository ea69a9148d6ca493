"""What each stream holds of a prompt, by the map on this host, by the indexer over HTTP, or by whichever
answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from events.logs import Throttled
from indexer.client import IndexerClient
from indexer.errors import IndexerAnswerError, IndexerClientError, MapError, MapMissingError
from indexer.reader import Matched
from indexer.shard_reader import View, open_map
from router.errors import LookupFailedError
from router.key_cache import KeyCache, PromptKeys

log = logging.getLogger(__name__)

INLINE_TOKENS = 8192
"""Prompts with up to this many tokens that have no keys yet are matched on the event loop (under a
millisecond); longer ones in a thread.
"""
REOPEN_S = 0.5

_T = TypeVar("_T")


class Lookup(Protocol):
    """Answers what streams hold of a prompt."""

    async def match(
        self, model: str, tokens: array[int], lora_name: str | None, cache_salt: str | None
    ) -> list[Matched]:
        """Every known stream of ``model``; raises LookupFailedError."""
        ...

    async def close(self) -> None:
        """Lets go of what it holds."""
        ...


class MapLookup:
    """Reads the map in this process. A map that is not there yet, or fails, is opened again now and then.

    All use of the reader is one at a time: on the loop for short prompts, in one thread for long ones and for
    opening, and never on the loop while the thread has work.
    """

    def __init__(
        self,
        path: Path,
        *,
        timeout_s: float,
        keys: KeyCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._keys = keys or KeyCache(0)
        self._timeout_s = timeout_s
        self._clock = clock
        self._reader: View | None = None
        self._failure: LookupFailedError | None = None
        self._retry_at = float("-inf")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="map-reader")
        self._busy = 0
        self._throttled = Throttled(log)

    async def match(
        self, model: str, tokens: array[int], lora_name: str | None, cache_salt: str | None
    ) -> list[Matched]:
        keys = self._keys.of(tokens, lora_name, cache_salt)
        query = partial(self._query, model, tokens, lora_name, cache_salt, keys)
        if self._reader is not None and not self._busy and self._is_quick(tokens, keys):
            return query()
        return await self._in_thread(query)

    @staticmethod
    def _is_quick(tokens: array[int], keys: PromptKeys) -> bool:
        return len(tokens) <= INLINE_TOKENS or len(tokens) - keys.known_tokens <= INLINE_TOKENS

    async def indexer_address(self) -> str | None:
        """Where the indexer that writes the map listens, or None while that cannot be read."""
        try:
            return await self._in_thread(lambda: self._open().indexer_address())
        except (LookupFailedError, MapError):
            return None

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close_reader)
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        self._busy += 1
        future.add_done_callback(self._done)
        try:
            async with asyncio.timeout(self._timeout_s):
                # The shield keeps a query that runs from being taken for finished when its caller gives up.
                return await asyncio.shield(future)
        except TimeoutError:
            raise LookupFailedError(
                "lookup-timeout", f"the map gave no answer in {self._timeout_s} s"
            ) from None

    def _done(self, future: asyncio.Future[_T]) -> None:
        self._busy -= 1
        if not future.cancelled():
            future.exception()

    def _query(
        self,
        model: str,
        tokens: array[int],
        lora_name: str | None,
        cache_salt: str | None,
        keys: PromptKeys,
    ) -> list[Matched]:
        reader = self._open()
        try:
            return reader.query(model, tokens, lora_name=lora_name, cache_salt=cache_salt, keys=keys)
        except MapError as error:
            self._close_reader()
            raise self._failed("map-failed", error) from error

    def _open(self) -> View:
        if self._reader is not None:
            return self._reader
        if self._failure is not None and self._clock() < self._retry_at:
            raise self._failure
        try:
            self._reader = open_map(self._path)
        except MapMissingError as error:
            raise self._failed("map-missing", error) from error
        except MapError as error:
            raise self._failed("map-failed", error) from error
        self._failure = None
        log.info("reading the map in %s", self._path)
        return self._reader

    def _failed(self, code: str, error: Exception) -> LookupFailedError:
        self._retry_at = self._clock() + REOPEN_S
        self._throttled.warning(str(error), "the map cannot be read: %s", error)
        self._failure = LookupFailedError(code, str(error))
        return self._failure

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class HttpLookup:
    """Asks the indexer over HTTP."""

    def __init__(self, client: IndexerClient, *, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    async def match(
        self, model: str, tokens: array[int], lora_name: str | None, cache_salt: str | None
    ) -> list[Matched]:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._client.query(model, tokens, lora_name=lora_name, cache_salt=cache_salt)
        except TimeoutError:
            raise LookupFailedError(
                "lookup-timeout", f"the indexer gave no answer in {self._timeout_s} s"
            ) from None
        except IndexerAnswerError as error:
            raise LookupFailedError("indexer-answer", str(error)) from error
        except IndexerClientError as error:
            raise LookupFailedError("indexer-unreachable", str(error)) from error

    async def close(self) -> None:
        """Nothing to let go of: the session is the caller's."""


class FirstThatAnswers:
    """Asks one lookup after the other; raises what the first one raised if none answers."""

    def __init__(self, lookups: Sequence[Lookup]) -> None:
        self._lookups = lookups

    async def match(
        self, model: str, tokens: array[int], lora_name: str | None, cache_salt: str | None
    ) -> list[Matched]:
        first: LookupFailedError | None = None
        for lookup in self._lookups:
            try:
                return await lookup.match(model, tokens, lora_name, cache_salt)
            except LookupFailedError as error:
                first = first or error
        raise first or LookupFailedError("no-index", "no index is configured")

    async def close(self) -> None:
        for lookup in self._lookups:
            await lookup.close()
