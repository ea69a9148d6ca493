"""How the workers of one router wake each other: a bell for each, which anybody may ring."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

MOST_BYTES = 1 << 16


class Bells:
    """Made before the workers are forked: a pipe for each of ``workers``. That it was rung is all that is
    said, and rung twice may be heard once.
    """

    def __init__(self, workers: int) -> None:
        self._pipes = [os.pipe() for _ in range(workers)]
        for pipe in self._pipes:
            for end in pipe:
                os.set_blocking(end, False)

    def ring(self, worker: int) -> None:
        """Wakes a worker. Nobody waits for one that does not listen: its pipe is full and says so."""
        with suppress(BlockingIOError):
            os.write(self._pipes[worker][1], b".")

    @contextmanager
    def heard(self, worker: int, call: Callable[[], None]) -> Iterator[None]:
        """Has ``call`` called by the running loop each time that the worker's bell was rung."""
        loop, (end, _) = asyncio.get_running_loop(), self._pipes[worker]

        def hear() -> None:
            with suppress(BlockingIOError):
                os.read(end, MOST_BYTES)
            call()

        loop.add_reader(end, hear)
        try:
            yield
        finally:
            loop.remove_reader(end)
