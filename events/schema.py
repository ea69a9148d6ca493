"""KV-cache event batches as vLLM and SGLang encode them, decoded to one set of structs.

Engines up to 0.23 send an event as an array with the type name first, later ones as a map with ``type``
(``vllm/distributed/kv_events.py``, 0.9.0.1 to 0.33.0). The two shapes have a typed decoder each, and the one
that fitted last is tried first. A payload that fits neither is taken apart event by event, so that one bad
event costs only itself.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

MAX_HASH_BYTES = 64
MIN_RAW_HASH_BYTES = 8
MAX_KIND_LENGTH = 64
_U64 = (1 << 64) - 1

RejectReason = Literal["unknown_event", "bad_event"]


class EventError(Exception):
    """Base of what this package raises."""


class PayloadError(EventError):
    """A payload that is no batch at all: empty, truncated, or of another shape."""


class BlockStored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that became reusable, in prefix order.

    ``hashes`` and ``parent`` are canonical engine hashes (see :func:`canonical_hash`); ``parent`` is None at
    the start of a prompt. ``tokens`` are u32 ids of all blocks together; they cover more than the hashes when
    an attention group lists only its tail. ``extra_keys`` has an entry per block (a list, or None), or is
    None. ``medium`` is upper-case, ``GPU`` where the engine said nothing.
    """

    hashes: list[bytes]
    parent: bytes | None
    tokens: array[int]
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    medium: str = "GPU"
    extra_keys: list[list[Any] | None] | None = None
    group: int = 0
    group_kind: str | None = None
    sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, gc=False):
    """Blocks that can no longer be reused, by canonical engine hash."""

    hashes: list[bytes]
    medium: str = "GPU"
    group: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False):
    """The whole prefix cache of the rank was dropped."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Rejected(msgspec.Struct, frozen=True):
    """One event that could not be understood; the rest of its batch stands."""

    reason: RejectReason
    detail: str


class Batch(msgspec.Struct, frozen=True):
    """One published batch: ``timestamp`` in unix seconds, and the data-parallel rank if it was said."""

    timestamp: float
    events: list[Event]
    rank: int | None = None
    rejected: list[Rejected] = []


# What stands on the wire. Field order is the array order; fields that only maps have come last.


class _Stored(msgspec.Struct, gc=False):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _Removed(msgspec.Struct, gc=False):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, gc=False):
    pass


class _ArrayStored(_Stored, array_like=True, tag="BlockStored", gc=False):
    pass


class _ArrayRemoved(_Removed, array_like=True, tag="BlockRemoved", gc=False):
    pass


class _ArrayCleared(_Cleared, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


class _MapStored(_Stored, tag_field="type", tag="BlockStored", gc=False):
    pass


class _MapRemoved(_Removed, tag_field="type", tag="BlockRemoved", gc=False):
    pass


class _MapCleared(_Cleared, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


_ArrayEvent = _ArrayStored | _ArrayRemoved | _ArrayCleared
_MapEvent = _MapStored | _MapRemoved | _MapCleared
_WireEvent = _Stored | _Removed | _Cleared


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_ArrayEvent]
    data_parallel_rank: int | None = None


class _MapBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_MapEvent]
    data_parallel_rank: int | None = None


class _AnyBatch(msgspec.Struct, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class _AnyArrayBatch(_AnyBatch, array_like=True, gc=False):
    pass


_encode_extra_keys = msgspec.msgpack.Encoder(order="deterministic").encode
_EVENT_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def canonical_hash(value: int | bytes) -> bytes:
    """The one byte form of an engine's block hash.

    An int becomes its 8 big-endian bytes (modulo 2**64, so a signed and an unsigned spelling are one). Raw
    bytes get a zero byte in front, so that no raw hash ever equals an int.

    Raises ValueError for raw hashes shorter than 8 or longer than 64 bytes.
    """
    if isinstance(value, int):
        return (value & _U64).to_bytes(8, "big")
    if not MIN_RAW_HASH_BYTES <= len(value) <= MAX_HASH_BYTES:
        span = f"{MIN_RAW_HASH_BYTES} to {MAX_HASH_BYTES}"
        raise ValueError(f"a block hash of {len(value)} bytes (expected {span})")
    return b"\x00" + value


def canonical_hashes(values: Sequence[int | bytes]) -> list[bytes]:
    """As :func:`canonical_hash`, of many; unsigned ints, which most engines announce, all at once."""
    try:
        packed = struct.pack(f">{len(values)}Q", *values)
    except struct.error:
        return [canonical_hash(value) for value in values]
    return [packed[start : start + 8] for start in range(0, len(packed), 8)]


def display_hash(canonical: bytes) -> str:
    """An engine hash for people: decimal for ints, ``0x`` and hex digits for raw bytes."""
    if len(canonical) == MIN_RAW_HASH_BYTES:
        return str(int.from_bytes(canonical, "big"))
    return "0x" + canonical[1:].hex()


def token_array(tokens: Sequence[int]) -> array[int]:
    """Token ids as an array of u32, the same one where it is one. Raises ValueError for an id outside u32."""
    if isinstance(tokens, array) and tokens.typecode == "I":
        return tokens
    try:
        return array("I", tokens)
    except OverflowError as error:
        raise ValueError("a token id outside 0 to 2**32-1") from error


def token_bytes(tokens: array[int]) -> memoryview:
    """Token ids as little-endian u32 bytes, the form that block hashes are taken of. Not a copy where they
    are that already: a prompt of 32,000 tokens is hashed a few times.
    """
    if sys.byteorder == "big":
        tokens = array("I", tokens)
        tokens.byteswap()
    # An empty view cannot be cast.
    return memoryview(tokens).cast("B") if tokens else memoryview(b"")


class Decoder:
    """Decodes payloads of one stream; remembers which shape fitted last."""

    def __init__(self) -> None:
        self._typed: list[Callable[[bytes], _ArrayBatch | _MapBatch]] = [
            msgspec.msgpack.Decoder(_MapBatch).decode,
            msgspec.msgpack.Decoder(_ArrayBatch).decode,
        ]

    def decode(self, payload: bytes) -> Batch:
        """The batch in ``payload``. Raises PayloadError when it holds no batch."""
        for shape in self._typed:
            try:
                wire = shape(payload)
                events = [_event(event) for event in wire.events]
            except (msgspec.DecodeError, ValueError, RecursionError):
                continue
            if shape is not self._typed[0]:
                self._typed.reverse()
            return Batch(wire.ts, events, wire.data_parallel_rank)
        return _decode_tolerantly(payload)


_SHARED = Decoder()


def decode(payload: bytes) -> Batch:
    """The batch in ``payload``, for callers without a stream. Raises PayloadError."""
    return _SHARED.decode(payload)


def _decode_tolerantly(payload: bytes) -> Batch:
    if not payload:
        raise PayloadError("an empty payload")
    try:
        raw = msgspec.msgpack.decode(payload)
        shape = _AnyBatch if isinstance(raw, dict) else _AnyArrayBatch
        batch: _AnyBatch = msgspec.convert(raw, shape)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PayloadError(f"{len(payload)} bytes that hold no event batch: {error}") from error
    events: list[Event] = []
    rejected: list[Rejected] = []
    for item in batch.events:
        try:
            events.append(_event(_convert(item)))
        except _UnknownEventError as error:
            rejected.append(Rejected("unknown_event", str(error)))
        except (msgspec.ValidationError, ValueError, RecursionError) as error:
            rejected.append(Rejected("bad_event", str(error)))
    return Batch(batch.ts, events, batch.data_parallel_rank, rejected)


class _UnknownEventError(EventError):
    pass


def _convert(item: Any) -> _WireEvent:
    if isinstance(item, dict):
        kind, shape = item.get("type"), _MapEvent
    elif isinstance(item, list) and item:
        kind, shape = item[0], _ArrayEvent
    else:
        raise ValueError(f"an event that is neither a map nor an array but {type(item).__name__}")
    if not isinstance(kind, str):
        raise ValueError("an event without a type name")
    if kind not in _EVENT_TYPES:
        raise _UnknownEventError(f"unknown event type {kind[:80]!r}")
    wire: _WireEvent = msgspec.convert(item, shape)
    return wire


def _event(wire: _WireEvent) -> Event:
    if isinstance(wire, _Stored):
        return BlockStored(
            hashes=canonical_hashes(wire.block_hashes),
            parent=None if wire.parent_block_hash is None else canonical_hash(wire.parent_block_hash),
            tokens=token_array(wire.token_ids),
            block_size=_block_size(wire.block_size),
            lora_id=wire.lora_id,
            lora_name=wire.lora_name,
            medium=_medium(wire.medium),
            extra_keys=_extra_keys(wire),
            group=_group(wire.group_idx),
            group_kind=_kind(wire.kv_cache_spec_kind),
            sliding_window=wire.kv_cache_spec_sliding_window,
        )
    if isinstance(wire, _Removed):
        return BlockRemoved(
            canonical_hashes(wire.block_hashes),
            _medium(wire.medium),
            _group(wire.group_idx),
        )
    return AllBlocksCleared()


def _block_size(block_size: int) -> int:
    if block_size < 0:
        raise ValueError(f"block_size {block_size} (expected a number of tokens)")
    return block_size


def _medium(medium: str | None) -> str:
    return "GPU" if not medium else medium.upper()


def _group(group: int | None) -> int:
    if group is None:
        return 0
    if not 0 <= group <= 255:
        raise ValueError(f"group_idx {group} (expected 0 to 255)")
    return group


def _kind(kind: str | None) -> str | None:
    """The name of an attention group's kind, which whoever follows the stream keeps."""
    if kind is not None and len(kind) > MAX_KIND_LENGTH:
        raise ValueError(
            f"a kv_cache_spec_kind of {len(kind)} characters (expected {MAX_KIND_LENGTH} at most)"
        )
    return kind


def _extra_keys(wire: _Stored) -> list[list[Any] | None] | None:
    """One entry per block; a bare key stands for a list of one."""
    if wire.extra_keys is None or not any(wire.extra_keys):
        return None
    try:
        _encode_extra_keys(wire.extra_keys)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"extra_keys that have no canonical form: {error}") from error
    return [key if key is None or isinstance(key, list) else [key] for key in wire.extra_keys]
