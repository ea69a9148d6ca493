"""Records that all workers write."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.ledger import Ledger
from tests.router.forked import all_at_once, patient_mutex

names = st.sampled_from([b"a", b"b", b"c", b"d"])


@given(st.lists(st.tuples(st.sampled_from(["put", "drop"]), names, st.integers(-9, 9)), max_size=30))
@settings(max_examples=200, deadline=None)
def test_it_keeps_what_was_written_last_under_each_name_as_far_as_there_is_room(
    steps: list[tuple[str, bytes, int]],
) -> None:
    ledger, model = Ledger(3, "qd"), dict[bytes, tuple[int, float]]()
    for step, name, value in steps:
        if step == "put":
            ledger.put(name, value, value / 2)
            if name in model or len(model) < 3:
                model[name] = (value, value / 2)
        else:
            ledger.drop(name)
            model.pop(name, None)
        assert {name: ledger.get(name) for name in model} == model
        assert len(ledger) == len(model)
        assert sorted(ledger.each()) == sorted(model.values())


def test_every_process_reads_and_changes_what_another_has_written() -> None:
    ledger = Ledger(8, "q")
    ledger.put(b"a", 1)
    assert ledger.get(b"b") is None

    def write(_: int) -> None:
        assert ledger.get(b"a") == (1,)
        ledger.drop(b"a")
        ledger.put(b"b", 2)
        ledger.put(b"c", 3)

    all_at_once(1, write)
    assert [ledger.get(name) for name in (b"a", b"b", b"c")] == [None, (2,), (3,)]
    ledger.change(lambda fields: (10 * fields[0],))
    all_at_once(1, lambda _: ledger.put(b"b", *(n + 1 for n in ledger.get(b"b") or ())))
    assert [ledger.get(name) for name in (b"b", b"c")] == [(21,), (30,)]


def test_none_is_lost_of_what_processes_write_at_once() -> None:
    ledger = Ledger(64, "q")
    ledger.table.mutex = patient_mutex()

    def write(number: int) -> None:
        for step in range(2000):
            with ledger.alone():
                ledger.put(b"own %d" % number, step)
                (count,) = ledger.get(b"all") or (0,)
                ledger.put(b"all", count + 1)
                if step % 3 == 0:
                    ledger.drop(b"own %d" % number)

    all_at_once(4, write)
    assert ledger.get(b"all") == (8000,)
    assert [ledger.get(b"own %d" % number) for number in range(4)] == [(1999,)] * 4
    assert len(ledger) == 5


def test_fields_are_of_eight_bytes() -> None:
    with pytest.raises(ValueError, match="fields are q or d"):
        Ledger(1, "qi")


@pytest.mark.parametrize("steps", range(6))
def test_a_worker_that_is_killed_in_the_midst_of_a_change_leaves_nothing_that_stops_the_others(
    steps: int,
) -> None:
    ledger = Ledger(2, "q")

    def change(_: int) -> None:
        heads, set_head = iter(range(steps)), ledger.table.set_head

        def fatal(which: int, number: int, count: int) -> None:
            if next(heads, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            set_head(which, number, count)

        ledger.table.set_head = fatal  # type: ignore[method-assign]
        with ledger.alone():
            ledger.put(b"a", 1)
            ledger.drop(b"a")
            ledger.put(b"b", 2)

    all_at_once(1, change)
    for name in (b"a", b"b"):
        with ledger.alone():
            ledger.put(name, 3)
    assert sorted(ledger.each()) == [(3,), (3,)]
    for name in (b"a", b"b"):
        ledger.drop(name)
    assert len(ledger) == 0
