"""Which healthy replicas are kept from requests for now, because requests to them failed, or because they
have only just come back.

After ``Outlier detection`` and ``Slow start`` of Envoy. A replica whose requests fail ``after`` times in a
row is ejected, for twice as long each time. When that is over, one request at a time tries it (another one if
that takes longer than any ejection); a whole answer takes it back. A replica that is back, from an ejection
or a restart, is a candidate for a growing share of requests only: otherwise the least loaded one would be
sent all of them while it warms up.

Failures, ejections and trials are of the router: where it has several workers, what one has found out holds
for all, and one of them alone tries a replica again. That a replica is new each sees for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec
from msgspec.structs import replace

from router.standings import NOBODY, OwnStandings, Record, Standings

SLOW_START_SHARE = 0.1
"""What a replica that has just come back is a candidate for, of all requests."""
SAME_RETURN_S = 5.0
"""Whoever sees within so long that a replica has come back sees the same return: health checks of several
workers are that far apart, late ones too.
"""


class Standing(StrEnum):
    """How far a replica is trusted with requests."""

    IN = "in"
    EJECTED = "ejected"
    HALF_OPEN = "half-open"
    SLOW_START = "slow-start"


class OutlierRules(msgspec.Struct, frozen=True, kw_only=True):
    """``after`` failures in a row eject (0: never), for ``base_s`` seconds, doubled each time up to
    ``max_s``; never more than ``share`` of the replicas at once. ``slow_start_s`` is how long a share grows
    to the whole.
    """

    after: int = 5
    base_s: float = 5.0
    max_s: float = 120.0
    share: float = 0.5
    slow_start_s: float = 10.0


class RandomSource(Protocol):
    def random(self) -> float: ...


class Outliers:
    """The standing of each replica, by name. ``size`` gives how many replicas are healthy; ``ejected`` is
    told of each ejection and its length in seconds; ``standings`` are the records of all workers, where there
    are several.
    """

    def __init__(
        self,
        rules: OutlierRules,
        size: Callable[[], int],
        rng: RandomSource,
        *,
        ejected: Callable[[str, float], None] = lambda name, seconds: None,
        clock: Callable[[], float] = time.monotonic,
        standings: Standings | None = None,
    ) -> None:
        self._rules = rules
        self._size = size
        self._rng = rng
        self._ejected = ejected
        self._clock = clock
        self._records: Standings = OwnStandings() if standings is None else standings
        self._came_at: dict[str, float] = {}

    @property
    def doubts_nobody(self) -> bool:
        """Whether no replica has failed, or come back, lately."""
        return not self._came_at and not self._records

    def standing(self, name: str) -> Standing:
        record, now = self._records.get(name), self._clock()
        if record is not None and record.ejected:
            return Standing.EJECTED if now < record.until else Standing.HALF_OPEN
        return Standing.SLOW_START if self._ramp(name, record, now) < 1 else Standing.IN

    def admit(self, names: Sequence[str]) -> list[str]:
        """Those of ``names`` that the next request may go to; all of them where it could go to none."""
        admitted = [name for name in names if self._admits(name)]
        if admitted:
            return admitted
        # Better one that is warming up than one that fails, and better that one than nobody.
        return [name for name in names if self.standing(name) is Standing.SLOW_START] or list(names)

    def failing(self, names: Iterable[str]) -> frozenset[str]:
        """Those of ``names`` whose last request failed, or that are kept out."""
        records = ((name, self._records.get(name)) for name in names)
        return frozenset(name for name, record in records if record and (record.failures or record.ejected))

    def _admits(self, name: str) -> bool:
        record, now = self._records.get(name), self._clock()
        if record is not None and record.ejected:
            return now >= record.until and self._may_try(record, now)
        ramp = self._ramp(name, record, now)
        return ramp >= 1 or self._rng.random() < ramp

    def _may_try(self, record: Record, now: float) -> bool:
        """Whether nobody tries it, or somebody has for so long that it may be a worker that was stopped."""
        return record.trying == NOBODY or now - record.until > self._rules.max_s

    def _ramp(self, name: str, record: Record | None, now: float) -> float:
        back_at = self._came_at.get(name, float("-inf"))
        since = now - (back_at if record is None else max(back_at, record.back_at))
        if since >= self._rules.slow_start_s:
            return 1.0
        return SLOW_START_SHARE + (1 - SLOW_START_SHARE) * since / self._rules.slow_start_s

    def chosen(self, name: str) -> bool:
        """A request goes to it now. One of the next three must follow, whatever becomes of the request.

        False where another worker has begun to try it since it was admitted.
        """
        record = self._records.get(name)
        if record is None or not record.ejected:
            return True
        with self._records.alone():
            record, own, now = self._records.get(name), self._records.worker, self._clock()
            if record is None or not record.ejected:
                return True
            if record.trying != own and not self._may_try(record, now):
                return False
            self._records.put(name, replace(record, trying=own, until=max(record.until, now)))
        return True

    def succeeded(self, name: str) -> None:
        """The replica gave a whole answer that is no fault of its own."""
        now = self._clock()
        if name in self._came_at and self._ramp(name, None, now) >= 1:
            del self._came_at[name]
        record = self._records.get(name)
        if record is None or self._after_success(name, record, now) is record:
            return
        with self._records.alone():
            record = self._records.get(name)
            after = None if record is None else self._after_success(name, record, now)
            if after is None:
                self._records.drop(name)
            else:
                self._records.put(name, after)

    def _after_success(self, name: str, record: Record, now: float) -> Record | None:
        """None where nothing of it counts any more: where nobody has a record, a choice needs to ask for
        none.
        """
        quiet_s = now - record.until
        if record.ejected:
            if quiet_s >= 0:
                return replace(record, failures=0, trying=NOBODY, ejected=False, back_at=now)
        elif self._ramp(name, record, now) >= 1 and quiet_s > self._rules.max_s:
            return None
        if record.failures or record.trying == self._records.worker:
            return replace(record, failures=0, trying=self._after(record))
        return record

    def let_go(self, name: str) -> None:
        """The request ended in a way that says nothing about the replica."""
        record = self._records.get(name)
        if record is None or record.trying != self._records.worker:
            return
        with self._records.alone():
            record = self._records.get(name)
            if record is not None:
                self._records.put(name, replace(record, trying=self._after(record)))

    def _after(self, record: Record) -> int:
        """Who tries it when a request of this worker is over."""
        return NOBODY if record.trying == self._records.worker else record.trying

    def failed(self, name: str) -> None:
        """The replica failed a request."""
        now, seconds = self._clock(), None
        with self._records.alone():
            record = self._records.get(name) or Record()
            record = replace(record, trying=self._after(record))
            if not record.ejected:
                record = replace(record, failures=record.failures + 1)
                if self._rules.after and record.failures >= self._rules.after and self._may_eject():
                    seconds, record = self._out(record, now)
            elif now >= record.until:
                seconds, record = self._out(record, now)
            self._records.put(name, record)
        if seconds is not None:
            self._ejected(name, seconds)

    def _may_eject(self) -> bool:
        out = sum(record.ejected for record in self._records.each())
        return out + 1 <= self._rules.share * self._size()

    def _out(self, record: Record, now: float) -> tuple[float, Record]:
        """How long the replica is ejected for, seconds, and its record then."""
        ejections = record.ejections
        if not record.ejected and now - record.until > self._rules.max_s:
            ejections = 0
        # Doubling stops counting where it has no more effect: the power must stay a number.
        seconds = min(self._rules.base_s * 2.0 ** min(ejections, 30), self._rules.max_s)
        return seconds, replace(
            record, ejections=ejections + 1, ejected=True, failures=0, until=now + seconds, trying=NOBODY
        )

    def came(self, name: str) -> None:
        """The replica is new here: it is let in gently."""
        self._came_at[name] = self._clock()

    def came_back(self, name: str) -> None:
        """The replica is healthy after it was not, or another one: what it has done before says nothing.

        Where there are several workers each sees it by itself, and what one of them has found out since the
        first did stays.
        """
        now = self._clock()
        with self._records.alone():
            record = self._records.get(name) or Record()
            if now - record.back_at >= SAME_RETURN_S:
                back = replace(record, ejected=False, failures=0, trying=NOBODY, back_at=now)
                self._records.put(name, back)

    def forget(self, name: str) -> None:
        """The replica is none of ours any more."""
        self._came_at.pop(name, None)
        with self._records.alone():
            self._records.drop(name)
