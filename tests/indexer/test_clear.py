"""IX-01: a clear is one small write; what it leaves is collected in steps that stall nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from events.schema import AllBlocksCleared
from indexer.writer import COLLECT_STEP

PROMPT = list(range(28))
ENTRIES = 10_000
LONG = list(range(1_000, 1_000 + 4 * ENTRIES))
TABLES_A_BLOCK = 3  # its rows in names, ages and blocks


def rows_of(rig: Any) -> int:
    """Rows of all tables."""
    with rig.writer.env.begin() as txn:
        return sum(txn.stat(table)["entries"] for table in rig.writer.tables.every)


@pytest.fixture
def two(rig: Any, engine: Any) -> Any:
    """A holds much, B a little of the same."""
    a, b = rig.follow("A"), rig.follow("B")
    rig.say(a, engine(1).stored(LONG), engine(1).stored(PROMPT))
    rig.say(b, engine(2).stored(LONG, 0, 10), engine(2).stored(PROMPT))
    return rig


def test_ix01_neither_the_clear_nor_a_step_of_collecting_touches_more_than_a_bounded_number_of_entries(
    two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[int] = []

    def note(before: int) -> int:
        changes.append(abs(rows_of(two) - before))
        return rows_of(two)

    collect = two.writer.collect
    monkeypatch.setattr(two.writer, "collect", lambda *_: None)
    rows = rows_of(two)
    two.say(("A", 0), AllBlocksCleared())
    rows = note(rows)
    assert changes == [1]  # the next generation's record
    assert two.held(LONG) == {"A": (0, 0, 0), "B": (40, 40, 40)}
    while two.writer.garbage:
        collect()
        rows = note(rows)
        assert two.held(LONG) == {"A": (0, 0, 0), "B": (40, 40, 40)}
    assert max(changes) <= TABLES_A_BLOCK * COLLECT_STEP + 1
    assert len(changes) > ENTRIES / COLLECT_STEP
    two.check()


def test_ix01_a_group_of_signals_is_followed_by_a_bounded_number_of_steps(
    two: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much there is to collect, the next batch waits for few steps."""
    steps, collect = [0], two.writer.collect

    def counted(*arguments: Any) -> None:
        steps[0] += 1
        collect(*arguments)

    monkeypatch.setattr(two.writer, "collect", counted)
    two.say(("A", 0), AllBlocksCleared())
    assert (steps[0], two.writer.garbage) == (1, 1)
    two.say(("A", 0), engine(1).stored(PROMPT))
    assert (steps[0], two.writer.garbage) == (2, 1)
    assert two.held(PROMPT) == {"A": (28, 28, 28), "B": (28, 28, 28)}


def test_ix01_a_clear_is_kept_over_a_restart_and_new_stores_count(
    make_rig: Any, engine: Any, tmp_path: Path
) -> None:
    rig = make_rig(tmp_path)
    for name in "AB":
        rig.say(rig.follow(name), engine().stored(PROMPT))
    rig.say(("A", 0), AllBlocksCleared())
    sequences = rig.sequences
    rig.abandon()
    rig = make_rig(tmp_path)
    rig.resume()
    assert rig.held(PROMPT) == {"A": (0, 0, 0), "B": (28, 28, 28)}
    rig.sequences = sequences
    rig.say(("A", 0), engine().stored(PROMPT, 0, 3))
    rig.collect()
    assert rig.held(PROMPT) == {"A": (12, 12, 12), "B": (28, 28, 28)}
    rig.check()
    rig.close()
