from __future__ import annotations

import asyncio
import json
import threading
import time
from array import array
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router import fallback
from router import tokens as tokens_module
from router.prompt import read_body
from router.replicas import Replica, parse_replica
from router.token_cache import TokenCache
from router.tokens import (
    AT_ONCE_BYTES,
    MISSING_FOR_S,
    SLOW_FOR_S,
    Tokenizer,
    is_plain_chat,
    tokenize_request,
    tokens_in_request,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def body(**fields: Any) -> Any:
    return read_body(json.dumps({"model": "m", **fields}).encode())


@pytest.mark.parametrize(
    ("prompt", "ids", "prompts"),
    [([1, 2, 3], [1, 2, 3], 1), ([[4, 5], [6]], [4, 5], 2), ([[]], [], 1)],
)
def test_ix11_ids_in_the_request_are_taken_and_the_first_prompt_decides(
    prompt: Any, ids: list[int], prompts: int
) -> None:
    tokens = tokens_in_request(body(prompt=prompt))
    assert tokens is not None
    assert (tokens.ids, tokens.prompts) == (array("I", ids), prompts)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, fallback.NO_PROMPT),
        ({"prompt": None}, fallback.NO_PROMPT),
        ({"prompt": []}, fallback.NO_PROMPT),
        ({"prompt": 5}, fallback.UNREADABLE_PROMPT),
        ({"prompt": {"a": 1}}, fallback.UNREADABLE_PROMPT),
        ({"prompt": [1, "x"]}, fallback.UNREADABLE_PROMPT),
        ({"prompt": [1, -2]}, fallback.BAD_TOKEN_IDS),
        ({"prompt": [1, 2**32]}, fallback.BAD_TOKEN_IDS),
        ({"prompt_embeds": "AAAA"}, fallback.PROMPT_EMBEDS),
        ({"prompt": "x", "truncate_prompt_tokens": 5}, fallback.TRUNCATED),
        ({"messages": "x"}, fallback.UNREADABLE_MESSAGES),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
                ]
            },
            fallback.MULTIMODAL,
        ),
        ({"messages": [{"role": "user", "content": [{"text": "no type"}]}]}, fallback.MULTIMODAL),
    ],
)
def test_ix11_what_has_no_known_tokens_says_why(fields: dict[str, Any], why: fallback.Fallback) -> None:
    tokens = tokens_in_request(body(**fields))
    assert tokens is not None
    assert (tokens.ids, tokens.why_not) == (None, why)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "text"},
        {"prompt": ["text", "more"]},
        {"prompt": ""},
        {"messages": [{"role": "user", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, "y"]}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
    ],
)
def test_text_is_for_the_engine_to_tokenise(fields: dict[str, Any]) -> None:
    assert tokens_in_request(body(**fields)) is None


def test_ix09_chat_is_tokenised_with_all_that_its_tokens_depend_on() -> None:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "ö \U0001f600"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template": "{{ messages }}",
        "chat_template_kwargs": {"a": 1},
        "add_generation_prompt": False,
        "continue_final_message": True,
        "add_special_tokens": True,
    }
    asked = tokenize_request(body(**fields, temperature=1, stream=True, documents=[{"text": "d"}]))
    assert asked is not None
    assert json.loads(asked[0]) == {
        "model": "m",
        **fields,
        "chat_template_kwargs": {"a": 1, "documents": [{"text": "d"}]},
    }


@pytest.mark.parametrize(("effort", "thinking"), [("high", True), ("none", False)])
def test_ix09_reasoning_effort_goes_to_the_template_as_chat_sends_it(effort: str, thinking: bool) -> None:
    asked = tokenize_request(body(messages=[], reasoning_effort=effort))
    assert asked is not None
    kwargs = json.loads(asked[0])["chat_template_kwargs"]
    assert kwargs == {"reasoning_effort": effort, "enable_thinking": thinking}


def test_a_completion_is_tokenised_with_its_special_tokens() -> None:
    asked = tokenize_request(body(prompt=["a", "b"], add_special_tokens=False))
    assert asked is not None
    assert (json.loads(asked[0]), asked[1]) == ({"model": "m", "prompt": "a", "add_special_tokens": False}, 2)


