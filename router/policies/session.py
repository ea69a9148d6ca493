"""``session``: the turns of a conversation go where the first one went, by what the client says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from http.cookies import CookieError, SimpleCookie
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from router.decision import Ask, Candidate, RandomSource, Ranked
from router.policies import least_loaded
from router.policies.keyed import Keyed
from router.policies.rendezvous import BOUND, SPARE_REQUESTS, by_key

HEADER, COOKIE, FIELD = "header", "cookie", "field"


class Session(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``keys`` are where a session's name may stand, the first that is there counts: ``header:NAME``,
    ``cookie:NAME``, or ``field:NAME`` of the body (``field:metadata.session`` reaches inside).

    A session goes where its turn before went. A new one, one whose stream is gone, and one whose stream has
    ``bound`` times the mean of requests in flight (and ``spare_requests`` at least) goes by rendezvous
    hashing.
    """

    keys: Annotated[tuple[str, ...], Meta(min_length=1)] = (
        "header:x-session-id",
        "field:prompt_cache_key",
        "field:user",
    )
    bound: Annotated[float, Meta(ge=1)] = BOUND
    spare_requests: Annotated[int, Meta(ge=1)] = SPARE_REQUESTS

    def __post_init__(self) -> None:
        for key in self.keys:
            kind, _, name = key.partition(":")
            if kind not in (HEADER, COOKIE, FIELD) or not name:
                raise ValueError(f"keys: {key!r} is none; write header:NAME, cookie:NAME or field:NAME")

    def key(self, request: Keyed) -> bytes | None:
        """The session's name, with where it stood."""
        for place in self.keys:
            kind, _, name = place.partition(":")
            if kind == HEADER:
                found = request.headers.get(name)
            elif kind == COOKIE:
                found = _cookie(request.headers.get("Cookie", ""), name)
            else:
                found = _field(request.body, name)
            if found:
                return f"{place}={found}".encode("utf-8", "surrogatepass")
        return None

    def rank(self, ask: Ask, candidates: Sequence[Candidate], rng: RandomSource) -> list[Ranked]:
        """By the session's seat and its key; by load without a key."""
        if ask.key is None:
            return least_loaded.rank(ask, candidates, rng)
        return by_key(
            "session", ask.key, candidates, bound=self.bound, spare=self.spare_requests, seat=ask.seat
        )


def _cookie(header: str, name: str) -> str | None:
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return None
    return morsel.value if morsel else None


@lru_cache(maxsize=64)
def _decoder(root: str) -> msgspec.json.Decoder[Any]:
    fields = [("value", Any, msgspec.field(default=None, name=root))]
    return msgspec.json.Decoder(msgspec.defstruct("Field", fields))


def _field(body: bytes, path: str) -> str | None:
    """A text or a whole number in the body; other values name no session."""
    root, *inner = path.split(".")
    try:
        value: Any = _decoder(root).decode(body).value
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    for name in inner:
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value)
