"""Texts given to ``tokenizers``."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from router.heap import give_back

GIVE_BACK_CHARS = 32 * 1024
"""Texts that leave megabytes behind, and take more than ten times as long as giving them back."""


def encoded(backend: Any, texts: Sequence[str], add_special_tokens: bool = False) -> list[array[int]]:
    """The ids of each. Raises TypeError for half of a pair of surrogates.

    ``encode`` would hold the interpreter for its whole run, half a second for 100,000 tokens, and the
    event loop with it; a batch lets go of it (``tokenizers`` 0.23: ``tokenizer.rs``), and this one leaves
    out offsets, which take as long as all the rest.
    """
    made = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    ids = [array("I", encoding.ids) for encoding in made]
    if sum(map(len, texts)) > GIVE_BACK_CHARS:
        del made
        give_back()
    return ids
