"""What answers say of the index: metrics, feedback to the indexer, and trust."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.errors import IndexerUnreachableError
from indexer.feedback_api import _resolve
from indexer.keys import keys_behind, local_hashes, prompt_extras, root_key
from indexer.layout import StreamRecord
from indexer.outcome import Outcome, refused
from indexer.registration import Registration
from router.feedback import LARGE_TOKENS, MAX_ANSWERS, MAX_TOKENS, Feedback, Learned
from router.metrics import RouterMetrics

PROMPT = list(range(100))
TEXT = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"text":"b","finish_reason":"length"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def answers(kit: Any, cached: int | None) -> Any:
    """Streams and bodies whose usage says ``cached`` tokens of all, as vLLM writes them."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 2}
        if cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if not body.get("stream"):
            return web.json_response({"choices": [], "usage": usage})
        told = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        asked = (body.get("stream_options") or {}).get("include_usage")
        stream: web.StreamResponse = await kit.stream(
            request, [TEXT, FINISH, *([told] if asked else []), DONE]
        )
        return stream

    return answer


async def streamed(router: Any, prompt: Any = PROMPT, **fields: Any) -> bytes:
    body = {"model": "m", "prompt": prompt, "stream": True, **fields}
    async with router.client.post(f"{router.url}/v1/completions", json=body) as response:
        assert response.status == 200
        content: bytes = await response.read()
        return content


