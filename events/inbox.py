"""Signals on their way from the sockets to whoever applies them."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Hashable

from events.signals import Frame, Overflowed, Replayed, Signal

StreamId = Hashable


class Inbox:
    """Bounded queues of signals, one per stream, taken in turns so that a noisy stream starves no other."""

    def __init__(self, max_frames: int = 10_000, max_bytes: int = 64 << 20) -> None:
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._queues: dict[StreamId, deque[Signal]] = {}
        self._bytes: Counter[StreamId] = Counter()
        self._turns: deque[StreamId] = deque()
        self._ready = threading.Condition()
        self.overflows: Counter[StreamId] = Counter()

    def put(self, stream: StreamId, signal: Signal) -> bool:
        """Queues ``signal``; False when it was dropped for lack of room."""
        carries = isinstance(signal, Frame | Replayed)
        size = len(signal.payload) if isinstance(signal, Frame | Replayed) else 0
        with self._ready:
            queue = self._queues.setdefault(stream, deque())
            full = len(queue) >= self._max_frames or self._bytes[stream] + size > self._max_bytes
            if carries and queue and full:
                self.overflows[stream] += 1
                if not isinstance(queue[-1], Overflowed):
                    queue.append(Overflowed())
                return False
            if not queue:
                self._turns.append(stream)
            queue.append(signal)
            self._bytes[stream] += size
            self._ready.notify()
            return True

    def has_room(self, stream: StreamId) -> bool:
        """Whether the stream's queue is less than half full."""
        queue = self._queues.get(stream)
        return not queue or (len(queue) * 2 < self._max_frames and self._bytes[stream] * 2 < self._max_bytes)

    def depth(self, stream: StreamId) -> int:
        """Signals that wait."""
        return len(self._queues.get(stream, ()))

    def take(
        self, limit: int, timeout: float, share: int = 32, max_bytes: int = 1 << 30
    ) -> list[tuple[StreamId, Signal]]:
        """Up to ``limit`` signals, at most ``share`` of a stream before the next has its turn.

        No more after ``max_bytes`` of payload. Waits up to ``timeout`` seconds for the first.
        """
        taken: list[tuple[StreamId, Signal]] = []
        with self._ready:
            if not self._turns:
                self._ready.wait(timeout)
            while self._turns and len(taken) < limit and max_bytes > 0:
                stream = self._turns.popleft()
                queue = self._queues[stream]
                for _ in range(min(share, limit - len(taken), len(queue))):
                    signal = queue.popleft()
                    if isinstance(signal, Frame | Replayed):
                        self._bytes[stream] -= len(signal.payload)
                        max_bytes -= len(signal.payload)
                    taken.append((stream, signal))
                    if max_bytes <= 0:
                        break
                if queue:
                    self._turns.append(stream)
        return taken

    def put_back(self, taken: list[tuple[StreamId, Signal]]) -> None:
        """Returns what was just taken to the front of its queues, in its order, whatever their bounds."""
        with self._ready:
            for stream, signal in reversed(taken):
                queue = self._queues.setdefault(stream, deque())
                if not queue:
                    self._turns.append(stream)
                queue.appendleft(signal)
                if isinstance(signal, Frame | Replayed):
                    self._bytes[stream] += len(signal.payload)

    def wake(self) -> None:
        """Ends a waiting :meth:`take`."""
        with self._ready:
            self._ready.notify()

    def forget(self, stream: StreamId) -> None:
        """Drops all that is queued of a stream."""
        with self._ready:
            self._queues.pop(stream, None)
            self._bytes.pop(stream, None)
            if stream in self._turns:
                self._turns.remove(stream)
