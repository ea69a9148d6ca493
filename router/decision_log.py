"""The last decisions with what came of them, for ``/debug/decisions``."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from router.decision import Decision


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended. ``status`` is an HTTP status, ``cancelled``, or why the replica gave none.

    Times in seconds; ``actual_cached_tokens`` as the engine reported, None where it did not or where it
    cannot be compared.
    """

    status: str
    ttft_s: float | None = None
    duration_s: float | None = None
    actual_cached_tokens: int | None = None


class Entry:
    """A decision, and its outcome once there is one."""

    __slots__ = ("decision", "outcome")

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.outcome: Outcome | None = None

    def shown(self) -> dict[str, Any]:
        """As JSON shows it."""
        return {**self.decision.shown(), "outcome": msgspec.to_builtins(self.outcome)}


class DecisionLog:
    """Keeps the last ``kept`` decisions."""

    def __init__(self, kept: int) -> None:
        self._entries: deque[Entry] = deque(maxlen=kept)

    def add(self, decision: Decision) -> Entry:
        entry = Entry(decision)
        self._entries.append(entry)
        return entry

    def shown(self, limit: int | None = None, request_id: str | None = None) -> list[dict[str, Any]]:
        """The newest first; only those of ``request_id`` if given."""
        newest = [
            e for e in reversed(self._entries) if request_id is None or e.decision.request_id == request_id
        ]
        return [entry.shown() for entry in newest[:limit]]
