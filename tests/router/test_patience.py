from __future__ import annotations

import random

import pytest

from router.patience import KNOWN_FROM, Patience


def test_few_requests_say_nothing() -> None:
    patience = Patience()
    for _ in range(KNOWN_FROM - 1):
        patience.sent(1.0)
    assert patience.seconds == float("inf")
    patience.sent(1.0)
    assert patience.seconds < float("inf")


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_a_twentieth_of_the_requests_wait_longer_whatever_the_scale(scale: float) -> None:
    patience, chance = Patience(), random.Random(5)
    longer = 0
    for number in range(8000):
        waits_s = scale * chance.expovariate(1)
        longer += number >= 2000 and waits_s > patience.seconds
        patience.sent(waits_s)
    assert 0.04 <= longer / 6000 <= 0.06


def test_it_follows_traffic_that_has_become_slower_or_faster() -> None:
    patience, chance = Patience(), random.Random(6)
    for scale in (1.0, 10.0, 1.0):
        for _ in range(3000):
            patience.sent(scale * chance.expovariate(1))
        assert 1.5 * scale < patience.seconds < 5 * scale
