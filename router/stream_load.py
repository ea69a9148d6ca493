"""What is told of a stream's load: within a worker, and between the workers of one router."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from router.replicas import StreamId


class StreamLoad(msgspec.Struct, frozen=True, gc=False):
    """``requests`` in flight; ``prefill_tokens`` uncached prompt tokens of those whose prefill is not over;
    ``decoding`` requests whose is.
    """

    requests: int = 0
    prefill_tokens: int = 0
    decoding: int = 0

    def __add__(self, other: StreamLoad) -> StreamLoad:
        return StreamLoad(
            self.requests + other.requests,
            self.prefill_tokens + other.prefill_tokens,
            self.decoding + other.decoding,
        )


IDLE = StreamLoad()
NEVER = float("inf")


class Share(msgspec.Struct, frozen=True):
    """What worker processes have at a stream, besides one that asks: their ``load``, and how many requests
    they have ever ``sent``, of ``sent_tokens`` to prefill. Of those that wait for their prefill, the first
    came at ``joined`` (NEVER: none waits) and has ``first_tokens``; ``left`` is when one that was first was
    last done. Times are of a clock that all have in common.
    """

    load: StreamLoad = IDLE
    sent: int = 0
    sent_tokens: int = 0
    joined: float = NEVER
    first_tokens: int = 0
    left: float = 0.0


NO_SHARE = Share()


class Shares(Protocol):
    """How the workers of one router tell each other of their requests."""

    def tell(self, stream: StreamId, share: Share) -> None:
        """What this worker has at the stream now."""

    def of(self, stream: StreamId) -> Share:
        """What all others have there together."""

    def alone(self) -> AbstractContextManager[None]:
        """While this is held, no other worker books what has a limit."""

    def forget(self, stream: StreamId) -> None:
        """The stream is none of ours any more."""
