"""Tokens that were made once, bounded by their number. Used from the loop and from the tokenizing threads."""

from __future__ import annotations

import threading
from array import array
from collections import Counter

from cachetools import LRUCache

ENTRY_TOKENS = 32
"""What an entry costs besides its tokens, in tokens of four bytes."""


class TokenCache:
    """Token ids by model and a digest of what they were made of, the least lately used forgotten first.

    ``size_tokens`` bounds them together. A model's tokens are forgotten at once when its engine may have
    another tokenizer now: what was asked for before, and comes later, is then kept under what nobody looks
    for.
    """

    def __init__(self, size_tokens: int) -> None:
        self._lock = threading.Lock()
        self._kept: LRUCache[tuple[str, int, bytes], array[int]] = LRUCache(
            max(1, size_tokens), getsizeof=lambda ids: ENTRY_TOKENS + len(ids)
        )
        self._forgotten: Counter[str] = Counter()

    def era(self, model: str) -> int:
        """The number of times that ``model`` was forgotten: to be asked before tokens are made."""
        return self._forgotten[model]

    def get(self, model: str, digest: bytes) -> array[int] | None:
        with self._lock:
            return self._kept.get((model, self._forgotten[model], digest))

    def put(self, model: str, era: int, digest: bytes, ids: array[int]) -> None:
        """Keeps tokens that were made in ``era``; too many for the whole cache are not kept."""
        with self._lock:
            if ENTRY_TOKENS + len(ids) <= self._kept.maxsize:
                self._kept[model, era, digest] = ids

    def forget(self, model: str) -> None:
        """Nothing of ``model`` that was kept is found again."""
        with self._lock:
            self._forgotten[model] += 1
