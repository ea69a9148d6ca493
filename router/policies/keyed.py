"""What a policy may take a routing key from: a request as it came."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Protocol

import msgspec

from router.prompt import RequestBody


class Keyed(msgspec.Struct, frozen=True, kw_only=True):
    """A request with its ``headers`` (their names in any case), its ``body`` as posted and as read, and its
    prompt's ``ids`` where they are known, of one with images those in front of the first.
    """

    headers: Mapping[str, str]
    body: bytes
    read: RequestBody
    ids: array[int] | None = None


class KeyFunction(Protocol):
    """Pure: the key of a request, or None where it has none."""

    def __call__(self, request: Keyed) -> bytes | None: ...
