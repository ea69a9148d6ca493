from __future__ import annotations

from router.trust import HALF_LIFE_S, Trust

A, B = ("a", 0), ("b", 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_replica_that_keeps_being_wrong_loses_its_advantage_until_it_is_right_again() -> None:
    trust = Trust(Clock())
    weights = []
    for _ in range(10):
        trust.learn(A, 1000, 0)
        weights.append(trust.weight(A))
    assert weights[0] == 1.0
    assert weights == sorted(weights, reverse=True)
    assert weights[-1] < 0.2
    for _ in range(10):
        trust.learn(A, 1000, 1000)
    assert trust.weight(A) == 1.0
    assert trust.weight(B) == 1.0
    trust.forget("a")
    assert not trust._wrong


def test_one_miss_and_little_ones_cost_little() -> None:
    trust = Trust(Clock())
    for _ in range(50):
        trust.learn(A, 1000, 900)
        trust.learn(A, 0, 0)
        trust.learn(A, 1000, 2000)
    assert trust.weight(A) == 1.0
    trust.learn(A, 1000, 0)
    assert trust.weight(A) > 0.9


def test_with_time_it_gets_another_try() -> None:
    clock = Clock()
    trust = Trust(clock)
    for _ in range(20):
        trust.learn(A, 1000, 0)
    before = trust.weight(A)
    clock.now = 4 * HALF_LIFE_S
    assert before < 0.2
    assert trust.weight(A) == 1.0
