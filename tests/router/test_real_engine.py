"""Against a real engine, where its URL is in WARMROUTE_ENGINE_URL and its tokenizer's folder in
WARMROUTE_ENGINE_TOKENIZER.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from array import array
from typing import Any

import aiohttp
import pytest

from router.conversation import InexactError, read_chat
from router.fallback import Fallback
from router.local_tokenizer import load_tokenizer
from router.prompt import read_body
from router.replicas import Replica, parse_replica
from router.token_cache import TokenCache
from router.tokens import Tokenizer, tokenize_request
from tests.router.chats import chat, text

URL = os.environ.get("WARMROUTE_ENGINE_URL", "")
FOLDER = os.environ.get("WARMROUTE_ENGINE_TOKENIZER", "")
pytestmark = pytest.mark.skipif(
    not (URL and FOLDER), reason="no engine in WARMROUTE_ENGINE_URL, WARMROUTE_ENGINE_TOKENIZER"
)


async def test_ix09_200_varied_chats_and_100_texts_have_the_engines_tokens() -> None:
    rng, exact, refused = random.Random(11), 0, 0
    local = load_tokenizer(FOLDER, "m", TokenCache(1_000_000))
    replica = Replica(parse_replica(f"e={URL}"))
    async with aiohttp.ClientSession() as session:
        model = (await (await session.get(f"{URL}/v1/models")).json())["data"][0]["id"]
        asking = Tokenizer(session, timeout_s=30, cache=TokenCache(1))

        async def theirs(body: Any) -> array[int] | Fallback:
            asked = tokenize_request(body)
            assert asked is not None
            return await asking.ask(replica, asked[0])

        while exact < 200:
            fields = {"model": model, **chat(rng)}
            body = read_body(json.dumps(fields).encode())
            answer = await theirs(body)
            try:
                said = read_chat(body, local.content_format())
                ids = local.encode(local.render(said), said.add_special_tokens)
            except InexactError:
                refused += 1
                assert refused < 200
                continue
            assert not isinstance(answer, Fallback), (answer, fields)
            assert ids == answer, fields
            exact += 1
        for number in range(100):
            add = number % 2 == 0
            prompt = {"model": model, "prompt": text(rng, 6), "add_special_tokens": add}
            answer = await theirs(read_body(json.dumps(prompt).encode()))
            assert local.encode(str(prompt["prompt"]), add) == answer, prompt
        said = [fields | {"max_tokens": 1} for fields in (chat(rng) for _ in range(40))]
        counted = 0
        for fields in said:
            if fields.get("tools") or fields.get("chat_template_kwargs"):
                continue  # some servers take tools only with a parser for them
            body = read_body(json.dumps(fields).encode())
            try:
                mine = read_chat(body, local.content_format())
                ids = local.encode(local.render(mine), mine.add_special_tokens)
            except InexactError:
                continue
            async with session.post(
                f"{URL}/v1/chat/completions", json={**fields, "model": model}
            ) as response:
                if response.status == 200:
                    counted += 1
                    assert (await response.json())["usage"]["prompt_tokens"] == len(ids), fields
        assert counted >= 5
    await asyncio.sleep(0)
    print(f"\n{exact} chats are exact, {refused} were left to the engine, {counted} were counted by it")
