from __future__ import annotations

import unicodedata
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

tokenizers = pytest.importorskip("tokenizers", reason="the extra local-tokenizer is not installed")
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers  # noqa: E402

from router import word_split  # noqa: E402
from router.word_split import LONGEST_SLICE, PLAIN, SLICE, word_split_of  # noqa: E402
from tests.router.backends import PATTERNS, split_as, split_by  # noqa: E402

PIECES = [
    *("'s", "'S", "'LL", "'re", "'x", "don't", "DON'T", "it's5", " 's", "''s", "/'s"),
    *("\x0b", " \x0c", "\x1c", " \x1f\x00", "\x7f'"),
    *(" ", "  ", "   ", "\n", "\r\n", "\n\n", " \n", "\n ", "\t", "\u00a0", " \u00a0"),
    *("word", " word", "Word", "HTTPServer", "aB", "Ab", "ǅ", "Ωμέγα", "Привет", "שלום", "Straße"),
    *("1", "12", "1234567", " 123", "²", "½", "x1", "1x"),
    *(
        ".",
        "...",
        " -",
        "(",
        "){",
        "\\",
        "/",
        "//\n",
        "[]",
        "^",
        "_a",
        "—",
        "…\n",
        "→",
        "€",
        "├─",
        "!x",
        ".word",
    ),
]
texts = st.lists(st.sampled_from(PIECES) | st.text(PLAIN, max_size=4), max_size=20).map("".join)


def made(text: str, backend: Any) -> list[str]:
    return [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("kind", PATTERNS)
@settings(max_examples=80, deadline=None)
@given(text=texts)
@example(text="".join(PLAIN))
@example(text=" ".join(PLAIN))
@example(text="x".join(PLAIN))
def test_ix09_words_are_those_of_the_tokenizer(kind: str, text: str) -> None:
    backend = split_as(kind)
    split = word_split_of(backend)
    assert split is not None
    assert split.words(text) == made(text, backend)


@pytest.mark.parametrize("kind", PATTERNS)
@settings(max_examples=25, deadline=None)
@given(text=texts.filter(bool))
def test_ix09_a_word_by_itself_is_one_word(kind: str, text: str) -> None:
    backend = split_as(kind)
    for word in made(text, backend):
        assert made(word, backend) == [word]


@pytest.mark.parametrize("kind", PATTERNS)
@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=20))
@example(parts=[f"aA9\u0431\u05d0\u4f60{mark}{mark}\u0301x" for mark in map(chr, range(128))])
@example(parts=[f"{end}{mark}1" for end in "aA9\u0431\u05d0\u4f60" for mark in map(chr, range(128))])
def test_ix09_words_of_slices_are_those_of_the_whole(kind: str, parts: list[str]) -> None:
    """Cut wherever it can be, whatever stands there."""
    text, backend = "".join(parts), split_as(kind)
    split = word_split_of(backend)
    assert split is not None
    with patch.multiple(word_split, SLICE=1, SMALL_SLICE=1):
        slices = [part for part, _ in split.slices(text)]
    assert "".join(slices) == text
    assert [*chain.from_iterable(made(part, backend) for part in slices)] == made(text, backend)


@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize(
    "line",
    [
        "123,456.78\n",
        "0x7fff30af",
        "NO SMALL LETTERS HERE. ",
        "\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 ",
        "\u05e9\u05dc\u05d5\u05dd \u05e2 ",
    ],
)
def test_numbers_capitals_and_other_letters_can_be_cut_behind(kind: str, line: str) -> None:
    """Else a megabyte of them is split at once, and the event loop waits for it."""
    split = word_split_of(split_as(kind))
    assert split is not None
    slices = list(split.slices(line * 9_000))
    assert max(len(part) for part, _ in slices) < SLICE + 20
    assert all(plain for _, plain in slices)


@pytest.mark.parametrize("char", ["7", "a", " ", "!", "\u0431"])
def test_what_is_long_and_cannot_be_cut_is_left_to_the_tokenizer(char: str) -> None:
    split = word_split_of(split_as("Llama 3"))
    assert split is not None
    longest, longer = char * LONGEST_SLICE, char * (LONGEST_SLICE + 1)
    assert list(split.slices(longest)) == [(longest, True)]
    assert list(split.slices("word " * 9_000 + "." + longer))[-1][1] is False


def test_characters_with_a_meaning_of_their_own_in_normalisation_are_not_plain() -> None:
    assert all(unicodedata.combining(char) == 0 for char in PLAIN)
    pairs = unicodedata.normalize("NFC", "".join(PLAIN) + "".join(reversed(PLAIN)))
    assert pairs == "".join(PLAIN) + "".join(reversed(PLAIN))
    assert {"\u0301", "\u212b", "\u0387", "\x85", "\ud800", "\u4e00"}.isdisjoint(PLAIN)


@pytest.mark.parametrize(
    "text",
    [
        "word, " * 9_000,
        "Grüße and word\n" * 4_000,
        "plain words " * 900 + "\u4f60\u597d\u3002" * 9_000 + " e\u0301 plain" * 9,
        "x" * 40_000,
        "",
    ],
)
def test_slices_are_the_text_and_no_longer_than_need_be(text: str) -> None:
    split = word_split_of(split_by([r"\s+", r" ?\p{L}+"]))
    assert split is not None
    slices = list(split.slices(text))
    assert "".join(part for part, _ in slices) == text
    assert all(set(part) <= set(PLAIN) for part, plain in slices if plain)
    if " " in text:
        assert all(len(part) < SLICE + 20 for part, _ in slices)


def without_a_known_split() -> dict[str, Any]:
    def of(pre_tokenizer: Any, normalizer: Any = None) -> Any:
        backend = Tokenizer(models.BPE())
        if pre_tokenizer is not None:
            backend.pre_tokenizer = pre_tokenizer
        if normalizer is not None:
            backend.normalizer = normalizer
        return backend

    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return {
        "none": of(None),
        "a space in front": of(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "no letters": split_by([r"\p{N}", r"\s+"]),
        "an alternative that is not known": split_by([r" ?\p{L}+|\s+\w"]),
        "merged": of(pre_tokenizers.Split(Regex(r" ?\p{L}+"), "merged_with_previous")),
        "metaspace": of(pre_tokenizers.Metaspace()),
        "lower case": of(plain, normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
    }


@pytest.mark.parametrize("kind", without_a_known_split())
def test_what_may_split_in_another_way_is_left_to_the_tokenizer(kind: str) -> None:
    assert word_split_of(without_a_known_split()[kind]) is None
