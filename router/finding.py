"""What ``warmroute doctor`` found in one look at one thing."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warning", "bad"]


class Finding(msgspec.Struct, frozen=True):
    """One check of a replica, a map or an indexer: what was found, and what to do if that is no good."""

    of: str
    check: str
    level: Level
    found: str
    fix: str = ""
