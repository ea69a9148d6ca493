"""Block keys of prompts that were seen before, so that a conversation's next turn hashes only what is new.

Prompts are kept in segments: the digest of a segment names it and all that is before it, as a block key
does. A key depends on more than tokens (see ``indexer/keys.py``): adapter and salt are in the first digest,
and a segment's keys are kept under the root key of their family (model, adapter, block size and the like).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from cachetools import LRUCache
from xxhash import xxh3_128

from events.schema import token_bytes
from indexer.keys import extra_bytes, keys_behind

SEGMENT_TOKENS = 1024
"""Block sizes that divide it are cached. The others are of hybrid models and large: few keys to make."""
ENTRY_BLOCKS = 8
"""What an entry costs besides its keys, in keys."""
MAX_FAMILIES = 64


class KeyCache:
    """Keys by segment, the least lately used forgotten first. ``size_blocks`` bounds them together.

    For one thread at a time.
    """

    def __init__(self, size_blocks: int) -> None:
        self._kept: OrderedDict[tuple[bytes, bytes], tuple[bytes, ...]] = OrderedDict()
        self._size_blocks = self._room = size_blocks
        self._families: LRUCache[bytes, None] = LRUCache(MAX_FAMILIES)

    def of(self, tokens: array[int], lora_name: str | None, cache_salt: str | None) -> PromptKeys:
        """The keys of a prompt, to be had for any model and block size."""
        return PromptKeys(self, _digests(tokens, lora_name, cache_salt))

    def known_tokens(self, digests: Sequence[bytes]) -> int:
        """How many leading tokens have keys already, all of them in one family."""
        kept, most = self._kept, 0
        for family in self._families:
            for number, digest in enumerate(digests):
                if (digest, family) not in kept:
                    break
                if number >= most:
                    most = number + 1
        return most * SEGMENT_TOKENS

    def keys(
        self,
        tokens: array[int],
        digests: Sequence[bytes],
        family: bytes,
        block_size: int,
        extras: Sequence[bytes],
    ) -> list[bytes]:
        """The keys of a prompt's whole blocks behind the root key ``family``; ``digests`` are of segments."""
        self._families[family] = None
        kept, keys = self._kept, list[bytes]()
        for number, digest in enumerate(digests):
            name = (digest, family)
            segment = kept.get(name)
            if segment is None:
                part = tokens[number * SEGMENT_TOKENS : (number + 1) * SEGMENT_TOKENS]
                before = keys[-1] if keys else family
                segment = tuple(keys_behind(before, part, block_size, () if keys else extras))
                self._keep(name, segment)
            else:
                kept.move_to_end(name)
            keys += segment
        tail = tokens[len(digests) * SEGMENT_TOKENS :]
        keys += keys_behind(keys[-1] if keys else family, tail, block_size, () if keys else extras)
        return keys

    def _keep(self, name: tuple[bytes, bytes], segment: tuple[bytes, ...]) -> None:
        size = ENTRY_BLOCKS + len(segment)
        if size > self._size_blocks:
            return
        self._room -= size
        self._kept[name] = segment
        while self._room < 0:
            _, forgotten = self._kept.popitem(last=False)
            self._room += ENTRY_BLOCKS + len(forgotten)


class PromptKeys:
    """The keys of one prompt. Called as :func:`indexer.keys.keys_behind` is, with the same prompt."""

    def __init__(self, cache: KeyCache, digests: Sequence[bytes]) -> None:
        self._cache = cache
        self._digests = digests

    @property
    def known_tokens(self) -> int:
        """How many leading tokens have keys already."""
        return self._cache.known_tokens(self._digests)

    def __call__(
        self, root: bytes, tokens: array[int], block_size: int, extras: Sequence[bytes] = (), /
    ) -> list[bytes]:
        if SEGMENT_TOKENS % block_size:
            return keys_behind(root, tokens, block_size, extras)
        return self._cache.keys(tokens, self._digests, root, block_size, extras)


def _digests(tokens: array[int], lora_name: str | None, cache_salt: str | None) -> list[bytes]:
    """One for each whole segment, of all up to its end."""
    running = xxh3_128(extra_bytes([lora_name or "", cache_salt or ""]))
    data = token_bytes(tokens)
    width = 4 * SEGMENT_TOKENS
    digests = []
    for end in range(width, len(data) + 1, width):
        running.update(data[end - width : end])
        digests.append(running.digest())
    return digests
