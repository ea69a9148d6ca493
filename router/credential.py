"""Credentials for replicas: named in the settings, held elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from router.errors import SettingsError


def credential(what: str, reference: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key that ``env:NAME`` or ``file:PATH`` refers to. Raises SettingsError, which names ``what`` and
    never quotes a key.
    """
    if reference is None:
        return None
    kind, _, place = reference.partition(":")
    if kind == "env":
        if place not in environment:
            raise SettingsError(f"{what}: the variable {place}, which should hold its key, is not set")
        key = environment[place]
    else:
        try:
            key = Path(place).read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise SettingsError(f"{what}: cannot read the key in {place}: {why}") from error
    key = key.strip()
    if not key or not key.isprintable() or not key.isascii():
        raise SettingsError(f"{what}: {reference} holds no usable key; one line of ASCII is needed")
    return key
