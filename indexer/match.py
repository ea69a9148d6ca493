"""How many leading blocks of a prompt each slot holds.

A key names its whole prefix, and engines evict tail first, so what a healthy slot holds of a prompt is a
leading run. It is enough to look at every 32nd block, and to walk only where the set of holders changes. A
slot with holes (blocks whose parent it does not hold) is walked block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

STRIDE = 32

Lookup = Callable[[bytes], int]


def match(lookup: Lookup, keys: Sequence[bytes], slots: int, holey: int = 0) -> dict[int, int]:
    """Leading blocks held, by slot number; slots that hold nothing of the prompt are left out.

    ``lookup`` gives the bitmap of the slots that hold a key. ``slots`` is the bitmap of those asked about,
    ``holey`` of those among them that may have holes.
    """
    if not keys:
        return {}
    first = lookup(keys[0]) & slots
    matched: dict[int, int] = {}
    _walk(lookup, keys, first & holey, 1, len(keys), matched)
    held, at = first & ~holey, 1
    while held and at < len(keys):
        end = min(at + STRIDE, len(keys))
        if held & ~lookup(keys[end - 1]):
            held = _walk(lookup, keys, held, at, end, matched)
        at = end
    for slot in _bits(held):
        matched[slot] = len(keys)
    return matched


def _walk(
    lookup: Lookup, keys: Sequence[bytes], held: int, start: int, end: int, matched: dict[int, int]
) -> int:
    """Looks at every block in ``start`` to ``end``; notes who lost it where, and gives those left."""
    for number in range(start, end):
        if not held:
            return 0
        lost = held & ~lookup(keys[number])
        for slot in _bits(lost):
            matched[slot] = number
        held &= ~lost
    if end == len(keys):
        for slot in _bits(held):
            matched[slot] = end
    return held


def _bits(bitmap: int) -> Iterator[int]:
    while bitmap:
        low = bitmap & -bitmap
        yield low.bit_length() - 1
        bitmap ^= low
