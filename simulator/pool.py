"""The paged pool of KV blocks, with vLLM's prefix cache and its order of eviction.

Facts from ``vllm/v1/core/block_pool.py`` and ``single_type_kv_cache_manager.py`` (0.32), for one
full-attention group. Pure: no clock, no I/O; what happened is left as events to take.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from events.schema import AllBlocksCleared, BlockRemoved, BlockStored, Event, token_bytes

GROUP_KIND = "full_attention"


class Block:
    """A physical block. It can be hit while ``hash`` is set, also when it is free (``references`` 0)."""

    __slots__ = ("hash", "id", "references")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.references = 0
        self.hash: bytes | None = None


class Prefix:
    """The tokens of one request and the chained hashes of its full blocks; grows at the end only.

    ``salt`` is an extra key of block 0. ``seed`` stands for the hash of "before the first block", which
    engines choose per process.
    """

    def __init__(self, tokens: Sequence[int], block_size: int, seed: bytes, salt: str | None = None) -> None:
        self.tokens = array("I", tokens)
        self.hashes: list[bytes] = []
        self._block_size = block_size
        self._seed = seed
        self._salt = salt
        self._hash_full_blocks()

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if len(self.tokens) % self._block_size == 0:
            self._hash_full_blocks()

    def extra_keys(self, index: int) -> list[str] | None:
        """The extra keys of a block, as events announce them."""
        return [self._salt] if self._salt is not None and index == 0 else None

    def _hash_full_blocks(self) -> None:
        size = self._block_size
        for index in range(len(self.hashes), len(self.tokens) // size):
            parent = self.hashes[-1] if self.hashes else self._seed
            content = hashlib.blake2b(parent, digest_size=8)
            content.update(token_bytes(self.tokens[index * size : (index + 1) * size]))
            if keys := self.extra_keys(index):
                content.update(msgspec.msgpack.encode(keys))
            self.hashes.append(content.digest())


class BlockPool:
    """``blocks`` blocks of ``block_size`` tokens, one of which is the null block that holds nothing."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._blocks = [Block(number) for number in range(blocks)]
        # First out is evicted first. Block 0 is the null block and never free.
        self._free: OrderedDict[int, Block] = OrderedDict((block.id, block) for block in self._blocks[1:])
        # One hash can be in several physical blocks: the one that was stored first is hit.
        self._cached: dict[bytes, dict[int, Block]] = {}
        self._events: list[Event] = []

    @property
    def capacity(self) -> int:
        """Blocks that can hold tokens."""
        return len(self._blocks) - 1

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold now, 0 to 1. Blocks only cached do not count."""
        return 1.0 - len(self._free) / self.capacity

    @property
    def cached_count(self) -> int:
        """Physical blocks that can be hit, copies counted."""
        return sum(len(copies) for copies in self._cached.values())

    def match(self, hashes: Sequence[bytes], limit: int) -> list[Block]:
        """The cached blocks of the longest cached prefix, at most ``limit`` of them."""
        found: list[Block] = []
        for block_hash in hashes[:limit]:
            copies = self._cached.get(block_hash)
            if copies is None:
                break
            found.append(next(iter(copies.values())))
        return found

    def touch(self, blocks: Iterable[Block]) -> None:
        """Takes a reference on cached blocks, so that they cannot be evicted."""
        for block in blocks:
            if block.references == 0:
                del self._free[block.id]
            block.references += 1

    def allocate(self, count: int) -> list[Block]:
        """``count`` blocks to write to, evicting what they held. Raises ValueError when fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        taken = [self._free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            self._evict(block)
            block.references = 1
        return taken

    def store(self, prefix: Prefix, blocks: Sequence[Block], stored: int, full: int) -> None:
        """Makes blocks ``stored`` to ``full`` of a request reusable, and announces them as one event."""
        if stored >= full:
            return
        hashes = prefix.hashes[stored:full]
        for block, block_hash in zip(blocks[stored:full], hashes, strict=True):
            block.hash = block_hash
            self._cached.setdefault(block_hash, {})[block.id] = block
        keys = [prefix.extra_keys(index) for index in range(stored, full)]
        self._events.append(
            BlockStored(
                hashes=hashes,
                parent=prefix.hashes[stored - 1] if stored else None,
                tokens=prefix.tokens[stored * self.block_size : full * self.block_size],
                block_size=self.block_size,
                extra_keys=keys if any(keys) else None,
                group_kind=GROUP_KIND,
            )
        )

    def free(self, blocks: Sequence[Block]) -> None:
        """Gives back the blocks of one request, in prefix order.

        The tail is evicted before the head. Blocks that cannot be hit go to the front of the queue, to be
        used again first; the others to its end.
        """
        unhashed: list[Block] = []
        for block in reversed(blocks):
            block.references -= 1
            if block.references > 0:
                continue
            if block.hash is None:
                unhashed.append(block)
            else:
                self._free[block.id] = block
        for block in reversed(unhashed):
            self._free[block.id] = block
            self._free.move_to_end(block.id, last=False)

    def reset(self) -> bool:
        """Drops the whole prefix cache; refused (False) while any request holds a block."""
        if len(self._free) != self.capacity:
            return False
        for block in self._blocks:
            block.hash = None
        self._cached.clear()
        self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[Event]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _evict(self, block: Block) -> None:
        if block.hash is None:
            return
        copies = self._cached[block.hash]
        del copies[block.id]
        if not copies:
            del self._cached[block.hash]
        self._events.append(BlockRemoved([block.hash]))
        block.hash = None
