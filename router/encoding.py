"""Texts given to ``tokenizers``."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from router.errors import RouterError
from router.heap import give_back

GIVE_BACK_CHARS = 32 * 1024
"""Texts that leave megabytes behind, and take more than ten times as long as giving them back."""


class PanicError(RouterError):
    """``tokenizers`` gave up for a fault of its own: it has some with added tokens that take spaces along."""


@contextmanager
def panics_raised() -> Iterator[None]:
    """Its panics are no ``Exception``: they would go past all that handles one, and end a thread."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise PanicError(f"tokenizers panicked: {error}") from error


def encoded(backend: Any, texts: Sequence[str], add_special_tokens: bool = False) -> list[array[int]]:
    """The ids of each. Raises TypeError for half of a pair of surrogates, and PanicError.

    ``encode`` would hold the interpreter for its whole run, half a second for 100,000 tokens, and the
    event loop with it; a batch lets go of it (``tokenizers`` 0.23: ``tokenizer.rs``), and this one leaves
    out offsets, which take as long as all the rest.
    """
    with panics_raised():
        made = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    ids = [array("I", encoding.ids) for encoding in made]
    if sum(map(len, texts)) > GIVE_BACK_CHARS:
        del made
        give_back()
    return ids