@pytest.mark.parametrize(
    ("last", "why_not"),
    [
        (7, None),
        (1 << 32, fallback.BAD_TOKEN_IDS),
        (-1, fallback.BAD_TOKEN_IDS),
        ("a", fallback.UNREADABLE_PROMPT),
        ([7], fallback.UNREADABLE_PROMPT),
        (1.5, fallback.UNREADABLE_PROMPT),
    ],
)
@pytest.mark.parametrize("blank", ["", " "])
def test_px13_very_many_ids_are_read_so_many_at_a_time(
    last: Any, why_not: fallback.Fallback | None, blank: str
) -> None:
    ids = [*range(3 * AT_ONCE_BYTES // 7), last]
    text = json.dumps({"prompt": ids}, separators=(f",{blank}", ":")).replace("]", f"{blank}]")
    tokens = tokens_in_request(read_body(text.encode()))
    assert tokens is not None
    assert tokens.why_not == why_not
    assert tokens.ids == (None if why_not else array("I", ids))


@pytest.mark.parametrize("size", [AT_ONCE_BYTES // 2, AT_ONCE_BYTES])
@pytest.mark.parametrize("kind", ["messages", "prompt"])
async def test_px13_what_is_long_is_read_off_the_loop(
    kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, real = [], tokens_module.tokens_in_request

    def noted(asked: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return real(asked)

    monkeypatch.setattr(tokens_module, "tokens_in_request", noted)
    values = {"messages": [{"role": "user", "content": [""] * (size // 4)}], "prompt": [100] * (size // 4)}
    asked = body(**{kind: values[kind]})
    assert await tokens_module.read_tokens(asked) == real(asked)
    assert threads == [size < AT_ONCE_BYTES]


async def make(
    *engines: Any, timeout_s: float = 5.0, cache_tokens: int = 1000
) -> tuple[Any, Clock, list[Replica], Any]:
    clock = Clock()
    session = aiohttp.ClientSession()
    tokenizer = Tokenizer(session, timeout_s=timeout_s, cache=TokenCache(cache_tokens), clock=clock)
    replicas = [Replica(parse_replica(f"e{number}={engine.url}")) for number, engine in enumerate(engines)]
    return tokenizer, clock, replicas, session


async def test_a_prompt_is_asked_for_once_and_kept(start_engine: Any) -> None:
    engine = await start_engine()
    tokenizer, _, replicas, session = await make(engine)
    async with session:
        first = await tokenizer.tokens(body(prompt="hello"), replicas)
        second = await tokenizer.tokens(body(prompt="hello"), replicas)
    assert first.ids == second.ids == array("I", list(b"hello"))
    assert engine.tokenized == 1


async def test_ix10_another_model_is_another_prompt(start_engine: Any) -> None:
    engine = await start_engine()
    tokenizer, _, replicas, session = await make(engine)
    async with session:
        await tokenizer.tokens(body(prompt="hello"), replicas)
        await tokenizer.tokens(read_body(b'{"model":"other","prompt":"hello"}'), replicas)
    assert engine.tokenized == 2


async def test_ix09_a_chat_is_asked_about_again_when_a_day_may_have_ended(
    start_engine: Any,
) -> None:
    engine = await start_engine()
    wall = Clock()
    async with aiohttp.ClientSession() as session:
        tokenizer = Tokenizer(session, timeout_s=5.0, cache=TokenCache(1000), wall_clock=wall)
        replicas = [Replica(parse_replica(f"e={engine.url}"))]
        for at, tokenized in ((86_400 - 1, 1), (86_400 - 0.1, 1), (86_400, 2), (86_400 + 899, 2)):
            wall.now = at
            await tokenizer.tokens(body(messages=[{"role": "user", "content": "what day is it?"}]), replicas)
            assert engine.tokenized == tokenized
        for wall.now in (0.0, 86_400.0):
            await tokenizer.tokens(body(prompt="hello"), replicas)
        assert engine.tokenized == 3, "a text says no date of its own"


async def test_prompts_beyond_the_bound_are_forgotten(start_engine: Any) -> None:
    engine = await start_engine()
    tokenizer, _, replicas, session = await make(engine, cache_tokens=6)
    async with session:
        for prompt in ("hello", "world", "hello", "much longer than the bound"):
            assert (await tokenizer.tokens(body(prompt=prompt), replicas)).ids == array(
                "I", list(prompt.encode())
            )
    assert engine.tokenized == 4


async def test_an_engine_without_tokenize_is_not_asked_again_for_a_minute(start_engine: Any) -> None:
    engine = await start_engine(tokenize=None)
    tokenizer, clock, replicas, session = await make(engine)
    async with session:
        for _ in range(3):
            assert (await tokenizer.tokens(body(prompt="x"), replicas)).why_not is fallback.TOKENIZE_MISSING
        assert engine.tokenized == 1
        clock.now += MISSING_FOR_S + 1
        await tokenizer.tokens(body(prompt="x"), replicas)
    assert engine.tokenized == 2


async def test_a_404_about_the_model_is_no_missing_tokenize(start_engine: Any) -> None:
    async def unknown(_: web.Request) -> web.Response:
        error = {
            "message": "The model `x` does not exist.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
        return web.json_response({"error": error}, status=404)

    engine = await start_engine(tokenize=unknown)
    tokenizer, _, replicas, session = await make(engine)
    async with session:
        assert (await tokenizer.tokens(body(prompt="x"), replicas)).why_not is fallback.TOKENIZE_REFUSED
    assert replicas[0].tokenize_missing_until == 0


async def test_another_engine_is_asked_when_one_fails(start_engine: Any) -> None:
    async def broken(_: web.Request) -> web.Response:
        return web.Response(status=500)

    bad, good = await start_engine(tokenize=broken), await start_engine()
    tokenizer, _, replicas, session = await make(bad, good)
    async with session:
        for number in range(20):
            prompt = f"prompt {number}"
            assert (await tokenizer.tokens(body(prompt=prompt), replicas)).ids == array(
                "I", list(prompt.encode())
            )
    assert bad.tokenized > 0


async def test_nonsense_from_tokenize_is_a_failure(start_engine: Any) -> None:
    async def nonsense(_: web.Request) -> web.Response:
        return web.json_response({"tokens": ["a"]})

    engine = await start_engine(tokenize=nonsense)
    tokenizer, _, replicas, session = await make(engine)
    async with session:
        assert (await tokenizer.tokens(body(prompt="x"), replicas)).why_not is fallback.TOKENIZE_FAILED


async def test_px13_an_engine_that_does_not_answer_costs_no_more_than_the_deadline(start_engine: Any) -> None:
    async def never(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    engine = await start_engine(tokenize=never)
    tokenizer, _, replicas, session = await make(engine, timeout_s=0.05)
    async with session:
        assert (await tokenizer.tokens(body(prompt="x"), replicas)).why_not is fallback.TOKENIZE_TIMEOUT


async def never(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def test_px13_a_silent_engine_is_helped_out_by_another_within_the_deadline_and_then_asked_last(
    start_engine: Any,
) -> None:
    hung, good = await start_engine(tokenize=never), await start_engine()
    tokenizer, clock, replicas, session = await make(hung, good, timeout_s=2.0)
    async with session:
        for number in range(20):
            prompt = f"prompt {number}"
            tokens = await tokenizer.tokens(body(prompt=prompt), replicas)
            assert tokens.ids == array("I", list(prompt.encode()))
        assert hung.tokenized == 1
        # Later it gets its chance again.
        clock.now += SLOW_FOR_S + 1
        for number in range(20):
            await tokenizer.tokens(body(prompt=f"again {number}"), replicas)
    assert hung.tokenized == 2


async def test_px13_one_deadline_holds_for_all_engines_that_are_asked(start_engine: Any) -> None:
    engines = [await start_engine(tokenize=never) for _ in range(8)]
    tokenizer, _, replicas, session = await make(*engines, timeout_s=0.2)
    async with session:
        begun = time.monotonic()
        assert (await tokenizer.tokens(body(prompt="x"), replicas)).why_not is fallback.TOKENIZE_TIMEOUT
        assert time.monotonic() - begun < 1
    assert sum(engine.tokenized for engine in engines) in (3, 4)


def test_ix09_reasoning_content_is_asked_about_as_chat_takes_it() -> None:
    messages = [
        {"role": "assistant", "content": "x", "reasoning_content": "old"},
        {"role": "assistant", "content": "x", "reasoning_content": "old", "reasoning": "new"},
        {"role": "user", "content": 'about "reasoning_content"', "reasoning_content": None},
    ]
    asked = tokenize_request(body(messages=messages))
    assert asked is not None
    assert json.loads(asked[0])["messages"] == [
        {"role": "assistant", "content": "x", "reasoning": "old"},
        {"role": "assistant", "content": "x", "reasoning": "new"},
        {"role": "user", "content": 'about "reasoning_content"'},
    ]


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ({"messages": [{"role": "user", "content": "hello"}]}, True),
        ({"messages": []}, True),
        ({"messages": [{"role": "user", "content": "a list: []"}]}, False),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}, False),
        ({"messages": [[]]}, False),
        ({"messages": None}, False),
        ({"prompt": "hello"}, False),
    ],
)
def test_ev28_a_chat_without_a_list_inside_holds_texts_alone(fields: dict[str, Any], plain: bool) -> None:
    body = read_body(json.dumps(fields).encode())
    assert is_plain_chat(body) is plain
    if plain:
        assert tokens_in_request(body) is None
