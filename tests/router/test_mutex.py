"""What only one of several processes may do at a time."""

from __future__ import annotations

import mmap
import os
import signal
import struct

from router.mutex import IN_VAIN_S, PATIENCE_S, PAUSE_S, Mutex
from tests.router.forked import all_at_once, forked, patient_mutex

COUNT = struct.Struct("@Q")


def test_what_four_processes_count_together_is_counted_once_each() -> None:
    mutex, memory = patient_mutex(), mmap.mmap(-1, COUNT.size)

    def count(_: int) -> None:
        for _ in range(10000):
            with mutex:
                (before,) = COUNT.unpack_from(memory)
                COUNT.pack_into(memory, 0, before + 1)

    all_at_once(4, count)
    assert COUNT.unpack_from(memory) == (40000,)


def test_nobody_waits_long_for_a_process_that_was_stopped_in_the_middle_nor_at_all_for_one_that_died() -> (
    None
):
    now, told = 0.0, os.pipe()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    mutex = Mutex(clock=lambda: now, sleep=sleep)

    def stop_in_the_middle(_: int) -> None:
        with mutex:
            os.write(told[1], b".")
            signal.pause()

    with forked(1, stop_in_the_middle) as (pid,):
        os.read(told[0], 1)
        waits = []
        for _ in range(3):
            before = now
            with mutex:
                waits.append(now - before)
        assert PATIENCE_S <= waits[0] <= PATIENCE_S + 2 * PAUSE_S
        assert max(waits[1:]) <= IN_VAIN_S + 2 * PAUSE_S
        os.kill(pid, signal.SIGKILL)
    before = now
    with mutex:
        assert now == before
    for end in told:
        os.close(end)
