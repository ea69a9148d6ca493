from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from router.marks import MARK_TOKENS, prompt_marks


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2000))
def test_marks_agree_exactly_as_far_as_the_prompts_do(shared: int, ours: int, theirs: int) -> None:
    one = prompt_marks(array("I", [7] * shared + [1] * ours), "m")
    two = prompt_marks(array("I", [7] * shared + [2] * theirs), "m")
    same = sum(first == second for first, second in zip(one, two, strict=False))
    assert len(one) == (shared + ours) // MARK_TOKENS
    common = shared if ours and theirs else shared + min(ours, theirs)
    assert same == common // MARK_TOKENS
    assert not set(one[same:]) & set(two[same:])


def test_models_and_salts_never_meet() -> None:
    tokens = array("I", range(MARK_TOKENS))
    kinds = [("m", None), ("n", None), ("m", "salt"), (None, None)]
    assert len({prompt_marks(tokens, model, salt) for model, salt in kinds}) == len(kinds)
