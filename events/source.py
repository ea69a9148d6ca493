"""Where the events of a stream come from."""

from __future__ import annotations

import msgspec


class Source(msgspec.Struct, frozen=True):
    """Where a stream comes from.

    ``address`` is connected to, or bound when ``binds``; then only messages with ``topic`` are this stream's
    (None: all). ``replay`` is the address of the engine's replay endpoint, if it has one. ``peer`` is the
    name under which CURVE keys are kept for it.
    """

    address: str
    binds: bool = False
    topic: str | None = None
    replay: str | None = None
    peer: str = ""
