"""Looks at the index as a router does: the map in a folder, and what its indexer says of the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from events.unreachable import why
from indexer.errors import IndexerError
from indexer.reader import HEARTBEAT_LIMIT_S
from indexer.shard_reader import open_map
from router.finding import Finding, Level
from router.inquiry import UNREACHABLE, ask
from router.introduction import DiscoveryError
from router.replicas import ReplicaSpec


def check_map(folder: Path) -> tuple[Finding, str | None]:
    """What a router would find at the map in ``folder``: whether it can be read, and its indexer's URL."""
    try:
        with closing(open_map(folder)) as reader:
            url = reader.indexer_address()
            silent_s = reader.heartbeat_age()
    except IndexerError as error:
        fix = "a router needs the indexer's folder, its uid and a writable mount; or give it --indexer alone"
        return Finding("map", "reading", "bad", str(error), fix), None
    if silent_s > HEARTBEAT_LIMIT_S:
        since = f"for {silent_s:.0f} s" if silent_s < float("inf") else "since this host started"
        fix = f"start `warmroute indexer --map {folder}`; if it runs, its log says why it cannot write"
        return Finding("map", "reading", "bad", f"{folder}: no sign of its indexer {since}", fix), url
    return Finding("map", "reading", "ok", f"{folder} is kept by {url}"), url


async def check_indexer(
    session: aiohttp.ClientSession, url: str, specs: Sequence[ReplicaSpec]
) -> list[Finding]:
    """What an indexer says of the replicas."""
    try:
        status, body = await ask(session, url.rstrip("/") + "/debug/replicas")
        if status != 200:
            raise DiscoveryError(f"/debug/replicas answered {status}")
        told = msgspec.json.decode(body)
        replicas: list[dict[str, Any]] = told["replicas"]
        unmatched: dict[str, int] = told["unmatched_topics"]
        states = [_of_stream(each) for each in replicas]
    except (DiscoveryError, msgspec.DecodeError, KeyError, TypeError, *UNREACHABLE) as error:
        fix = "start `warmroute indexer`, or give its URL"
        return [Finding("indexer", "http", "bad", f"{url}: {why(error)}", fix)]
    findings = [Finding("indexer", "http", "ok", f"{url} follows {len(replicas)} streams"), *states]
    known = {each["instance"] for each in replicas}
    findings += [
        Finding(
            spec.name, "indexer", "bad", "it does not follow it", "is a router running that registers it?"
        )
        for spec in specs
        if spec.name not in known
    ]
    if unmatched:
        found = (
            f"{sum(unmatched.values())} messages of no registered topic: {', '.join(sorted(unmatched)[:5])}"
        )
        findings.append(
            Finding("indexer", "topics", "bad", found, "register the topic that the engine sends")
        )
    return findings


def _of_stream(told: dict[str, Any]) -> Finding:
    """A stream as ``/debug/replicas`` has it."""
    state, skipped = told["state"], told["skipped"]
    counts = ", ".join(f"{count} {name}" for name, count in skipped.items())
    left_out = f"; left out: {counts}" if counts else ""
    level: Level = "ok" if state == "live" else "warning" if state in ("partial", "replaying") else "bad"
    found = f"{state}: {told['reason']}; {told['blocks']} blocks{left_out}"
    fix = "" if level == "ok" else "see `reason`, and the checks of its port and events"
    return Finding(told["instance"], f"rank {told['rank']} in the indexer", level, found, fix)
