"""OP-04: events that were not switched on, seen by the requests that complete without them."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import generate_latest

from indexer.registration import Registration
from indexer.service import Indexer
from indexer.settings import IndexerSettings
from indexer.silence import SILENT_AFTER_S, SILENT_REQUESTS, Silence
from indexer.witness import ASK_EVERY_S, Witness


def test_op04_requests_that_complete_without_an_event_are_silence_from_the_first_of_them() -> None:
    silence = Silence()
    assert silence.look(5, 100, 0.0) == 0.0
    assert silence.look(5, 100, 1000.0) == 0.0, "nobody asks anything"
    assert silence.look(5, 100 + SILENT_REQUESTS, 1010.0) == 0.0, "they have only just completed"
    assert silence.look(5, 200, 1070.0) == 60.0
    assert silence.look(6, 300, 1080.0) == 0.0, "an event came"


def test_op04_a_few_requests_and_an_engine_that_counts_anew_are_no_silence() -> None:
    silence = Silence()
    silence.look(5, 100, 0.0)
    silence.look(5, 99 + SILENT_REQUESTS, 10.0)
    assert silence.look(5, 99 + SILENT_REQUESTS, 500.0) == 0.0
    assert silence.look(5, 3, 600.0) == 0.0, "another process"
    assert silence.look(5, 3, 700.0) == 0.0


class Engine:
    """``/metrics`` of an engine that completes requests."""

    def __init__(self) -> None:
        self.requests = 0
        self.caching = "True"

    async def answer(self, _: web.Request) -> web.Response:
        finished = "vllm:request_success_total"
        lines = [
            f'{finished}{{finished_reason="stop",model_name="m"}} {self.requests}.0',
            f'{finished}{{finished_reason="abort",model_name="m"}} 900.0',
            f'vllm:cache_config_info{{block_size="16",enable_prefix_caching="{self.caching}"}} 1.0',
        ]
        return web.Response(text="\n".join(lines))


@pytest.fixture
async def engine() -> AsyncIterator[tuple[Engine, str]]:
    engine = Engine()
    app = web.Application()
    app.router.add_get("/metrics", engine.answer)
    async with TestServer(app) as server:
        yield engine, str(server.make_url("")).rstrip("/")


async def test_op04_an_engine_without_events_is_warned_of_and_measured(
    engine: tuple[Engine, str], tmp_path: Path, caplog: Any
) -> None:
    said, url = engine
    said.caching = "False"
    now = 1000.0
    indexer = Indexer(IndexerSettings(map=str(tmp_path / "map"), map_size=64 << 20))
    indexer.witness = Witness(indexer.ingest, indexer.reader, clock=lambda: now)
    indexer.start()
    try:
        nobody = Registration(instance_id="A", endpoint="tcp://127.0.0.1:1", model_name="m", url=url)
        await asyncio.wrap_future(indexer.ingest.register(nobody))
        async with aiohttp.ClientSession() as session:
            with caplog.at_level(logging.WARNING):
                for _ in range(3):
                    await indexer.witness.look(session)
                    said.requests += SILENT_REQUESTS
                    now += ASK_EVERY_S + SILENT_AFTER_S
        silent = SILENT_AFTER_S + ASK_EVERY_S
        assert indexer.witness.silent == {url: silent}
        metrics = generate_latest(indexer.metrics.registry).decode()
        assert f'warmroute_indexer_silent_seconds{{url="{url}"}} {silent}' in metrics
        assert f"no events of A for {silent:.0f} s while 20 requests completed" in caplog.text
        assert "prefix caching off" in caplog.text
        await asyncio.wrap_future(indexer.ingest.unregister("A", "m"))
        async with aiohttp.ClientSession() as session:
            await indexer.witness.look(session)
        assert indexer.witness.silent == {}
    finally:
        indexer.close()
