"""Output is not changed by routing: each policy gives the texts that engines give by themselves.

Over simulated engines always; over real ones where WARMROUTE_ENGINE_URLS names two of one model, with events
and without anybody else's requests, which would be batched with these.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.policies import POLICIES
from tests.router.whole_path import IndexerProcess, engines, until_live

URLS = [url for url in os.environ.get("WARMROUTE_ENGINE_URLS", "").split(",") if url]
SYSTEM = "You answer briefly. Caches keep what was computed, so that nobody computes it again. " * 20
QUESTIONS = (
    "What is a cache?",
    "Name three colours.",
    "How far is the moon?",
    "Was ist ein Präfix? \U0001f914",
    "Write a line about rain.",
)


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Chats with one long beginning and their second turns, a story to go on with, and token ids; some of
    them as streams.
    """
    asked: list[tuple[str, dict[str, Any]]] = []
    for number, question in enumerate(QUESTIONS):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        turn = [*messages, {"role": "assistant", "content": "I know."}, {"role": "user", "content": "More!"}]
        for said in (messages, turn):
            fields = {"messages": said, "user": f"user {number}", "stream": number % 2 == 0}
            asked.append(("/v1/chat/completions", fields))
    asked.append(("/v1/completions", {"prompt": SYSTEM + "Once upon a time"}))
    asked.append(("/v1/completions", {"prompt": list(range(1000, 1300)), "stream": True}))
    return asked


async def answer(
    client: aiohttp.ClientSession, url: str, path: str, fields: dict[str, Any]
) -> tuple[str, int]:
    """The text, and how many prompt tokens were cached, where the answer says."""
    body = {"model": "model", "temperature": 0, "max_tokens": 16, **fields}
    async with client.post(url + path, json=body) as response:
        raw = (await response.read()).decode()
        assert response.status == 200, raw
    lines = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines] if fields.get("stream") else [json.loads(raw)]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    parts = [choice.get("delta") or choice.get("message") or choice for choice in choices]
    text = "".join(part.get("text") or part.get("content") or "" for part in parts)
    details = (chunks[-1].get("usage") or {}).get("prompt_tokens_details") or {}
    return text, details.get("cached_tokens") or 0


async def compare(urls: Sequence[str], kit: Any, tmp_path: Path) -> None:
    """Each engine by itself, cold and warm; then all policies. One request at a time, as batches change
    roundings.
    """
    indexer = IndexerProcess(tmp_path / "map")
    await indexer.start()
    try:
        async with aiohttp.ClientSession() as client:
            own: list[list[str]] = []
            for path, fields in requests():
                said = [(await answer(client, url, path, fields))[0] for url in urls for _ in range(2)]
                own.append(said)
            unsteady = sum(len(set(said)) > 1 for said in own)
            print(f"\n{len(own)} prompts; of {unsteady} the engines by themselves give several texts")
            for policy in POLICIES:
                await compare_policy(client, policy, urls, own, kit, tmp_path / "map")
    finally:
        await indexer.kill()


async def compare_policy(
    client: aiohttp.ClientSession,
    policy: str,
    urls: Sequence[str],
    own: Sequence[Sequence[str]],
    kit: Any,
    index: Path,
) -> None:
    for url in urls:
        async with client.post(f"{url}/reset_prefix_cache") as response:
            assert response.status == 200, "the engine needs VLLM_SERVER_DEV_MODE=1"
    names = [f"v{number}={url}" for number, url in enumerate(urls)]
    async with kit.running_router(*names, policy=policy, map=str(index)) as router:
        if POLICIES[policy].uses_matches:
            await until_live(router, kit.wait_until)
        cached = 0
        for (path, fields), texts in zip(requests(), own, strict=True):
            text, hit = await answer(client, router.url, path, fields)
            assert text in texts, (policy, path, fields)
            assert text
            cached += hit
        entries = (await router.get(f"/debug/decisions?limit={len(own)}"))["decisions"]
        chosen = sorted({entry["chosen"][0] for entry in entries})
        print(f"{policy}: {len(own)} texts the same, from {', '.join(chosen)}; {cached} prompt tokens cached")
        assert cached > 0, "without hits nothing is shown"


async def test_output_is_not_changed_by_routing(kit: Any, tmp_path: Path) -> None:
    async with engines(2) as fleet:
        await compare([engine.url for engine in fleet], kit, tmp_path)


@pytest.mark.skipif(len(URLS) < 2, reason="no two engines in WARMROUTE_ENGINE_URLS")
async def test_output_of_real_engines_is_not_changed_by_routing(kit: Any, tmp_path: Path) -> None:
    await compare(URLS, kit, tmp_path)
