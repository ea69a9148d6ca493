from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.ledger import Ledger
from router.mutex import Mutex
from router.outliers import SAME_RETURN_S, OutlierRules, Outliers, Standing
from router.standings import MOST_REPLICAS, SHAPE, Record, SharedStandings, let_go
from tests.router.forked import all_at_once, patient_mutex

RULES = OutlierRules(after=3, base_s=5.0, max_s=20.0, share=0.5, slow_start_s=10.0)
NAMES = ("a", "b", "c", "d")


class Chance:
    """The next number that chance gives."""

    def __init__(self) -> None:
        self.next = 0.0

    def random(self) -> float:
        return self.next


class Rig:
    def __init__(self, rules: OutlierRules = RULES, size: int = len(NAMES)) -> None:
        self.now = 1000.0
        self.chance = Chance()
        self.ejections: list[tuple[str, float]] = []
        self.outliers = Outliers(
            rules,
            lambda: size,
            self.chance,
            ejected=lambda name, seconds: self.ejections.append((name, seconds)),
            clock=lambda: self.now,
        )

    def fail(self, name: str, times: int = 1) -> None:
        for _ in range(times):
            self.outliers.chosen(name)
            self.outliers.failed(name)

    def admitted(self) -> list[str]:
        return self.outliers.admit(NAMES)


def until(rig: Rig, name: str) -> float:
    record = rig.outliers._records.get(name)
    assert record is not None
    return record.until


def test_failures_in_a_row_eject_and_a_success_between_them_does_not() -> None:
    rig = Rig()
    rig.fail("a", 2)
    rig.outliers.succeeded("a")
    rig.fail("a", 2)
    assert rig.admitted() == list(NAMES)
    rig.fail("a")
    assert rig.admitted() == ["b", "c", "d"]
    assert rig.ejections == [("a", 5.0)]


def test_endings_that_say_nothing_do_not_count() -> None:
    rig = Rig()
    for _ in range(50):
        rig.outliers.chosen("a")
        rig.outliers.let_go("a")
    assert rig.admitted() == list(NAMES)


def test_an_ejection_is_twice_as_long_each_time_up_to_the_most() -> None:
    rig = Rig()
    rig.fail("a", 3)
    for _ in range(4):
        rig.now = until(rig, "a")
        rig.fail("a")
    assert [seconds for _, seconds in rig.ejections] == [5.0, 10.0, 20.0, 20.0, 20.0]


def test_a_long_time_without_failures_is_forgiven() -> None:
    rig = Rig()
    rig.fail("a", 3)
    rig.now += 5.0
    rig.outliers.succeeded("a")
    rig.now += RULES.max_s + 1
    rig.fail("a", 3)
    assert [seconds for _, seconds in rig.ejections] == [5.0, 5.0]


def test_after_an_ejection_one_request_at_a_time_tries_it() -> None:
    rig = Rig()
    rig.fail("a", 3)
    rig.now += 5.0
    assert rig.outliers.standing("a") is Standing.HALF_OPEN
    assert "a" in rig.admitted()
    rig.outliers.chosen("a")
    assert "a" not in rig.admitted()
    rig.outliers.let_go("a")
    assert "a" in rig.admitted()
    rig.outliers.chosen("a")
    rig.outliers.succeeded("a")
    assert rig.outliers.standing("a") is Standing.SLOW_START


def test_an_answer_to_a_request_from_before_does_not_end_an_ejection() -> None:
    rig = Rig()
    rig.fail("a", 3)
    rig.outliers.succeeded("a")
    assert rig.outliers.standing("a") is Standing.EJECTED


@pytest.mark.parametrize(("after_s", "share"), [(0.0, 0.1), (5.0, 0.55), (9.999, 0.999)])
def test_a_replica_that_came_back_is_a_candidate_for_a_growing_share(after_s: float, share: float) -> None:
    rig = Rig()
    rig.outliers.came_back("a")
    rig.now += after_s
    rig.chance.next = share - 0.01
    assert "a" in rig.admitted()
    rig.chance.next = share + 0.001
    assert "a" not in rig.admitted()
    rig.now += RULES.slow_start_s
    assert rig.outliers.standing("a") is Standing.IN
    assert rig.admitted() == list(NAMES)


def test_where_nobody_else_is_left_the_one_that_warms_up_is_taken_before_those_that_fail() -> None:
    rig = Rig(size=4)
    rig.fail("a", 3)
    rig.outliers.came_back("b")
    rig.chance.next = 0.99
    assert rig.outliers.admit(["a", "b"]) == ["b"]
    assert rig.outliers.admit(["a"]) == ["a"]


