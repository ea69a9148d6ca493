from __future__ import annotations

import pytest

from router.crowding import MOST, Crowding


def test_an_idle_fleet_has_nobody_behind() -> None:
    crowding = Crowding()
    for _ in range(1000):
        crowding.found(0, 8)
    assert crowding.behind == 0.0


def test_a_fleet_half_busy_has_one_behind() -> None:
    crowding = Crowding()
    for _ in range(500):
        crowding.found(4, 8)
    assert crowding.behind == pytest.approx(1.0, rel=0.01)


def test_a_saturated_fleet_has_many_behind_and_no_more() -> None:
    crowding = Crowding()
    for _ in range(5000):
        crowding.found(8, 8)
    assert crowding.behind == pytest.approx(MOST / (1 - MOST))
