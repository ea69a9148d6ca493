"""Log lines that repeat are written at most once a minute for each subject."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from cachetools import TTLCache

INTERVAL_S = 60.0
MAX_SUBJECTS = 1024


class Throttled:
    """Warnings about ``subject`` at most once a minute; the next one says how many were left out."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._recent: TTLCache[str, None] = TTLCache(MAX_SUBJECTS, INTERVAL_S, timer=clock)
        self._left_out: TTLCache[str, int] = TTLCache(MAX_SUBJECTS, 60 * INTERVAL_S, timer=clock)

    def warning(self, subject: str, message: str, *args: object) -> None:
        if subject in self._recent:
            self._left_out[subject] = self._left_out.get(subject, 0) + 1
            return
        self._recent[subject] = None
        left_out = self._left_out.pop(subject, 0)
        if left_out:
            message, args = f"{message} (and %d times before)", (*args, left_out)
        self._log.warning(message, *args)


class OncePerInterval(logging.Filter):
    """Lets a logger's records of one message template through once a minute: for libraries that log as they
    like.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._recent: TTLCache[str, None] = TTLCache(MAX_SUBJECTS, INTERVAL_S, timer=clock)

    def filter(self, record: logging.LogRecord) -> bool:
        template = str(record.msg)
        if template in self._recent:
            return False
        self._recent[template] = None
        return True
