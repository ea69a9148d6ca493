from __future__ import annotations

import asyncio
import json
import threading
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from router import fallback
from router.local_tokenizer import TokenizerLoadError
from router.local_tokens import (
    AT_ONCE_BYTES,
    AT_ONCE_CHARS,
    AT_ONCE_MESSAGES,
    AT_ONCE_PLACES,
    AT_ONCE_TOOLS_BYTES,
    AT_ONCE_VALUES,
    FORMATS,
    RELOAD_AFTER_S,
    LocalTokens,
)
from router.prompt import read_body
from router.token_cache import TokenCache


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Begun:
    """A text of which nothing is known."""

    new_chars = AT_ONCE_CHARS + 1

    def __init__(self, ids: Callable[[], array[int]]) -> None:
        self.ids = ids


class Bytes:
    """A tokenizer whose ids are bytes. ``hold`` keeps its threads until it is set."""

    cuts_texts = False
    is_plain = False

    def __init__(self) -> None:
        self.hold = threading.Event()
        self.hold.set()
        self.threads: set[str] = set()

    def render(self, chat: Any) -> str:
        return json.dumps(chat.messages)

    def encode(self, text: str, add_special_tokens: bool) -> array[int]:
        self.threads.add(threading.current_thread().name)
        assert self.hold.wait(10)
        return array("I", list((b"^" if add_special_tokens else b"") + text.encode()))

    def places(self, text: str) -> int:
        return text.count("<")

    def begin(self, text: str, add_special_tokens: bool) -> Any:
        return Begun(partial(self.encode, text, add_special_tokens))

    def content_format(self) -> str:
        return "string"


class Loader:
    """Loads by source: what it holds, or the error that it is."""

    def __init__(self, **sources: Any) -> None:
        self.sources = sources
        self.loads: list[tuple[str, str]] = []

    def __call__(self, source: str, name: str, cache: TokenCache) -> Any:
        self.loads.append((source, name))
        found = self.sources[source]
        if isinstance(found, threading.Event):
            found.wait(10)
            return Bytes()
        if isinstance(found, Exception):
            raise found
        return found


def make(loader: Loader, clock: Clock | None = None, **given: Any) -> LocalTokens:
    settings = {"threads": 1, "timeout_s": 5.0} | given
    sources = {f"model-{source}": source for source in loader.sources}
    return LocalTokens(sources, TokenCache(1000), load=loader, clock=clock or Clock(), **settings)


async def ready(local: LocalTokens, *models: str) -> None:
    """Waits until the models' tokenizers are loaded, or have failed to."""
    loaded = asyncio.Event()
    local.changed = loaded.set
    local.start()
    async with asyncio.timeout(10):
        while any(local.state(model) == "loading" for model in models):
            await loaded.wait()
            loaded.clear()


async def rendered_in(fields: dict[str, Any]) -> set[str]:
    """The threads that a request is tokenised in."""
    tokenizer = Bytes()
    local = make(Loader(a=tokenizer))
    await ready(local, "model-a")
    local.judge("model-a", set(FORMATS))
    await local.tokens("model-a", body(**fields))
    local.close()
    return tokenizer.threads


def body(**fields: Any) -> Any:
    return read_body(json.dumps({"model": "m", **fields}).encode())


async def test_ix09_a_tokenizer_is_used_once_an_engine_agrees_and_until_one_differs() -> None:
    local = make(Loader(a=Bytes()))
    await ready(local, "model-a")
    asked = body(prompt="hi")
    assert await local.tokens("model-a", asked) == fallback.local("unchecked")
    local.judge("model-a", set(FORMATS))
    assert await local.tokens("model-a", asked) == array("I", list(b"^hi"))
    local.judge("model-a", set())
    assert await local.tokens("model-a", asked) == fallback.local("differs")
    local.judge("model-a", {"openai"})
    assert await local.tokens("model-a", asked) == array("I", list(b"^hi"))
    local.doubt("model-a")
    assert await local.tokens("model-a", asked) == fallback.local("unchecked")
    local.close()


async def test_ix09_content_is_given_to_the_template_in_the_way_that_agrees() -> None:
    local = make(Loader(a=Bytes()))
    await ready(local, "model-a")
    asked = body(messages=[{"role": "user", "content": "x"}])
    local.judge("model-a", {"openai"})
    parts = json.dumps([{"role": "user", "content": [{"type": "text", "text": "x"}]}])
    assert await local.tokens("model-a", asked) == array("I", list(parts.encode()))
    assert local.told()[0].content_format == "openai"
    local.close()


