"""The HTTP API of the real application: the shapes that others already speak, and ours beside them."""

import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from events.publisher import Publisher
from events.schema import display_hash, token_array
from indexer.errors import MapError
from indexer.keys import local_hashes
from indexer.service import Indexer

PROMPT = list(range(28))
SALT = "a secret of the tenant"


class Api:
    """The application on a real port, and what a client says to it."""

    def __init__(self, indexer: Indexer, client: Any) -> None:
        self.indexer = indexer
        self._client = client

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body)
        async with self._client.request(method, path, data=data) as response:
            raw = await response.read()
            if response.content_type == "application/json":
                return response.status, json.loads(raw)
            return response.status, raw.decode()

    async def get(self, path: str) -> Any:
        status, body = await self.call("GET", path)
        assert status == 200, body
        return body

    async def post(self, path: str, body: Any) -> Any:
        status, answer = await self.call("POST", path, body)
        assert status < 300, answer
        return answer

    async def register(self, instance: str | int, publisher: Publisher, **fields: Any) -> None:
        body = {
            "instance_id": instance,
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "model_name": "m",
            "block_size": 4,
        }
        assert await self.call("POST", "/register", body | fields) == (201, {"status": "ok"})

    async def query(self, tokens: list[int] = PROMPT, **fields: Any) -> Any:
        return await self.post("/query", {"model_name": "m", "token_ids": tokens} | fields)


@pytest.fixture
async def api(indexers: Any) -> AsyncIterator[Api]:
    indexer = indexers()
    async with TestClient(TestServer(indexer.application())) as client:
        yield Api(indexer, client)


@pytest.fixture
def publish(until: Any) -> Callable[..., None]:
    """Publishes a batch and waits until it is in the map."""

    def publish(api: Api, instance: str, publisher: Publisher, *events: Any, rank: int = 0) -> None:
        sequence = publisher.publish(events, 1.0)

        def applied() -> bool:
            records = [status.record for status in api.indexer.reader.streams()]
            return any(
                (one.id, one.sequence, one.state) == ((instance, rank), sequence, "live") for one in records
            )

        until(applied)

    return publish


@pytest.fixture
async def two(api: Api, publishers: Any, engine: Any, publish: Any) -> Api:
    """A holds all seven blocks of the prompt, 1 holds three of them, one of these in memory only."""
    a, one = publishers(), publishers()
    await api.register("A", a, aliases=["short"])
    await api.register(1, one)
    publish(api, "A", a, engine(1).stored(PROMPT))
    publish(api, "1", one, engine(2).stored(PROMPT, 0, 2), engine(2).stored(PROMPT, 2, 3, medium="CPU"))
    return api


# the API that others speak


async def test_a_registration_is_answered_as_dynamos_indexer_does(api: Api, publishers: Any) -> None:
    publisher = publishers()
    body = {"instance_id": "A", "endpoint": publisher.endpoint, "model_name": "m", "block_size": 4}
    for _ in range(2):  # The same again is accepted.
        assert await api.call("POST", "/register", body) == (201, {"status": "ok"})
    assert await api.call("POST", "/register", body | {"block_size": 8, "dp_rank": 1, "unknown": 1}) == (
        201,
        {"status": "ok"},
    )


async def test_workers_list_what_is_registered_by_instance(api: Api, publishers: Any) -> None:
    zero, one = publishers(), publishers()
    await api.register("A", zero)
    await api.register("A", one, dp_rank=1)
    await api.register(7, zero, block_size=16)
    workers = sorted(await api.get("/workers"), key=lambda each: str(each["instance_id"]), reverse=True)
    statuses = [listener["status"] for each in workers for listener in each["listeners"].values()]
    assert [each["status"] for each in workers] == [
        "active" if set(states) == {"live"} else "pending" for states in (statuses[:2], statuses[2:])
    ]
    for each in workers:
        each.pop("status")
        for listener in each["listeners"].values():
            assert listener.pop("status") in ("connecting", "replaying", "live")
    assert workers == [
        {
            "instance_id": "A",
            "source": "zmq",
            "model_name": "m",
            "block_size": 4,
            "endpoints": {"0": zero.endpoint, "1": one.endpoint},
            "listeners": {
                "0": {"endpoint": zero.endpoint, "registered": True},
                "1": {"endpoint": one.endpoint, "registered": True},
            },
        },
        {
            "instance_id": 7,
            "source": "zmq",
            "model_name": "m",
            "block_size": 16,
            "endpoints": {"0": zero.endpoint},
            "listeners": {"0": {"endpoint": zero.endpoint, "registered": True}},
        },
    ]


