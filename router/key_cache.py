"""Block keys of prompts that were seen before, so that a conversation's next turn hashes only what is new.

Prompts are kept in segments, long ones and short ones behind the last: the digest of a segment names it and
all that is before it, as a block key does. A key depends on more than tokens (see ``indexer/keys.py``):
adapter and salt are in the first digest, and a segment's keys are kept under the root key of their family
(model, adapter, block size and the like).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from struct import iter_unpack
from typing import overload

from xxhash import xxh3_128

from events.schema import token_bytes
from indexer.keys import extra_bytes, keys_behind

SEGMENT_TOKENS, SHORT_TOKENS = 1024, 256
"""A prompt's segments; what is left behind the last one is kept in short ones. Block sizes that divide them
are cached. The others are of hybrid models and large: few keys to make.
"""
KEY_BYTES = 8
ENTRY_BLOCKS = 32
"""What an entry costs besides its keys, in keys."""
MAX_FAMILIES = 64

Segment = tuple[int, bytes]
"""Where it ends, in tokens, and the digest of all up to there."""


class BlockKeys(Sequence[bytes]):
    """The keys of a prompt's blocks, end to end: 8 bytes each, where each as an object takes 57. A query
    looks at few of them.
    """

    __slots__ = ("_count", "_joined")

    def __init__(self, joined: bytes) -> None:
        self._joined = joined
        self._count = len(joined) // KEY_BYTES

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        return (key for (key,) in iter_unpack(f"{KEY_BYTES}s", self._joined))

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            return list(self)[index]
        at = KEY_BYTES * (index if index >= 0 else self._count + index)
        key = self._joined[at : at + KEY_BYTES]
        if not key or at < 0:
            raise IndexError(index)
        return key


class KeyCache:
    """Keys by segment, the least lately used forgotten first. ``size_blocks`` bounds them together.

    For one thread at a time.
    """

    def __init__(self, size_blocks: int) -> None:
        self._kept: OrderedDict[tuple[bytes, bytes], bytes] = OrderedDict()
        self._size_blocks = self._room = size_blocks
        self._families: OrderedDict[bytes, None] = OrderedDict()

    def of(self, tokens: array[int], lora_name: str | None, cache_salt: str | None) -> PromptKeys:
        """The keys of a prompt, to be had for any model and block size."""
        return PromptKeys(self, _segments(tokens, lora_name, cache_salt))

    def known_tokens(self, segments: Sequence[Segment]) -> int:
        """How many leading tokens have keys already, all of them in one family."""
        kept, most = self._kept, 0
        for family in self._families:
            known = 0
            for end, digest in segments:
                if (digest, family) not in kept:
                    break
                known = end
            most = max(most, known)
        return most

    def keys(
        self,
        tokens: array[int],
        segments: Sequence[Segment],
        family: bytes,
        block_size: int,
        extras: Sequence[bytes],
    ) -> Sequence[bytes]:
        """The keys of a prompt's whole blocks behind the root key ``family``."""
        self._note_family(family)
        kept, parts, begin = self._kept, list[bytes](), 0
        for end, digest in segments:
            if (end - begin) % block_size:
                break
            name = (digest, family)
            segment = kept.get(name)
            if segment is None:
                segment = _behind(parts, tokens[begin:end], family, block_size, extras)
                self._keep(name, segment)
            else:
                kept.move_to_end(name)
            parts.append(segment)
            begin = end
        if not parts:
            return keys_behind(family, tokens, block_size, extras)
        parts.append(_behind(parts, tokens[begin:], family, block_size, extras))
        return BlockKeys(b"".join(parts))

    def _note_family(self, family: bytes) -> None:
        self._families[family] = None
        self._families.move_to_end(family)
        if len(self._families) > MAX_FAMILIES:
            self._families.popitem(last=False)

    def _keep(self, name: tuple[bytes, bytes], segment: bytes) -> None:
        size = _size_blocks(segment)
        if size > self._size_blocks:
            return
        self._room -= size
        self._kept[name] = segment
        while self._room < 0:
            _, forgotten = self._kept.popitem(last=False)
            self._room += _size_blocks(forgotten)


def _behind(
    parts: Sequence[bytes], tokens: array[int], family: bytes, block_size: int, extras: Sequence[bytes]
) -> bytes:
    """The keys of what comes behind ``parts``, end to end."""
    if parts:
        return b"".join(keys_behind(parts[-1][-KEY_BYTES:], tokens, block_size))
    return b"".join(keys_behind(family, tokens, block_size, extras))


def _size_blocks(segment: bytes) -> int:
    return ENTRY_BLOCKS + len(segment) // KEY_BYTES


class PromptKeys:
    """The keys of one prompt. Called as :func:`indexer.keys.keys_behind` is, with the same prompt."""

    def __init__(self, cache: KeyCache, segments: Sequence[Segment]) -> None:
        self._cache = cache
        self._segments = segments

    @property
    def known_tokens(self) -> int:
        """How many leading tokens have keys already."""
        return self._cache.known_tokens(self._segments)

    def __call__(
        self, root: bytes, tokens: array[int], block_size: int, extras: Sequence[bytes] = (), /
    ) -> Sequence[bytes]:
        return self._cache.keys(tokens, self._segments, root, block_size, extras)


def _segments(tokens: array[int], lora_name: str | None, cache_salt: str | None) -> list[Segment]:
    running = xxh3_128(extra_bytes([lora_name or "", cache_salt or ""]))
    data, begin, segments = token_bytes(tokens), 0, list[Segment]()
    for width in (SEGMENT_TOKENS, SHORT_TOKENS):
        for end in range(begin + width, len(tokens) + 1, width):
            running.update(data[4 * begin : 4 * end])
            segments.append((end, running.digest()))
            begin = end
    return segments
