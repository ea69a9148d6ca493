"""Content keys of blocks: what a block of tokens means, whatever hash an engine gives it.

Engines hash blocks their own way, some with a seed per process, so their hashes cannot be compared across
replicas. A key is made of content alone, in two levels: a local hash of the block's tokens (the value that
Dynamo's ``compute_block_hash_for_seq`` gives and ``/query_by_hash`` takes), and a chain over the local hashes
that starts from all that must never mix.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import iter_unpack
from typing import Any

import msgspec
from xxhash import xxh3_64_digest

from events.schema import token_bytes

HASH_VERSION = 1
LOCAL_SEED = 1337
KEY_BYTES = 8

_encode_extra = msgspec.msgpack.Encoder(order="deterministic").encode


def root_key(
    model: str, lora_name: str | None, block_size: int, salt: str | None = None, epoch: int = 0
) -> bytes:
    """The key before block 0: model, LoRA adapter, block size in tokens, hash version.

    ``salt`` is the ``additional_salt`` of a registration, ``epoch`` tells an adapter
    from its namesakes before it was loaded anew.
    """
    parts = [HASH_VERSION, model, lora_name or "", block_size, salt or ""]
    return xxh3_64_digest(_encode_extra([*parts, epoch] if epoch else parts))


def local_hashes(tokens: array[int], block_size: int) -> list[bytes]:
    """xxh3-64 of the tokens of each whole block, 8 big-endian bytes each."""
    data, width = token_bytes(tokens), 4 * block_size
    whole = data[: len(data) // width * width]
    return [xxh3_64_digest(block, LOCAL_SEED) for (block,) in iter_unpack(f"{width}s", whole)]


def extra_bytes(extra_keys: Sequence[Any] | None, lora_name: str | None = None) -> bytes:
    """One canonical form of a block's extra keys; empty, None and absent are one.

    Engines announce the LoRA name first among them; it is in the root key already and left out here.
    """
    if not extra_keys:
        return b""
    keys = list(extra_keys)
    if lora_name and keys[0] == lora_name:
        keys = keys[1:]
    return _encode_extra(keys) if keys else b""


def next_key(before: bytes, local: bytes, extra: bytes = b"") -> bytes:
    """The key of a block that follows ``before``."""
    return xxh3_64_digest(before + local + extra)


def block_keys(before: bytes, locals_: Sequence[bytes], extras: Sequence[bytes] = ()) -> list[bytes]:
    """Keys of consecutive blocks behind the key ``before``; ``extras`` are of the first blocks, or of all."""
    key = before
    keys = [key := xxh3_64_digest(key + local + extra) for local, extra in zip(locals_, extras, strict=False)]
    return keys + [key := xxh3_64_digest(key + local) for local in locals_[len(extras) :]]


def keys_behind(
    root: bytes, tokens: array[int], block_size: int, extras: Sequence[bytes] = ()
) -> list[bytes]:
    """Keys of the whole blocks of a prompt behind its root key."""
    return block_keys(root, local_hashes(tokens, block_size), extras)


def prompt_extras(cache_salt: str | None) -> list[bytes]:
    """The extra keys of a prompt's blocks. An empty ``cache_salt`` is none."""
    return [extra_bytes([cache_salt])] if cache_salt else []
