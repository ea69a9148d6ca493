from __future__ import annotations

import re
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

tokenizers = pytest.importorskip("tokenizers", reason="the extra local-tokenizer is not installed")
from tokenizers import AddedToken as Added  # noqa: E402
from tokenizers import pre_tokenizers  # noqa: E402

from router.chat_template import ChatTemplates  # noqa: E402
from router.cuts import FEW, SHORTEST, AddedToken, Cuts, cuts_of  # noqa: E402
from router.local_tokenizer import LocalTokenizer  # noqa: E402
from router.token_cache import TokenCache  # noqa: E402
from tests.router.backends import (  # noqa: E402
    FRAGMENTS,
    SPECIAL,
    bert,
    byte_level,
    legacy_llama,
    metaspace,
    tiktoken_like,
    unigram,
    with_added,
)

BACKENDS = {
    "byte-level": byte_level(),
    "byte-level with a space in front": byte_level(prefix_space=True),
    "tiktoken-like": tiktoken_like(),
    "metaspace first": metaspace("first"),
    "metaspace first, not split": metaspace("first", split=False),
    "metaspace always": metaspace("always"),
    "metaspace never": metaspace("never"),
    "legacy llama": legacy_llama(),
    "bert": bert(),
    "unigram": unigram(),
}
LOCAL = {
    name: LocalTokenizer(
        with_added(backend), ChatTemplates({}, {}), name, TokenCache(1_000_000), is_plain=True
    )
    for name, backend in BACKENDS.items()
}


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=8), max_size=14), add=st.booleans())
def test_ix09_a_text_in_pieces_has_the_tokens_of_the_whole(kind: str, parts: list[str], add: bool) -> None:
    text = "".join(parts)
    local = LOCAL[kind]
    assert local.cuts_texts
    whole = array("I", BACKENDS[kind].encode(text, add_special_tokens=add).ids)
    assert local.encode(text, add) == whole
    assert local.encode(text, add) == whole, "from the cache"


@settings(deadline=None)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=14))
def test_pieces_are_the_text_and_begin_with_a_token(parts: list[str]) -> None:
    text = "".join(parts)
    cuts = Cuts([AddedToken(content) for content in SPECIAL])
    for pieces in (cuts.pieces(text), cuts.all_pieces(text)):
        assert "".join(pieces) == text
        assert all(piece.startswith(tuple(SPECIAL)) for piece in pieces[1:])
    assert all(len(piece) >= SHORTEST for piece in cuts.pieces(text)[:-1])


@settings(deadline=None)
@given(
    before=st.lists(st.sampled_from(FRAGMENTS), max_size=30),
    behind=st.lists(st.sampled_from(FRAGMENTS), max_size=30),
)
def test_a_text_that_goes_on_has_the_same_pieces_so_far(before: list[str], behind: list[str]) -> None:
    cuts = Cuts([AddedToken(content) for content in SPECIAL])
    text = "".join(before)
    # A token may come about where the two meet: the piece that ends there is not yet done.
    *done, _ = cuts.pieces(text.rstrip("<|ab>s/think") + "<s>")
    assert cuts.pieces(text.rstrip("<|ab>s/think") + "<s>" + "".join(behind))[: len(done)] == done


def test_a_longer_token_wins_as_it_does_in_the_tokenizer() -> None:
    cuts = Cuts([AddedToken("<a>"), AddedToken("<a><b>"), AddedToken("<b>")])
    assert cuts.all_pieces("x<a><b><b><a>") == ["x", "<a><b>", "<b>", "<a>"]


@pytest.mark.parametrize("special", [SPECIAL, ["<s>", "</s>"], ["<s>", "[INST]"], ["<s>x", "<s>"], ["<"]])
@settings(deadline=None)
@given(parts=st.lists(st.sampled_from([*FRAGMENTS, "[INST]", "<s>x"]), max_size=20))
def test_every_token_is_found(special: list[str], parts: list[str]) -> None:
    text = "".join(parts)
    longest_first = sorted(special, key=len, reverse=True)
    found = list(re.finditer("|".join(map(re.escape, longest_first)), text))
    starts = sorted({0, *(match.start() for match in found)})
    cut = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    assert Cuts([AddedToken(content) for content in special]).all_pieces(text) == cut


