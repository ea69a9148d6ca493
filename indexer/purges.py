"""What is to be forgotten of streams, or of an adapter of theirs, until it is."""

from __future__ import annotations

from collections.abc import Callable

from events.inbox import StreamId
from indexer.followed import Followed

Purging = tuple[StreamId, str | None]
"""A stream, and the adapter; None for all that the stream holds."""


class Purges:
    """Purges that were asked for. They are ``due`` with each group until one of these is committed.

    What was purged of a stream that is behind its engine is purged again when it has caught up. ``port_of``
    gives the port of a stream that is followed, ``held`` how many signals of a port are still to be applied.
    """

    def __init__(
        self, port_of: Callable[[StreamId], Followed | None], held: Callable[[StreamId], int]
    ) -> None:
        self._port_of = port_of
        self._held = held
        self._asked: set[Purging] = set()
        self._later: dict[Purging, int] = {}  # and how often the engine had restarted then

    def ask(self, stream: StreamId, lora_name: str | None) -> None:
        self._asked.add((stream, lora_name))

    def due(self) -> set[Purging]:
        """Those to be done with the group at hand: new ones, and those of streams that were behind and have
        caught up, of the same engine process.
        """
        return self._asked | {
            (stream, lora_name)
            for (stream, lora_name), restarts in self._later.items()
            if not self._is_behind(stream) and self._restarts(stream) == restarts
        }

    def committed(self) -> None:
        """Those that were due are done, but for streams that are behind."""
        wanted = self._later | {each: self._restarts(each[0]) for each in self._asked}
        self._later = {each: before for each, before in wanted.items() if self._is_behind(each[0])}
        self._asked.clear()

    def _restarts(self, stream: StreamId) -> int:
        port = self._port_of(stream)
        return port.machine.restarts if port is not None else 0

    def _is_behind(self, stream: StreamId) -> bool:
        """Whether batches that the engine said already are still to be applied, as far as can be told."""
        port = self._port_of(stream)
        return port is not None and (
            port.machine.state not in ("live", "partial") or self._held(port.stream) > 0
        )
