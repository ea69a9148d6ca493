"""Marks: digests of the beginnings of a prompt, by which a router remembers what it has sent where.

Coarser than an engine's blocks, and cheap: a prompt of 32,000 tokens has 62 of them. One mark names all of
the prompt before it, like a block's key.
"""

from __future__ import annotations

from array import array

import msgspec
from xxhash import xxh3_64

from events.schema import token_bytes

MARK_TOKENS = 512


def prompt_marks(tokens: array[int], model: str | None, cache_salt: str | None = None) -> tuple[bytes, ...]:
    """The digest of each multiple of 512 leading tokens, 8 bytes each.

    ``model`` is as the request names it: adapters have names of their own.
    """
    running = xxh3_64(msgspec.msgpack.encode((model, cache_salt)))
    data = token_bytes(tokens)
    width = 4 * MARK_TOKENS
    marks = []
    for at in range(0, len(data) - width + 1, width):
        running.update(data[at : at + width])
        marks.append(running.digest())
    return tuple(marks)
