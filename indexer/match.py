"""How many leading blocks of a prompt each slot holds.

A key names its whole prefix, and engines evict tail first, so what a healthy slot holds of a prompt is a
leading run. It is enough to look at the first block and the last, and to search by halves where the set of
holders changes in between. A slot with holes (blocks whose parent it does not hold) is walked block by block.

An engine that keeps blocks in several attention groups may use less of it: what the other groups hold
restricts a hit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice

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
    _walk(lookup, keys, first & holey, matched)
    held = first & ~holey
    if held:
        whole = held & lookup(keys[-1])
        for slot in _slots(whole):
            matched[slot] = len(keys)
        _locate(lookup, keys, held & ~whole, 1, len(keys), matched)
    return matched


def restrict(holds: Callable[[int, int], bool], length: int, needs: Mapping[int, int | None]) -> int:
    """The longest hit of at most ``length`` blocks that has what it needs in each attention group.

    ``needs`` says how many of its last blocks must be in a group (None: all), ``holds(group, number)``
    whether a block is. A block is looked at once a group, and again when another group made the hit shorter.
    """
    while True:
        before = length
        for group, need in needs.items():
            length = _shorten(partial(holds, group), length, need)
        if length in (before, 0):
            return length


def _shorten(holds: Callable[[int], bool], length: int, need: int | None) -> int:
    end = at = length
    while at > 0 and (need is None or end - at < need):
        at -= 1
        if not holds(at):
            end = at
    return end


def _locate(
    lookup: Lookup, keys: Sequence[bytes], lost: int, start: int, end: int, matched: dict[int, int]
) -> None:
    """Notes where each slot of ``lost`` ends: they all hold what is before ``start``, none all before
    ``end``.
    """
    searches = [(lost, start, end)] if lost else []
    while searches:
        lost, start, end = searches.pop()
        while end - start > 1:
            middle = (start + end) // 2
            beyond = lost & lookup(keys[middle - 1])
            if not beyond:
                end = middle
            elif beyond == lost:
                start = middle
            else:
                searches.append((beyond, middle, end))
                lost, end = lost & ~beyond, middle
        for slot in _slots(lost):
            matched[slot] = start


def _walk(lookup: Lookup, keys: Sequence[bytes], held: int, matched: dict[int, int]) -> None:
    """Looks at every block behind the first; notes where each slot of ``held`` ends."""
    for number, key in enumerate(islice(keys, 1, None), 1):
        if not held:
            return
        lost = held & ~lookup(key)
        for slot in _slots(lost):
            matched[slot] = number
        held &= ~lost
    for slot in _slots(held):
        matched[slot] = len(keys)


@lru_cache(1 << 12)
def _slots(bitmap: int) -> tuple[int, ...]:
    """The slots in a bitmap. Those that prompts find are few: one slot, all, and who shares a prefix."""
    return tuple(slot for slot in range(bitmap.bit_length()) if bitmap >> slot & 1)
