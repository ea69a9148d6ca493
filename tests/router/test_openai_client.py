"""The official ``openai`` client gets the same through the router as from the engine itself."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

openai = pytest.importorskip("openai")

MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Naïve ☀ forecast",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}}
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
HEAD = {"id": "chatcmpl-1", "created": 1, "model": "m"}


def whole(message: dict[str, Any], finish: str) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return {**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE}


def events(deltas: list[dict[str, Any]]) -> list[bytes]:
    chunks = [
        {**HEAD, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}
        for delta in deltas
    ]
    last = {**HEAD, "object": "chat.completion.chunk", "choices": [], "usage": USAGE}
    return [b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in [*chunks, last]] + [b"data: [DONE]\n\n"]


async def answer(request: web.Request) -> web.StreamResponse:
    """What vLLM would say; the model's name chooses the ending."""
    body = json.loads(await request.read())
    told = body.get("user", "")
    if told.isdecimal():
        error = {"message": f"told to: {told}", "type": "BadRequestError", "param": None, "code": int(told)}
        return web.json_response({"error": error}, status=int(told), headers={"Retry-After": "0"})
    if request.path == "/v1/embeddings":
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}]
        return web.json_response({"object": "list", "data": data, "model": "m", "usage": USAGE})
    call = {"content": None, "tool_calls": [CALL]}
    if not body.get("stream"):
        said = whole(call, "tool_calls") if body.get("tools") else whole({"content": "héllo"}, "stop")
        return web.json_response(said)
    deltas = [{"role": "assistant"}, {"content": "hé"}, {"content": "llo"}]
    if body.get("tools"):
        deltas = [{"tool_calls": [{"index": 0, **CALL}]}]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for event in events(deltas):
        await response.write(event)
        if told == "dies" and request.transport is not None:
            await asyncio.sleep(0.05)
            request.transport.abort()
            break
    return response


class Both:
    """A client of the engine itself, and one through a router."""

    def __init__(self, engine: Any, router: Any) -> None:
        self.engine, self.router = engine, router
        self.clients = [
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-client", max_retries=0)
            for url in (engine.url, router.url)
        ]

    async def close(self) -> None:
        for client in self.clients:
            await client.close()


@pytest.fixture
async def both(start_engine: Any, start_router: Any) -> AsyncIterator[Both]:
    engine = await start_engine(answer=answer)
    pair = Both(engine, await start_router(engine))
    yield pair
    await pair.close()


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "auto"}], ids=["chat", "tools"])
async def test_chat_and_tools_are_the_same_and_so_is_what_the_engine_gets(
    both: Both, more: dict[str, Any]
) -> None:
    said = [
        (await client.chat.completions.create(model="m", messages=MESSAGES, **more)).model_dump()
        for client in both.clients
    ]
    assert said[0] == said[1]
    assert bool(said[0]["choices"][0]["message"]["tool_calls"]) == bool(more)
    direct, relayed = both.engine.requests
    assert both.engine.bodies[0] == both.engine.bodies[1]
    for name in ("Authorization", "Content-Type", "Accept", "User-Agent", "X-Stainless-Lang"):
        assert direct.headers[name] == relayed.headers[name]


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}], ids=["chat", "tools"])
async def test_streams_are_the_same_chunk_by_chunk(both: Both, more: dict[str, Any]) -> None:
    said = []
    for client in both.clients:
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True, **more)
        said.append([chunk.model_dump() async for chunk in stream])
    assert said[0] == said[1]
    assert said[0][-1]["usage"]["total_tokens"] == 11


async def test_embeddings_and_models_are_the_same(both: Both) -> None:
    said = [(await client.embeddings.create(model="m", input="x")).model_dump() for client in both.clients]
    assert said[0] == said[1]
    listed = [[model.model_dump() async for model in await client.models.list()] for client in both.clients]
    assert listed[0] == listed[1]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422, 429, 500, 503])
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_are_of_the_same_class_and_say_the_same(both: Both, status: int, stream: bool) -> None:
    raised = []
    for client in both.clients:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(
                model="m", messages=MESSAGES, user=str(status), stream=stream
            )
        raised.append((type(caught.value), caught.value.status_code, caught.value.body, str(caught.value)))
    assert raised[0] == raised[1]


async def test_a_stream_that_dies_is_an_error_and_no_short_answer(both: Both) -> None:
    client = both.clients[1]
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, user="dies", stream=True)
    with pytest.raises(openai.APIError, match="broke off"):
        async for _ in stream:
            pass


async def test_what_the_router_refuses_itself_is_an_error_of_the_right_class(
    start_engine: Any, start_router: Any
) -> None:
    key = f"team={hashlib.sha256(b'sk-good').hexdigest()},rate=0.001"
    router = await start_router(await start_engine(answer=answer), api_key=(key,))

    async def send(key: str, model: str = "m") -> None:
        async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key=key, max_retries=0) as client:
            await client.chat.completions.create(model=model, messages=MESSAGES)

    with pytest.raises(openai.AuthenticationError):
        await send("sk-bad")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await send("sk-good", "nobody-has-it")
    with pytest.raises(openai.RateLimitError):
        await send("sk-good")
    empty = await start_router()
    async with openai.AsyncOpenAI(base_url=f"{empty.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES)
    assert caught.value.status_code == 503
