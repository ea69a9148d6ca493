"""Dumps: whole, without secrets, and without holding on to old pages of the map."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner

from events.schema import AllBlocksCleared, display_hash
from indexer.dump import PAGE_ROWS, dump_events, dump_lines
from indexer.errors import MapError
from indexer.folder import DATA_FILE
from indexer.registration import Registration
from warmroute import main

ROOT = Path(__file__).parents[2]
PROMPT = list(range(28))
LONG = list(range(1_000, 1_000 + 4 * (2 * PAGE_ROWS + 500)))
SALT = "a secret of the tenant"


def parsed(pages: Iterator[bytes]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in b"".join(pages).splitlines()]


def blocks(lines: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {line["block"]: line["holders"] for line in lines if "block" in line}


def pinned(rig: Any) -> bool:
    """Whether some reader pins a snapshot."""
    readers = rig.writer.env.readers().splitlines()[1:]
    return any(not line.split()[-1].startswith("-") for line in readers)


def filled(indexers: Any, engine: Any) -> Any:
    """An indexer whose ingest has ended, with a long prompt in its map."""
    indexer = indexers()
    registration = Registration(instance_id="A", endpoint="tcp://127.0.0.1:1", model_name="m")
    indexer.ingest.register(registration).result(10)
    indexer.ingest.stop()
    with indexer.writer.group() as group:
        group.blocks(indexer.writer.streams["A", 0]).store(engine().stored(LONG))
    return indexer


def churn(rig: Any, stream: Any, hasher: Any, rounds: int) -> None:
    """Stores and removes other blocks, again and again."""
    for number in range(rounds):
        other = [number, *LONG[:2_000]]
        rig.say(stream, hasher.stored(other))
        rig.say(stream, *hasher.removed(other))


# lines


def test_a_dump_names_every_block_once_with_its_holders_and_tiers(rig: Any, engine: Any) -> None:
    a, b = rig.follow("A"), rig.follow("B")
    rig.say(a, engine(1).stored(LONG))
    rig.say(b, engine(2).stored(LONG, 0, 2), engine(2).stored(LONG, 0, 1, medium="CPU"))
    rig.say(rig.follow("C"), engine(3).stored(PROMPT), AllBlocksCleared())
    lines = parsed(dump_lines(rig.reader))
    assert [line["stream"]["instance"] for line in lines[:3]] == ["A", "B", "C"]
    assert (
        lines[0]["stream"] | {"state": "live", "sequence": 0, "blocks": len(LONG) // 4} == lines[0]["stream"]
    )
    found = blocks(lines)
    assert len(found) == len(lines) - 4 == len(LONG) // 4
    mine = {"instance": "A", "rank": 0, "tiers": ["gpu"]}
    both = [each for each in found.values() if each != [mine]]
    assert sorted(both, key=str) == sorted(
        [
            [mine, {"instance": "B", "rank": 0, "tiers": ["gpu", "cpu"]}],
            [mine, {"instance": "B", "rank": 0, "tiers": ["gpu"]}],
        ],
        key=str,
    )
    assert lines[-1] == {"end": {"streams": 3, "blocks": len(found)}}


def test_a_map_without_streams_has_a_dump_too(rig: Any) -> None:
    assert parsed(dump_lines(rig.reader)) == [{"end": {"streams": 0, "blocks": 0}}]
    assert b"".join(dump_events(rig.reader)) == b"{}"


def test_what_is_there_all_the_time_is_in_a_dump_of_a_map_that_changes(rig: Any, engine: Any) -> None:
    stream, hasher = rig.follow("A"), engine()
    rig.say(stream, hasher.stored(LONG))
    before = set(blocks(parsed(dump_lines(rig.reader))))
    pages = []
    for number, page in enumerate(dump_lines(rig.reader)):
        pages.append(page)
        rig.say(stream, hasher.stored([number, *PROMPT]))
        rig.say(stream, *hasher.removed([number, *PROMPT]))
    assert before <= set(blocks(parsed(iter(pages))))


def test_the_command_prints_what_the_generator_gives(make_rig: Any, engine: Any, tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    rig.say(rig.follow("A"), engine().stored(PROMPT))
    expected = parsed(dump_lines(rig.reader))
    rig.close()
    done = CliRunner().invoke(main, ["indexer", "dump", str(tmp_path)])
    assert done.exit_code == 0, done.output
    got = [json.loads(line) for line in done.stdout.splitlines()]
    assert got == expected
    assert CliRunner().invoke(main, ["indexer", "dump", str(tmp_path / "nowhere")]).exit_code == 2


def test_a_dump_into_a_pipe_that_closes_ends_quietly(make_rig: Any, engine: Any, tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    for number in range(4):
        rig.say(rig.follow(f"A{number}"), engine().stored([number, *LONG]))
    rig.close()
    command = [sys.executable, "-m", "warmroute", "indexer", "dump", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b'{"stream"')
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


# events, as the peer gives them


def test_events_have_the_shape_of_the_peers(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow(7), engine()
    rig.say(a, hasher.stored(PROMPT, 0, 2), hasher.stored(PROMPT, 0, 1, medium="CPU"))
    rig.say(rig.follow("B", model="other"), engine(1, 8).stored(PROMPT))
    first, second = (int(display_hash(each)) for each in hasher.hashes(PROMPT)[:2])
    told = json.loads(b"".join(dump_events(rig.reader)))
    assert told.keys() == {"m:default", "other:default"}
    assert told["m:default"]["block_size"] == 4
    assert told["other:default"]["block_size"] == 8
    events = told["m:default"]["events"]
    assert {(each["worker_id"], each["dp_rank"]) for each in events} == {(7, 0)}
    assert all(each["event"]["event_id"] == 0 for each in events)
    stored = [(each["storage_tier"], each["event"]["data"]["stored"]) for each in events]
    found = {(tier, one["parent_hash"], one["blocks"][0]["block_hash"]) for tier, one in stored}
    assert found == {
        ("device", None, first),
        ("host_pinned", None, first),
        ("device", first, second),
    }
    assert all(one["blocks"][0]["tokens_hash"] is None for _, one in stored)
    assert {each["worker_id"] for each in told["other:default"]["events"]} == {"B"}


def test_events_of_more_than_a_page_are_one_object(rig: Any, engine: Any) -> None:
    rig.say(rig.follow("A"), engine().stored(LONG))
    told = json.loads(b"".join(dump_events(rig.reader)))
    hashes = {
        each["event"]["data"]["stored"]["blocks"][0]["block_hash"] for each in told["m:default"]["events"]
    }
    assert hashes == {int(display_hash(each)) for each in engine().hashes(LONG)}


def test_events_of_a_stream_that_is_cleared_meanwhile_end_there(rig: Any, engine: Any) -> None:
    stream = rig.follow("A")
    rig.say(stream, engine().stored(LONG))
    pages = dump_events(rig.reader)
    begun = [next(pages), next(pages)]
    rig.say(stream, AllBlocksCleared())
    told = json.loads(b"".join([*begun, *pages]))
    assert len(told["m:default"]["events"]) == PAGE_ROWS


# what must not be in it


@pytest.mark.parametrize("dump", [dump_lines, dump_events])
def test_op10_a_dump_has_neither_tokens_nor_salts(dump: Any, rig: Any, engine: Any, prompt: Any) -> None:
    tokens = [random.Random(1).randrange(10_000_000, 99_000_000) for _ in range(28)]
    stream = rig.follow("A", additional_salt=SALT)
    rig.say(stream, engine().stored(prompt(tuple(tokens), None, ((0, (SALT,)),))))
    rig.say(stream, engine().stored(tokens[::-1], 2))
    text = b"".join(dump(rig.reader)).decode()
    assert SALT not in text
    assert not any(str(token) in text for token in tokens)


# slow clients


@pytest.mark.parametrize("dump", [dump_lines, dump_events])
def test_pe06_between_two_pages_of_a_dump_nothing_is_pinned_and_the_file_does_not_grow(
    dump: Any, rig: Any, engine: Any
) -> None:
    stream, hasher = rig.follow("A"), engine()
    rig.say(stream, hasher.stored(LONG))
    churn(rig, stream, hasher, 5)
    file = rig.writer.path / DATA_FILE
    pages = dump(rig.reader)
    for _ in range(4):
        next(pages)
        assert not pinned(rig)
    size = file.stat().st_size
    churn(rig, stream, hasher, 40)
    assert file.stat().st_size <= 1.1 * size
    with rig.reader.snapshot():  # What a dump in one transaction would do.
        assert pinned(rig)
        churn(rig, stream, hasher, 40)
    assert file.stat().st_size > 1.5 * size


@pytest.mark.parametrize("path", ["/dump", "/debug/dump"])
async def test_pe06_nothing_is_pinned_while_a_client_is_waited_for(
    path: str, indexers: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexer = filled(indexers, engine)
    waited_for, reads = asyncio.Event(), asyncio.Event()
    write, seen = web.StreamResponse.write, []

    async def slow(self: web.StreamResponse, data: Any) -> None:
        waited_for.set()
        seen.append(pinned(indexer))
        await reads.wait()
        await write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", slow)
    async with TestClient(TestServer(indexer.application())) as client:
        answer = asyncio.create_task(client.get(path))
        await asyncio.wait_for(waited_for.wait(), 10)
        assert not pinned(indexer)
        reads.set()
        assert len(await (await answer).read()) > 100_000
    assert len(seen) > 3
    assert not any(seen)


async def test_dumps_over_http_are_those_of_the_map(indexers: Any, engine: Any) -> None:
    indexer = filled(indexers, engine)
    async with TestClient(TestServer(indexer.application())) as client:
        async with client.get("/debug/dump") as response:
            assert response.content_type == "application/x-ndjson"
            assert await response.read() == b"".join(dump_lines(indexer.reader))
        async with client.get("/dump") as response:
            assert response.content_type == "application/json"
            assert len((await response.json())["m:default"]["events"]) == len(LONG) // 4


async def test_a_dump_that_breaks_off_ends_the_connection(
    indexers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_: Any) -> Iterator[bytes]:
        yield b"{"
        raise MapError("made to fail")

    indexer = indexers()
    monkeypatch.setattr("indexer.dump.dump_lines", breaks)
    async with TestClient(TestServer(indexer.application())) as client:
        with pytest.raises(Exception, match=r"(?i)payload|disconnect|closed"):
            async with client.get("/debug/dump") as response:
                await response.read()


async def test_a_map_that_cannot_be_read_answers_503(indexers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> Iterator[bytes]:
        raise MapError("made to fail")
        yield b""

    indexer = indexers()
    monkeypatch.setattr("indexer.dump.dump_events", broken)
    async with TestClient(TestServer(indexer.application())) as client, client.get("/dump") as response:
        assert response.status == 503
        assert await response.json() == {"error": "made to fail"}