UNUSED = [f"<unused{number}>" for number in range(6000)]
LINES = ["\n" * number for number in range(2, 200)]
ALL = frozenset(UNUSED + LINES)
CUTS_OF_ALL = Cuts([AddedToken(content) for content in ALL])


@settings(max_examples=30, deadline=None)
@given(parts=st.lists(st.sampled_from(["<unused1", "0", "9", ">", "<", "\n", "\n" * 70, "\n" * 300, "x"])))
def test_the_longest_of_thousands_of_tokens_is_found(parts: list[str]) -> None:
    text, found, at = "".join(parts), [], 0
    while at < len(text):
        fits = [text[at:end] for end in range(at + 1, min(len(text), at + 200) + 1) if text[at:end] in ALL]
        found += fits[-1:]
        at += len(fits[-1]) if fits else 1
    assert CUTS_OF_ALL.added(text) == found


def test_px13_a_place_where_a_token_may_begin_is_not_compared_with_all_of_them() -> None:
    alternatives = CUTS_OF_ALL.patterns
    assert len(alternatives) == 2, "one for each character that tokens begin with"
    assert len("".join(alternatives)) < len("".join(ALL)) / 2


@given(begin=st.sampled_from(["<", "<|"]), count=st.integers(0, 3 * FEW), text=st.text("<|x", max_size=9))
def test_px13_places_are_counted_where_they_are_few_and_where_they_are_many(
    begin: str, count: int, text: str
) -> None:
    cuts = Cuts([AddedToken(begin + "a"), AddedToken(begin + "b")])
    long = (begin + "x") * count + text
    assert long.count(begin) <= cuts.places(long) <= long.count(begin[0])


def test_no_cut_where_a_token_takes_spaces_in_front_of_it_or_is_only_found_in_normalised_text() -> None:
    cuts = Cuts(
        [AddedToken("<l>", lstrip=True), AddedToken("<r>", rstrip=True), AddedToken("<n>", normalized=True)]
    )
    assert cuts.all_pieces("x <l> <n> y") == ["x <l> <n> y"]
    assert cuts.all_pieces("x <l> <r> <n> y") == ["x <l> ", "<r> <n> y"]


ALL_STRIP = with_added(byte_level(), rstrip=True)
LOCAL_ALL_STRIP = LocalTokenizer(ALL_STRIP, ChatTemplates({}, {}), "r", TokenCache(1_000_000), is_plain=True)


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.sampled_from([*FRAGMENTS, " ", "\n "]) | st.text(max_size=8), max_size=14))
def test_ix09_texts_are_cut_in_front_of_tokens_that_take_the_spaces_behind_them(parts: list[str]) -> None:
    text = "".join(parts)
    whole = ALL_STRIP.encode(text, add_special_tokens=False).ids
    cuts = cuts_of(ALL_STRIP)
    assert cuts is not None
    pieces = cuts.all_pieces(text)
    assert [id_ for piece in pieces for id_ in ALL_STRIP.encode(piece, add_special_tokens=False).ids] == whole
    assert LOCAL_ALL_STRIP.encode(text, False) == array("I", whole)
    assert len(cuts_of(ALL_STRIP).all_pieces("x<s> y</s>\n z")) == 3


def spoiled_by_a_word(backend: Any) -> None:
    backend.add_special_tokens([Added("<word>", single_word=True)])


def spoiled_by_chance(backend: Any) -> None:
    backend.model.dropout = 0.5


def spoiled_by_an_unknown_part(backend: Any) -> None:
    class Own:
        def pre_tokenize(self, text: Any) -> None: ...

    backend.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Own())


@pytest.mark.parametrize("spoil", [spoiled_by_a_word, spoiled_by_chance, spoiled_by_an_unknown_part])
def test_what_could_look_across_a_cut_ends_cutting(spoil: Any) -> None:
    backend = byte_level()
    backend.add_special_tokens(["<s>"])
    assert cuts_of(backend) is not None
    spoil(backend)
    assert cuts_of(backend) is None


def test_a_tokenizer_without_special_tokens_is_not_cut() -> None:
    assert cuts_of(byte_level()) is None
