"""The other workers of this router, asked for their pages, so that any of them shows all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

TIMEOUT_S = 2.0
OWN = "own"
"""The value of ``?worker=`` that asks for the page of the worker alone that is asked."""


class Colleagues:
    """``number`` is that of this worker, of ``workers``; ``urls`` gives where the others have their pages."""

    def __init__(
        self,
        number: int,
        workers: int,
        urls: Callable[[], Mapping[int, str]],
        session: aiohttp.ClientSession,
    ) -> None:
        self.number = number
        self.workers = workers
        self._urls = urls
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)

    async def pages(self, path: str, query: Mapping[str, str]) -> dict[int, bytes | None]:
        """What the others have at ``path``; None from one that does not answer."""
        urls = self._urls()
        found = await asyncio.gather(*(self._page(url + path, query) for url in urls.values()))
        return {number: None for number in range(self.workers) if number != self.number} | dict(
            zip(urls, found, strict=True)
        )

    async def page(self, number: int, path: str, query: Mapping[str, str]) -> bytes | None:
        """What one of them has there; None where it does not answer, or is none."""
        url = self._urls().get(number)
        return None if url is None else await self._page(url + path, query)

    async def _page(self, url: str, query: Mapping[str, str]) -> bytes | None:
        asked = {**query, "worker": OWN}
        try:
            async with self._session.get(url, params=asked, timeout=self._timeout) as answer:
                return await answer.read() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None


class _Fixed(Collector):
    """Families that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def together(pages: Mapping[int, bytes | None]) -> bytes:
    """The metrics of all workers on one page, each with a label ``worker``; ``..._worker_up`` says which are
    there.
    """
    families: dict[str, Metric] = {}
    up = GaugeMetricFamily("warmroute_router_worker_up", "1 for a worker that answers", labels=["worker"])
    for number, page in sorted(pages.items()):
        up.add_metric([str(number)], page is not None)
        for family in text_string_to_metric_families((page or b"").decode()):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.samples.append(sample._replace(labels={"worker": str(number), **sample.labels}))
    merged = CollectorRegistry()
    merged.register(_Fixed([*families.values(), up]))
    return generate_latest(merged)
