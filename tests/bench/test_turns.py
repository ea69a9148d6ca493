"""CPU of tokenising the tenth turn of a chat of 30,000 tokens, whole and as it goes on from the ninth, and of
all that tokens take of a request.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from router.conversation import read_chat
from router.fallback import Fallback
from router.local_tokenizer import load_tokenizer
from router.local_tokens import FORMATS, LocalTokens
from router.prompt import RequestBody, read_body
from router.token_cache import TokenCache
from router.tokens import tokens_in_request
from tests.bench.relay_load import MODEL, Bodies

TOKENIZER = Path(__file__).parents[3] / "shared" / "data" / "smollm2-tokenizer"
WORDS = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text().split()
ROUNDS = 7


def chat(chance: random.Random, turns: int, first_words: int, turn_words: int) -> list[dict[str, str]]:
    """A system prompt of ``first_words``, and that many questions with an answer between any two."""
    messages = [{"role": "system", "content": " ".join(chance.choices(WORDS, k=first_words))}]
    for number in range(2 * turns - 1):
        role = "user" if number % 2 == 0 else "assistant"
        messages.append({"role": role, "content": " ".join(chance.choices(WORDS, k=turn_words))})
    return messages


def request(messages: list[dict[str, str]]) -> RequestBody:
    return read_body(json.dumps({"messages": messages}).encode())


def cpu_ms(tokenizer: Any, body: RequestBody) -> tuple[float, int]:
    begun = time.thread_time()
    said = read_chat(body, "string")
    ids = tokenizer.encode(tokenizer.render(said), said.add_special_tokens)
    return (time.thread_time() - begun) * 1e3, len(ids)


@pytest.mark.skipif(not TOKENIZER.exists(), reason=f"no tokenizer in {TOKENIZER}")
def test_the_tenth_turn_of_a_30k_token_chat() -> None:
    pytest.importorskip("tokenizers")
    chance, table = random.Random(1), Table("chat", "tokens", "whole ms", "tenth turn ms", "share")
    for name, first_words, turn_words in [
        ("a document of 24k tokens, turns of 700", 17_000, 240),
        ("turns of 3,200", 200, 1_150),
    ]:
        whole, turn, tokens = [], [], 0
        for number in range(ROUNDS):
            tokenizer = load_tokenizer(str(TOKENIZER), f"{name} {number}", TokenCache(1_000_000))
            messages = chat(chance, 10, first_words, turn_words)
            cpu_ms(tokenizer, request(messages[:1] + messages[-1:]))  # the template is compiled once
            fresh = load_tokenizer(str(TOKENIZER), f"{name} {number} whole", TokenCache(1))
            cpu_ms(fresh, request(messages[-1:]))
            whole.append(cpu_ms(fresh, request(messages))[0])
            cpu_ms(tokenizer, request(messages[:-2]))
            spent, tokens = cpu_ms(tokenizer, request(messages))
            turn.append(spent)
        best, least = min(whole), min(turn)
        table.add_row(name, f"{tokens:,}", f"{best:.1f}", f"{least:.2f}", f"{100 * least / best:.1f} %")
    console = Console(width=140)
    console.print(f"\nfastest of {ROUNDS}")
    console.print(table)


def tool(number: int) -> dict[str, object]:
    properties = {f"p{name}": {"type": "string", "description": "x " * 20} for name in range(6)}
    parameters = {"type": "object", "properties": properties}
    function = {"name": f"f{number}", "description": "d " * 100, "parameters": parameters}
    return {"type": "function", "function": function}


async def tokens_us(size: int, tools: bytes) -> tuple[float, float, int]:
    """CPU of reading a request and of its tokens, its prefix known and its question new: the cheapest and the
    median of 15 times 50; and how many tokens it has.
    """
    local = LocalTokens({MODEL: str(TOKENIZER)}, TokenCache(4_000_000), threads=2, timeout_s=5)
    loaded = asyncio.Event()
    local.changed = loaded.set
    local.start()
    await loaded.wait()
    local.judge(MODEL, set(FORMATS))
    made, spent, count = Bodies(size, warm=True), [], 0
    for number in range(16):
        asked = [made()[:-1] + tools + b"}" for _ in range(50)]
        begun = time.process_time()
        for text in asked:
            body = read_body(text)
            assert tokens_in_request(body) is None
            ids = await local.tokens(MODEL, body)
            assert not isinstance(ids, Fallback)
            count = len(ids)
        if number:
            spent.append((time.process_time() - begun) / len(asked) * 1e6)
    local.close()
    return min(spent), statistics.median(spent), count


@pytest.mark.skipif(not TOKENIZER.exists(), reason=f"no tokenizer in {TOKENIZER}")
def test_the_tokens_of_a_request() -> None:
    pytest.importorskip("tokenizers")
    tools = b',"tools":' + json.dumps([tool(number) for number in range(12)]).encode()
    table = Table("prompt", "tokens", "CPU us", "median")
    for name, size, more in [
        ("400 B", 400, b""),
        ("8 kB", 8_000, b""),
        ("128 kB", 128_000, b""),
        (f"8 kB, {len(tools):,} bytes of tools", 8_000, tools),
    ]:
        least, median, count = asyncio.run(tokens_us(size, more))
        table.add_row(name, f"{count:,}", f"{least:.0f}", f"{median:.0f}")
    Console(width=140).print(table)
