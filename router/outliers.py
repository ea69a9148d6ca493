"""Which healthy replicas are kept from requests for now, because requests to them failed, or because they
have only just come back.

After ``Outlier detection`` and ``Slow start`` of Envoy. A replica whose requests fail ``after`` times in a
row is ejected, for twice as long each time. When that is over, one request at a time tries it; a whole answer
takes it back. A replica that is back, from an ejection or a restart, is a candidate for a growing share of
requests only: otherwise the least loaded one would be sent all of them while it warms up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

SLOW_START_SHARE = 0.1
"""What a replica that has just come back is a candidate for, of all requests."""


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


class _Record:
    __slots__ = ("back_at", "ejected", "ejections", "failures", "trying", "until")

    def __init__(self) -> None:
        self.failures = 0
        self.ejections = 0
        self.ejected = False
        self.until = float("-inf")
        self.trying = False
        self.back_at = float("-inf")


class Outliers:
    """The standing of each replica, by name. ``size`` gives how many replicas are healthy; ``ejected`` is
    told of each ejection and its length in seconds.
    """

    def __init__(
        self,
        rules: OutlierRules,
        size: Callable[[], int],
        rng: RandomSource,
        *,
        ejected: Callable[[str, float], None] = lambda name, seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules = rules
        self._size = size
        self._rng = rng
        self._ejected = ejected
        self._clock = clock
        self._records: dict[str, _Record] = {}

    @property
    def doubts_nobody(self) -> bool:
        """Whether no replica has failed, or come back, lately."""
        return not self._records

    def standing(self, name: str) -> Standing:
        record = self._records.get(name)
        if record is None:
            return Standing.IN
        now = self._clock()
        if record.ejected:
            return Standing.EJECTED if now < record.until else Standing.HALF_OPEN
        return Standing.SLOW_START if self._ramp(record, now) < 1 else Standing.IN

    def admit(self, names: Sequence[str]) -> list[str]:
        """Those of ``names`` that the next request may go to; all of them where it could go to none."""
        admitted = [name for name in names if self._admits(name)]
        if admitted:
            return admitted
        # Better one that is warming up than one that fails, and better that one than nobody.
        return [name for name in names if self.standing(name) is Standing.SLOW_START] or list(names)

    def failing(self) -> frozenset[str]:
        """Those whose last request failed, or that are kept out."""
        return frozenset(name for name, record in self._records.items() if record.failures or record.ejected)

    def _admits(self, name: str) -> bool:
        record = self._records.get(name)
        if record is None:
            return True
        now = self._clock()
        if record.ejected:
            return now >= record.until and not record.trying
        ramp = self._ramp(record, now)
        return ramp >= 1 or self._rng.random() < ramp

    def _ramp(self, record: _Record, now: float) -> float:
        since = now - record.back_at
        if since >= self._rules.slow_start_s:
            return 1.0
        return SLOW_START_SHARE + (1 - SLOW_START_SHARE) * since / self._rules.slow_start_s

    def chosen(self, name: str) -> None:
        """A request goes to it now. One of the next three must follow, whatever becomes of the request."""
        record = self._records.get(name)
        if record is not None and record.ejected:
            record.trying = True

    def succeeded(self, name: str) -> None:
        """The replica gave a whole answer that is no fault of its own."""
        record = self._records.get(name)
        if record is None:
            return
        record.failures, record.trying, now = 0, False, self._clock()
        if record.ejected and now >= record.until:
            record.ejected, record.back_at = False, now
        elif not record.ejected and self._ramp(record, now) >= 1 and now - record.until > self._rules.max_s:
            # Nothing of it counts any more, and where nobody has a record a choice needs to ask for none.
            del self._records[name]

    def let_go(self, name: str) -> None:
        """The request ended in a way that says nothing about the replica."""
        record = self._records.get(name)
        if record is not None:
            record.trying = False

    def failed(self, name: str) -> None:
        """The replica failed a request."""
        record = self._records.setdefault(name, _Record())
        record.trying = False
        now = self._clock()
        if record.ejected:
            if now >= record.until:
                self._eject(name, record, now)
            return
        record.failures += 1
        if self._rules.after and record.failures >= self._rules.after and self._may_eject():
            self._eject(name, record, now)

    def _may_eject(self) -> bool:
        out = sum(record.ejected for record in self._records.values())
        return out + 1 <= self._rules.share * self._size()

    def _eject(self, name: str, record: _Record, now: float) -> None:
        if not record.ejected and now - record.until > self._rules.max_s:
            record.ejections = 0
        # Doubling stops counting where it has no more effect: the power must stay a number.
        seconds = min(self._rules.base_s * 2.0 ** min(record.ejections, 30), self._rules.max_s)
        record.ejections += 1
        record.ejected, record.failures, record.until = True, 0, now + seconds
        self._ejected(name, seconds)

    def came_back(self, name: str) -> None:
        """The replica is healthy after it was not: another process, which is let in gently."""
        record = self._records.setdefault(name, _Record())
        record.ejected, record.failures, record.trying = False, 0, False
        record.back_at = self._clock()

    def forget(self, name: str) -> None:
        """The replica is none of ours any more."""
        self._records.pop(name, None)
