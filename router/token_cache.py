"""Tokens that were made once, bounded by their number. Used from the loop and from the tokenizing threads."""

from __future__ import annotations

import threading
from array import array
from collections import Counter, OrderedDict

ENTRY_TOKENS = 96
"""What an entry costs besides its tokens, in tokens of four bytes."""


class TokenCache:
    """Token ids by model and a digest of what they were made of, the least lately used forgotten first.

    ``size_tokens`` bounds them together. A model's tokens are forgotten at once when its engine may have
    another tokenizer now: what was asked for before, and comes later, is then kept under what nobody looks
    for.
    """

    def __init__(self, size_tokens: int) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int, bytes], array[int]] = OrderedDict()
        self._size_tokens = size_tokens
        self._held_tokens = 0
        self._forgotten: Counter[str] = Counter()

    def era(self, model: str) -> int:
        """The number of times that ``model`` was forgotten: to be asked before tokens are made."""
        return self._forgotten[model]

    def get(self, model: str, digest: bytes) -> array[int] | None:
        key = (model, self._forgotten[model], digest)
        with self._lock:
            ids = self._kept.get(key)
            if ids is not None:
                self._kept.move_to_end(key)
            return ids

    def put(self, model: str, era: int, digest: bytes, ids: array[int]) -> None:
        """Keeps tokens that were made in ``era``; too many for the whole cache are not kept."""
        key, size = (model, era, digest), ENTRY_TOKENS + len(ids)
        if size > self._size_tokens:
            return
        with self._lock:
            self._drop(self._kept.pop(key, None))
            while self._held_tokens + size > self._size_tokens:
                self._drop(self._kept.popitem(last=False)[1])
            self._kept[key] = ids
            self._held_tokens += size

    def _drop(self, ids: array[int] | None) -> None:
        if ids is not None:
            self._held_tokens -= ENTRY_TOKENS + len(ids)

    def forget(self, model: str) -> None:
        """Nothing of ``model`` that was kept is found again."""
        with self._lock:
            self._forgotten[model] += 1
