"""The workload: the same for every policy, and measured as a client sees it."""

from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web

from simulator import workload
from simulator.engine import Engine
from simulator.errors import WorkloadError
from simulator.settings import EngineSettings
from simulator.tokenizer import render
from simulator.workload import Conversation, Shape, conversations

QUICK = EngineSettings(listen="127.0.0.1:0", prefill_rate=1e6, decode_rate=1e4, blocks=20_000)


def test_the_workload_is_the_one_of_its_seed() -> None:
    assert conversations(Shape()) == conversations(Shape())
    assert conversations(Shape()) != conversations(Shape(seed=2))


def test_the_workload_has_the_shape_that_was_asked_for() -> None:
    made = conversations(Shape())
    assert len(made) == 48
    assert len({one.system for one in made}) == 8
    assert {len(one.turns) for one in made} == {4}
    prompts = [
        render([{"role": "system", "content": one.system}, {"role": "user", "content": turn}])
        for one in made
        for turn in one.turns
    ]
    assert {len(prompt) for prompt in prompts} == {1650}
    assert len({turn for one in made for turn in one.turns}) == 192
    starts = [one.starts for one in made]
    assert starts == sorted(starts)
    many = conversations(Shape(conversations=4000))
    assert many[-1].starts == pytest.approx(4000 / 8.2, rel=0.05)


async def test_every_turn_but_the_first_hits_all_whole_blocks_of_the_turn_before() -> None:
    shape = Shape(systems=1, system_tokens=100, conversations=1, turns=3, new_tokens=30, starts_per_s=1e3)
    answered: list[None] = []
    async with Engine(QUICK) as engine:
        results = await workload.run(
            engine.url, "model", conversations(shape), 8, lambda: answered.append(None)
        )
    assert len(results) == len(answered) == shape.requests
    for before, after in pairwise(results):
        assert after.cached_tokens == (before.prompt_tokens + 8 - 1) // 16 * 16
    assert all(result.ttft_s > 0 for result in results)
    assert results[0].replica is None


async def test_what_a_router_says_in_headers_is_in_the_results() -> None:
    chunks = (
        b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\nda'
        b'ta: {"choices":[{"delta":{"content":"x"}}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,'
        b'"prompt_tokens_details":{"cached_tokens":4}}}\n\ndata: [DONE]\n\n'
    )
    headers = {"x-warmroute-replica": "r1", "x-warmroute-reason": "fallback: no index"}
    (result,) = await against(web.Response(body=chunks, headers=headers))
    assert (result.replica, result.fallback) == ("r1", "fallback: no index")
    assert (result.prompt_tokens, result.cached_tokens) == (9, 4)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (503, b"no replica", "status 503: no replica"),
        (200, b'data: {"choices":[]}\n\n', "ended without"),
        (200, b'data: {"choices":[]}\n\ndata: [DONE]\n\n', "an answer of None"),
        (200, b'data: {"error":{"message":"gone"}}\n\n', "gone"),
    ],
)
async def test_a_request_that_does_not_succeed_ends_the_run(status: int, body: bytes, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        await against(web.Response(status=status, body=body))


async def test_nobody_at_the_url_is_an_error_that_names_it() -> None:
    with pytest.raises(WorkloadError, match=r"http://127\.0\.0\.1:1/v1/chat"):
        await workload.run("http://127.0.0.1:1", "model", [Conversation(0.0, "a", ["b"])], 1)


async def against(answer: web.Response) -> Any:
    async def respond(_: web.BaseRequest) -> web.Response:
        return answer

    runner = web.ServerRunner(web.Server(respond))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return await workload.run(url, "model", [Conversation(0.0, "a", ["b"])], 1)
    finally:
        await runner.cleanup()
