"""What a router has to do with its indexer: it reads the map, registers streams, tells what it learned."""

from __future__ import annotations

import os
from pathlib import Path

import aiohttp

from indexer.client import IndexerClient
from router.errors import SettingsError
from router.feedback import Feedback
from router.fleet import Fleet
from router.key_cache import KeyCache
from router.lookup import FirstThatAnswers, HttpLookup, Lookup, MapLookup
from router.metrics import RouterMetrics
from router.registrar import Registrar
from router.settings import RouterSettings
from router.trust import Trust

TIMEOUT_S = 2.0
"""For all that no request waits for."""


def check_map(folder: str | None) -> None:
    """Raises SettingsError for a path that can be no map; one that is not there yet may become one."""
    if folder is None or not Path(folder).exists():
        return
    if not Path(folder).is_dir():
        raise SettingsError(f"--map {folder} is a file; give the folder that the indexer writes")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise SettingsError(f"--map {folder}: no permission to read the folder; run as the indexer's user")


class IndexerLink:
    """The indexer that the settings name, by its map, its URL or both; there may be none.

    ``lookup`` says what streams hold of a prompt: the map in this process, or the indexer over HTTP where no
    map can be read; None without an indexer.
    """

    def __init__(self, settings: RouterSettings, session: aiohttp.ClientSession) -> None:
        self._url = None if settings.indexer is None else settings.indexer.rstrip("/")
        self._session = session
        self._map: MapLookup | None = None
        timeout_s, lookups = settings.lookup_timeout_s, list[Lookup]()
        if settings.map:
            keys = KeyCache(settings.key_cache_blocks)
            self._map = MapLookup(Path(settings.map), timeout_s=timeout_s, keys=keys)
            lookups.append(self._map)
        if self._url is not None:
            lookups.append(HttpLookup(IndexerClient(self._url, session, timeout_s), timeout_s=timeout_s))
        self.lookup = FirstThatAnswers(lookups) if len(lookups) > 1 else next(iter(lookups), None)

    async def close(self) -> None:
        if self._map is not None:
            await self._map.close()

    async def address(self) -> str | None:
        """The indexer's URL: as configured, or as the map says; None while neither is known."""
        if self._url is not None or self._map is None:
            return self._url
        return await self._map.indexer_address()

    def registrar(self, fleet: Fleet) -> Registrar | None:
        """Has the indexer follow the fleet's streams, once started; None without an indexer."""
        if self._url is None and self._map is None:
            return None
        return Registrar(fleet, self.address, self._client)

    def feedback(self, metrics: RouterMetrics, trust: Trust) -> Feedback:
        """Tells the indexer what engines report, once started; ``trust`` learns what it cannot be told."""
        return Feedback(
            self.address,
            self._client,
            metrics,
            lambda untold: trust.learn(untold.stream, untold.predicted_tokens, untold.cached_tokens),
        )

    def _client(self, url: str) -> IndexerClient:
        return IndexerClient(url, self._session, TIMEOUT_S)
