"""The seam for a recorder: it sees each request as it is sent to a replica, and what came of it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Protocol

import msgspec

from router.answer import Answer

SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key", "api-key"})


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """A request about to be sent. ``exchange`` is its number, ours: request ids are clients' and may repeat.

    ``body`` is as posted; ``tokens`` the prompt's ids where known; ``headers`` those that go to the replica,
    but for keys and cookies.
    """

    exchange: int
    request_id: str
    replica: str
    rank: int
    path: str
    body: bytes
    tokens: array[int] | None
    headers: Mapping[str, str]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What came of the request with the same ``exchange``.

    ``status`` is the replica's, or None where it gave none; ``complete`` tells whether the answer came to
    its end.
    """

    exchange: int
    request_id: str
    replica: str
    rank: int
    status: int | None
    complete: bool
    answer: Answer


class Recorder(Protocol):
    """Gets every request and its outcome, on the event loop: it must not block.

    What it raises is logged, no more.
    """

    def on_send(self, sent: Sent) -> None:
        """Called right before a request goes out, once for each attempt."""
        ...

    def on_done(self, done: Done) -> None:
        """Called once for each ``on_send``."""
        ...
