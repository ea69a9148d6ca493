"""Frames that wait until something is known of what comes before them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from events.signals import Frame, Replayed

Waiting = TypeVar("Waiting", Frame, Replayed)


class Held(Generic[Waiting]):
    """Frames in the order in which they came: at most ``max_frames`` of at most ``max_bytes`` in all."""

    def __init__(self, max_frames: int, max_bytes: int) -> None:
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._frames: deque[Waiting] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._frames)

    def add(self, frame: Waiting) -> bool:
        """Keeps a frame behind the others; False, and it is not kept, where there is no room."""
        if len(self) >= self._max_frames or self._bytes + len(frame.payload) > self._max_bytes:
            return False
        self._frames.append(frame)
        self._bytes += len(frame.payload)
        return True

    def take(self) -> Waiting:
        """Takes out the first frame. Raises IndexError when there is none."""
        frame = self._frames.popleft()
        self._bytes -= len(frame.payload)
        return frame

    def put_back(self, frame: Waiting) -> None:
        """Puts a frame that was taken in front again."""
        self._frames.appendleft(frame)
        self._bytes += len(frame.payload)

    def clear(self) -> None:
        self._frames.clear()
        self._bytes = 0

    def copy(self) -> Held[Waiting]:
        """The same frames, to be changed apart."""
        same: Held[Waiting] = Held(self._max_frames, self._max_bytes)
        same._frames = self._frames.copy()
        same._bytes = self._bytes
        return same