async def test_workers_are_active_once_they_are_live(two: Api) -> None:
    assert [each["status"] for each in await two.get("/workers")] == ["active", "active"]


async def test_a_query_is_answered_in_the_shape_of_the_rfc(two: Api) -> None:
    answer = await two.query()
    assert answer["scores"] == {"A": {"0": 28}, "1": {"0": 12}}
    assert answer["instances"] == {
        "A": {"longest_matched": 28, "gpu": 28, "cpu": 28, "disk": 28, "dp": {"0": 28}},
        "1": {"longest_matched": 12, "gpu": 8, "cpu": 12, "disk": 12, "dp": {"0": 12}},
    }
    assert answer["states"] == {"A": {"0": "live"}, "1": {"0": "live"}}


@pytest.mark.parametrize(
    ("fields", "scores"),
    [
        ({"token_ids": PROMPT[:9]}, {"A": {"0": 8}, "1": {"0": 8}}),
        ({"token_ids": []}, {"A": {"0": 0}, "1": {"0": 0}}),
        ({"token_ids": [7, 7, 7, 7]}, {"A": {"0": 0}, "1": {"0": 0}}),
        ({"lora_name": "adapter"}, {"A": {"0": 0}, "1": {"0": 0}}),
        ({"cache_salt": "salt"}, {"A": {"0": 0}, "1": {"0": 0}}),
        ({"lora_name": None, "cache_salt": None, "unknown": [1]}, {"A": {"0": 28}, "1": {"0": 12}}),
        ({"model_name": "short"}, {"A": {"0": 28}}),
    ],
)
async def test_a_query_names_prompt_adapter_and_salt(two: Api, fields: Any, scores: Any) -> None:
    assert (await two.query(**fields))["scores"] == scores


async def test_a_long_prompt_is_answered_alike(two: Api) -> None:
    assert (await two.query([*PROMPT, *range(20_000)]))["scores"] == {"A": {"0": 28}, "1": {"0": 12}}


async def test_ranks_of_an_instance_are_told_apart_and_the_best_counts(
    api: Api, publishers: Any, engine: Any, publish: Any
) -> None:
    zero, one = publishers(), publishers()
    await api.register("A", zero)
    publish(api, "A", zero, engine().stored(PROMPT))
    await api.register("A", one, dp_rank=1)
    publish(api, "A", one, engine().stored(PROMPT, 0, 2), rank=1)
    answer = await api.query()
    assert answer["scores"] == {"A": {"0": 28, "1": 8}}
    assert answer["instances"]["A"] == {
        "longest_matched": 28,
        "gpu": 28,
        "cpu": 28,
        "disk": 28,
        "dp": {"0": 28, "1": 8},
    }


async def test_local_hashes_are_taken_signed_and_unsigned(two: Api) -> None:
    unsigned = [int.from_bytes(each, "big") for each in local_hashes(token_array(PROMPT), 4)]
    signed = [each - 2**64 if each >= 2**63 else each for each in unsigned]
    assert min(signed) < 0 <= max(signed)
    expected = await two.query()
    for hashes in (unsigned, signed):
        answer = await two.post("/query_by_hash", {"model_name": "m", "block_hashes": hashes})
        assert answer["scores"] == expected["scores"]
        assert answer["instances"] == expected["instances"]
    nothing = await two.post("/query_by_hash", {"model_name": "m", "block_hashes": []})
    assert nothing["scores"] == {"A": {"0": 0}, "1": {"0": 0}}


@pytest.mark.parametrize("given", [1, "1"])
async def test_1_and_its_text_are_one_instance(two: Api, given: int | str) -> None:
    assert await two.call("POST", "/unregister", {"instance_id": given, "model_name": "m"}) == (
        200,
        {"status": "ok"},
    )
    assert list((await two.query())["scores"]) == ["A"]


async def test_one_rank_can_be_removed_alone(api: Api, publishers: Any) -> None:
    await api.register("A", publishers())
    await api.register("A", publishers(), dp_rank=1)
    await api.post("/unregister", {"instance_id": "A", "model_name": "m", "dp_rank": 0})
    assert [list(each["endpoints"]) for each in await api.get("/workers")] == [["1"]]


