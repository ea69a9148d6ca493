"""Block keys of prompts that were seen before, so that a conversation's next turn hashes only what is new.

Prompts are kept in segments: the digest of a segment names it and all that is before it, as a block key
does. A key depends on more than tokens (see ``indexer/keys.py``): adapter and salt are in the first digest,
model, block size and the registration's salt are the family under which a segment's keys are kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

from cachetools import LRUCache
from xxhash import xxh3_128_digest

from events.schema import token_bytes
from indexer.keys import KEY_BYTES, block_keys, extra_bytes, local_hashes, root_key

SEGMENT_TOKENS = 1024
"""Block sizes that divide it are cached. The others are of hybrid models and large: few keys to make."""
ENTRY_BLOCKS = 48
"""What an entry costs besides its keys, in keys of eight bytes."""

MAX_FAMILIES = 64


class Keys(Sequence[bytes]):
    """Block keys in one run of bytes: a match looks at few of them."""

    __slots__ = ("_run",)

    def __init__(self, run: bytes) -> None:
        self._run = run

    def __len__(self) -> int:
        return len(self._run) // KEY_BYTES

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        if at < 0:
            at += len(self)
        key = self._run[KEY_BYTES * at : KEY_BYTES * (at + 1)] if at >= 0 else b""
        if not key:
            raise IndexError(at)
        return key

    def __iter__(self) -> Iterator[bytes]:
        run = self._run
        return (run[at : at + KEY_BYTES] for at in range(0, len(run), KEY_BYTES))


class KeyCache:
    """Keys by segment, the least lately used forgotten first. ``size_blocks`` bounds them together.

    One caller at a time; :meth:`known_tokens` may be called meanwhile.
    """

    def __init__(self, size_blocks: int) -> None:
        self._kept: LRUCache[tuple[bytes, bytes], bytes] = LRUCache(
            max(1, size_blocks), getsizeof=lambda run: ENTRY_BLOCKS + len(run) // KEY_BYTES
        )
        self._families: LRUCache[bytes, None] = LRUCache(MAX_FAMILIES)

    def known_tokens(self, tokens: array[int], lora_name: str | None, cache_salt: str | None) -> int:
        """How many leading tokens have keys already, in some family: prompts of two models hardly ever
        agree.
        """
        families = list(self._families)
        known = 0
        for digest in _digests(tokens, lora_name, cache_salt):
            if not any((digest, family) in self._kept for family in families):
                break
            known += SEGMENT_TOKENS
        return known

    def prompt_keys(
        self,
        tokens: array[int],
        *,
        model: str,
        block_size: int,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        additional_salt: str | None = None,
        epoch: int = 0,
    ) -> Sequence[bytes]:
        """As :func:`indexer.keys.prompt_keys`."""
        key = family = root_key(model, lora_name, block_size, additional_salt, epoch)
        extras = [extra_bytes([cache_salt])] if cache_salt else []
        if SEGMENT_TOKENS % block_size:
            return block_keys(key, local_hashes(tokens, block_size), extras)
        self._families[family] = None
        runs: list[bytes] = []
        for number, digest in enumerate(_digests(tokens, lora_name, cache_salt)):
            run = self._kept.get((digest, family))
            if run is None:
                segment = tokens[number * SEGMENT_TOKENS : (number + 1) * SEGMENT_TOKENS]
                run = b"".join(block_keys(key, local_hashes(segment, block_size), extras))
                if ENTRY_BLOCKS + len(run) // KEY_BYTES <= self._kept.maxsize:
                    self._kept[digest, family] = run
            runs.append(run)
            key, extras = run[-KEY_BYTES:], []
        tail = tokens[len(runs) * SEGMENT_TOKENS :]
        runs += block_keys(key, local_hashes(tail, block_size), extras)
        return Keys(b"".join(runs))


def _digests(tokens: array[int], lora_name: str | None, cache_salt: str | None) -> Iterator[bytes]:
    """One for each whole segment, of all up to its end."""
    digest = xxh3_128_digest(extra_bytes([lora_name or "", cache_salt or ""]))
    data = memoryview(token_bytes(tokens))
    width = 4 * SEGMENT_TOKENS
    for at in range(0, len(data) - width + 1, width):
        digest = xxh3_128_digest(digest + data[at : at + width])
        yield digest