def test_never_more_than_the_share_is_ejected() -> None:
    rig = Rig()
    for name in NAMES:
        rig.fail(name, 10)
    assert rig.admitted() == ["c", "d"]


@pytest.mark.parametrize(("share", "size"), [(0.5, 1), (0.0, 4)])
def test_the_only_replica_is_never_ejected(share: float, size: int) -> None:
    rig = Rig(OutlierRules(after=1, share=share), size=size)
    rig.fail("a", 100)
    assert rig.outliers.standing("a") is Standing.IN


def test_ejection_can_be_switched_off() -> None:
    rig = Rig(OutlierRules(after=0))
    rig.fail("a", 100)
    assert rig.admitted() == list(NAMES)


def test_a_restart_ends_an_ejection_gently() -> None:
    rig = Rig()
    rig.fail("a", 3)
    rig.outliers.came_back("a")
    assert rig.outliers.standing("a") is Standing.SLOW_START


def test_who_has_long_been_well_again_has_no_record() -> None:
    rig = Rig()
    rig.fail("a", 3)
    rig.outliers.came_back("b")
    rig.fail("c")
    for after_s, doubtful in ((6.0, "abc"), (9.0, "abc"), (2.0, "a"), (20.0, "")):
        rig.now += after_s
        for name in "abc":
            rig.outliers.succeeded(name)
        assert {name for name in "abc" if rig.outliers._records.get(name)} <= set(doubtful)
    assert rig.outliers.doubts_nobody
    assert rig.admitted() == list(NAMES)


def test_a_replica_that_is_removed_is_forgotten() -> None:
    rig = Rig()
    rig.fail("a", 3)
    rig.outliers.forget("a")
    assert rig.admitted() == list(NAMES)
    assert not rig.outliers._records


WORKERS = 3


def workers_of(rig: Rig) -> tuple[list[Outliers], Ledger]:
    """The outliers of several workers of one router."""
    ledger = Ledger(MOST_REPLICAS, SHAPE)
    return [
        Outliers(
            RULES,
            lambda: len(NAMES),
            rig.chance,
            clock=lambda: rig.now,
            standings=SharedStandings(ledger, number),
        )
        for number in range(WORKERS)
    ], ledger


def test_failures_in_a_row_are_counted_over_all_workers_and_what_one_ejects_is_ejected_for_all() -> None:
    rig = Rig()
    (one, two, three), _ = workers_of(rig)
    for worker in (one, two, one):
        assert worker.chosen("a")
        worker.failed("a")
    for worker in (one, two, three):
        assert worker.standing("a") is Standing.EJECTED
        assert worker.admit(NAMES) == ["b", "c", "d"]
        assert worker.failing(NAMES) == {"a"}


def test_one_worker_alone_tries_a_replica_again_and_what_it_finds_holds_for_all() -> None:
    rig = Rig()
    (one, two, three), ledger = workers_of(rig)
    for _ in range(3):
        one.failed("a")
    rig.now += 5.0
    assert "a" in one.admit(NAMES)
    assert "a" in two.admit(NAMES)
    # Both were to send it a request.
    assert one.chosen("a")
    assert not two.chosen("a")
    assert "a" not in three.admit(NAMES)
    two.let_go("a")  # Nothing of the other's trial is its to end.
    assert "a" not in three.admit(NAMES)
    one.failed("a")
    assert three.standing("a") is Standing.EJECTED
    rig.now += 10.0
    assert three.chosen("a")
    # A worker that dies tries nothing any more.
    let_go(ledger, 2)
    assert two.chosen("a")
    two.succeeded("a")
    assert [worker.standing("a") for worker in (one, two, three)] == [Standing.SLOW_START] * 3


def test_a_trial_of_a_worker_that_was_stopped_is_not_waited_for_for_ever() -> None:
    rig = Rig()
    (one, two, three), _ = workers_of(rig)
    for _ in range(3):
        one.failed("a")
    rig.now += 1000.0  # Nobody came to try it for long: it is from the trial on that is counted.
    assert one.chosen("a")
    rig.now += RULES.max_s
    assert not two.chosen("a")
    assert "a" not in two.admit(NAMES)
    rig.now += 0.1
    assert "a" in two.admit(NAMES)
    assert two.chosen("a")
    assert not three.chosen("a")
    one.let_go("a")
    assert not three.chosen("a")
    two.succeeded("a")
    assert three.standing("a") is Standing.SLOW_START


def test_a_record_that_another_worker_drops_in_the_midst_of_a_change_does_not_come_back() -> None:
    rig = Rig()
    (one, two, _), ledger = workers_of(rig)

    class Late(Mutex):
        """Whoever waits for it finds that the replica has gone meanwhile."""

        def __enter__(self) -> None:
            ledger.drop(b"a")
            super().__enter__()

    for change in (lambda: one.chosen("a"), lambda: one.let_go("a"), lambda: one.succeeded("a")):
        mutex = ledger.table.mutex
        for _ in range(3):
            two.failed("a")
        rig.now += 5.0
        assert one.chosen("a")
        ledger.table.mutex = Late()
        change()
        ledger.table.mutex = mutex
        assert len(ledger) == 0