async def test_what_is_unknown_is_404(two: Api) -> None:
    for path, body in (
        ("/query", {"model_name": "other", "token_ids": [1]}),
        ("/query_by_hash", {"model_name": "other", "block_hashes": [1]}),
        ("/unregister", {"instance_id": "B", "model_name": "m"}),
        ("/unregister", {"instance_id": "A", "model_name": "other"}),
        ("/nowhere", {}),
    ):
        status, answer = await two.call("POST", path, body)
        assert status == 404
        assert isinstance(answer["error"], str)
    assert answer["error"].startswith("Not Found: POST /nowhere; here are /debug/")
    status, answer = await two.call("GET", "/query")
    assert (status, list(answer)) == (405, ["error"])


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/query", b"{", "cannot be used"),
        ("/query", b"", "cannot be used"),
        ("/query", b"\xff\xfe", "cannot be used"),
        ("/query", b"[]", "object"),
        ("/query", {"model_name": "m"}, "token_ids"),
        ("/query", {"token_ids": []}, "model_name"),
        ("/query", {"model_name": 3, "token_ids": []}, "model_name"),
        ("/query", {"model_name": "m", "token_ids": "text"}, "token_ids"),
        ("/query", {"model_name": "m", "token_ids": [1.5]}, "token_ids"),
        ("/query", {"model_name": "m", "token_ids": [-1]}, "token_ids"),
        ("/query", {"model_name": "m", "token_ids": [2**32]}, "token_ids"),
        ("/query", {"model_name": "m", "token_ids": [], "cache_salt": 1}, "cache_salt"),
        ("/debug/explain", {"model_name": "m", "token_ids": [-1]}, "token_ids"),
        ("/query_by_hash", {"model_name": "m", "block_hashes": ["x"]}, "block_hashes"),
        ("/query_by_hash", {"model_name": "m", "block_hashes": [2**64]}, "block_hashes"),
        ("/query_by_hash", {"model_name": "m", "block_hashes": [-(2**63) - 1]}, "block_hashes"),
        ("/unregister", {"instance_id": 1.5, "model_name": "m"}, "instance_id"),
        ("/register", {"instance_id": "A", "model_name": "m"}, "endpoint"),
        ("/register", {"endpoint": "tcp://h:1", "model_name": "m"}, "instance_id"),
        ("/register", {"instance_id": "", "endpoint": "tcp://h:1", "model_name": "m"}, "instance_id"),
        ("/register", {"instance_id": "A", "endpoint": "tcp://h:1", "model_name": ""}, "model_name"),
        ("/register", {"instance_id": "A", "endpoint": "http://h:1", "model_name": "m"}, "tcp://HOST:PORT"),
        ("/register", {"instance_id": "A", "endpoint": "tcp://h:0", "model_name": "m"}, "tcp://HOST:PORT"),
        ("/register", {"instance_id": "A", "endpoint": "tcp://*:1", "model_name": "m"}, "names no host"),
        (
            "/register",
            {"instance_id": "A", "endpoint": "tcp://h:1", "model_name": "m", "block_size": 0},
            "block_size",
        ),
        (
            "/register",
            {"instance_id": "A", "endpoint": "tcp://h:1", "model_name": "m", "dp_rank": -1},
            "dp_rank",
        ),
        (
            "/register",
            {"instance_id": "A", "endpoint": "tcp://h:1", "model_name": "m", "replay_endpoint": "h"},
            "replay_endpoint",
        ),
    ],
)
async def test_a_body_that_cannot_be_used_is_400_and_names_what_is_wrong(
    two: Api, path: str, body: Any, says: str
) -> None:
    status, answer = await two.call("POST", path, body)
    assert (status, list(answer)) == (400, ["error"])
    assert says in answer["error"]
    assert len(await two.get("/workers")) == 2


async def test_a_stream_that_is_not_trusted_scores_nothing(
    two: Api, publishers: Any, engine: Any, publish: Any, until: Any
) -> None:
    gone = publishers()
    await two.register("gone", gone)
    publish(two, "gone", gone, engine().stored(PROMPT))
    gone.close()
    until(lambda: any(one.state == "offline" for one in two.indexer.reader.streams()))
    answer = await two.query()
    assert answer["scores"] == {"A": {"0": 28}, "1": {"0": 12}, "gone": {"0": 0}}
    assert answer["states"]["gone"] == {"0": "offline"}
    assert answer["instances"]["gone"]["longest_matched"] == 0


