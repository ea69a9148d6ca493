from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router import hints
from router.hints import LINGER_S, LONGEST_S, Hint, Hints

A, B = ("a", 0), ("b", 0)


def test_a_prompt_on_its_way_is_soon_cached_as_far_as_another_begins_like_it() -> None:
    side = Hints()
    side.add(A, ("1", "12", "123"), now=0.0, predicted_s=1.0)
    side.add(B, ("1",), now=0.0, predicted_s=1.0)
    assert side.soon(("1", "12", "12x"), now=0.5) == {A: 2, B: 1}
    assert side.soon(("x", "12"), now=0.5) == {}


def test_ix12_a_hint_lives_for_seconds_after_the_predicted_first_token() -> None:
    side = Hints()
    side.add(A, ("1",), now=0.0, predicted_s=2.0)
    side.add(B, ("1",), now=0.0, predicted_s=1e9)
    assert side.soon(("1",), now=1.99 + LINGER_S) == {A: 1, B: 1}
    assert side.soon(("1",), now=2.0 + LINGER_S) == {B: 1}
    assert side.soon(("1",), now=LONGEST_S) == {}
    assert len(side) == 0


def test_ix12_a_hint_dies_with_its_request_and_with_its_stream() -> None:
    side = Hints()
    first, _ = (side.add(A, ("1", "12"), now=0.0, predicted_s=1.0) for _ in range(2))
    first.drop()
    first.drop()
    assert side.soon(("1", "12"), now=0.0) == {A: 2}
    side.add(B, ("1",), now=0.0, predicted_s=1.0)
    side.forget(A)
    assert side.soon(("1", "12"), now=0.0) == {B: 1}
    assert len(side) == 1


def test_hints_are_bounded_and_those_that_would_go_first_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "MOST_MARKS", 10)
    side = Hints()
    for number in range(20):
        side.add(A, (number,), now=0.0, predicted_s=float(number))
    assert len(side) == 10
    assert [number for number in range(20) if side.soon((number,), 0.0)] == list(range(10, 20))


class HintsMachine(RuleBasedStateMachine):
    """Against a list of (stream, marks, expiry) that is searched from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.side = Hints()
        self.now = 0.0
        self.model: dict[Hint, tuple[tuple[str, int], tuple[str, ...], float]] = {}

    @rule(
        stream=st.sampled_from([A, B]),
        prompt=st.text("xy", max_size=4),
        predicted_s=st.floats(0, 200),
    )
    def add(self, stream: tuple[str, int], prompt: str, predicted_s: float) -> None:
        marks = tuple(prompt[:end] for end in range(1, len(prompt) + 1))
        hint = self.side.add(stream, marks, self.now, predicted_s)
        self.model[hint] = (stream, marks, self.now + min(LONGEST_S, predicted_s + LINGER_S))

    @rule(seconds=st.floats(0, 60))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.model:
            hint = data.draw(st.sampled_from(list(self.model)))
            hint.drop()
            del self.model[hint]

    @rule(stream=st.sampled_from([A, B]))
    def forget(self, stream: tuple[str, int]) -> None:
        self.side.forget(stream)
        self.model = {hint: known for hint, known in self.model.items() if known[0] != stream}

    @invariant()
    def says_what_the_model_says(self) -> None:
        self.model = {hint: known for hint, known in self.model.items() if known[2] > self.now}
        for prompt in ("xxyx", "yyyy", "xy"):
            asked = [prompt[:end] for end in range(1, len(prompt) + 1)]
            expected: dict[tuple[str, int], int] = {}
            for stream, marks, _ in self.model.values():
                leading = sum(mark in marks for mark in asked)
                if leading:
                    expected[stream] = max(expected.get(stream, 0), leading)
            assert self.side.soon(asked, self.now) == expected
        assert len(self.side) == sum(len(marks) for _, marks, _ in self.model.values())


TestHintsMachine = HintsMachine.TestCase
TestHintsMachine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