def test_of_processes_that_would_try_a_replica_at_the_same_instant_one_does() -> None:
    rig, ledger = Rig(), Ledger(MOST_REPLICAS, SHAPE)
    for number in range(500):
        SharedStandings(ledger, 0).put(str(number), Record(ejected=True))
    claimed = Ledger(64, "q")
    ledger.table.mutex, claimed.table.mutex = patient_mutex(), patient_mutex()

    def claim(number: int) -> None:
        outliers = Outliers(RULES, lambda: 500, rig.chance, standings=SharedStandings(ledger, number))
        won = sum(outliers.chosen(str(name)) for name in range(500))
        with claimed.alone():
            claimed.put(str(number).encode(), won)

    all_at_once(4, claim)
    assert sum(won for (won,) in claimed.each()) == 500


def test_a_worker_that_is_started_again_takes_no_ejection_back_by_finding_the_replicas() -> None:
    rig = Rig()
    (one, two, _), _ = workers_of(rig)
    for _ in range(3):
        one.failed("a")
    two.came("a")
    assert two.standing("a") is Standing.EJECTED
    two.came_back("a")
    assert [one.standing("a"), two.standing("a")] == [Standing.SLOW_START] * 2


def test_a_worker_that_sees_late_that_a_replica_is_healthy_again_takes_back_nothing_found_out_since() -> None:
    rig = Rig()
    (one, two, _), _ = workers_of(rig)
    one.came_back("a")
    for _ in range(3):
        one.failed("a")
    rig.now += 2.0
    two.came_back("a")
    assert [one.standing("a"), two.standing("a")] == [Standing.EJECTED] * 2
    rig.now += SAME_RETURN_S
    two.came_back("a")
    assert [one.standing("a"), two.standing("a")] == [Standing.SLOW_START] * 2


how_it_ends = st.sampled_from(("failed", "succeeded", "let_go"))
happens = st.one_of(
    st.tuples(st.integers(0, WORKERS - 1), st.sampled_from(NAMES), how_it_ends),
    st.tuples(st.just("came_back"), st.sampled_from(NAMES)),
    st.tuples(st.just("passes"), st.floats(0, 30), st.floats(0, 0.999)),
)


@given(st.lists(happens, max_size=40))
@settings(max_examples=150, deadline=None)
def test_workers_together_judge_replicas_as_one_does(steps: list[Any]) -> None:
    rig = Rig()
    workers, _ = workers_of(rig)
    for step in steps:
        if step[0] == "passes":
            rig.now += step[1]
            rig.chance.next = step[2]
        elif step[0] == "came_back":
            for outliers in (rig.outliers, *workers):  # Each sees it by itself.
                outliers.came_back(step[1])
        else:
            number, name, how = step
            for outliers in (rig.outliers, workers[number]):
                assert outliers.chosen(name)
                getattr(outliers, how)(name)
        for outliers in workers:
            assert [outliers.standing(name) for name in NAMES] == [
                rig.outliers.standing(name) for name in NAMES
            ]
            assert outliers.admit(NAMES) == rig.outliers.admit(NAMES)
            assert outliers.failing(NAMES) == rig.outliers.failing(NAMES)


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: some replica is always admitted, the share is kept, and every
    ejection ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rig: Any = Rig()

    @rule(name=st.sampled_from(NAMES), how=st.sampled_from(("failed", "succeeded", "let_go", "came_back")))
    def ends(self, name: str, how: str) -> None:
        self.rig.outliers.chosen(name)
        getattr(self.rig.outliers, how)(name)

    @rule(seconds=st.floats(0, 30), chance=st.floats(0, 0.999))
    def passes(self, seconds: float, chance: float) -> None:
        self.rig.now += seconds
        self.rig.chance.next = chance

    @invariant()
    def somebody_is_admitted(self) -> None:
        assert self.rig.admitted()
        for name in NAMES:
            assert self.rig.outliers.admit([name]) == [name]

    @invariant()
    def the_share_is_kept(self) -> None:
        out = [n for n in NAMES if self.rig.outliers.standing(n) in (Standing.EJECTED, Standing.HALF_OPEN)]
        assert len(out) <= len(NAMES) * RULES.share

    @invariant()
    def ejections_end(self) -> None:
        for record in self.rig.outliers._records.each():
            assert record.until <= self.rig.now + RULES.max_s


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase
