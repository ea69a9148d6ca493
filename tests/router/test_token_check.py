"""Over real sockets: engines that tokenise with ``transformers``, and a router that has, or has not, their
tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from array import array
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")

from router import token_check  # noqa: E402
from router.conversation import ContentFormat, InexactError, read_chat  # noqa: E402
from router.local_tokenizer import LocalTokenizer  # noqa: E402
from router.prompt import read_body  # noqa: E402
from router.replicas import parse_replicas  # noqa: E402
from router.token_check import compare  # noqa: E402
from tests.router import small_tokenizer  # noqa: E402
from tests.router.backends import PATTERNS, split_as  # noqa: E402
from tests.router.chats import chat  # noqa: E402


class Tokenize:
    """An engine's ``/tokenize``, by the tokenizer in a folder."""

    def __init__(self, folder: str, form: ContentFormat = "string") -> None:
        self.use(folder)
        self.form = form
        self.asked = 0

    def use(self, folder: str) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def ids(self, fields: dict[str, Any]) -> list[int]:
        if "prompt" in fields:
            add = fields.get("add_special_tokens", True)
            return list(self.tokenizer(fields["prompt"], add_special_tokens=add)["input_ids"])
        said = read_chat(read_body(json.dumps(fields).encode()), self.form)
        text = self.tokenizer.apply_chat_template(
            said.messages, tools=said.tools, tokenize=False, **said.kwargs
        )
        return list(self.tokenizer(text, add_special_tokens=said.add_special_tokens)["input_ids"])

    async def __call__(self, request: web.Request) -> web.Response:
        self.asked += 1
        try:
            return web.json_response({"tokens": self.ids(await request.json())})
        except (InexactError, TypeError, ValueError):
            return web.json_response({"error": {"message": "no"}}, status=400)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "one": small_tokenizer.save(root / "one"),
        "two": small_tokenizer.save(root / "two", words="quite other words " * 30),
        "parts": small_tokenizer.save(root / "parts", small_tokenizer.PARTS),
    }


ALIKE = [
    {"Llama 3", "GPT-4", "OLMo 2"},
    {"GPT-4o", "MiniMax"},
    {"DeepSeek 3", "DeepSeek 3, as its file has line ends"},
]
"""Ways to split texts that hardly differ, or not at all."""


def test_ix09_the_probes_tell_apart_the_ways_to_split_a_text() -> None:
    """An engine with another expression than the files say differs in the probes, not in prompts first."""
    text = token_check.PROBES[0]["prompt"]
    words = {name: split_as(name).pre_tokenizer.pre_tokenize_str(text) for name in PATTERNS}
    same = [{one, other} for one, other in combinations(words, 2) if words[one] == words[other]]
    assert all(any(pair <= alike for alike in ALIKE) for pair in same), same


def state(router: Any) -> Any:
    return router.parts.tokenizers()[0].state


class Agreed(NamedTuple):
    """A router whose local tokenizer was found to be its one engine's; ``theirs`` is the engine's."""

    theirs: Tokenize
    engine: Any
    lookup: Any
    router: Any


@pytest.fixture
async def agreed(kit: Any, start_engine: Any, start_router: Any, folders: dict[str, str]) -> Agreed:
    theirs = Tokenize(folders["one"])
    engine = await start_engine(tokenize=theirs)
    lookup = kit.lookup(kit.matched("e0", 16))
    router = await start_router(engine, lookup=lookup, tokenizer=(f"m={folders['one']}",))
    await kit.wait_until(lambda: state(router) == "agrees", "the tokenizers were compared")
    return Agreed(theirs, engine, lookup, router)


