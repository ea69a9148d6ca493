from __future__ import annotations

import logging

import pytest

from events.logs import INTERVAL_S, OncePerInterval, Throttled


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_op08_a_subject_is_logged_once_a_minute_and_says_how_often_it_happened(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    throttled = Throttled(logging.getLogger("test"), clock)
    for _ in range(10_000):
        throttled.warning("disk", "no room for %s", "a")
    throttled.warning("net", "no route")
    clock.now += INTERVAL_S + 1
    throttled.warning("disk", "no room for %s", "b")
    assert [record.getMessage() for record in caplog.records] == [
        "no room for a",
        "no route",
        "no room for b (and 9999 times before)",
    ]


def test_a_library_that_repeats_itself_is_heard_once_a_minute(clock: Clock) -> None:
    only = OncePerInterval(clock)
    records = [logging.makeLogRecord({"msg": text}) for text in ("failed %s", "failed %s", "other")]
    assert [only.filter(record) for record in records] == [True, False, True]
    clock.now += INTERVAL_S + 1
    assert only.filter(records[0])
