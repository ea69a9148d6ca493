"""What workers tell each other over shared memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

from router.board import Table


@contextmanager
def child(work: object) -> Iterator[int]:
    """A forked process that does ``work`` and then stays, until it is killed."""
    assert callable(work)
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        work()
        os.write(told, b".")
        signal.pause()
        os._exit(0)
    os.read(ready, 1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(told)


def test_another_process_reads_what_a_worker_has_written_until_its_row_is_cleared() -> None:
    table = Table(2, 8, "qd")
    reader = table.row(0)
    before = reader.version()
    with child(lambda: table.row(1).put(b"a", 3, 0.5)):
        assert list(reader.others(b"a")) == [(3, 0.5)]
        assert list(reader.others(b"b")) == []
        assert reader.version() != before
    assert list(reader.others(b"a")) == [(3, 0.5)]
    table.clear(1)
    assert list(reader.others(b"a")) == []
    with child(lambda: table.row(1).put(b"b", 1, 0.0)):
        assert list(reader.others(b"b")) == [(1, 0.0)]


def test_more_names_than_there_is_room_for_are_left_out() -> None:
    table = Table(2, 2, "q")
    writer, reader = table.row(0), table.row(1)
    for number, name in enumerate((b"a", b"b", b"c")):
        writer.put(name, number)
    assert [list(reader.others(name)) for name in (b"a", b"b", b"c")] == [[(0,)], [(1,)], []]
    writer.drop(b"a")
    writer.put(b"c", 5)
    assert [list(reader.others(name)) for name in (b"a", b"b", b"c")] == [[], [(1,)], [(5,)]]


names = st.sampled_from([b"a", b"b", b"c", b"d"])
steps = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["put", "drop", "dies"]), names, st.integers(-9, 9)),
    max_size=60,
)


@settings(deadline=None)
@given(steps)
def test_every_row_reads_what_stands_in_the_others(steps: list[tuple[int, str, bytes, int]]) -> None:
    table = Table(3, 4, "q")
    rows = [table.row(number) for number in range(3)]
    model: list[dict[bytes, int]] = [{}, {}, {}]
    for worker, step, name, value in steps:
        if step == "put":
            rows[worker].put(name, value)
            model[worker][name] = value
        elif step == "drop":
            rows[worker].drop(name)
            model[worker].pop(name, None)
        else:
            table.clear(worker)
            rows[worker], model[worker] = table.row(worker), {}
        for reader, row in enumerate(rows):
            for asked in (b"a", b"b", b"c", b"d"):
                there = [
                    (stands[asked],) for n, stands in enumerate(model) if n != reader and asked in stands
                ]
                assert list(row.others(asked)) == there
