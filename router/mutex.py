"""What only one of several processes may do at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Callable
from types import TracebackType

PATIENCE_S = 0.1
"""Nobody waits longer. What is done alone takes some ten microseconds; who holds the mutex for longer was
taken off its core, or stopped.
"""
IN_VAIN_S = 0.002
"""Nor longer than this as long as one has waited in vain."""
PAUSE_S = 0.0001
_TAKEN = (errno.EACCES, errno.EAGAIN)


class Mutex:
    """Made before the processes are forked; each uses it from one thread only. It is a lock of the kernel's
    on a file without a name (POSIX record locks are of a process), so that of one that dies is free at once.

    ``with mutex:`` never fails and never waits for long. Where another process was stopped in the middle,
    the others go on without it: a limit that is passed by one is better than a router that stands still.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._file = _nameless_file()
        self._clock = clock
        self._sleep = sleep
        self._held = False
        self._patience_s = PATIENCE_S

    def __enter__(self) -> None:
        self._held = self._try() or self._wait()
        self._patience_s = PATIENCE_S if self._held else IN_VAIN_S

    def _wait(self) -> bool:
        until = self._clock() + self._patience_s
        while self._clock() < until:
            self._sleep(PAUSE_S)
            if self._try():
                return True
        return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held:
            self._held = False
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _try(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            return False
        return True


def _nameless_file() -> int:
    """It stays open as long as the process, and those that are forked from it."""
    if sys.platform == "linux":
        return os.memfd_create("warmroute")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
