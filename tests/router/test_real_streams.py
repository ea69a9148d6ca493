"""Streams of a real engine, byte for byte as it writes them, though usage is asked for behind the client's
back. Where the engine's URL is in WARMROUTE_ENGINE_URL, and it takes tools (vLLM: with a --tool-call-parser).
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import aiohttp
import pytest

from router import relay
from router.usage import UnaskedUsage

URL = os.environ.get("WARMROUTE_ENGINE_URL", "")
pytestmark = pytest.mark.skipif(not URL, reason="no engine in WARMROUTE_ENGINE_URL")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ATTEMPTS = 6
"""An engine that is ahead of whoever reads puts several tokens into one event."""
_OF_THE_REQUEST = re.compile(rb'"(?:id|created|request_id)": ?(?:"[^"]*"|\d+)')
_USAGE_CHUNK = re.compile(rb'"choices": ?\[\],')

LONG = " ".join(f"Fact {number}: the cache of replica {number} is warm." for number in range(12))
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}
WEATHER = {"type": "function", "function": {"name": "weather"}}
OPTIONS: dict[str, Any] = {
    "none": {},
    "null": {"stream_options": None},
    "empty": {"stream_options": {}},
    "false": {"stream_options": {"include_usage": False}},
    "null usage": {"stream_options": {"include_usage": None}},
    "true": {"stream_options": {"include_usage": True}},
    "true and each": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "each alone": {"stream_options": {"continuous_usage_stats": True}},
    "false and each": {"stream_options": {"include_usage": False, "continuous_usage_stats": True}},
}
ASKED = {"none", "null", "empty", "false", "null usage", "each alone", "false and each"}
"""Those in which the client does not want usage, so the router asks for it and takes it out."""
MORE: dict[str, tuple[str, dict[str, Any], bool]] = {
    "chat": (CHAT, {}, True),
    "chat, logprobs": (CHAT, {"logprobs": True, "top_logprobs": 2}, True),
    "chat, stop": (CHAT, {"stop": ["the", "."], "max_tokens": 24}, True),
    "chat, stop in the text": (CHAT, {"stop": ["the"], "include_stop_str_in_output": True}, True),
    "chat, tools left alone": (CHAT, {"tools": [TOOL], "tool_choice": "none"}, True),
    "chat, a tool": (CHAT, {"tools": [TOOL], "tool_choice": WEATHER, "max_tokens": 40}, True),
    "chat, ids": (CHAT, {"return_token_ids": True}, True),
    "chat, one token": (CHAT, {"max_tokens": 1}, True),
    "chat, two": (CHAT, {"n": 2, "seed": 7}, False),
    "chat, log probabilities of the prompt": (CHAT, {"prompt_logprobs": 1}, False),
    "chat, required tools": (CHAT, {"tools": [TOOL], "tool_choice": "required", "max_tokens": 40}, True),
    "chat, too long": (CHAT, {"max_tokens": 100_000}, False),
    "text": (COMPLETIONS, {}, True),
    "text, logprobs": (COMPLETIONS, {"logprobs": 2}, True),
    "text, stop": (COMPLETIONS, {"stop": ["the", "."], "max_tokens": 24}, True),
    "text, echo": (COMPLETIONS, {"echo": True}, True),
    "text, two": (COMPLETIONS, {"n": 2, "seed": 7}, False),
    "text, two prompts": (COMPLETIONS, {"prompt": [LONG, "The"]}, False),
    "text, ids": (COMPLETIONS, {"prompt": list(range(100, 180)), "return_token_ids": True}, True),
}


@pytest.fixture
def taken_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that were taken out of each stream that was asked for usage behind its client's back."""
    found: list[int] = []

    class Counted(UnaskedUsage):
        def __init__(self) -> None:
            super().__init__()
            found.append(0)

        def feed(self, chunk: bytes) -> bytes:
            passed = super().feed(chunk)
            found[-1] += len(chunk) - len(passed)
            return passed

        def end(self, *, is_whole: bool = True) -> bytes:
            passed = super().end(is_whole=is_whole)
            found[-1] -= len(passed)
            return passed

    monkeypatch.setattr(relay, "UnaskedUsage", Counted)
    return found


@pytest.fixture
async def router(start_router: Any, kit: Any) -> Any:
    return await start_router(f"e0={URL}", lookup=kit.lookup(kit.matched("e0", 16)))


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    said = {"prompt": LONG} if path == COMPLETIONS else {"messages": [{"role": "user", "content": LONG}]}
    return {"model": "model", "temperature": 0, "max_tokens": 12, "stream": True, **said, **fields}


async def read(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, str, bytes]:
    async with client.post(url, json=body) as response:
        content = await response.read()
    said = _OF_THE_REQUEST.sub(b'"of the request"', content)
    if isinstance(body.get("prompt"), list) and isinstance(body["prompt"][0], str):
        said = b"\n\n".join(sorted(said.split(b"\n\n")))  # several prompts are answered in any order
    return response.status, response.content_type, said


async def same(router: Any, path: str, body: dict[str, Any]) -> bytes:
    """What both answer."""
    await read(router.client, URL + path, body)  # what is cached then is cached for both
    for _ in range(ATTEMPTS):
        direct = await read(router.client, URL + path, body)
        routed = await read(router.client, router.url + path, body)
        if direct == routed:
            break
    assert routed == direct
    return direct[2]


@pytest.fixture
async def for_all(router: Any) -> bool:
    """Whether the engine gives usage to those who do not want it (--enable-force-include-usage)."""
    _, _, content = await read(router.client, URL + CHAT, body_of(CHAT, {}))
    return _USAGE_CHUNK.search(content) is not None


@pytest.mark.parametrize("name", MORE)
async def test_a_stream_is_what_the_engine_writes(
    router: Any, taken_out: list[int], for_all: bool, name: str
) -> None:
    path, fields, asked = MORE[name]
    content = await same(router, path, body_of(path, fields))
    assert bool(taken_out) is asked
    if b"[DONE]" in content:
        assert (_USAGE_CHUNK.search(content) is not None) is for_all
    assert all((count > 50) is not for_all for count in taken_out)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", OPTIONS)
async def test_a_stream_has_usage_as_its_client_wants_it(
    router: Any, taken_out: list[int], for_all: bool, name: str, path: str
) -> None:
    content = await same(router, path, body_of(path, OPTIONS[name]))
    assert content.endswith(b"data: [DONE]\n\n")
    assert (_USAGE_CHUNK.search(content) is not None) is (for_all or name not in ASKED)
    assert bool(taken_out) is (name in ASKED)
    assert all((count > 50) is not for_all for count in taken_out)


@pytest.mark.parametrize("name", ["none", "true", "true and each"])
async def test_the_openai_client_reads_the_same(
    router: Any, taken_out: list[int], for_all: bool, name: str
) -> None:
    openai = pytest.importorskip("openai")

    async def chunks(url: str, path: str) -> list[Any]:
        body = body_of(path, OPTIONS[name])
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            made = client.completions if path == COMPLETIONS else client.chat.completions
            told = [chunk.model_dump() async for chunk in await made.create(**body)]
        return [chunk | {"id": "", "created": 0} for chunk in told]

    for path in (CHAT, COMPLETIONS):
        await chunks(URL, path)
        for _ in range(ATTEMPTS):
            direct, routed = await chunks(URL, path), await chunks(router.url, path)
            if direct == routed:
                break
        assert json.dumps(routed) == json.dumps(direct)
        assert (routed[-1]["usage"] is not None) is (for_all or name != "none")
    assert bool(taken_out) is (name == "none")
