from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers", reason="the extra local-tokenizer is not installed")

from router.cuts import cuts_of  # noqa: E402
from router.encoding import PanicError, encoded, panics_raised  # noqa: E402
from router.words import Words, words_of  # noqa: E402
from tests.router.backends import byte_level, with_added  # noqa: E402


def turns_of_others(work: Any) -> int:
    """How often another thread runs while ``work`` is done in a thread that only lets go by itself."""
    done, count = threading.Event(), 0

    def run() -> None:
        work()
        done.set()

    thread = threading.Thread(target=run)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread.start()
        while not done.is_set():
            count += 1
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    return count


def test_px13_other_threads_run_while_a_long_text_is_tokenised_whole() -> None:
    backend = byte_level()
    assert turns_of_others(lambda: encoded(backend, ["the word is a word " * 20_000])) > 10


def test_px13_other_threads_run_while_the_words_of_a_long_text_are_looked_up() -> None:
    backend = with_added(byte_level())
    words: Words | None = words_of(backend, cuts_of(backend))
    assert words is not None
    words.ids("the word is a word ")
    assert turns_of_others(lambda: words.ids("the word is a word " * 20_000)) > 10


def test_a_panic_of_the_library_is_an_error_like_any_other() -> None:
    """Some version will have mended this one: a token takes along a line end that is a token too."""
    backend = byte_level()
    backend.add_tokens([tokenizers.AddedToken("\n", lstrip=True, normalized=False)])
    backend.add_tokens([tokenizers.AddedToken("x", rstrip=True, normalized=False)])
    with suppress(PanicError):
        encoded(backend, ["x\n "])


def test_what_ends_the_process_is_not_taken_for_a_panic() -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    for raised, comes in ((panic("why"), PanicError), (SystemExit(1), SystemExit), (KeyError(1), KeyError)):
        with pytest.raises(comes), panics_raised():
            raise raised