async def test_tr06_with_a_stale_index_the_reported_tokens_drop_and_the_predicted_do_not(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    lookup = kit.lookup(kit.matched("e0", 96), kit.matched("e1", 64))
    fresh, stale = answers(kit, 96), answers(kit, 0)
    engine, other = await start_engine(answer=fresh), await start_engine(answer=fresh)
    router = await start_router(engine, other, lookup=lookup)
    counts = []
    for answer in (fresh, stale):
        engine.answer = answer
        for _ in range(2):
            assert await streamed(router) == TEXT + FINISH + DONE
        names = ("best_available_tokens_total", "matched_tokens_total", "cached_tokens_total")
        counts.append([await router.metric(name, replica="e0") for name in names])
    assert counts == [[192, 192, 192], [384, 384, 192]]
    outcome = (await router.get("/debug/decisions?limit=1"))["decisions"][0]
    told = (outcome["best_available_tokens"], outcome["matched_tokens"])
    assert (*told, outcome["outcome"]["actual_cached_tokens"]) == (96, 96, 0)


async def test_a_stream_with_a_length_loses_its_usage_chunk_too_and_none_comes_compressed(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    async def answer(request: web.Request) -> web.Response:
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":100}}\n\n'
        response = web.Response(body=TEXT + FINISH + usage + DONE, content_type="text/event-stream")
        if "gzip" in request.headers["Accept-Encoding"]:
            response.enable_compression(web.ContentCoding.gzip)
        return response

    engine = await start_engine(answer=answer)
    router = await start_router(engine, lookup=kit.lookup(kit.matched("e0", 96)))
    assert await streamed(router) == TEXT + FINISH + DONE


async def test_usage_is_kept_from_clients_of_an_engine_that_names_no_coding_at_all(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    async def answer(request: web.Request) -> web.Response:
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":100}}\n\n'
        headers = {"Content-Type": "text/event-stream", "Content-Encoding": "identity"}
        return web.Response(body=TEXT + FINISH + usage + DONE, headers=headers)

    engine = await start_engine(answer=answer)
    router = await start_router(engine, lookup=kit.lookup(kit.matched("e0", 96)))
    assert await streamed(router) == TEXT + FINISH + DONE


async def test_usage_is_asked_for_and_kept_from_clients_that_did_not_ask(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    engine = await start_engine(answer=answers(kit, 96))
    router = await start_router(engine, lookup=kit.lookup(kit.matched("e0", 96)))
    assert await streamed(router) == TEXT + FINISH + DONE
    assert json.loads(engine.bodies[-1])["stream_options"] == {"include_usage": True}
    assert await router.metric("compared_total", replica="e0", outcome="exact") == 1
    own = await streamed(router, stream_options={"include_usage": True})
    assert b'"usage"' in own
    assert await router.metric("compared_total", replica="e0", outcome="exact") == 2


@pytest.mark.parametrize("passed", [TEXT, TEXT + FINISH], ids=["an event", "the one that waits for the next"])
async def test_px07_a_stream_that_dies_in_mid_event_ends_with_an_error_that_can_be_read(
    start_engine: Any, start_router: Any, kit: Any, passed: bytes
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        stream: web.StreamResponse = await kit.stream(request, [passed, TEXT[:20]])
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return stream

    engine = await start_engine(answer=answer)
    router = await start_router(engine, lookup=kit.lookup(kit.matched("e0", 96)))
    content = await streamed(router)
    assert "stream_options" in json.loads(engine.bodies[-1])
    assert content.startswith(passed + b"data: {")
    assert json.loads(content.removeprefix(passed).removeprefix(b"data: "))["error"]["code"] == 502


@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"prompt_logprobs": 1}, {"prompt": [[1, 2], [3]]}, {"echo": True, "logprobs": 1}],
)
async def test_nothing_is_asked_of_requests_that_say_nothing_of_the_cache(
    start_engine: Any, start_router: Any, kit: Any, fields: dict[str, Any]
) -> None:
    engine = await start_engine(answer=answers(kit, 0))
    router = await start_router(engine, lookup=kit.lookup(kit.matched("e0", 96)))
    await streamed(router, **fields)
    assert "stream_options" not in json.loads(engine.bodies[-1])
    (told,) = [f for f in router.parts.metrics.registry.collect() if f.name == "warmroute_router_feedback"]
    assert sum(sample.value for sample in told.samples) == 0


@pytest.mark.parametrize("settings", [{"ask_usage": False}, {"lookup": None}])
async def test_nothing_is_asked_when_it_is_switched_off_or_there_is_no_index(
    start_engine: Any, start_router: Any, kit: Any, settings: dict[str, Any]
) -> None:
    engine = await start_engine(answer=answers(kit, 0))
    router = await start_router(engine, **({"lookup": kit.lookup(kit.matched("e0", 96))} | settings))
    await streamed(router)
    assert "stream_options" not in json.loads(engine.bodies[-1])


async def test_a_stream_that_breaks_off_still_ends_with_the_error_event(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        response = await kit.stream(request, [TEXT, FINISH])
        request.transport.abort()  # type: ignore[union-attr]
        return response  # type: ignore[no-any-return]

    router = await start_router(await start_engine(answer=breaks), lookup=kit.lookup(kit.matched("e0", 96)))
    content = await streamed(router)
    assert content.startswith(TEXT + FINISH + b'data: {"error"')


class Indexer:
    """``/feedback`` as the indexer answers it."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.status = 200

    async def feedback(self, request: web.Request) -> web.Response:
        self.told.append(await request.json())
        return web.json_response([{"status": "taken"} for _ in self.told[-1]], status=self.status)

    async def workers(self, _: web.Request) -> web.Response:
        return web.json_response([])

    async def start(self) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.add_routes([web.post("/feedback", self.feedback), web.get("/workers", self.workers)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def test_the_indexer_is_told_what_was_cached_as_of_the_decision(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    indexer = Indexer()
    runner, url = await indexer.start()
    engine = await start_engine(answer=answers(kit, 32), cards=[{"id": "m"}, {"id": "sql", "parent": "m"}])
    router = await start_router(engine, lookup=kit.lookup(kit.matched("e0", 96)), indexer=url)
    await streamed(router, model="sql", cache_salt="s4lt")
    await kit.wait_until(lambda: len(indexer.told) == 1, "it is told")
    (told,) = indexer.told[0]
    # 32 tokens are two blocks; the third is the first that was not there.
    hashes = [int.from_bytes(local) for local in local_hashes(array("I", PROMPT[:48]), 16)]
    assert told == {
        "instance_id": "e0",
        "model_name": "m",
        "lora_name": "sql",
        "cache_salt": "s4lt",
        "generation": 1,
        "sequence": 1,
        "block_hashes": hashes,
        "block_size": 16,
        "prompt_tokens": 100,
        "cached_tokens": 32,
        "predicted_tokens": 96,
    }
    assert await router.metric("feedback_total", outcome="taken") == 1
    await runner.cleanup()


async def test_a_replica_that_is_wrong_loses_its_advantage_when_no_indexer_is_told(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    lookup = kit.lookup(kit.matched("e0", 96), kit.matched("e1", 64))
    wrong, right = await start_engine(answer=answers(kit, 0)), await start_engine(answer=answers(kit, 64))
    router = await start_router(wrong, right, lookup=lookup)
    replicas = []
    judged = router.parts.metrics.feedback.labels("no_indexer")
    for number in range(12):
        replicas.append((await router.complete(PROMPT)).headers["x-warmroute-replica"])
        await kit.wait_until(lambda before=number: judged._value.get() > before, "it is judged")
    assert replicas[0] == "e0"
    assert replicas[-4:] == ["e1"] * 4
    reason = (await router.complete(PROMPT)).headers["x-warmroute-reason"]
    assert reason.startswith("64 of 100 prompt tokens cached")
    # Right again, it is asked for what it has.
    for _ in range(12):
        router.parts.trust.learn(("e0", 0), 96, 96)
    assert (await router.complete(PROMPT)).headers["x-warmroute-replica"] == "e0"


def learned(cached: int, stream: tuple[str, int] = ("a", 0), tokens: int = 100) -> Learned:
    return Learned(
        stream=stream,
        model="m",
        lora_name=None,
        cache_salt=None,
        ids=array("I", [1] * tokens),
        generation=1,
        sequence=1,
        predicted_tokens=96,
        cached_tokens=cached,
    )


class Client:
    """An indexer that is told: it answers, or fails, or never answers."""

    def __init__(self, answer: Outcome | Exception | None) -> None:
        self.answer = answer
        self.told = 0
        self.bodies: list[bytes] = []

    async def feedback_all(self, told: bytes, count: int) -> list[Outcome]:
        self.told += 1
        self.bodies.append(told)
        if self.answer is None:
            await asyncio.sleep(60)
            raise AssertionError
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer] * count


@pytest.mark.parametrize(
    ("answer", "outcome", "untold"),
    [
        (Outcome(), "taken", 0),
        (Outcome(reason="touched_since"), "taken", 0),
        (refused("too_old"), "too_old", 0),
        (refused("shard_down"), "shard_down", 1),
        (IndexerUnreachableError("gone"), "failed", 1),
    ],
)
async def test_what_the_indexer_says_is_counted_and_what_it_never_heard_is_ours_to_judge(
    kit: Any, answer: Any, outcome: str, untold: int
) -> None:
    left: list[Learned] = []
    metrics, client = RouterMetrics(), Client(answer)

    async def address() -> str:
        return "http://there"

    feedback = Feedback(address, lambda url: client, metrics, left.append)
    feedback.start()
    feedback.offer(learned(0))
    name, labels = "warmroute_router_feedback_total", {"outcome": outcome}
    await kit.wait_until(lambda: metrics.registry.get_sample_value(name, labels) == 1, "it is counted")
    assert len(left) == untold
    await feedback.close()


@pytest.mark.parametrize(("tokens", "most"), [(1, MAX_ANSWERS), (MAX_TOKENS // 4, 4)])
async def test_the_queue_is_bounded_and_what_does_not_fit_is_dropped_and_counted(
    tokens: int, most: int
) -> None:
    left: list[Learned] = []
    metrics = RouterMetrics()

    async def address() -> str:
        return "http://there"

    feedback = Feedback(address, lambda url: Client(None), metrics, left.append)
    offered = learned(0, tokens=tokens)
    for _ in range(most + 3):
        feedback.offer(offered)
    assert metrics.registry.get_sample_value("warmroute_router_feedback_total", {"outcome": "dropped"}) == 3
    assert len(left) == 3


async def test_answers_of_a_moment_are_told_in_one_call(kit: Any) -> None:
    metrics, client = RouterMetrics(), Client(Outcome())

    async def address() -> str:
        return "http://there"

    feedback = Feedback(address, lambda url: client, metrics, lambda _: None)
    feedback.start()
    for number in range(5):
        feedback.offer(learned(0, tokens=LARGE_TOKENS + number))
    name, labels = "warmroute_router_feedback_total", {"outcome": "taken"}
    await kit.wait_until(lambda: metrics.registry.get_sample_value(name, labels) == 5, "all are told")
    assert client.told == 1
    assert [told["prompt_tokens"] for told in json.loads(client.bodies[0])] == [
        LARGE_TOKENS + number for number in range(5)
    ]
    await feedback.close()


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 200), st.integers(0, 24))
def test_the_indexer_learns_the_same_from_hashes_as_from_the_whole_prompt(
    tokens: int, cached: int, block_size: int
) -> None:
    answer = msgspec.structs.replace(
        learned(min(cached, tokens), tokens=tokens), block_size=block_size, cache_salt="s"
    )
    told = answer.told()
    size = block_size or 16
    keys = keys_behind(root_key("m", None, size), answer.ids, size, prompt_extras("s"))
    resolved = _resolve(
        told, StreamRecord(0, 1, Registration(instance_id="a", endpoint="tcp://x:1", model_name="m")), size
    )
    there = min(answer.cached_tokens // size, len(keys))
    usable = (tokens - 1) // size
    assert resolved.keys[:there] == keys[:there]
    lacks = there < usable
    assert (there < min(resolved.usable, len(resolved.keys))) == lacks
    if lacks:
        assert resolved.keys[there] == keys[there]
