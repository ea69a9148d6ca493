from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

import pytest

from router.threads import Threads, ThreadsBusyError


async def test_work_is_done_in_threads_and_its_errors_come_back() -> None:
    threads = Threads("w", 2, 8)
    names = await asyncio.gather(*(threads.run(lambda: threading.current_thread().name) for _ in range(5)))
    assert set(names) == {"w"}
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    threads.close()


async def test_px13_a_thread_outlives_what_is_no_exception() -> None:
    """A panic in Rust is none, and threads that are gone are not started again."""
    threads = Threads("w", 1, 8)

    def panic() -> None:
        raise type("PanicException", (BaseException,), {})("bad split")

    async with asyncio.timeout(10):
        for _ in range(3):
            with pytest.raises(RuntimeError, match=r"^PanicException: bad split$"):
                await threads.run(panic)
        assert await threads.run(lambda: 1) == 1
    threads.close()


async def test_px13_what_waits_is_bounded_and_what_was_given_up_is_not_begun() -> None:
    threads, hold, done = Threads("w", 1, 2), threading.Event(), []
    started = threading.Event()

    def work(number: int) -> None:
        started.set()
        hold.wait(10)
        done.append(number)

    first = threads.run(lambda: work(1))
    await asyncio.to_thread(started.wait, 10)
    second, third = threads.run(lambda: work(2)), threads.run(lambda: work(3))
    with pytest.raises(ThreadsBusyError):
        threads.run(lambda: work(4))
    second.cancel()
    hold.set()
    await asyncio.gather(first, third)
    assert done == [1, 3]
    threads.close()


async def test_px13_what_comes_just_when_a_thread_takes_other_work_gets_a_thread_of_its_own() -> None:
    threads, taken, go_on, hold = Threads("w", 2, 8), threading.Event(), threading.Event(), threading.Event()

    class Halting(queue.SimpleQueue[Any]):
        def get(self, *args: Any) -> Any:
            job = super().get(*args)
            taken.set()
            go_on.wait(10)
            return job

    threads._jobs = Halting()
    first = threads.run(lambda: hold.wait(10))
    await asyncio.to_thread(taken.wait, 10)
    second = threads.run(lambda: 2)
    go_on.set()
    async with asyncio.timeout(5):
        assert await second == 2
    hold.set()
    assert await first
    threads.close()


async def test_threads_are_daemons_and_no_more_than_said() -> None:
    threads, hold = Threads("w-many", 3, 100), threading.Event()
    jobs: list[Any] = [threads.run(lambda: hold.wait(10)) for _ in range(10)]
    started = [thread for thread in threading.enumerate() if thread.name == "w-many"]
    assert len(started) == 3
    assert all(thread.daemon for thread in started)
    hold.set()
    await asyncio.gather(*jobs)
    threads.close()
