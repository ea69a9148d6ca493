"""What happens to a stream, as its state machine is told: batches, replays, connections, losses."""

from __future__ import annotations

import msgspec

MAX_MESSAGE_BYTES = 32 << 20
"""How long a batch may be, unless the settings say otherwise."""


class Connected(msgspec.Struct, frozen=True, gc=False):
    """The live socket has a peer (again)."""


class Disconnected(msgspec.Struct, frozen=True, gc=False):
    """The live socket lost its peer."""


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A batch from the live socket."""

    sequence: int
    payload: bytes


class Replayed(msgspec.Struct, frozen=True, gc=False):
    """A batch that answers replay request number ``ask``."""

    ask: int
    sequence: int
    payload: bytes


class ReplayEnded(msgspec.Struct, frozen=True, gc=False):
    """The end marker of replay request number ``ask``."""

    ask: int


class Overflowed(msgspec.Struct, frozen=True, gc=False):
    """Frames of this stream were dropped before they came here."""


Signal = Connected | Disconnected | Frame | Replayed | ReplayEnded | Overflowed
