"""``warmroute indexer --shards N``: real processes that are asked as one, killed, and come back."""

from __future__ import annotations

import os
import signal
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from indexer.check import check_folder
from indexer.front import Front
from indexer.settings import IndexerSettings
from indexer.shard_metrics import of_shards
from indexer.shard_process import ShardProcess
from indexer.shard_reader import open_map
from indexer.sharding import divide, shard_of, share_of

PROMPT = list(range(28))
ONE, OTHER = "A", "C"
"""Replicas of shard 1 and of shard 0, of two."""
QUERY = {"model_name": "m", "token_ids": PROMPT}


class Fleet:
    """Engines in miniature, followed by a divided indexer."""

    def __init__(self, indexer: Any, publishers: Any, engine: Any, until: Any) -> None:
        self.indexer = indexer
        self.publishers = {name: publishers() for name in (ONE, OTHER)}
        self._engine = engine
        self._until = until

    def register(self, name: str, **fields: Any) -> Any:
        publisher = self.publishers[name]
        body = {
            "instance_id": name,
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "model_name": "m",
        }
        return self.indexer.call("/register", body | fields)

    def stored(self, tokens: list[int] = PROMPT) -> None:
        """Every engine has the prompt cached."""
        for seed, publisher in enumerate(self.publishers.values()):
            publisher.publish([self._engine(seed).stored(tokens)], 1.0)

    def held(self, tokens: list[int] = PROMPT) -> dict[str, tuple[str, float, int]]:
        """State, weight and tokens of the prompt, by instance."""
        told = self.indexer.call("/query", {"model_name": "m", "token_ids": tokens})
        return {one["instance"]: (one["state"], one["weight"], one["gpu"]) for one in told.get("streams", ())}

    def await_whole(self, tokens: list[int] = PROMPT) -> None:
        """Waits until all of the prompt is held everywhere, beyond doubt."""
        whole = dict.fromkeys(self.publishers, ("live", 1.0, len(tokens)))
        self._until(lambda: self.held(tokens) == whole, "every replica holds the prompt")

    def shards(self) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = self.indexer.call("/debug/replicas")["shards"]
        return told


@pytest.fixture
def fleet(indexer_process: Any, publishers: Any, engine: Any, until: Any, tmp_path: Path) -> Any:
    """Two engines with a prompt cached, one in each shard."""
    assert (shard_of(ONE, 2), shard_of(OTHER, 2)) == (1, 0)
    indexer = indexer_process(tmp_path / "map", "--shards", "2").listening()
    made = Fleet(indexer, publishers, engine, until)
    for name in made.publishers:
        assert made.register(name) == {"status": "ok"}, "it waits for its shard, which only starts"
    until(lambda: all(shard["answers"] for shard in made.shards()), "both shards run")
    made.stored()
    made.await_whole()
    return made


def test_two_writers_are_asked_as_one(fleet: Fleet, until: Any, tmp_path: Path) -> None:
    indexer = fleet.indexer
    well = {"ready": True, "waiting_for": [], "standing_still": [], "trouble": {}}
    assert indexer.call("/ready") == well
    assert {worker["instance_id"]: worker["status"] for worker in indexer.call("/workers")} == {
        ONE: "active",
        OTHER: "active",
    }
    replicas = indexer.replicas()
    assert {name: replicas[name]["counters"]["stored"] for name in replicas} == {ONE: 7, OTHER: 7}
    assert {one["instance"] for one in indexer.call("/debug/explain", QUERY)["replicas"]} == {ONE, OTHER}
    assert [len(worker["events"]) for worker in indexer.call("/dump").values()] == [14]

    metrics = scraped(indexer.url)
    assert metrics["warmroute_indexer_blocks", ("instance", ONE), ("rank", "0")] == 7
    assert metrics["warmroute_indexer_shard_up", ("shard", "1")] == 1
    assert metrics["warmroute_indexer_query_seconds_count",] > 0
    age = metrics["warmroute_indexer_event_age_seconds", ("instance", OTHER), ("rank", "0")]
    assert 0 <= age < 60
    assert metrics["warmroute_indexer_queued", ("instance", OTHER), ("rank", "0")] == 0

    with closing(open_map(tmp_path / "map")) as reader:  # as a router does
        assert {one.instance: one.gpu for one in reader.query("m", PROMPT)} == {ONE: 28, OTHER: 28}
        assert reader.indexer_address() == indexer.url
        generations = {one.instance: one.generation for one in reader.query("m", PROMPT)}

    decided = {"generation": generations[ONE], "sequence": 0}
    lacking = {**QUERY, **decided, "instance_id": ONE, "cached_tokens": 8}
    assert indexer.call("/feedback", lacking)["denied"] == 1
    assert {name: tokens for name, (_, _, tokens) in fleet.held().items()} == {ONE: 8, OTHER: 28}
    both = {**QUERY, **decided, "generation": generations[OTHER], "instance_id": OTHER, "cached_tokens": 12}
    outcomes = indexer.call("/feedback", [both, {**lacking, "instance_id": "nobody"}, lacking])
    assert [(one["status"], one["denied"]) for one in outcomes] == [
        ("taken", 1),
        ("refused", 0),
        ("taken", 1),
    ]
    assert {name: tokens for name, (_, _, tokens) in fleet.held().items()} == {ONE: 8, OTHER: 12}
    assert indexer.call("/reset", {"instance_id": OTHER, "model_name": "m"}) == {"status": "ok"}
    assert fleet.held()[OTHER][2] == 0
    assert indexer.call("/reset", {"model_name": "m", "lora_name": "a"}) == {"status": "ok"}
    assert fleet.held()[ONE][2] == 8
    assert indexer.call("/reset", {"model_name": "m"}) == {"status": "ok"}
    assert [tokens for _, _, tokens in fleet.held().values()] == [0, 0]
    assert "no instance" in indexer.call("/reset", {"model_name": "x"})["error"]
    gone = {"instance_id": ONE, "model_name": "m"}
    assert indexer.call("/unregister", gone) == {"status": "ok"}
    assert indexer.call("/unregister", gone) == {"error": "no instance 'A' of model 'm' is registered"}
    assert list(fleet.held()) == [OTHER]
    assert "instance_id" in indexer.call("/register", {})["error"]

    assert indexer.stop() == 0
    assert check_folder(tmp_path / "map").clean


