from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.demand import Demand, Run, borne_by_others

A, B = ("a", 0), ("b", 0)


def begun(prompt: str) -> tuple[str, ...]:
    """Marks of a prompt: all its beginnings."""
    return tuple(prompt[:end] for end in range(1, len(prompt) + 1))


def test_those_who_wait_count_as_far_as_they_begin_alike() -> None:
    demand = Demand()
    for prompt in ("sys-one", "sys-two", "other"):
        demand.join(A, begun(prompt))
    assert demand.alike(begun("sys-one"), [(A, 7)]) == [Run(4, 2), Run(7, 1)]
    assert demand.alike(begun("new"), [(A, 3)]) == []


def test_of_several_copies_the_one_that_fewest_wait_for_counts_and_a_copy_is_who_has_all_of_it() -> None:
    demand = Demand()
    for stream, waiting in ((A, 5), (B, 1)):
        for _ in range(waiting):
            demand.join(stream, begun("sys"))
    assert demand.alike(begun("sys"), [(A, 3), (B, 3)]) == [Run(3, 1)]
    assert demand.alike(begun("sys"), [(A, 3), (B, 2)]) == [Run(3, 5)]
    assert demand.alike(begun("sys"), []) == [Run(3, 0)]


def test_each_bears_as_much_as_the_others_of_what_they_share() -> None:
    assert borne_by_others([Run(10, 4)], 0, 1.0) == pytest.approx(8.0)
    assert borne_by_others([Run(10, 4)], 0, 0.25) == pytest.approx(5.0)
    assert borne_by_others([Run(10, 4), Run(12, 1)], 6, 1.0) == pytest.approx(4 * 0.8 + 2 * 0.5)
    assert borne_by_others([Run(10, 4)], 10, 1.0) == 0.0
    assert borne_by_others([], 0, 1.0) == 0.0


class DemandMachine(RuleBasedStateMachine):
    """Against a list of who waits, that is counted from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.demand = Demand()
        self.waiting: list[tuple[tuple[str, int], str, Callable[[], None]]] = []

    @rule(stream=st.sampled_from([A, B]), prompt=st.text("xy", max_size=4))
    def join(self, stream: tuple[str, int], prompt: str) -> None:
        self.waiting.append((stream, prompt, self.demand.join(stream, begun(prompt))))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.waiting:
            number = data.draw(st.integers(0, len(self.waiting) - 1))
            self.waiting.pop(number)[2]()

    @invariant()
    def as_counted(self) -> None:
        for asked in ("xxyy", "yx", "z"):
            found = [0] * len(asked)
            for run in self.demand.alike(begun(asked), [(A, 9)]):
                found[: run.end] = [count or run.waiting for count in found[: run.end]]
            expected = [
                sum(stream == A and prompt.startswith(asked[:end]) for stream, prompt, _ in self.waiting)
                for end in range(1, len(asked) + 1)
            ]
            assert found == expected

    def teardown(self) -> None:
        for _, _, left in self.waiting:
            left()
        assert self.demand.alike(begun("x"), [(A, 1)]) == []


TestDemandMachine = DemandMachine.TestCase
TestDemandMachine.settings = settings(max_examples=50, deadline=None)
