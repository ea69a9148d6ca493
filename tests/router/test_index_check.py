"""EV-31, EV-32, OP-04: what a router would find at a map, and what an indexer says of the replicas."""

from contextlib import closing
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from indexer.layout import boot_clock
from indexer.writer import MapWriter
from router.finding import Finding
from router.index_check import check_indexer, check_map
from router.replicas import parse_replica

E0 = parse_replica("e0=http://127.0.0.1:1")


async def look(session: aiohttp.ClientSession, app: web.Application) -> dict[tuple[str, str], Finding]:
    """What is found at an indexer whose pages are those of ``app``, by thing and check."""
    async with TestServer(app) as server:
        return {
            (each.of, each.check): each
            for each in await check_indexer(session, str(server.make_url("")), [E0])
        }


async def test_ev31_ev32_what_the_indexer_says_is_told_and_what_it_does_not_follow(
    session: aiohttp.ClientSession,
) -> None:
    stream = {"instance": "e1", "rank": 0, "state": "offline", "reason": "lost", "blocks": 3}
    told = {"replicas": [stream | {"skipped": {"sparse": 2}}], "unmatched_topics": {"kv@x@m": 7}}

    async def replicas(_: web.Request) -> web.Response:
        return web.json_response(told)

    app = web.Application()
    app.router.add_get("/debug/replicas", replicas)
    findings = await look(session, app)
    assert findings["e0", "indexer"].level == "bad"
    assert findings["e1", "rank 0 in the indexer"].found == "offline: lost; 3 blocks; left out: 2 sparse"
    assert findings["indexer", "topics"].found == "7 messages of no registered topic: kv@x@m"


async def test_ev32_a_server_that_is_no_indexer_is_all_that_is_said(session: aiohttp.ClientSession) -> None:
    findings = await look(session, web.Application())
    assert list(findings) == [("indexer", "http")]
    assert findings["indexer", "http"].level == "bad"


def test_op04_a_map_that_is_not_there_is_said_and_names_no_indexer(tmp_path: Path) -> None:
    finding, kept_by = check_map(tmp_path)
    assert (finding.of, finding.level, kept_by) == ("map", "bad", None)
    assert finding.found.startswith(f"no map in {tmp_path} yet")


@pytest.mark.parametrize(
    ("silent_s", "level", "found"),
    [
        (None, "bad", "no sign of its indexer since this host started"),
        (60, "bad", "no sign of its indexer for 6"),
        (0, "ok", "is kept by http://127.0.0.1:1"),
    ],
)
def test_op04_a_map_is_good_as_long_as_its_indexer_writes(
    tmp_path: Path, silent_s: float | None, level: str, found: str
) -> None:
    beat_at = boot_clock() - (silent_s or 0)
    with closing(MapWriter(tmp_path, clock=lambda: beat_at)) as writer:
        writer.set_address("http://127.0.0.1:1")
        if silent_s is not None:
            with writer.group():
                pass
    finding, kept_by = check_map(tmp_path)
    assert (finding.level, kept_by) == (level, "http://127.0.0.1:1")
    assert found in finding.found