async def test_a_map_that_cannot_be_read_is_503(two: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MapError("cannot read the map")

    monkeypatch.setattr(two.indexer.reader, "streams", fail)
    assert await two.call("GET", "/workers") == (503, {"error": "cannot read the map"})
    assert (await two.call("POST", "/query", {"model_name": "m", "token_ids": []}))[0] == 503


# health


async def test_ix14_ready_comes_once_every_stream_has_proven_itself(
    indexers: Any, publishers: Any, until: Any, tmp_path: Path
) -> None:
    indexer = indexers(tmp_path / "map", ready_deadline_s=600)
    async with TestClient(TestServer(indexer.application())) as client:
        api = Api(indexer, client)
        silent = "tcp://127.0.0.1:9"
        body = {"instance_id": "A", "model_name": "m", "endpoint": silent, "replay_endpoint": silent}
        await api.post("/register", body)
        status, answer = await api.call("GET", "/ready")
        assert (status, answer) == (
            503,
            {"ready": False, "waiting_for": ["A rank 0: connecting"], "trouble": None},
        )
        assert await api.get("/health") == {"status": "ok"}
        await api.register("A", publishers())
        until(lambda: indexer.reader.streams()[0].state == "live")
        assert await api.get("/ready") == {"ready": True, "waiting_for": [], "trouble": None}
        await api.post("/register", body | {"instance_id": "B"})
        assert (await api.get("/ready"))["ready"]  # Who comes later does not make it cold again.


async def test_ix14_ready_waits_no_longer_than_told(indexers: Any) -> None:
    indexer = indexers(ready_deadline_s=0)
    async with TestClient(TestServer(indexer.application())) as client:
        api = Api(indexer, client)
        await api.post("/register", {"instance_id": "A", "model_name": "m", "endpoint": "tcp://127.0.0.1:9"})
        assert (await api.get("/ready"))["ready"]


async def test_health_fails_when_nothing_is_ingested_any_more(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await api.get("/health") == {"status": "ok"}
    monkeypatch.setattr(api.indexer.reader, "_clock", lambda: float("inf"))
    assert await api.call("GET", "/health") == (
        503,
        {"status": "ingesting stands still", "trouble": None},
    )
    assert (await api.call("GET", "/ready"))[0] == 503


# debug


async def test_replicas_show_state_sequence_lag_and_counts(two: Api) -> None:
    answer = await two.get("/debug/replicas")
    assert answer["unmatched_topics"] == {}
    assert answer["map"]["used_bytes"] > 0
    assert 0 <= answer["map"]["heartbeat_age_s"] < 2
    assert answer["map"]["failures"] == 0
    replicas = {each["instance"]: each for each in answer["replicas"]}
    assert replicas.keys() == {"A", "1"}
    a = replicas["A"]
    assert (a["rank"], a["model_name"], a["aliases"]) == (0, "m", ["short"])
    assert (a["state"], a["weight"], a["sequence"], a["lag_batches"]) == ("live", 1.0, 0, 0)
    assert (a["blocks"], a["orphans"], a["waiting"], a["block_size"]) == (7, 0, 0, 4)
    assert (a["hash_form"], a["group_kinds"], a["skipped"]) == ("int", {"0": None}, {})
    assert a["event_age_s"] >= 0
    assert a["counters"]["stored"] == 7
    assert {value for name, value in a["counters"].items() if name not in ("stored", "batches")} == {0}


async def test_a_block_size_other_than_registered_is_visible(
    api: Api, publishers: Any, engine: Any, publish: Any, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = publishers()
    await api.register("A", publisher, block_size=16)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            publish(api, "A", publisher, engine(1, 4).stored(PROMPT))
    (replica,) = (await api.get("/debug/replicas"))["replicas"]
    assert replica["skipped"] == {"block_size": 21}
    assert replica["blocks"] == 0
    warnings = [each.getMessage() for each in caplog.records if "blocks of 4 tokens" in each.getMessage()]
    assert len(warnings) == 1
    assert "16 are registered" in warnings[0]


async def test_messages_that_were_none_are_visible(two: Api) -> None:
    two.indexer.subscriber.faults.count(("A", 0), "frames")
    skipped = {each["instance"]: each["skipped"] for each in (await two.get("/debug/replicas"))["replicas"]}
    assert skipped == {"A": {"frames": 1}, "1": {}}
    assert 'skipped_total{instance="A",rank="0",reason="frames"} 1.0' in await two.get("/metrics")


async def test_unmatched_topics_are_visible(api: Api, publishers: Any, until: Any) -> None:

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    publisher = publishers(address, None, topic="kv@nobody@m")
    body = {"instance_id": "A", "endpoint": f"bind:{address}", "model_name": "m", "topic": "kv@a@m"}
    await api.post("/register", body)

    def heard() -> int:
        publisher.publish([], 1.0)
        return api.indexer.subscriber.faults.unmatched["kv@nobody@m"]

    until(heard)
    assert (await api.get("/debug/replicas"))["unmatched_topics"]["kv@nobody@m"] > 0


async def test_a_block_is_found_by_key_and_by_engine_hash(two: Api, engine: Any) -> None:
    engine_hash = display_hash(engine(1).hashes(PROMPT)[2])
    answer = await two.get(f"/debug/block?instance=A&hash={engine_hash}")
    assert answer["hash"] == engine_hash
    assert answer["copies"] == {"gpu": 1, "cpu": 0, "disk": 0}
    holders = sorted((each["instance"], each["rank"], each["tiers"]) for each in answer["holders"])
    assert holders == [("1", 0, ["cpu"]), ("A", 0, ["gpu"])]
    by_key = await two.get(f"/debug/block?key={answer['key']}")
    assert by_key["holders"] == answer["holders"]
    signed = int(engine_hash) - 2**64
    assert await two.get(f"/debug/block?instance=A&hash={signed}") == answer
    assert (await two.get(f"/debug/block?key={'0' * 16}"))["holders"] == []


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ("", 400),
        ("key=", 400),
        ("key=xyz", 400),
        ("key=00", 400),
        ("instance=A", 400),
        ("hash=1", 400),
        ("instance=A&hash=x", 400),
        ("instance=A&hash=0x0", 400),
        ("instance=A&hash=0x00", 400),
        ("instance=A&hash=1&rank=x", 400),
        ("instance=A&hash=1&group=256", 400),
        ("instance=A&hash=1&group=-1", 400),
        ("instance=A&hash=1", 404),
        ("instance=A&hash=1&rank=4&group=255", 404),
        ("instance=Z&hash=1", 404),
        ("instance=A&hash=0x" + "00" * 32, 404),
    ],
)
async def test_a_block_that_is_none_is_an_error_that_says_so(two: Api, asked: str, status: int) -> None:
    found, answer = await two.call("GET", f"/debug/block?{asked}")
    assert (found, list(answer)) == (status, ["error"])


async def why(api: Api, instance: str, tokens: list[int], **fields: Any) -> str:
    told = await api.post("/debug/explain", {"model_name": "m", "token_ids": tokens} | fields)
    (replica,) = [each for each in told["replicas"] if each["instance"] == instance]
    return replica["why"]


async def test_an_explanation_goes_step_by_step(two: Api) -> None:
    told = await two.post("/debug/explain", {"model_name": "m", "token_ids": PROMPT})
    assert (told["model_name"], told["known_model"], told["prompt_tokens"]) == ("m", True, 28)
    replicas = {each["instance"]: each for each in told["replicas"]}
    one = replicas["1"]
    assert (one["matched_tokens"], one["usable_tokens"], one["matched_blocks"], one["prompt_blocks"]) == (
        12,
        12,
        3,
        7,
    )
    assert one["tiers"] == {"gpu": 8, "cpu": 12, "disk": 12}
    assert [step["held_in"] for step in one["steps"]] == [["gpu"], ["gpu"], ["cpu"], [], [], [], []]
    assert [step["holders"] for step in one["steps"]] == [["1/0", "A/0"]] * 3 + [["A/0"]] * 4
    hashes = [int.from_bytes(each, "big") for each in local_hashes(token_array(PROMPT), 4)]
    assert [step["local_hash"] for step in one["steps"]] == hashes
    block = await two.get(f"/debug/block?key={one['steps'][0]['key']}")
    assert len(block["holders"]) == 2
    assert (replicas["A"]["matched_tokens"], replicas["A"]["usable_tokens"]) == (28, 24)


async def test_an_explanation_says_why_a_match_ends(
    two: Api, publishers: Any, engine: Any, publish: Any, until: Any
) -> None:
    assert (
        await why(two, "A", PROMPT)
        == "all whole blocks of the prompt are held; the last token is always computed"
    )
    assert await why(two, "A", PROMPT[:27]) == "all whole blocks of the prompt are held"
    assert await why(two, "1", PROMPT) == "block 3 is not held here, only by A rank 0"
    assert await why(two, "1", [7] * 8) == "block 0 is not held here, nor by anyone"
    assert await why(two, "A", PROMPT[:3]) == "the prompt is shorter than one block"
    assert await why(two, "A", PROMPT, cache_salt="salt") == "block 0 is not held here, nor by anyone"
    holey, other, offline, empty = (publishers() for _ in range(4))
    await two.register("holey", holey)
    publish(two, "holey", holey, engine().stored(PROMPT), *engine().removed(PROMPT, 4, 5))
    assert await why(two, "holey", PROMPT) == "block 4 is not held: a hole, later blocks of the prompt are"
    await two.register("other", other, model_name="other model")
    assert await why(two, "other", PROMPT) == "it serves 'other model', another model"
    await two.register("empty", empty, block_size=None)
    until(lambda: all(one.state == "live" for one in two.indexer.reader.streams()))
    assert await why(two, "empty", PROMPT) == "no block was stored yet, so its block size is not known"
    await two.register("offline", offline)
    publish(two, "offline", offline, engine().stored(PROMPT))
    offline.close()
    until(lambda: any(one.state == "offline" for one in two.indexer.reader.streams()))
    assert await why(two, "offline", PROMPT) == (
        "the stream is offline (the connection was lost), so nothing of it is credited"
    )


async def test_an_explanation_of_an_unknown_model_says_that_it_is(two: Api) -> None:
    told = await two.post("/debug/explain", {"model_name": "unknown", "token_ids": PROMPT})
    assert not told["known_model"]
    assert {each["why"] for each in told["replicas"]} == {"it serves 'm', another model"}


# metrics and secrets


async def test_metrics_parse_and_tell_each_stream(two: Api) -> None:
    await two.query()
    text = await two.get("/metrics")
    samples = {
        (sample.name, sample.labels.get("instance"), sample.labels.get("state")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    prefix = "warmroute_indexer_"
    assert samples[prefix + "blocks", "A", None] == 7
    assert samples[prefix + "blocks", "1", None] == 3
    assert samples[prefix + "batches_total", "A", None] == 1
    assert samples[prefix + "stream_state", "A", "live"] == 1
    assert samples[prefix + "stream_weight", "A", None] == 1
    assert samples[prefix + "orphans", "A", None] == 0
    assert samples[prefix + "unjudged_groups", "A", None] == 0
    assert samples[prefix + "hash_seeds", None, None] >= 0
    assert samples[prefix + "queued", "A", None] == 0
    assert samples[prefix + "event_age_seconds", "A", None] >= 0
    assert samples[prefix + "query_seconds_count", None, None] == 1
    assert samples[prefix + "groups_total", None, None] > 0
    assert samples[prefix + "failures_total", None, None] == 0
    assert samples[prefix + "map_used_bytes", None, None] > 0


async def test_metrics_count_what_was_skipped_by_reason(
    api: Api, publishers: Any, engine: Any, publish: Any
) -> None:
    publisher = publishers()
    await api.register("A", publisher, block_size=16)
    publish(api, "A", publisher, engine(1, 4).stored(PROMPT))
    families = text_string_to_metric_families(await api.get("/metrics"))
    skipped = [
        one for family in families for one in family.samples if one.name == "warmroute_indexer_skipped_total"
    ]
    assert [(one.labels, one.value) for one in skipped] == [
        ({"instance": "A", "rank": "0", "reason": "block_size"}, 7)
    ]


async def test_op10_nothing_shows_tokens_or_salts(
    api: Api, publishers: Any, engine: Any, prompt: Any, publish: Any, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = publishers()
    token = 1_234_567_891
    tokens = [token] * 28
    with caplog.at_level(logging.DEBUG):
        await api.register("A", publisher, additional_salt=SALT)
        publish(api, "A", publisher, engine().stored(prompt(tuple(tokens), None, ((0, (SALT,)),))))
        publish(api, "A", publisher, engine().stored(prompt((*tokens, 5), None, ((0, (SALT + "2",)),)), 3))
        body: dict[str, Any] = {"model_name": "m", "token_ids": tokens, "cache_salt": SALT}
        shown = [
            await api.post("/query", body),
            await api.post("/debug/explain", body),
            await api.get("/debug/replicas"),
            await api.get("/workers"),
            await api.get("/metrics"),
            await api.call("POST", "/query", body | {"token_ids": [*tokens, -1]}),
            await api.call("POST", "/query", body | {"cache_salt": [SALT]}),
            await api.call("POST", "/query", body | {"model_name": "other"}),
        ]
    assert shown[0]["scores"] == {"A": {"0": 28}}
    text = json.dumps(shown) + caplog.text
    assert SALT not in text
    assert str(token) not in text
    assert token.to_bytes(4, "little") not in (api.indexer.writer.path / "data.mdb").read_bytes()