async def test_ix09_the_engines_ids_come_from_the_local_tokenizer_without_asking(
    agreed: Agreed, folders: dict[str, str]
) -> None:
    theirs, _, lookup, router = agreed
    asked, rng = theirs.asked, random.Random(3)
    for _ in range(40):
        fields = {"model": "m", **chat(rng)}
        async with router.client.post(f"{router.url}/v1/chat/completions", json=fields) as response:
            assert response.status == 200
        if lookup.asked:
            assert lookup.asked.pop()[1] == array("I", theirs.ids(fields))
    await router.complete("plain text", add_special_tokens=False)
    assert lookup.asked.pop()[1] == array(
        "I", theirs.ids({"prompt": "plain text", "add_special_tokens": False})
    )
    refused = await router.metric("tokenize_fallback_total", reason="inexact-template-refused")
    assert theirs.asked - asked == refused < 20
    told = (await router.get("/debug/tokenizers"))["tokenizers"]
    assert told == [
        {
            "model": "m",
            "source": folders["one"],
            "state": "agrees",
            "error": None,
            "read_by": "router",
            "content_format": "string",
            "cuts_texts": True,
            "media_agrees": None,
        }
    ]


async def test_ix09_a_tokenizer_that_gives_other_ids_is_an_alert_and_is_not_used_until_it_agrees(
    kit: Any, start_engine: Any, start_router: Any, folders: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    theirs = Tokenize(folders["two"])
    engine = await start_engine(tokenize=theirs)
    lookup = kit.lookup(kit.matched("e0", 16))
    router = await start_router(
        engine, lookup=lookup, tokenizer=(f"m={folders['one']}",), tokenizer_check_interval_s=0.05
    )
    await kit.wait_until(lambda: state(router) == "differs", "a difference is seen")
    assert "gives other ids than replica e0" in caplog.text
    assert await router.metric("tokenizer_checks_total", model="m", outcome="differs") >= 1
    await router.complete("some other words")
    assert lookup.asked.pop()[1] == array("I", theirs.ids({"prompt": "some other words"}))
    # It is loaded once more by what engines use, and is to be compared again then.
    told = ("local-differs", "local-unchecked")
    assert sum([await router.metric("tokenize_fallback_total", reason=reason) for reason in told]) == 1
    theirs.use(folders["one"])
    await kit.wait_until(lambda: state(router) == "agrees", "it agrees again")


async def test_ix09_one_engine_of_several_that_differs_is_enough(
    kit: Any, start_engine: Any, start_router: Any, folders: dict[str, str]
) -> None:
    engines = [await start_engine(tokenize=Tokenize(folders[name])) for name in ("one", "two")]
    router = await start_router(*engines, tokenizer=(f"m={folders['one']}",))
    await kit.wait_until(lambda: state(router) == "differs", "a difference is seen")


async def test_ix09_the_way_to_give_content_is_learned_from_the_engine(
    kit: Any, start_engine: Any, start_router: Any, folders: dict[str, str]
) -> None:
    engine = await start_engine(tokenize=Tokenize(folders["parts"], "openai"))
    router = await start_router(engine, tokenizer=(f"m={folders['parts']}",))
    await kit.wait_until(lambda: state(router) == "agrees", "the tokenizers were compared")
    assert router.parts.tokenizers()[0].content_format == "openai"


async def test_ix09_an_engine_that_comes_back_with_another_tokenizer_is_noticed_at_once(
    agreed: Agreed, kit: Any, folders: dict[str, str]
) -> None:
    theirs, engine, lookup, router = agreed
    engine.health_status = 503
    await kit.wait_until(lambda: router.parts.fleet.replicas["e0"].health == "down", "the engine is down")
    theirs.use(folders["two"])
    engine.health_status = 200
    await kit.wait_until(lambda: router.parts.fleet.replicas["e0"].health == "up", "the engine is back")
    await router.complete("quite other words")
    assert lookup.asked.pop()[1] == array("I", theirs.ids({"prompt": "quite other words"}))
    await kit.wait_until(lambda: state(router) == "differs", "the difference is seen")


async def test_ix09_an_engine_that_could_not_be_asked_is_asked_again_though_another_agrees(
    kit: Any, start_engine: Any, start_router: Any, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, other = True, Tokenize(folders["two"])

    async def tokenize(request: web.Request) -> web.Response:
        return web.Response(status=503) if busy else await other(request)

    monkeypatch.setattr(token_check, "UNASKED_S", 0.02)
    engines = await start_engine(tokenize=Tokenize(folders["one"])), await start_engine(tokenize=tokenize)
    router = await start_router(*engines, tokenizer=(f"m={folders['one']}",))
    await kit.wait_until(lambda: state(router) == "agrees", "one of them was compared")
    busy = False
    await kit.wait_until(lambda: state(router) == "differs", "the other one is seen to differ")


async def test_ix09_an_engine_that_is_another_process_is_noticed_though_it_was_never_away(
    kit: Any, start_engine: Any, start_router: Any, folders: dict[str, str]
) -> None:
    theirs, said = Tokenize(folders["one"]), b"vllm:num_requests_running 0\nprocess_start_time_seconds %d\n"
    engine = await start_engine(tokenize=theirs)
    engine.metrics = said % 1
    router = await start_router(engine, tokenizer=(f"m={folders['one']}",), poll_interval_s=0.1)
    replica = router.parts.fleet.replicas["e0"]
    await kit.wait_until(lambda: replica.process_started == 1, "it has said when it was started")
    await kit.wait_until(lambda: state(router) == "agrees", "the tokenizers were compared")
    theirs.use(folders["two"])
    engine.metrics = said % 2
    await kit.wait_until(lambda: state(router) == "differs", "the difference is seen")


async def test_what_engines_tokenised_is_forgotten_when_one_comes_back(
    kit: Any, start_engine: Any, start_router: Any, folders: dict[str, str]
) -> None:
    theirs = Tokenize(folders["one"])
    engine = await start_engine(tokenize=theirs)
    lookup = kit.lookup(kit.matched("e0", 16))
    router = await start_router(engine, lookup=lookup)
    await router.complete("quite other words")
    engine.health_status = 503
    await kit.wait_until(lambda: router.parts.fleet.replicas["e0"].health == "down", "the engine is down")
    theirs.use(folders["two"])
    engine.health_status = 200
    await kit.wait_until(lambda: router.parts.fleet.replicas["e0"].health == "up", "the engine is back")
    await router.complete("quite other words")
    old, new = lookup.asked[-2][1], lookup.asked[-1][1]
    assert old != new == array("I", theirs.ids({"prompt": "quite other words"}))


async def test_what_engines_tokenised_is_forgotten_when_a_new_one_comes_under_another_name(
    kit: Any, start_engine: Any, start_router: Any, folders: dict[str, str]
) -> None:
    theirs = Tokenize(folders["one"])
    engine = await start_engine(tokenize=theirs)
    lookup = kit.lookup(kit.matched("pod-1", 16), kit.matched("pod-2", 16))
    router = await start_router(f"pod-1={engine.url}", lookup=lookup)
    fleet = router.parts.fleet
    await router.complete("quite other words")
    theirs.use(folders["two"])
    fleet.update(parse_replicas([f"pod-2={engine.url}"]))
    await kit.wait_until(lambda: list(fleet.replicas) == ["pod-2"], "the old one is gone")
    await kit.wait_until(lambda: fleet.replicas["pod-2"].models is not None, "the new one is known")
    await router.complete("quite other words")
    old, new = lookup.asked[-2][1], lookup.asked[-1][1]
    assert old != new == array("I", theirs.ids({"prompt": "quite other words"}))


@pytest.mark.parametrize(
    ("configured", "asked"), [("m", "other"), ("other", "m"), ("m", "lora"), ("other", "lora")]
)
async def test_ix10_an_alias_and_an_adapter_have_their_models_tokenizer(
    configured: str, asked: str, kit: Any, start_engine: Any, start_router: Any, folders: dict[str, str]
) -> None:
    theirs = Tokenize(folders["one"])
    engine = await start_engine(
        tokenize=theirs, cards=[{"id": "m"}, {"id": "other"}, {"id": "lora", "parent": "m"}]
    )
    lookup = kit.lookup(kit.matched("e0", 16))
    router = await start_router(engine, lookup=lookup, tokenizer=(f"{configured}={folders['one']}",))
    await kit.wait_until(lambda: state(router) == "agrees", "the tokenizers were compared")
    before = theirs.asked
    await router.complete("the word", model=asked, cache_salt="pepper")
    assert theirs.asked == before
    ids = array("I", theirs.ids({"prompt": "the word"}))
    assert lookup.asked.pop() == ("m", ids, "lora" if asked == "lora" else None, "pepper")


async def test_without_tokenize_the_configured_tokenizer_is_used_unverified(
    kit: Any, start_engine: Any, start_router: Any, folders: dict[str, str]
) -> None:
    engine = await start_engine(tokenize=None)
    lookup = kit.lookup(kit.matched("e0", 16))
    router = await start_router(engine, lookup=lookup, tokenizer=(f"m={folders['one']}",))
    await kit.wait_until(lambda: state(router) == "unverifiable", "the engine was asked")
    await router.complete("the word")
    assert lookup.asked.pop()[1] == array("I", Tokenize(folders["one"]).ids({"prompt": "the word"}))


def test_probes_that_one_side_refuses_are_not_compared() -> None:
    a, b = array("I", [1]), array("I", [2])
    assert compare([{}, {"string": a, "openai": a}], [a, None]).probes == 0
    result = compare([{"string": a, "openai": b}, {"string": a}, {}], [a, a, a])
    assert (result.agreeing, result.probes) == ({"string"}, 2)


async def test_px13_health_and_other_requests_are_answered_while_every_tokenizing_thread_is_held(
    kit: Any,
    start_engine: Any,
    start_router: Any,
    folders: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = await start_engine(tokenize=Tokenize(folders["one"]))
    lookup = kit.lookup(kit.matched("e0", 16))
    router = await start_router(
        engine, lookup=lookup, tokenizer=(f"m={folders['one']}",), tokenizer_threads=2
    )
    await kit.wait_until(lambda: state(router) == "agrees", "the tokenizers were compared")
    hold, held, real = threading.Event(), threading.Semaphore(0), LocalTokenizer.make

    def make(self: LocalTokenizer, *parts: Any) -> list[array[int]]:
        assert threading.current_thread() is not threading.main_thread()
        held.release()
        assert hold.wait(20)
        return real(self, *parts)

    monkeypatch.setattr(LocalTokenizer, "make", make)
    prompts = [f"{number} " + "word " * 20_000 for number in range(8)]
    sent = [asyncio.create_task(router.complete(prompt)) for prompt in prompts]
    for _ in range(2):
        assert await asyncio.to_thread(held.acquire, timeout=20)
    for _ in range(20):
        assert (await router.get("/health"))["status"] == "ok"
    assert (await router.complete([1, 2, 3])).status == 200
    assert not any(task.done() for task in sent)
    hold.set()
    assert {(await task).status for task in sent} == {200}


@pytest.mark.parametrize(
    "prompt", ["text", ["a", "b"], [1, 2], [[1, 2], [3]], "", [], [[]], None, {"a": 1}, [1, "a"], ["a", 1], 5]
)
async def test_ix11_no_form_of_a_prompt_is_an_error_of_ours(prompt: Any, agreed: Agreed) -> None:
    router = agreed.router
    assert (await router.complete(prompt)).status == 200
    assert (await router.complete(prompt_embeds="AAAA")).status == 200


async def test_ix09_where_engines_differ_from_the_files_transformers_reads_them(
    kit: Any, start_engine: Any, start_router: Any, tmp_path: Path
) -> None:
    # A class of transformers makes the tokenizer anew from its vocabulary, whatever its file says.
    folder = tmp_path / "one"
    small_tokenizer.save(folder)
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    file.write_text(file.read_text().replace('"normalizer":null', '"normalizer":{"type":"Lowercase"}'))
    config.write_text(config.read_text().replace("PreTrainedTokenizerFast", "Qwen2Tokenizer"))
    theirs = Tokenize(str(folder))
    assert theirs.ids({"prompt": "A"}) != theirs.ids({"prompt": "a"})
    engine = await start_engine(tokenize=theirs)
    lookup = kit.lookup(kit.matched("e0", 16))
    router = await start_router(engine, lookup=lookup, tokenizer=(f"m={folder}",))
    await kit.wait_until(lambda: state(router) == "agrees", "transformers gives the engine's ids")
    assert await router.metric("tokenizer_checks_total", model="m", outcome="differs") == 1
    assert (await router.get("/debug/tokenizers"))["tokenizers"][0]["read_by"] == "transformers"
    await router.complete("A prompt")
    assert lookup.asked.pop()[1] == array("I", theirs.ids({"prompt": "A prompt"}))
