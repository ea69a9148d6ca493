"""The time, for templates that say it (Llama's say the date): as far as it is sure to be the engine's too."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from router.conversation import InexactError

CLOCKS_APART = timedelta(seconds=5)
"""How far an engine's clock may be from ours, with the way of the request to it."""


def moments() -> list[datetime]:
    """What an engine's clock may show: our time or UTC, as in most containers; a little less, or more."""
    return [
        now.replace(tzinfo=None) + off
        for now in (datetime.now(), datetime.now(UTC))
        for off in (-CLOCKS_APART, CLOCKS_APART)
    ]


def certain_time(form: str) -> str:
    """The time, as ``strftime`` gives it. Raises InexactError where it may be another one at the engine."""
    said = {moment.strftime(form) for moment in moments()}
    if len(said) > 1:
        raise InexactError("time")
    return said.pop()
