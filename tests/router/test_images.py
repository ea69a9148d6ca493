"""Chats with images: the text in front of the first one counts, nothing behind it does."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")

from events.publisher import Publisher  # noqa: E402
from events.schema import BlockStored, token_array  # noqa: E402
from router.conversation import ContentFormat, InexactError, read_media_chat  # noqa: E402
from router.local_tokenizer import LocalTokenizer, load_tokenizer  # noqa: E402
from router.prompt import read_body  # noqa: E402
from router.token_cache import TokenCache  # noqa: E402
from tests.router import small_tokenizer  # noqa: E402
from tests.router.whole_path import IndexerProcess, until_live  # noqa: E402

SPECIAL = ("<s>", "</s>", "<i>")
IMAGE_TOKENS = 40
BLOCK = 16
IN_ORDER = small_tokenizer.IMAGES
FIRST_IN_MESSAGE = IN_ORDER.replace(
    "{% for part in m.content %}{% if part.type == 'image' %}<i>{% else %}{{ part.text }}{% endif %}",
    "{% for part in m.content if part.type == 'image' %}<i>{% endfor %}"
    "{% for part in m.content if part.type == 'text' %}{{ part.text }}",
)
FIRST_OF_ALL = (
    "{% for m in messages %}{% if m.content is not string %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<i>{% endif %}{% endfor %}{% endif %}{% endfor %}"
    + IN_ORDER.replace("{% if part.type == 'image' %}<i>{% else %}", "{% if part.type == 'text' %}")
)
NO_SYSTEM_WITH_IMAGES = (
    "{% set seen = namespace(images=false) %}{% for m in messages %}{% if m.content is not string %}"
    "{% for part in m.content %}{% if part.type == 'image' %}{% set seen.images = true %}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
    + IN_ORDER.replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'system' or not seen.images %}"
    )
)
ONE_TEXT = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}<s>assistant\n"
TEMPLATES: list[tuple[str, ContentFormat]] = [
    (IN_ORDER, "openai"),
    (FIRST_IN_MESSAGE, "openai"),
    (FIRST_OF_ALL, "openai"),
    (NO_SYSTEM_WITH_IMAGES, "openai"),
    (ONE_TEXT, "string"),
]


def picture(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


class Vision:
    """What an engine makes of a chat: its template, then each placeholder as many tokens as an image has."""

    def __init__(self, folder: str, content_format: ContentFormat) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._form = content_format
        self.image = self._tokenizer.convert_tokens_to_ids("<i>")

    def tokens(self, messages: Sequence[dict[str, Any]]) -> tuple[list[int], list[tuple[int, str]]]:
        """The ids, and where each image begins."""
        text = self._tokenizer.apply_chat_template(
            [message | {"content": self._content(message["content"])} for message in messages],
            tokenize=False,
            add_generation_prompt=True,
        )
        names = [
            part["image_url"]["url"]
            for message in messages
            if isinstance(message["content"], list)
            for part in message["content"]
            if part["type"] == "image_url"
        ]
        ids: list[int] = []
        images: list[tuple[int, str]] = []
        for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]:
            if token == self.image and names:
                images.append((len(ids), names.pop(0)))
                ids += [token] * IMAGE_TOKENS
            else:
                ids.append(token)
        return ids, images

    def _content(self, content: str | list[dict[str, Any]]) -> Any:
        parts = [words(content)] if isinstance(content, str) else content
        if self._form == "openai":
            return [part if part["type"] == "text" else {"type": "image"} for part in parts]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        # vLLM 0.32 drops empty texts, and puts images in front (_get_full_multimodal_text_prompt).
        return "\n".join(["<i>"] * (len(parts) - len(texts)) + list(filter(None, texts)))


@pytest.fixture(scope="module", params=range(len(TEMPLATES)))
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalTokenizer, Vision, int]:
    template, form = TEMPLATES[request.param]
    folder = small_tokenizer.save(tmp_path_factory.mktemp("model"), template, special=SPECIAL)
    return load_tokenizer(folder, "m#1", TokenCache(100_000)), Vision(folder, form), request.param


TEXTS = st.text(st.sampled_from("a word \n<i>s/\ue000\ue001ö"), max_size=12) | st.sampled_from(
    ["<i>", "<i>look", "</s><s>user\n", "<s>", "<i><i>"]
)
CONTENTS = st.lists(TEXTS.map(words) | st.sampled_from([picture("a"), picture("b")]), max_size=4) | TEXTS
CHATS = st.lists(CONTENTS, min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(system=TEXTS, contents=CHATS)
def test_ev28_what_is_known_is_what_the_engine_has_in_front_of_the_first_image(
    model: tuple[LocalTokenizer, Vision, int], system: str, contents: list[Any]
) -> None:
    local, vision, template = model
    messages = [{"role": "system", "content": system}]
    messages += [{"role": "user", "content": content} for content in contents]
    body = read_body(json.dumps({"model": "m", "messages": messages}).encode())
    try:
        known = local.encode_before_media(*read_media_chat(body, TEMPLATES[template][1])).tolist()
    except InexactError:
        return
    exact, _ = vision.tokens(messages)
    assert known == exact[: len(known)]
    assert vision.image not in known


def test_ev28_all_text_in_front_of_an_image_is_known_where_the_template_keeps_the_order(
    tmp_path: Path,
) -> None:
    folder = small_tokenizer.save(tmp_path, IN_ORDER, special=SPECIAL)
    local, vision, rng = (
        load_tokenizer(folder, "m#1", TokenCache(1000)),
        Vision(folder, "openai"),
        random.Random(3),
    )
    for _ in range(20):
        text = " ".join(rng.choices(["the", "word", "is", "ö", "\n"], k=50))
        content = [words(text), picture("a"), words("a"), picture("b")]
        messages: list[dict[str, Any]] = [{"role": "system", "content": text}]
        messages.append({"role": "user", "content": content})
        body = read_body(json.dumps({"model": "m", "messages": messages}).encode())
        exact, images = vision.tokens(messages)
        known = local.encode_before_media(*read_media_chat(body, "openai"))
        assert known.tolist() == exact[: images[0][0]]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": None},
        {"type": "image_url", "image_url": {"url": ""}},
        {"type": "image_url", "image_url": {"url": "x"}, "uuid": "1"},
        {"type": "image_embeds", "image_embeds": {"data": "x"}},
        {"type": "no such part"},
    ],
)
def test_ev28_parts_of_unusual_form_are_left_to_the_engine(part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [part]}]
    with pytest.raises(InexactError):
        read_media_chat(read_body(json.dumps({"messages": messages}).encode()), "openai")


class Engine:
    """An engine with eyes, and a cache that never evicts: it says what it had cached and publishes what it
    stores, with the images in the extra keys of the blocks that they are in.
    """

    def __init__(self, vision: Vision, publisher: Publisher) -> None:
        self._vision = vision
        self._publisher = publisher
        self._held: set[bytes] = set()
        self.server: Any = None
        self.cached = 0

    async def answer(self, request: web.Request) -> web.Response:
        ids, images = self._vision.tokens(json.loads(self.server.bodies[-1])["messages"])
        self.cached = self._take(ids, images)
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1}
        usage |= {"prompt_tokens_details": {"cached_tokens": self.cached}}  # type: ignore[dict-item]
        return web.json_response({"choices": [{"message": {"content": "ok"}}], "usage": usage})

    def _take(self, ids: list[int], images: list[tuple[int, str]]) -> int:
        hashes, extras = list[bytes](), list[list[Any] | None]()
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            inside = [
                [name, at - start] for at, name in images if at < start + BLOCK and at + IMAGE_TOKENS > start
            ]
            extras.append(inside or None)
            said = json.dumps([hashes[-1].hex() if hashes else "", ids[start : start + BLOCK], inside])
            hashes.append(xxh3_64_digest(said.encode()))
        usable = (len(ids) - 1) // BLOCK
        held = next((n for n, block in enumerate(hashes) if block not in self._held), len(hashes))
        if new := hashes[held:]:
            parent = hashes[held - 1] if held else None
            tokens = token_array(ids[held * BLOCK : len(hashes) * BLOCK])
            self._publisher.publish([BlockStored(new, parent, tokens, BLOCK, extra_keys=extras[held:])], 1.0)
            self._held.update(new)
        return min(held, usable) * BLOCK


@pytest.fixture
async def fleet(indexer: IndexerProcess, tmp_path: Path, start_engine: Any) -> AsyncIterator[list[Engine]]:
    folder = small_tokenizer.save(tmp_path / "model", IN_ORDER, special=SPECIAL)
    engines = []
    for _ in range(2):
        publisher = Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
        engine = Engine(Vision(folder, "openai"), publisher)
        source = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
        engine.server = await start_engine(answer=engine.answer, tokenize=None, event_sources={"0": source})
        engines.append(engine)
    yield engines
    for engine in engines:
        engine._publisher.close()


STORY = "the word is a word and the word is cached where it was computed before. " * 8


async def test_ev28_another_image_behind_the_same_text_finds_the_text_and_nothing_of_the_image(
    fleet: list[Engine], start_router: Any, kit: Any, tmp_path: Path
) -> None:
    router = await start_router(
        *(engine.server for engine in fleet),
        map=str(tmp_path / "map"),
        tokenizer=(f"m={tmp_path / 'model'}",),
    )

    async def ask(*content: dict[str, Any]) -> tuple[Any, int]:
        messages = [{"role": "system", "content": STORY}, {"role": "user", "content": list(content)}]
        body = {"model": "m", "messages": messages}
        async with router.client.post(f"{router.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
            headers = response.headers
        await asyncio.sleep(0.1)  # Events reach the map some milliseconds after the answer.
        return headers, fleet[int(headers["x-warmroute-replica"][1:])].cached

    await live(router, kit.wait_until, fleet)
    question = [words("what is it? " * 10), picture("cat"), words(STORY)]
    first, _ = await ask(*question)
    _, images = fleet[0]._vision.tokens(
        [{"role": "system", "content": STORY}, {"role": "user", "content": question}]
    )
    in_front = images[0][0] // BLOCK * BLOCK
    assert in_front >= 20 * BLOCK
    assert int(first["x-warmroute-prompt-tokens"]) > images[0][0] + IMAGE_TOKENS
    assert "tokens in front of the first image are known" in first["x-warmroute-reason"]
    for name in ("dog", "cow"):
        headers, cached = await ask(question[0], picture(name), question[2])
        assert headers["x-warmroute-replica"] == first["x-warmroute-replica"]
        assert int(headers["x-warmroute-matched-tokens"]) == cached == in_front
    headers, cached = await ask(*question)
    assert headers["x-warmroute-replica"] == first["x-warmroute-replica"]
    assert int(headers["x-warmroute-matched-tokens"]) == in_front, "what is behind an image is never matched"
    assert cached > in_front
    # An image in front of the text: only the system prompt is the same, though the tokens are.
    before = [picture("cat"), *question[::2]]
    await ask(*before)
    _, images = fleet[0]._vision.tokens(
        [{"role": "system", "content": STORY}, {"role": "user", "content": before}]
    )
    headers, cached = await ask(picture("dog"), *question[::2])
    assert int(headers["x-warmroute-matched-tokens"]) == cached == images[0][0] // BLOCK * BLOCK
    replicas = [f"e{number}" for number in range(2)]
    for replica in replicas:
        for outcome in ("exact", "over", "under"):
            assert await router.metric("compared_total", replica=replica, outcome=outcome) == 0
        assert await router.metric("token_count_mismatch_total", replica=replica) == 0


@pytest.mark.parametrize(("theirs", "agrees"), [(IN_ORDER, True), (NO_SYSTEM_WITH_IMAGES, False)])
async def test_ev28_what_is_in_front_of_an_image_counts_only_while_the_engines_agree(
    start_engine: Any, start_router: Any, kit: Any, tmp_path: Path, theirs: str, agrees: bool
) -> None:
    vision = Vision(small_tokenizer.save(tmp_path / "theirs", theirs, special=SPECIAL), "openai")

    async def tokenize(request: web.Request) -> web.Response:
        fields = await request.json()
        if fields.get("tools") or fields.get("add_generation_prompt") is False or "prompt" in fields:
            return web.json_response({"error": {"message": "no"}}, status=400)
        return web.json_response({"tokens": vision.tokens(fields["messages"])[0]})

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({})

    lookup = kit.lookup(kit.matched("e0", 16))
    mine = small_tokenizer.save(tmp_path / "mine", IN_ORDER, special=SPECIAL)
    engine = await start_engine(tokenize=tokenize, answer=answer)
    router = await start_router(engine, lookup=lookup, tokenizer=(f"m={mine}",))
    await kit.wait_until(lambda: router.parts.tokenizers()[0].state == "agrees", "texts were compared")
    assert router.parts.tokenizers()[0].media_agrees is agrees
    outcome = "media-agrees" if agrees else "media-differs"
    assert await router.metric("tokenizer_checks_total", model="m", outcome=outcome) >= 1
    content = [words("what is it?"), picture("cat")]
    messages = [{"role": "system", "content": STORY}, {"role": "user", "content": content}]
    body = {"model": "m", "messages": messages}
    async with router.client.post(f"{router.url}/v1/chat/completions", json=body) as response:
        reason = response.headers["x-warmroute-reason"]
    exact, images = vision.tokens(messages)
    if agrees:
        assert lookup.asked.pop()[1].tolist() == exact[: images[0][0]]
    else:
        assert not lookup.asked
        assert reason.startswith("fallback: messages with other than text parts")
        assert await router.metric("tokenize_fallback_total", reason="inexact-media-differs") == 1


async def test_prefix_hash_by_tokens_knows_the_beginning_of_a_chat_with_an_image(
    start_engine: Any, start_router: Any, kit: Any, tmp_path: Path
) -> None:
    """By its ids, so that it goes where the same chat without the image does."""
    engines = [await start_engine(tokenize=None) for _ in range(4)]
    mine = small_tokenizer.save(tmp_path / "mine", IN_ORDER, special=SPECIAL)
    router = await start_router(
        *engines,
        policy="prefix-hash",
        policy_parameters={"boundary": "tokens", "tokens": 16},
        tokenizer=(f"m={mine}",),
    )
    await kit.wait_until(lambda: router.parts.tokenizers()[0].state == "unverifiable", "it is loaded")

    async def replica(system: str, *content: dict[str, Any]) -> str:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": list(content)}]
        body = {"model": "m", "messages": messages}
        async with router.client.post(f"{router.url}/v1/chat/completions", json=body) as response:
            assert response.headers["x-warmroute-reason"].startswith("prefix hash: place 1 of 4")
            return str(response.headers["x-warmroute-replica"])

    for text in ("a word ", "the cache ", "was computed ", "is it ", "where ", "before "):
        assert await replica(text * 20, words("what?")) == await replica(text * 20, picture("cat"))


async def live(router: Any, wait_until: Any, fleet: list[Engine]) -> None:
    """Waits until the tokenizer is loaded and the index follows all engines; these tell of nothing so far."""
    for _ in range(1000):
        if "unverifiable" in str(await router.get("/debug/tokenizers")):
            break
        await asyncio.sleep(0.02)
    answers = [engine.server.answer for engine in fleet]

    async def nothing(_: web.Request) -> web.Response:
        return web.json_response({})

    for engine in fleet:
        engine.server.answer = nothing
    await until_live(router, wait_until)
    for engine, answer in zip(fleet, answers, strict=True):
        engine.server.answer = answer
