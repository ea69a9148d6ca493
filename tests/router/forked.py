"""Processes that do something at the same time over what was made before they were forked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.mutex import Mutex


def patient_mutex() -> Mutex:
    """One that is waited for however busy the machine is."""
    return Mutex(clock=lambda: 0.0)


@contextmanager
def forked(number: int, work: Callable[[int], object]) -> Iterator[list[int]]:
    """So many processes, each of which does ``work`` with its number, from 0, once all are there; waits for
    all in the end.
    """
    pids, (begun, begin) = [], os.pipe()
    for one in range(number):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(begin)
                os.read(begun, 1)  # Until nobody can write to it any more.
                work(one)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    os.close(begin)
    os.close(begun)
    try:
        yield pids
    finally:
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert all(code <= 0 for code in codes), codes


def all_at_once(number: int, work: Callable[[int], object]) -> None:
    """Has so many processes do it, and waits for them."""
    with forked(number, work):
        pass
