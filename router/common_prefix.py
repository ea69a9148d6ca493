"""What two texts begin with."""

from __future__ import annotations


def common_chars(one: str, other: str) -> int:
    """How many leading characters two texts have in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
