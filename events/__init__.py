"""What engines say: KV-cache events, from the bytes on the wire to typed batches."""

from events.schema import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    PayloadError,
    Rejected,
    decode,
)

__all__ = [
    "AllBlocksCleared",
    "Batch",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "PayloadError",
    "Rejected",
    "decode",
]
