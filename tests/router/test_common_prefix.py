from __future__ import annotations

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from router.common_prefix import common_chars

texts = st.text("ab", max_size=40)


@given(texts, texts, texts)
def test_what_two_texts_begin_with(shared: str, one: str, other: str) -> None:
    one, other = shared + one, shared + other
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    assert common_chars(one, other) == len(list(alike))
