"""IX-14: an indexer that has just started says so, and for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from indexer.readiness import Readiness

PROMPT = list(range(28))
DEADLINE_S = 30.0


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def restarted(make_rig: Any, engine: Any, tmp_path: Path) -> Any:
    """A map of two streams, taken up by a new indexer that has heard of neither yet."""
    rig = make_rig(tmp_path)
    for name in "AB":
        rig.say(rig.follow(name), engine().stored(PROMPT))
    sequences = rig.sequences
    rig.abandon()
    rig = make_rig(tmp_path)
    rig.resume()
    rig.sequences = sequences
    yield rig
    rig.close()


def test_ix14_a_restarted_indexer_is_ready_when_the_last_of_its_streams_is_proven(
    restarted: Any, engine: Any
) -> None:
    clock = Clock()
    readiness = Readiness(restarted.reader, DEADLINE_S, clock)
    assert readiness.settling() == ["A rank 0: unverified", "B rank 0: unverified"]
    restarted.say(("A", 0), engine().stored([1, *PROMPT]))
    clock.now += DEADLINE_S - 0.1
    assert readiness.settling() == ["B rank 0: unverified"]
    restarted.say(("B", 0), engine().stored([1, *PROMPT]))
    assert readiness.settling() == []


def test_ix14_what_comes_after_it_was_ready_does_not_make_it_cold_again(restarted: Any, engine: Any) -> None:
    readiness = Readiness(restarted.reader, DEADLINE_S, Clock())
    for name in "AB":
        restarted.say((name, 0), engine().stored([1, *PROMPT]))
    assert readiness.settling() == []
    restarted.follow("C", replay_endpoint="tcp://127.0.0.1:5558")
    assert restarted.record(("C", 0)).state == "replaying"
    assert readiness.settling() == []


def test_ix14_a_stream_that_is_never_proven_is_waited_for_until_the_deadline(restarted: Any) -> None:
    clock = Clock()
    readiness = Readiness(restarted.reader, DEADLINE_S, clock)
    clock.now += DEADLINE_S - 0.1
    assert len(readiness.settling()) == 2
    clock.now += 0.2
    assert readiness.settling() == []
    assert {one.weight for one in restarted.reader.query("m", PROMPT)} == {0.0}  # ready, and still honest
