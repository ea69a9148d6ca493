"""What came of an answer that the indexer was told of."""

from __future__ import annotations

from typing import Literal

import msgspec

Refusal = Literal["unknown", "state", "generation", "too_old", "block_size", "touched_since", "shard_down"]


class Outcome(msgspec.Struct):
    """How many blocks are denied or believed (again), and how many no longer are.

    ``reason`` says why an answer, or the denial that it would be, is refused: the stream is not followed, or
    not trusted now; the answer is of another generation, or older than what is remembered; the block size is
    not known, or another; the block was stored or removed since; the shard of the stream does not answer.
    """

    status: Literal["taken", "refused"] = "taken"
    reason: Refusal | None = None
    denied: int = 0
    believed: int = 0
    ended: int = 0


def refused(reason: Refusal) -> Outcome:
    return Outcome("refused", reason)
