"""Streams of events reach their clients by lines: what breaks off within one leaves no half of it behind."""

from __future__ import annotations

MOST_HELD_BYTES = 256 * 1024
"""A line longer than this passes as it comes."""


class WholeLines:
    """Holds the beginning of a line until its end is there. An engine sends whole events; where the network
    cuts one, and the engine dies before the rest, the client would get the beginning, fail to read that, and
    never look at the error behind it.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._held_bytes = 0

    def feed(self, chunk: bytes) -> bytes:
        """What the client gets now."""
        if not self._held and chunk.endswith(b"\n"):
            return chunk
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if not end and self._held_bytes + len(chunk) > MOST_HELD_BYTES:
            end = len(chunk)
        passed = b"".join([*self._held, chunk[:end]]) if end else b""
        if end:
            self._held, self._held_bytes = [], 0
        if end < len(chunk):
            self._held.append(chunk[end:])
            self._held_bytes += len(chunk) - end
        return passed

    def end(self, *, is_whole: bool = True) -> bytes:
        """What was held back, when nothing comes any more; nothing of a stream that is not whole."""
        held, self._held, self._held_bytes = b"".join(self._held), [], 0
        return held if is_whole else b""
