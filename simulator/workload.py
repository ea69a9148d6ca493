"""Conversations over shared system prompts, and a client that holds them and measures.

The workload is pure and seeded: the same conversations, at the same times, for everything it is run
against. The client needs a URL that speaks the OpenAI API, an engine's or a router's.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from simulator import tokenizer
from simulator.errors import WorkloadError

CHAT = "/v1/chat/completions"
REQUEST_TIMEOUT_S = 60.0

_WORDS = (
    *(
        "block",
        "prefix",
        "cache",
        "replica",
        "router",
        "prompt",
        "token",
        "queue",
        "batch",
        "engine",
        "index",
    ),
    *("event", "stream", "sequence", "tail", "head", "store", "evict", "replay", "answer", "turn", "system"),
    *("request", "reuse", "warm", "cold", "share", "depth", "order", "bound"),
)
_EMPTY_SYSTEM = {"role": "system", "content": ""}
_EMPTY_TURN = {"role": "user", "content": ""}
_JSON = {"Content-Type": "application/json"}


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How much of what, in tokens of the simulated engines, chat template included."""

    systems: int = 8
    system_tokens: int = 1_500
    conversations: int = 48
    turns: int = 4
    new_tokens: int = 150
    answer_tokens: int = 32
    starts_per_s: float = 8.2
    seed: int = 0

    @property
    def requests(self) -> int:
        return self.conversations * self.turns


class Conversation(msgspec.Struct, frozen=True):
    """``starts`` seconds into the run; then each turn as soon as the one before is answered."""

    starts: float
    system: str
    turns: list[str]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it. ``ttft_s`` runs to the first streamed bytes of the answer."""

    ttft_s: float
    replica: str | None
    fallback: str | None
    prompt_tokens: int
    cached_tokens: int


def conversations(shape: Shape) -> list[Conversation]:
    """The workload: a Poisson process of starts, system prompts dealt out evenly and shuffled."""
    chance = random.Random(shape.seed)
    system_text = shape.system_tokens - len(tokenizer.render([_EMPTY_SYSTEM], add_generation_prompt=False))
    turn_text = shape.new_tokens - len(tokenizer.render([_EMPTY_TURN]))
    systems = [_text(chance, system_text) for _ in range(shape.systems)]
    dealt = [systems[index % shape.systems] for index in range(shape.conversations)]
    chance.shuffle(dealt)
    starts = 0.0
    made = []
    for system in dealt:
        starts += chance.expovariate(shape.starts_per_s)
        turns = [_text(chance, turn_text) for _ in range(shape.turns)]
        made.append(Conversation(starts, system, turns))
    return made


async def run(
    url: str,
    model: str,
    workload: Sequence[Conversation],
    answer_tokens: int,
    on_answer: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Holds all conversations against ``url`` and returns a result for each request.

    Raises WorkloadError at the first request that fails; the others are given up then.
    """
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        begin = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        _hold(session, model, one, answer_tokens, begin + one.starts, on_answer)
                    )
                    for one in workload
                ]
        except* (aiohttp.ClientError, TimeoutError, WorkloadError) as failures:
            first = _first(failures)
            raise WorkloadError(f"{url}{CHAT}: {str(first) or type(first).__name__}") from first
    return [result for task in tasks for result in task.result()]


async def _hold(
    session: aiohttp.ClientSession,
    model: str,
    conversation: Conversation,
    answer_tokens: int,
    begin: float,
    on_answer: Callable[[], None],
) -> list[Result]:
    await asyncio.sleep(max(0.0, begin - asyncio.get_running_loop().time()))
    messages = [{"role": "system", "content": conversation.system}]
    results = []
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn})
        answer, result = await _ask(session, model, messages, answer_tokens)
        messages.append({"role": "assistant", "content": answer})
        results.append(result)
        on_answer()
    return results


async def _ask(
    session: aiohttp.ClientSession, model: str, messages: list[dict[str, str]], answer_tokens: int
) -> tuple[str, Result]:
    """One streamed request: the text of its answer, and what it cost."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": answer_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent = time.perf_counter()
    ttft = None
    text: list[str] = []
    usage: dict[str, Any] | None = None
    async with session.post(CHAT, data=msgspec.json.encode(body), headers=_JSON) as response:
        if response.status != 200:
            raise WorkloadError(f"status {response.status}: {(await response.text())[:300]}")
        async for chunk in _chunks(response):
            ttft = time.perf_counter() - sent if ttft is None else ttft
            usage = chunk.get("usage") or usage
            text += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
        headers = response.headers
    if ttft is None or usage is None or usage["completion_tokens"] != answer_tokens:
        raise WorkloadError(f"an answer of {usage} where {answer_tokens} tokens were asked for")
    reason = headers.get("x-warmroute-reason", "")
    return "".join(text), Result(
        ttft_s=ttft,
        replica=headers.get("x-warmroute-replica"),
        fallback=reason if reason.startswith("fallback") else None,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON chunks of a stream of server-sent events. Raises WorkloadError when it ends early."""
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n\n")
        for line in lines:
            data = line.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            chunk = msgspec.json.decode(data)
            if "error" in chunk:
                raise WorkloadError(f"error in the stream: {chunk['error']}")
            yield chunk
    raise WorkloadError("a stream that ended without [DONE]")


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _text(chance: random.Random, length: int) -> str:
    words: list[str] = []
    while sum(map(len, words)) + len(words) < length:
        words += chance.choices(_WORDS, k=max(1, length // 7))
    return " ".join(words)[:length]
