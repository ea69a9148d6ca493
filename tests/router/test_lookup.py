from __future__ import annotations

import asyncio
import threading
from array import array
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from indexer.client import IndexerClient
from indexer.errors import MapError, MapMissingError
from indexer.reader import MapReader
from router.errors import LookupFailedError
from router.lookup import INLINE_TOKENS, REOPEN_S, FirstThatAnswers, HttpLookup, MapLookup

SHORT, LONG = array("I", range(100)), array("I", range(INLINE_TOKENS + 1))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Reader:
    """Stands for an opened map where its thread and its failures are what is tested."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.failure: MapError | None = None
        self.hold = threading.Event()
        self.hold.set()
        self.closed = False

    def query(
        self, model: str, tokens: Any, *, lora_name: str | None, cache_salt: str | None, keys: Any
    ) -> list[Any]:
        self.threads.append(threading.current_thread().name)
        assert self.hold.wait(10)
        if self.failure is not None:
            raise self.failure
        return []

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
    opened = Reader()
    monkeypatch.setattr(MapReader, "open", classmethod(lambda cls, path: opened))
    return opened


async def test_a_map_that_is_not_there_yet_is_opened_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    lookup = MapLookup(tmp_path / "map", timeout_s=5, clock=clock)
    for _ in range(2):
        with pytest.raises(LookupFailedError) as caught:
            await lookup.match("m", SHORT, None, None)
        assert caught.value.code == "map-missing"
        clock.now += REOPEN_S
    clock.now -= REOPEN_S
    assert [f"no map in {tmp_path / 'map'} yet" in each.getMessage() for each in caplog.records] == [True]
    monkeypatch.setattr(MapReader, "open", classmethod(lambda cls, path: Reader()))
    with pytest.raises(LookupFailedError):
        await lookup.match("m", SHORT, None, None)
    clock.now += REOPEN_S
    assert await lookup.match("m", SHORT, None, None) == []
    await lookup.close()


async def test_px13_short_prompts_are_matched_on_the_loop_and_long_ones_in_a_thread(
    tmp_path: Path, reader: Reader
) -> None:
    lookup = MapLookup(tmp_path, timeout_s=5)
    await lookup.match("m", SHORT, None, None)
    reader.threads.clear()
    await lookup.match("m", SHORT, None, None)
    await lookup.match("m", LONG, None, None)
    assert reader.threads[0] == threading.main_thread().name
    assert reader.threads[1].startswith("map-reader")
    await lookup.close()


async def test_the_reader_is_never_used_on_the_loop_while_the_thread_uses_it(
    tmp_path: Path, reader: Reader
) -> None:
    lookup = MapLookup(tmp_path, timeout_s=5)
    await lookup.match("m", SHORT, None, None)
    reader.threads.clear()
    reader.hold.clear()
    long = asyncio.create_task(lookup.match("m", LONG, None, None))
    short = asyncio.create_task(lookup.match("m", SHORT, None, None))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not short.done()
    reader.hold.set()
    await asyncio.gather(long, short)
    assert all(name.startswith("map-reader") for name in reader.threads)
    await lookup.close()


async def test_a_map_that_gives_no_answer_in_time_fails_the_lookup_and_stays_busy(
    tmp_path: Path, reader: Reader
) -> None:
    lookup = MapLookup(tmp_path, timeout_s=5)
    await lookup.match("m", SHORT, None, None)
    lookup._timeout_s = 0.02
    reader.hold.clear()
    for tokens in (LONG, SHORT):
        with pytest.raises(LookupFailedError) as caught:
            await lookup.match("m", tokens, None, None)
        assert caught.value.code == "lookup-timeout"
    reader.hold.set()
    await lookup.close()


async def test_a_map_that_fails_is_closed_and_opened_again(tmp_path: Path, reader: Reader) -> None:
    clock = Clock()
    lookup = MapLookup(tmp_path, timeout_s=5, clock=clock)
    await lookup.match("m", SHORT, None, None)
    reader.failure = MapError("damaged")
    with pytest.raises(LookupFailedError) as caught:
        await lookup.match("m", SHORT, None, None)
    assert (caught.value.code, reader.closed) == ("map-failed", True)
    reader.failure = None
    clock.now += REOPEN_S
    assert await lookup.match("m", SHORT, None, None) == []
    await lookup.close()


class Answers:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def match(self, *_: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def close(self) -> None:
        pass


async def test_http_is_asked_when_the_map_fails_and_the_maps_failure_is_told_when_both_do() -> None:
    broken, down = LookupFailedError("map-missing", "none"), LookupFailedError("indexer-unreachable", "no")
    assert await FirstThatAnswers([Answers(broken), Answers(["x"])]).match("m", SHORT, None, None) == ["x"]  # type: ignore[comparison-overlap]
    with pytest.raises(LookupFailedError) as caught:
        await FirstThatAnswers([Answers(broken), Answers(down)]).match("m", SHORT, None, None)
    assert caught.value is broken


async def serving(answer: web.Response) -> tuple[web.AppRunner, str]:
    async def handle(_: web.Request) -> web.Response:
        return answer

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def test_px14_an_indexer_that_answers_garbage_fails_the_lookup() -> None:
    for answer in (web.Response(text="<html>"), web.Response(status=500), web.json_response({"streams": 5})):
        runner, url = await serving(answer)
        async with aiohttp.ClientSession() as session:
            with pytest.raises(LookupFailedError) as caught:
                await HttpLookup(IndexerClient(url, session), timeout_s=5).match("m", SHORT, None, None)
        assert caught.value.code == "indexer-answer"
        await runner.cleanup()


async def test_px14_an_indexer_that_is_not_there_fails_the_lookup() -> None:
    runner, url = await serving(web.Response())
    await runner.cleanup()
    async with aiohttp.ClientSession() as session:
        with pytest.raises(LookupFailedError) as caught:
            await HttpLookup(IndexerClient(url, session), timeout_s=5).match("m", SHORT, None, None)
    assert caught.value.code == "indexer-unreachable"


def test_a_missing_map_is_a_map_error() -> None:
    assert issubclass(MapMissingError, MapError)
