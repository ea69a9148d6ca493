"""``warmroute doctor``: why nothing comes of a replica, or that all is well.

Each finding that is no good says what to do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

import aiohttp

from events.curve import Curve
from router.engine_check import EngineCheck
from router.finding import Finding
from router.index_check import check_indexer
from router.replicas import BIND, ReplicaSpec, configured_sources


async def examine(
    specs: Sequence[ReplicaSpec],
    indexer: str | None,
    session: aiohttp.ClientSession,
    *,
    wait_s: float = 5.0,
    curve: Curve | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Finding]:
    """Looks at the replicas at the same time, then at the indexer. Waits ``wait_s`` seconds for events.

    ``curve`` are the keys for events, with servers by the names of the replicas.
    """
    for finding in _shared_addresses(specs):
        yield finding
    looks = [EngineCheck(spec, session, wait_s, curve, clock).findings() for spec in specs]
    for findings in await asyncio.gather(*looks):
        for finding in findings:
            yield finding
    if indexer is not None:
        for finding in await check_indexer(session, indexer, specs):
            yield finding


def _shared_addresses(specs: Sequence[ReplicaSpec]) -> list[Finding]:
    """Replicas that are one and the same, or whose events are: each of them would be credited with what
    another holds. An address of ours that engines connect to (``bind:``) may be shared.
    """
    first: dict[str, str] = {}
    findings = []
    for spec in specs:
        sources = configured_sources(spec)
        endpoints = [each for source in sources for each in (source.endpoint, source.replay_endpoint)]
        for address in (spec.url, *(each for each in endpoints if each and not each.startswith(BIND))):
            other = first.setdefault(address, spec.name)
            if other != spec.name:
                found, fix = (
                    f"{address} is that of {other} too",
                    "give each replica its own URL, events= and replay=",
                )
                findings.append(Finding(spec.name, "address", "bad", found, fix))
    return findings
