from __future__ import annotations

import json
import random
import socket
from array import array
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")

from router.conversation import InexactError, read_chat  # noqa: E402
from router.local_tokenizer import LocalTokenizer, TokenizerLoadError, load_tokenizer  # noqa: E402
from router.prompt import read_body  # noqa: E402
from router.token_cache import TokenCache  # noqa: E402
from tests.router import small_tokenizer  # noqa: E402
from tests.router.chats import chat, text  # noqa: E402

SMOLLM2 = Path(__file__).parents[3] / "shared" / "data" / "smollm2-tokenizer"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_tokenizer.save(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def theirs(folder: str) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def load(folder: str, size_tokens: int = 100_000) -> LocalTokenizer:
    return load_tokenizer(folder, "m#1", TokenCache(size_tokens))


def body(fields: dict[str, Any]) -> Any:
    return read_body(json.dumps(fields).encode())


@pytest.mark.parametrize("source", ["small", "smollm2"])
def test_ix09_chats_and_texts_have_the_tokens_that_transformers_gives(source: str, folder: str) -> None:
    if source == "smollm2":
        if not SMOLLM2.exists():
            pytest.skip(f"no tokenizer in {SMOLLM2}")
        folder = str(SMOLLM2)
    theirs, local, rng = transformers.AutoTokenizer.from_pretrained(folder), load(folder), random.Random(5)
    for _ in range(60):
        said = read_chat(body(chat(rng)), "string")
        if said.add_special_tokens:
            continue
        try:
            ids = local.encode(local.render(said), False)
        except InexactError:
            with pytest.raises((TypeError, ValueError)):
                theirs.apply_chat_template(said.messages, tools=said.tools, **said.kwargs)
            continue
        exact = theirs.apply_chat_template(said.messages, tools=said.tools, return_dict=False, **said.kwargs)
        assert list(ids) == exact
        prompt = text(rng, 8)
        for add in (False, True):
            assert list(local.encode(prompt, add)) == theirs(prompt, add_special_tokens=add)["input_ids"]


def test_the_next_turn_pays_for_its_new_text_only(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    local = load(folder)
    encoded: list[str] = []
    make = local.make

    def counted(missing: Any, add_special_tokens: bool) -> Any:
        encoded.extend(part.text for part in missing)
        return make(missing, add_special_tokens)

    monkeypatch.setattr(local, "make", counted)
    turns = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"turn {n} " * 50} for n in range(7)]
    for length in (1, 3, 5, 7):
        encoded.clear()
        ids = local.encode(local.render(read_chat(body({"messages": turns[:length]}), "string")), False)
    # The answer to the turn before and the new question, and nothing of what was said earlier.
    assert [piece[:16] for piece in encoded] == ["</s><s>assistant", "</s><s>user\nturn"]
    whole = local._backend.encode(
        local.render(read_chat(body({"messages": turns}), "string")), add_special_tokens=False
    ).ids
    assert ids == array("I", whole)


def test_ix10_two_models_share_a_cache_and_nothing_else(tmp_path: Path) -> None:
    cache = TokenCache(100_000)
    a = load_tokenizer(small_tokenizer.save(tmp_path / "a"), "a", cache)
    b = load_tokenizer(small_tokenizer.save(tmp_path / "b", words="other words " * 20), "b", cache)
    prompt = "<s>the word is other words</s>"
    first, second = a.encode(prompt, False), b.encode(prompt, False)
    assert first != second
    assert (a.encode(prompt, False), b.encode(prompt, False)) == (first, second)


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerLoadError, match=str(tmp_path)):
        load(str(tmp_path))


def test_nothing_is_fetched_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the network was asked")

    folder = small_tokenizer.save(tmp_path)
    monkeypatch.setattr(socket, "create_connection", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    assert load(folder).cuts_texts


@pytest.mark.parametrize(
    ("template", "form"), [(small_tokenizer.STRING, "string"), (small_tokenizer.PARTS, "openai")]
)
def test_a_template_that_goes_through_parts_gets_parts(tmp_path: Path, template: str, form: str) -> None:
    assert load(small_tokenizer.save(tmp_path, template)).content_format() == form


def test_ix11_half_of_a_pair_of_surrogates_is_for_the_engine(folder: str) -> None:
    local = load(folder)
    for said in ("\ud83d", "word " * 50 + "</s>word \udc00 word"):
        with pytest.raises(InexactError, match="surrogates"):
            local.encode(said, False)
    assert local.encode("\U0001f600", False) == load(folder).encode("\U0001f600", False)