async def test_where_no_engine_can_be_asked_the_configured_tokenizer_is_taken_at_its_word() -> None:
    local = make(Loader(a=Bytes()))
    await ready(local, "model-a")
    local.unverifiable("model-a")
    ids = await local.tokens("model-a", body(prompt="hi", add_special_tokens=False))
    assert ids == array("I", list(b"hi"))
    local.close()


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("hi", b"^hi"), (["hi", "there"], b"^hi"), ("", b"^"), ("\U0001f600", "^\U0001f600".encode())],
)
async def test_ix11_of_several_texts_the_first_decides(prompt: Any, text: bytes) -> None:
    local = make(Loader(a=Bytes()))
    await ready(local, "model-a")
    local.judge("model-a", set(FORMATS))
    assert await local.tokens("model-a", body(prompt=prompt)) == array("I", list(text))
    local.close()


@pytest.mark.parametrize("fields", [{"prompt": ["a", 5]}, {"prompt": "a", "add_special_tokens": "yes"}])
async def test_ix11_odd_forms_are_left_to_the_engine(fields: dict[str, Any]) -> None:
    local = make(Loader(a=Bytes()))
    await ready(local, "model-a")
    local.judge("model-a", set(FORMATS))
    why = await local.tokens("model-a", body(**fields))
    assert isinstance(why, fallback.Fallback)
    assert why.code.startswith("inexact-")
    local.close()


async def test_ix10_a_load_that_failed_is_not_tried_again_before_its_time() -> None:
    clock, loader = Clock(), Loader(a=TokenizerLoadError("no such file"), b=Bytes())
    local = make(loader, clock)
    await ready(local, "model-a", "model-b")
    for _ in range(5):
        assert await local.tokens("model-a", body(prompt="x")) == fallback.local("failed")
    assert local.state("model-b") == "unchecked", "another model is not concerned"
    assert [source for source, _ in loader.loads].count("a") == 1
    assert local.told()[0].error == "no such file"
    loader.sources["a"] = Bytes()
    clock.now += RELOAD_AFTER_S
    loaded = asyncio.Event()
    local.changed = loaded.set
    await local.tokens("model-a", body(prompt="x"))
    async with asyncio.timeout(10):
        await loaded.wait()
    assert local.state("model-a") == "unchecked"
    assert len({name for _, name in loader.loads}) == 3, "each load keeps tokens under a name of its own"
    local.close()


async def test_px13_a_load_that_hangs_is_attempted_once_and_holds_nothing_up() -> None:
    hang = threading.Event()
    loader = Loader(a=hang, b=Bytes())
    local = make(loader)
    await ready(local, "model-b")
    local.judge("model-b", set(FORMATS))
    for _ in range(20):
        assert await local.tokens("model-a", body(prompt="x")) == fallback.local("loading")
        assert await local.tokens("model-b", body(prompt="x")) == array("I", list(b"^x"))
    assert [source for source, _ in loader.loads].count("a") == 1
    hang.set()
    local.close()


async def test_px13_work_is_done_off_the_loop_and_what_is_late_or_too_much_falls_back() -> None:
    slow = Bytes()
    local = make(Loader(a=slow), timeout_s=0.05)
    await ready(local, "model-a")
    local.judge("model-a", set(FORMATS))
    slow.hold.clear()
    results = await asyncio.gather(*(local.tokens("model-a", body(prompt="x")) for _ in range(30)))
    assert set(results) == {fallback.TOKENIZE_TIMEOUT, fallback.TOKENIZE_BUSY}
    slow.hold.set()
    assert slow.threads == {"tokenize"}
    local.close()


async def test_a_tokenizer_that_fails_is_a_reason_and_no_error() -> None:
    class Broken(Bytes):
        def encode(self, text: str, add_special_tokens: bool) -> array[int]:
            raise RuntimeError(text)

    local = make(Loader(a=Broken()))
    await ready(local, "model-a")
    local.judge("model-a", set(FORMATS))
    assert await local.tokens("model-a", body(prompt="x")) == fallback.inexact("error")
    local.close()


