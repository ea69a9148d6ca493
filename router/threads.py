"""Threads for work that must not hold the event loop, a bounded number with a bounded queue.

They are daemons, unlike those of ``concurrent.futures``: work that never ends (a template that loops, a hub
that does not answer) must not keep the process from going down.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_T = TypeVar("_T")
_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class ThreadsBusyError(Exception):
    """Too much is waiting for a thread."""


class Threads:
    """``threads`` threads, started when there is work; at most ``waiting`` jobs wait for one."""

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self._name = name
        self._most = threads
        self._started = 0
        self._open = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._waiting = waiting
        self._lock = threading.Lock()

    def run(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """What ``work`` returns or raises, once a thread has done it; a cancelled job that waits is not
        begun.

        Raises ThreadsBusyError.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        with self._lock:
            if self._jobs.qsize() >= self._waiting:
                raise ThreadsBusyError
            self._jobs.put((loop, future, work))
            self._open += 1
            if self._started < min(self._open, self._most):
                self._started += 1
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        """Ends the threads that wait; the others end with what they do."""
        for _ in range(self._most):
            self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            loop, future, work = job
            result, error = (None, None) if future.cancelled() else _done(work)
            with self._lock:
                self._open -= 1
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, result, error)


def _done(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error
    except BaseException as panic:  # of a library: the thread would be gone, and nobody told
        return None, RuntimeError(f"{type(panic).__name__}: {panic}")


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
