from __future__ import annotations

import pytest

from router.crowding import MOST, OWN, Crowding

A, B = ("a", 0), ("b", 0)


def found(
    crowding: Crowding, a_busy: float, b_busy: float, requests: int = 3000, ahead_s: float = 9.0
) -> None:
    for number in range(requests):
        crowding.sent(ahead_s, 1.0)
        crowding.found(((A, number % 10 < 10 * a_busy), (B, number % 10 < 10 * b_busy)))


def test_an_idle_fleet_has_nobody_behind() -> None:
    crowding = Crowding()
    assert crowding.behind([A])[0] == 0.0
    found(crowding, 0, 0)
    assert crowding.behind([A])[0] == 0.0


def test_a_fleet_half_busy_has_one_behind_and_so_has_a_stream_that_is_new_to_it() -> None:
    crowding = Crowding()
    found(crowding, 0.5, 0.5)
    assert crowding.behind([A])[0] == pytest.approx(1.0, rel=0.02)
    assert crowding.behind([("new", 0)])[0] == pytest.approx(1.0, rel=0.02)


def test_a_busy_stream_has_more_behind_than_an_idle_one_and_the_mean_steadies_both() -> None:
    crowding = Crowding()
    found(crowding, 0.7, 0.1)
    assert crowding.behind([A])[0] == pytest.approx(1 / (1 - (OWN * 0.7 + (1 - OWN) * 0.4)) - 1, rel=0.03)
    assert crowding.behind([B])[0] == pytest.approx(1 / (1 - (OWN * 0.1 + (1 - OWN) * 0.4)) - 1, rel=0.03)
    crowding.forget(A)
    assert crowding.behind([A])[0] == pytest.approx(1 / (1 - 0.4) - 1, rel=0.03)


@pytest.mark.parametrize(("ahead_s", "behind"), [(0.0, 0.0), (0.125, 0.25), (0.5, 1.0), (5.0, 1.0)])
def test_no_more_wait_for_what_a_request_brings_than_are_seen_to_wait_where_they_are_sent(
    ahead_s: float, behind: float
) -> None:
    crowding = Crowding()
    found(crowding, 0.5, 0.5, ahead_s=ahead_s)
    assert crowding.behind([A])[0] == pytest.approx(behind, rel=0.02)


def test_a_saturated_fleet_has_many_behind_and_no_more() -> None:
    crowding = Crowding()
    found(crowding, 1, 1)
    assert crowding.behind([A])[0] == pytest.approx(MOST / (1 - MOST))


def test_the_average_follows_from_its_first_requests_on() -> None:
    crowding = Crowding()
    found(crowding, 1, 1, requests=40)
    assert crowding.behind([A])[0] > 1


def test_rq06_what_a_request_brings_counts_for_more_where_most_of_the_load_is_that_of_others() -> None:
    crowding = Crowding()
    found(crowding, 0.5, 0.5)
    alone, one_of_four = (1 + crowding.behind([A], echo)[0] for echo in (0.0, 3.0))
    assert one_of_four == pytest.approx(4 * alone)