def test_a_shard_that_stands_still_fades_and_one_that_is_killed_comes_back_and_proves_its_streams(
    fleet: Fleet, until: Any, tmp_path: Path
) -> None:
    before = fleet.shards()
    assert fleet.indexer.call("/ready")["ready"]
    os.kill(before[1]["pid"], signal.SIGSTOP)
    until(lambda: fleet.held()[ONE][0] == "partial", "the trust in a silent writer fades")
    assert fleet.held()[ONE][1] < 0.5
    assert fleet.held()[OTHER] == ("live", 1.0, 28)
    assert fleet.indexer.call("/health") == {"status": "ok", "standing_still": ["shard 1"], "trouble": {}}
    assert fleet.indexer.call("/ready")["ready"]

    os.kill(before[1]["pid"], signal.SIGKILL)
    fleet.await_whole()
    after = fleet.shards()
    assert [shard["restarts"] for shard in after] == [0, 1]
    assert after[0]["pid"] == before[0]["pid"]
    longer = [*PROMPT, *range(200, 228)]
    fleet.stored(longer)
    fleet.await_whole(longer)
    assert fleet.indexer.replicas()[ONE]["generation"] == 1, "nothing was forgotten"


def test_shards_end_with_the_indexer_and_the_next_finds_their_streams(
    fleet: Fleet, indexer_process: Any, until: Any, tmp_path: Path
) -> None:
    pids = [shard["pid"] for shard in fleet.shards()]
    fleet.indexer.kill()
    fleet.indexer = indexer_process(tmp_path / "map", "--shards", "2").listening()
    until(lambda: not any(runs(pid) for pid in pids), "the shards of the dead indexer end")
    fleet.await_whole()
    assert {one["generation"] for one in fleet.indexer.replicas().values()} == {1}
    second = indexer_process(tmp_path / "map", "--shards", "2")
    assert second.process.wait(20) == 2
    assert "is written by another indexer" in second._log.read_text()
    assert fleet.indexer.stop() == 0
    assert not any(runs(shard) for shard in pids)

    for shards in ("1", "3"):
        refused = indexer_process(tmp_path / "map", "--shards", shards)
        assert refused.process.wait(20) == 2
        assert f"was made with --shards 2, not {shards}" in refused._log.read_text()


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_stream_that_moves_to_another_shard_is_in_one_of_them(fleet: Fleet, until: Any) -> None:
    port = next(port for port in range(20_000, 30_000) if shard_of(f"tcp://127.0.0.1:{port}", 2) == 0)
    fleet.register(ONE, endpoint=f"bind:tcp://127.0.0.1:{port}", topic="kv@A", replay_endpoint=None)
    found = [one for one in fleet.indexer.call("/debug/replicas")["replicas"] if one["instance"] == ONE]
    assert [one["endpoint"] for one in found] == [f"bind:tcp://127.0.0.1:{port}"]
    fleet.register(ONE)
    fleet.await_whole()
    assert len(fleet.indexer.call("/debug/replicas")["replicas"]) == 2


