"""Which blocks go at a bound: a clock's hand passes over them from the oldest.

Without the beginning of a prompt nothing behind it can match, and what many prompts begin with came first. So
a block on which held blocks hang is spared and becomes the youngest. One on which none hangs goes, and with
it the blocks before it, up to where another prompt branches off: a conversation goes from its end, the one
that was continued the longest ago first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import msgspec

from indexer.blocks import StreamBlocks
from indexer.changes import Changes

SPARED_SHARE = 4
"""Blocks spared in a step, for each that may go: what is written in a step stays in proportion."""

BlocksOf = Callable[[bytes], StreamBlocks | None]


class Hand(msgspec.Struct, frozen=True):
    """Where the hand stands: up to the age ``passed`` none of its blocks is left.

    ``end`` is the age and the names key of the block where the last turn stopped within a conversation, None
    if it did not: its blocks were spared, and are young, until its end was found. It is not kept over a
    restart, after which the rest of that conversation goes later.
    """

    passed: int = 0
    end: tuple[int, bytes] | None = None

    def turn(self, changes: Changes, blocks_of: BlocksOf, count: int, slot: bytes = b"") -> Hand:
        """Evicts up to ``count`` blocks, of all slots or of one; gives where the hand stands then.

        ``blocks_of`` a names key: the blocks of its stream, None if they are not to be evicted. Fewer may go,
        where many rows have to be passed; the next turn goes on from there.
        """
        gone, end, passed = 0, self.end, self.passed
        if end is not None and (blocks := blocks_of(end[1])) is not None:
            gone, end = blocks.evict_up(*end, count)
        spared = 0
        with closing(changes.ages(passed + 1)) as rows:
            while gone < count and spared < SPARED_SHARE * count and (row := next(rows, None)):
                passed, key = row
                blocks = blocks_of(key) if key.startswith(slot) else None
                if blocks is None:
                    continue
                if blocks.spare(passed, key):
                    spared += 1
                else:
                    more, end = blocks.evict_up(passed, key, count - gone)
                    gone += more
        return Hand(passed, end)