async def test_ix09_the_library_of_the_engines_gets_one_try_where_they_differ_and_another_in_time() -> None:
    clock, plain = Clock(), Bytes()
    plain.is_plain = True
    loader, converter = Loader(a=plain), Loader(a=TokenizerLoadError("transformers is not installed"))
    local = make(loader, clock, convert=converter)
    await ready(local, "model-a")
    loaded = asyncio.Event()
    local.changed = loaded.set
    for tries in (1, 2):
        local.judge("model-a", set())
        async with asyncio.timeout(10):
            await loaded.wait()
        loaded.clear()
        local.judge("model-a", set())
        assert len(converter.loads) == tries
        assert (local.state("model-a"), local.told()[0].error) == ("differs", "transformers is not installed")
        clock.now += RELOAD_AFTER_S
    converter.sources["a"] = Bytes()
    local.judge("model-a", set())
    async with asyncio.timeout(10):
        await loaded.wait()
    assert (local.state("model-a"), local.told()[0].error) == ("unchecked", None)
    local.judge("model-a", set())
    assert len(converter.loads) == 3, "there is nothing else to try"
    assert len(loader.loads) == 1
    local.close()


USER = {"role": "user", "content": "x"}
MANY_ARGUMENTS = {
    "id": "1",
    "type": "function",
    "function": {"name": "f", "arguments": json.dumps({"x": [0] * AT_ONCE_VALUES})},
}


@pytest.mark.parametrize("new_chars", [AT_ONCE_CHARS, AT_ONCE_CHARS + 1])
async def test_px13_what_is_new_is_tokenised_on_the_loop_only_if_it_is_little(
    new_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Begun, "new_chars", new_chars)
    tokenizer = Bytes()
    local = make(Loader(a=tokenizer))
    await ready(local, "model-a")
    local.judge("model-a", set(FORMATS))
    await local.tokens("model-a", body(messages=[{"role": "user", "content": "x"}]))
    expected = threading.current_thread().name if new_chars <= AT_ONCE_CHARS else "tokenize"
    assert tokenizer.threads == {expected}
    local.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "x" * AT_ONCE_BYTES}]},
        {"messages": [{"role": "user", "content": "x"}] * (AT_ONCE_MESSAGES + 1)},
        {"prompt": "x" * AT_ONCE_BYTES},
        {"prompt": "<" * (AT_ONCE_PLACES + 1)},
        {"messages": [{"role": "user", "content": ["x"] * (AT_ONCE_VALUES + 1)}]},
        {"messages": [{"role": "user", "content": "x"}], "documents": [{}] * (AT_ONCE_VALUES // 2)},
        {"messages": [USER], "chat_template_kwargs": {"x": [[[]]] * (AT_ONCE_VALUES // 2)}},
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [MANY_ARGUMENTS]}]},
        {
            "messages": [USER],
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"x": [[]] * AT_ONCE_VALUES}}}
            ],
        },
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [
                {"type": "function", "function": {"name": "f", "description": "x" * AT_ONCE_TOOLS_BYTES}}
            ],
        },
    ],
)
async def test_px13_what_is_long_to_render_is_never_on_the_loop(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Begun, "new_chars", 0)
    assert await rendered_in(fields) == {"tokenize"}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "lists, [of] {things}, " * AT_ONCE_VALUES}]},
        {"prompt": "lists, [of] {things}, " * AT_ONCE_VALUES},
        {"messages": [USER, {"role": "user", "content": ["x"] * (AT_ONCE_VALUES // 2)}]},
    ],
)
async def test_px13_a_long_text_is_one_value_whatever_marks_are_in_it(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Begun, "new_chars", 0)
    assert await rendered_in(fields) == {threading.current_thread().name}


async def test_px13_long_tools_are_rendered_on_the_loop_once_they_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Begun, "new_chars", 0)
    tokenizer = Bytes()
    local = make(Loader(a=tokenizer))
    await ready(local, "model-a")
    local.judge("model-a", set(FORMATS))
    function = {"name": "known", "description": "y" * AT_ONCE_TOOLS_BYTES}
    asked = body(
        messages=[{"role": "user", "content": "x"}], tools=[{"type": "function", "function": function}]
    )
    for thread in ("tokenize", threading.current_thread().name):
        await local.tokens("model-a", asked)
        assert tokenizer.threads == {thread}
        tokenizer.threads.clear()
    local.close()
