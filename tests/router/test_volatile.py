"""Texts without what changes in them, those that were seen before too."""

from __future__ import annotations

import re

import pytest
from cachetools import LRUCache
from hypothesis import given, settings
from hypothesis import strategies as st

from router.policies import volatile
from router.policies.prefix_hash import DATES, TIMES, UUIDS
from router.policies.volatile import MOST_PLACES, SHORT, steady

PATTERNS = (DATES, TIMES, UUIDS)
WORDS = [
    "2026-11-29T12:00",
    "9:30 pm",
    "1",
    "2",
    "-",
    ":",
    " ",
    "words ",
    "6f1e6a3c-0000-4000-8000-0123456789ab",
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(WORDS), max_size=40), st.sampled_from([PATTERNS, (TIMES,), ("w.*?s", ""), ()])
)
def test_a_text_is_steady_the_first_time_and_each_other(words: list[str], patterns: tuple[str, ...]) -> None:
    for text in ("".join(words), "".join(words) + "x" * SHORT):
        said = text.encode()
        expected = (
            re.sub("|".join(f"(?:{each})" for each in patterns).encode(), b"", said) if patterns else said
        )
        assert [steady(said, patterns) for _ in range(3)] == [expected] * 3


def test_px13_a_long_text_is_searched_once_and_what_is_kept_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched, real = [], volatile._compiled

    def compiled(patterns: tuple[str, ...]) -> object:
        class Search:
            @staticmethod
            def finditer(text: bytes) -> object:
                searched.append(len(text))
                return real(patterns).finditer(text)

        return Search

    monkeypatch.setattr(volatile, "_compiled", compiled)
    monkeypatch.setattr(volatile, "_seen", LRUCache(50))
    text = b"at 12:30 " + b"words " * SHORT
    for _ in range(3):
        assert steady(text, PATTERNS) == b"at  " + b"words " * SHORT
    assert searched == [len(text)]
    many = b"12:30 " * (MOST_PLACES + SHORT)
    assert steady(many, PATTERNS) == b" " * (MOST_PLACES + SHORT)
    assert len(volatile._seen) == 1, "one with many matches is not kept"
    for number in range(55):
        steady(b"%06d" % number + text, PATTERNS)
    assert len(volatile._seen) == 50