def test_a_shard_that_can_never_start_ends_the_indexer_with_its_reason(
    indexer_process: Any, tmp_path: Path
) -> None:
    divide(tmp_path, 2)
    (tmp_path / "shard-1").mkdir()
    (tmp_path / "shard-1" / "data.mdb").write_bytes(b"no map" * 10_000)
    refused = indexer_process(tmp_path, "--shards", "2")
    assert refused.process.wait(20) == 2
    assert "error: shard 1: the map in" in refused._log.read_text()


async def test_whatever_can_be_asked_of_one_indexer_can_be_asked_of_the_whole(
    indexers: Any, tmp_path: Path
) -> None:
    divide(tmp_path, 2)
    front = Front(IndexerSettings(map=str(tmp_path), shards=2), [], None)  # type: ignore[arg-type]
    assert asked(front.application()) == asked(indexers().application())


def asked(app: web.Application) -> set[tuple[str, str]]:
    return {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource}


async def test_what_concerns_a_stream_is_refused_while_its_shard_is_down_and_says_so(
    make_rig: Any, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.front.START_PATIENCE_S", 0.1)
    settings = IndexerSettings(map=str(tmp_path), map_size=256 << 20, shards=2)
    divide(tmp_path, 2)
    rig = make_rig(tmp_path / "shard-1")
    rig.say(rig.follow(ONE), engine().stored(PROMPT))
    rig.abandon()
    shards = [ShardProcess(number, share_of(settings, number)) for number in range(2)]
    async with ClientSession() as session:
        front = Front(settings, shards, session)
        async with TestClient(TestServer(front.application())) as client:
            body = {"instance_id": ONE, "model_name": "m", "endpoint": "tcp://127.0.0.1:1"}
            for path in ("/register", "/unregister", "/reset", "/feedback"):
                async with client.post(path, json=body) as response:
                    assert response.status == 503
                    assert (await response.json())["error"].startswith("shard 1 is not running")
            async with client.post("/query", json=QUERY) as response:
                assert [one["instance"] for one in (await response.json())["streams"]] == [ONE]
            async with client.get("/debug/replicas") as response:
                told = await response.json()
                assert [one["blocks"] for one in told["replicas"]] == [7]
                assert [shard["answers"] for shard in told["shards"]] == [False, False]
            async with client.get("/ready") as response:
                assert response.status == 503
                assert "shard 0" in (await response.json())["waiting_for"]
            async with client.get("/metrics") as response:
                assert 'warmroute_indexer_shard_up{shard="1"} 0.0' in await response.text()
        front.reader.close()


async def test_what_keeps_a_shard_from_writing_is_said_by_the_whole(tmp_path: Path) -> None:
    async def ready(_: web.Request) -> web.Response:
        return web.json_response({"ready": False, "trouble": "no space left on device"}, status=503)

    full = web.Application()
    full.router.add_get("/ready", ready)
    settings = IndexerSettings(map=str(tmp_path), shards=2)
    divide(tmp_path, 2)
    shards = [ShardProcess(number, share_of(settings, number)) for number in range(2)]
    async with TestServer(full) as server, ClientSession() as session:
        shards[1].url = str(server.make_url("")).rstrip("/")
        front = Front(settings, shards, session)
        async with TestClient(TestServer(front.application())) as client:
            for path in ("/health", "/ready"):
                async with client.get(path) as response:
                    assert (await response.json())["trouble"] == {"shard 1": "no space left on device"}
        front.reader.close()


def test_metrics_of_all_shards_are_one_page() -> None:
    settings = IndexerSettings(shards=2)
    shards = [ShardProcess(number, share_of(settings, number)) for number in range(2)]
    own = CollectorRegistry()
    Counter("asked", "Own.", registry=own).inc(3)
    page = "# HELP asked_total Theirs.\n# TYPE asked_total counter\nasked_total 9.0\n"
    page += "# HELP groups_total G.\n# TYPE groups_total counter\ngroups_total 2.0\n"
    page += '# HELP blocks B.\n# TYPE blocks gauge\nblocks{instance="A \\"q\\"",rank="0"} 7.0\n'
    whole = parsed(of_shards(own, shards, [page.encode(), None]).decode())
    assert whole["asked_total",] == 3
    assert whole["groups_total", ("shard", "0")] == 2
    assert whole["blocks", ("instance", 'A "q"'), ("rank", "0")] == 7
    assert whole["warmroute_indexer_shard_up", ("shard", "0")] == 1
    assert whole["warmroute_indexer_shard_up", ("shard", "1")] == 0


def scraped(url: str) -> dict[Any, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        return parsed(response.read().decode())


def parsed(text: str) -> dict[Any, float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
