from __future__ import annotations

from array import array
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

tokenizers = pytest.importorskip("tokenizers", reason="the extra local-tokenizer is not installed")
from tokenizers import AddedToken as Added  # noqa: E402
from tokenizers import normalizers  # noqa: E402

from router import word_split, words  # noqa: E402
from router.cuts import cuts_of  # noqa: E402
from router.words import Words, words_of  # noqa: E402
from tests.router.backends import (  # noqa: E402
    FRAGMENTS,
    PATTERNS,
    SPECIAL,
    byte_level,
    split_as,
    tiktoken_like,
    with_added,
)

WORDS = ["word ", "words and ", "it's\n", "\u4f60\u597d\u3002", "e \u0301", "a\u0301 ", "12 ", "  ", "x" * 60]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NEW = ["".join(word) for word in product(LETTERS, repeat=2)]


def with_special(backend: Any) -> Any:
    backend.add_special_tokens([Added(text, normalized=False) for text in SPECIAL])
    return backend


def backends() -> dict[str, Any]:
    composed = split_as("Qwen 2")
    composed.normalizer = normalizers.NFC()
    made = {name: with_special(split_as(name)) for name in PATTERNS}
    made |= {"composed": with_special(composed), "byte-level": with_special(byte_level())}
    return made | {"all added": with_added(byte_level()), "tiktoken": with_added(tiktoken_like())}


BACKENDS = backends()


def known(backend: Any) -> Words:
    made = words_of(backend, cuts_of(backend))
    assert made is not None
    return made


WORDS_OF = {name: known(backend) for name, backend in BACKENDS.items()}


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=50, deadline=None)
@given(
    parts=st.lists(st.sampled_from([*FRAGMENTS, *WORDS]) | st.text(max_size=8), max_size=30),
    size=st.sampled_from([1, 8, 50]),
    room=st.sampled_from([1, 20, 8192]),
)
def test_ix09_ids_by_words_are_those_of_the_whole(kind: str, parts: list[str], size: int, room: int) -> None:
    """Cut as often as can be, with room for few words, and where most are new."""
    text, whole = "".join(parts), BACKENDS[kind]
    small = patch.multiple(word_split, SLICE=size, SMALL_SLICE=size // 2)
    with small, patch.multiple(words, KEPT_WORDS=room, LEARNED=min(room, 3), CHARS_PER_NEW=room, BREATH_S=0):
        exact = array("I", whole.encode(text, add_special_tokens=False).ids)
        for _ in range(2):
            assert WORDS_OF[kind].ids(text) == exact


def test_only_so_many_words_are_kept_and_those_in_use_longest() -> None:
    of = known(with_special(byte_level()))
    for number in range(3 * words.KEPT_WORDS // 100):
        of.ids(
            " ".join(f"w{chr(97 + number % 26)}{'abcdefghij'[at // 10]}{at}x{number}" for at in range(100))
        )
        of.ids(" often")
        assert len(of._young) + len(of._old) <= 2 * words.KEPT_WORDS + 100
        assert " often" in of._young or " often" in of._old
    of.ids("y" * (words.LONGEST + 1))
    assert max(map(len, of._young)) <= words.LONGEST


def test_a_word_is_given_to_the_tokenizer_once() -> None:
    backend, asked = with_special(byte_level()), list[str]()

    class Counted:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
            asked.extend(texts)
            return backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    of = known(backend)
    of._backend = Counted()
    of.ids("the word is a word " * 2_000)
    assert sorted(asked) == [" ", " a", " is", " the", " word", "the"]


def test_text_of_new_words_alone_is_given_to_the_tokenizer_whole() -> None:
    backend = with_special(byte_level())
    of = known(backend)
    text = " ".join(
        chr(97 + a) + chr(97 + b) + chr(97 + c) for a in range(9) for b in range(9) for c in range(9)
    )
    assert of.ids(text) == array("I", backend.encode(text, add_special_tokens=False).ids)
    assert len(of._young) == words.LEARNED


def by_small_slices(backend: Any, text: str) -> array[int] | None:
    """None if the tokenizer is asked for the whole."""
    of = words_of(backend, cuts_of(backend))
    with patch.multiple(word_split, SLICE=1, SMALL_SLICE=1):
        return None if of is None else of.ids(text)


@pytest.mark.parametrize(
    "token", [Added("\u00e9y b", normalized=True), Added("\u00e9y", rstrip=True, normalized=True)]
)
@pytest.mark.parametrize("text", ["xe\u0301y b", "e\u0301y  b", "word \u00e9y b"])
def test_an_added_token_that_holds_or_takes_blanks_is_left_to_the_tokenizer(token: Any, text: str) -> None:
    """Where normalisation alone makes it what it is, it is not to be seen before."""
    backend = with_special(split_as("Qwen 2"))
    backend.normalizer = normalizers.NFC()
    backend.add_tokens([token])
    whole = array("I", backend.encode(text, add_special_tokens=False).ids)
    assert by_small_slices(backend, text) in (None, whole)


@pytest.mark.parametrize(
    ("token", "text"),
    [
        ("e\u0301.x", "\u00e9.x"),
        ("\u00e9a.b", "word e\u0301a.b"),
        ("\u00e91.b", "e\u03011.b"),
        ("Ka.b", "\u212aa.b"),
        ("a;b.", "a\u037eb."),
    ],
)
def test_an_added_token_that_is_found_in_composed_text_alone_is_left_to_the_tokenizer(
    token: str, text: str
) -> None:
    backend = with_special(split_as("Qwen 2"))
    backend.normalizer = normalizers.NFC()
    backend.add_tokens([Added(token, normalized=True)])
    whole = array("I", backend.encode(text, add_special_tokens=False).ids)
    assert by_small_slices(backend, text) in (None, whole)


@pytest.mark.parametrize("token", ["<think>", "<|user|>", "\u00e9y", "\uff5c\u2581"])
def test_other_added_tokens_that_are_looked_for_in_composed_text_are_no_hindrance(token: str) -> None:
    backend = with_special(split_as("Qwen 2"))
    backend.normalizer = normalizers.NFC()
    backend.add_tokens([Added(token, normalized=True)])
    of = known(backend)
    for text in (f"word {token} word", f"word{token}.", "word"):
        assert of.ids(text) == array("I", backend.encode(text, add_special_tokens=False).ids)
