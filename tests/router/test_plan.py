"""What goes wrong in front of the relay, and what the answer then says."""

from __future__ import annotations

import json
import sys
from array import array
from bisect import bisect_left
from typing import Any

import msgspec
import pytest
from aiohttp import web

from router.prompt import CHAT_PATH

PROMPT = list(range(100))


async def test_the_request_lands_where_its_prefix_is_and_the_headers_say_so(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    lookup = kit.lookup(kit.matched("e0", 16), kit.matched("e1", 96))
    router = await start_router(await start_engine(), await start_engine(), lookup=lookup)
    headers = (await router.complete(PROMPT)).headers
    said = {name: value for name, value in headers.items() if name.startswith("x-warmroute-")}
    assert said == {
        "x-warmroute-replica": "e1",
        "x-warmroute-policy": "cache-aware",
        "x-warmroute-matched-tokens": "96",
        "x-warmroute-prompt-tokens": "100",
        "x-warmroute-reason": "96 of 100 prompt tokens cached, 0 queued, 0 requests in flight",
    }
    assert lookup.asked == [("m", array("I", PROMPT), None, None)]


@pytest.mark.parametrize(
    ("held", "prompt_tokens", "usable"), [(96, 96, 80), (96, 97, 96), (160, 100, 96), (16, 16, 0)]
)
async def test_the_last_token_of_a_prompt_is_never_a_hit(
    start_engine: Any, start_router: Any, kit: Any, held: int, prompt_tokens: int, usable: int
) -> None:
    router = await start_router(await start_engine(), lookup=kit.lookup(kit.matched("e0", held)))
    response = await router.complete(PROMPT[:prompt_tokens])
    assert response.headers["x-warmroute-matched-tokens"] == str(usable)


async def test_ix06_block_sizes_may_differ_between_replicas(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    lookup = kit.lookup(kit.matched("e0", 96, block_size=16), kit.matched("e1", 64, block_size=64))
    router = await start_router(await start_engine(), await start_engine(), lookup=lookup)
    assert (await router.complete(PROMPT)).headers["x-warmroute-replica"] == "e0"


async def test_ev27_an_adapter_is_looked_up_as_base_model_and_lora_name(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    lookup = kit.lookup(kit.matched("e1", 96))
    plain = await start_engine()
    adapted = await start_engine(cards=[{"id": "m"}, {"id": "alias"}, {"id": "sql", "parent": "m"}])
    router = await start_router(plain, adapted, lookup=lookup)
    for model in ("sql", "alias"):
        assert (await router.complete(PROMPT, model=model)).headers["x-warmroute-replica"] == "e1"
    assert [(asked[0], asked[2]) for asked in lookup.asked] == [("m", "sql"), ("m", None)]


async def test_ev29_the_cache_salt_reaches_the_lookup_and_nothing_else(
    start_engine: Any, start_router: Any, kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lookup = kit.lookup(kit.matched("e0", 96))
    router = await start_router(await start_engine(), lookup=lookup)
    with caplog.at_level("DEBUG"):
        response = await router.complete("my secret prompt", cache_salt="s4lt", stream=True)
    assert lookup.asked[0][3] == "s4lt"
    shown = json.dumps(await router.get("/debug/decisions")) + router.parts.metrics.render().decode()
    shown += json.dumps(await router.get("/debug/replicas")) + str(response.headers) + caplog.text
    assert "s4lt" not in shown
    assert "secret" not in shown


async def test_a_prompt_logprobs_request_is_told_to_hit_nothing_and_asks_nothing(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    lookup = kit.lookup(kit.matched("e0", 96))
    router = await start_router(await start_engine(), lookup=lookup)
    headers = (await router.complete(PROMPT, prompt_logprobs=1)).headers
    assert (headers["x-warmroute-matched-tokens"], headers["x-warmroute-prompt-tokens"]) == ("0", "100")
    assert not headers["x-warmroute-reason"].startswith("fallback")
    assert lookup.asked == []


async def test_rq16_an_index_that_fails_is_said_in_header_metric_and_decision(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    lookup = kit.lookup()
    lookup.failure = kit.failure("indexer-unreachable", "connection refused")
    router = await start_router(await start_engine(), lookup=lookup)
    headers = (await router.complete(PROMPT)).headers
    assert headers["x-warmroute-reason"].startswith("fallback: the indexer cannot be reached; least load")
    assert (headers["x-warmroute-prompt-tokens"], headers["x-warmroute-matched-tokens"]) == ("100", "0")
    assert await router.metric("decisions_total", policy="cache-aware", mode="fallback") == 1
    assert await router.metric("fallback_total", reason="indexer-unreachable") == 1
    decision = (await router.get("/debug/decisions"))["decisions"][0]
    assert (decision["mode"], decision["fallback"]) == ("fallback", "indexer-unreachable")


async def test_px14_a_lookup_that_raises_anything_still_serves(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    lookup = kit.lookup()
    lookup.failure = ZeroDivisionError("surprise")
    router = await start_router(await start_engine(), lookup=lookup)
    response = await router.complete(PROMPT)
    assert response.status == 200
    assert response.headers["x-warmroute-reason"].startswith("fallback: the index failed")


async def test_px14_a_lookup_that_answers_nonsense_still_serves(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    lookup = kit.lookup()
    lookup.matches = [None]
    router = await start_router(await start_engine(), lookup=lookup)
    response = await router.complete(PROMPT)
    assert (response.status, response.headers["x-warmroute-reason"].split(";")[0]) == (
        200,
        "fallback: the index failed in an unexpected way",
    )


async def test_ix03_an_unknown_replica_in_the_index_is_never_chosen(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    router = await start_router(await start_engine(), lookup=kit.lookup(kit.matched("ghost", 96)))
    headers = (await router.complete(PROMPT)).headers
    assert headers["x-warmroute-replica"] == "e0"
    assert headers["x-warmroute-reason"].startswith("fallback: the index names only unknown replicas")
    assert await router.metric("unknown_streams_total") == 1


async def test_an_unknown_replica_beside_known_ones_is_ignored_and_named_once(
    start_engine: Any, start_router: Any, kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lookup = kit.lookup(kit.matched("ghost", 96), kit.matched("e0", 32))
    router = await start_router(await start_engine(), lookup=lookup)
    answers = [(await router.complete(PROMPT)).headers for _ in range(3)]
    assert {headers["x-warmroute-matched-tokens"] for headers in answers} == {"32"}
    reasons = [headers["x-warmroute-reason"] for headers in answers]
    assert reasons[0].endswith("; ignored in the index: ghost")
    assert not any("ghost" in reason or reason.startswith("fallback") for reason in reasons[1:])
    assert caplog.text.count("ghost") == 1
    assert await router.metric("unknown_streams_total") == 3
    assert (await router.get("/debug/replicas"))["unknown_in_index"] == ["ghost"]


async def test_a_model_that_the_index_does_not_know_is_a_fallback(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    router = await start_router(await start_engine(), lookup=kit.lookup())
    reason = (await router.complete(PROMPT)).headers["x-warmroute-reason"]
    assert reason.startswith("fallback: the index knows no stream of the model")


@pytest.mark.parametrize("state", ["unverified", "offline", "partial"])
async def test_streams_without_trust_are_not_credited(
    start_engine: Any, start_router: Any, kit: Any, state: str
) -> None:
    lookup = kit.lookup(
        kit.matched("e0", 96, state=state, weight=0.0), kit.matched("e1", 0, state=state, weight=0.0)
    )
    router = await start_router(await start_engine(), await start_engine(), lookup=lookup)
    headers = [(await router.complete(PROMPT)).headers for _ in range(20)]
    assert {h["x-warmroute-replica"] for h in headers} == {"e0", "e1"}
    assert {h["x-warmroute-matched-tokens"] for h in headers} == {"0"}
    assert all(
        h["x-warmroute-reason"].startswith("fallback: no stream in the index can be trusted") for h in headers
    )
    assert not any("cached" in h["x-warmroute-reason"] for h in headers)


async def test_rq16_matched_is_what_the_map_holds_and_the_reason_says_how_far_it_is_trusted(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    lookup = kit.lookup(kit.matched("e0", 96, state="partial", weight=0.25))
    router = await start_router(await start_engine(), lookup=lookup)
    headers = (await router.complete(PROMPT)).headers
    assert headers["x-warmroute-matched-tokens"] == "96"
    assert headers["x-warmroute-reason"].startswith("96 of 100 prompt tokens cached, trusted 25 %, ")
    candidate = (await router.get("/debug/decisions"))["decisions"][0]["ranked"][0]["candidate"]
    assert (candidate["matched_tokens"], candidate["credited_tokens"]) == (96, 24)


async def test_one_stream_without_trust_beside_a_trusted_one_is_mentioned(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    lookup = kit.lookup(kit.matched("e0", 96, state="unverified", weight=0.0), kit.matched("e1", 32))
    router = await start_router(await start_engine(), await start_engine(), lookup=lookup)
    headers = (await router.complete(PROMPT)).headers
    assert (headers["x-warmroute-replica"], headers["x-warmroute-matched-tokens"]) == ("e1", "32")
    assert headers["x-warmroute-reason"].endswith("1 of 2 streams not trusted now (unverified)")


async def test_an_engine_without_tokenize_is_served_without_counts(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    router = await start_router(await start_engine(tokenize=None), lookup=kit.lookup(kit.matched("e0", 96)))
    headers = (await router.complete("hello")).headers
    assert headers["x-warmroute-reason"].startswith("fallback: the engine has no /tokenize")
    assert "x-warmroute-prompt-tokens" not in headers
    assert "x-warmroute-matched-tokens" not in headers
    assert await router.metric("fallback_total", reason="tokenize-missing") == 1


async def test_ev28_images_are_routed_by_load(start_engine: Any, start_router: Any, kit: Any) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({})

    router = await start_router(await start_engine(answer=answer), lookup=kit.lookup(kit.matched("e0", 96)))
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    body = {"model": "m", "messages": [{"role": "user", "content": image}]}
    async with router.client.post(f"{router.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200
        assert response.headers["x-warmroute-reason"].startswith(
            "fallback: messages with other than text parts"
        )


async def test_ev28_an_image_weighs_as_one_and_not_by_the_bytes_of_its_file(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({})

    engine = await start_engine(answer=answer)
    router = await start_router(engine, lookup=kit.lookup(kit.matched("e0", 96)))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 500_000}}
    content = [{"type": "text", "text": "x" * 400}, image]
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    async with router.client.post(f"{router.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200
    decision = (await router.get("/debug/decisions"))["decisions"][0]
    assert decision["prefill_tokens"] == 100 + 1000
    assert engine.tokenized == 0, "an engine would have to look at the image"


async def test_without_an_index_cache_aware_says_that_it_cannot(start_engine: Any, start_router: Any) -> None:
    router = await start_router(await start_engine())
    assert (
        (await router.complete(PROMPT))
        .headers["x-warmroute-reason"]
        .startswith("fallback: no index is configured")
    )


async def test_without_an_index_round_robin_neither_complains_nor_tokenises(
    start_engine: Any, start_router: Any
) -> None:
    engine = await start_engine()
    router = await start_router(engine, policy="round-robin")
    headers = (await router.complete("hello")).headers
    assert headers["x-warmroute-reason"] == "its turn"
    assert "x-warmroute-prompt-tokens" not in headers
    assert engine.tokenized == 0
    assert (await router.complete(PROMPT)).headers["x-warmroute-prompt-tokens"] == "100"


async def test_ix11_no_form_of_prompt_is_a_fault_of_ours(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    router = await start_router(await start_engine(), lookup=kit.lookup(kit.matched("e0", 96)))
    prompts: list[Any] = [
        "x",
        ["x", "y"],
        [1, 2],
        [[1, 2], [3]],
        "",
        [],
        [[]],
        None,
        5,
        {"a": 1},
        [None],
        [-1],
    ]
    for prompt in prompts:
        assert (await router.complete(prompt)).status == 200


async def test_prediction_and_report_are_compared(start_engine: Any, start_router: Any, kit: Any) -> None:
    async def answer(_: web.Request) -> web.Response:
        usage = {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 80}}
        return web.json_response({"choices": [], "usage": usage})

    lookup = kit.lookup(kit.matched("e0", 96))
    router = await start_router(await start_engine(answer=answer), lookup=lookup)
    await router.complete(PROMPT)
    for name, value in (("matched", 96), ("best_available", 96), ("cached", 80), ("prompt", 100)):
        assert await router.metric(f"{name}_tokens_total", replica="e0") == value
    assert await router.metric("compared_total", replica="e0", outcome="over") == 1
    outcome = (await router.get("/debug/decisions"))["decisions"][0]["outcome"]
    assert outcome["actual_cached_tokens"] == 80
    await router.complete(PROMPT, n=2)
    await router.complete(PROMPT[:50])
    assert await router.metric("cached_tokens_total", replica="e0") == 80
    assert await router.metric("token_count_mismatch_total", replica="e0") == 1


class Recorder:
    """Keeps what it is told, and fails at it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_send(self, sent: Any) -> None:
        self.seen.append(sent)

    def on_done(self, done: Any) -> None:
        self.seen.append(done)
        raise RuntimeError("a recorder's fault costs no request")


async def test_a_recorder_sees_each_request_and_its_outcome_without_keys(
    start_engine: Any, start_router: Any
) -> None:
    recorder = Recorder()
    router = await start_router(await start_engine(), recorder=recorder)
    headers = {"Authorization": "Bearer key", "X-Session-ID": "s"}
    body = json.dumps({"model": "m", "prompt": PROMPT}).encode()
    async with router.client.post(f"{router.url}/v1/completions", data=body, headers=headers) as response:
        assert response.status == 200
    sent, done = recorder.seen
    assert (sent.replica, sent.path, sent.body, sent.tokens) == (
        "e0",
        "/v1/completions",
        body,
        array("I", PROMPT),
    )
    assert sent.headers["X-Session-ID"] == "s"
    assert "key" not in str(sent.headers)
    assert (done.request_id, done.status, done.complete, done.answer.text) == (
        sent.request_id,
        200,
        True,
        "ok",
    )


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("policy", ["round-robin", "random", "session", "prefix-hash"])
async def test_a_recorder_has_the_tokens_also_where_the_policy_takes_none(
    start_engine: Any, start_router: Any, policy: str
) -> None:
    recorder, engine = Recorder(), await start_engine()
    router = await start_router(engine, recorder=recorder, policy=policy)
    async with router.client.post(
        f"{router.url}{CHAT_PATH}", json=CHAT, headers={"x-session-id": "s"}
    ) as response:
        assert (response.status, "fallback" in response.headers["x-warmroute-reason"]) == (200, False)
    sent, _ = recorder.seen
    assert sent.tokens.tolist() == list(json.dumps(CHAT["messages"]).encode())
    plain = await start_router(engine, policy=policy)
    async with plain.client.post(f"{plain.url}{CHAT_PATH}", json=CHAT) as response:
        assert response.status == 200
    assert engine.tokenized == 1, "nobody else asks for them"


async def test_tokens_for_a_recorder_are_no_matter_of_the_choice(
    start_engine: Any, start_router: Any
) -> None:
    """``prefix-hash`` goes by a text where its tokens are not known."""
    recorder, engines = Recorder(), [await start_engine() for _ in range(4)]
    recording = await start_router(*engines, policy="prefix-hash", recorder=recorder)
    plain = await start_router(*engines, policy="prefix-hash")
    prompts = [f"prompt {number}" for number in range(6)]
    chosen = [
        [(await router.complete(prompt)).headers["x-warmroute-replica"] for prompt in prompts]
        for router in (recording, plain)
    ]
    assert chosen[0] == chosen[1]
    assert recorder.seen[0].tokens.tolist() == list(b"prompt 0")
    for engine in engines:
        engine.tokenize = None
    assert "fallback" not in (await recording.complete("hello")).headers["x-warmroute-reason"]
    assert recorder.seen[-2].tokens is None


async def test_ix11_what_a_path_does_not_know_is_no_prompt(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    lookup = kit.lookup(kit.matched("e0", 16))
    router = await start_router(await start_engine(), lookup=lookup)
    await router.complete(PROMPT, messages=[{"role": "user", "content": "x"}])
    assert [asked[1] for asked in lookup.asked] == [array("I", PROMPT)]
    body = {"model": "m", "prompt": PROMPT}
    async with router.client.post(f"{router.url}{CHAT_PATH}", json=body) as response:
        await response.read()
    assert len(lookup.asked) == 1, "a chat without messages is for the engine to refuse"


def deepest_json() -> int:
    """How many arrays in each other are read: what the Python at hand leaves of its stack here."""

    def is_read(depth: int) -> bool:
        try:
            msgspec.json.decode(b"[" * depth + b"]" * depth)
        except RecursionError:
            return False
        return True

    return bisect_left(range(1_000_000), True, key=lambda depth: not is_read(depth)) - 1


@pytest.mark.parametrize("policy", ["cache-aware", "session", "prefix-hash", "round-robin"])
@pytest.mark.parametrize("path", [CHAT_PATH, "/v1/messages"])
async def test_px13_json_that_is_too_deep_to_be_read_twice_is_served_by_load(
    start_engine: Any, start_router: Any, policy: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    router = await start_router(await start_engine(), policy=policy)
    statuses, reasons = set(), set()
    deepest = deepest_json()
    for depth in (*range(deepest - 90, deepest, 2), 2 * deepest):
        body = {"model": "m", "messages": [{"role": "user", "content": "DEEP"}]}
        data = json.dumps(body).replace('"DEEP"', "[" * depth + "]" * depth)
        url, headers = f"{router.url}{path}", {"Content-Type": "application/json"}
        async with router.client.post(url, data=data, headers=headers) as response:
            statuses.add(response.status)
            reasons.add(response.headers.get("x-warmroute-reason", "").partition(":")[0])
    assert "failed unexpectedly" not in caplog.text
    if path == CHAT_PATH:
        assert statuses <= {200, 400}, "beyond some depth it is no JSON, as for vLLM"
        if sys.version_info < (3, 12):  # Newer ones pass over more in a body than they read of it.
            assert statuses == {200, 400}
            assert "fallback" in reasons
