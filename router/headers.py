"""Which headers pass through a proxy (RFC 9110, section 7.6.1), both ways."""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec
from multidict import CIMultiDict, CIMultiDictProxy

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
REQUEST_ID = "X-Request-Id"
RANK = "X-data-parallel-rank"
_NOT_TO_REPLICA = HOP_BY_HOP | {"host", "content-length", "expect", REQUEST_ID.lower()}
_OURS = "x-warmroute-"
_SINGLE = ("authorization",)
MAX_REQUEST_ID_CHARS = 256


_NEVER_TRAILERS = HOP_BY_HOP | {
    *("host", "content-length", "content-encoding", "content-type", "content-range"),
    *("authorization", "set-cookie", "www-authenticate", "authentication-info", "location", "retry-after"),
    *("age", "cache-control", "date", "expires", "vary", "warning", "etag", "last-modified"),
    REQUEST_ID.lower(),
}
"""What decides how an answer is read, kept or followed counts in its head alone (RFC 9110, section 6.5.1)."""


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's request id, or one of ours where there is none that is printable ASCII of sensible length:
    it is shown in answers, decisions, spans and recordings.
    """
    given = headers.get(REQUEST_ID, "")
    usable = given.isascii() and given.isprintable() and 0 < len(given) <= MAX_REQUEST_ID_CHARS
    # Not uuid4, which asks the system for its bytes: an id has to be new, not secret.
    return given if usable else f"{random.getrandbits(128):032x}"


def shown(text: str) -> str:
    """``text`` of a client as JSON and spans can carry it: bytes that were no UTF-8 become question marks."""
    return text.encode("utf-8", "replace").decode()


def _without_hop(headers: CIMultiDictProxy[str], left_out: frozenset[str]) -> CIMultiDict[str]:
    """The headers but for ``left_out``, in small letters, and for those that ``Connection`` names."""
    if "Connection" in headers:
        left_out |= {
            name.strip().lower() for value in headers.getall("Connection") for name in value.split(",")
        }
    return CIMultiDict([item for item in headers.items() if item[0].lower() not in left_out])


class Via(msgspec.Struct, frozen=True):
    """From where, how and to which Host a request came to us."""

    address: str
    scheme: str
    host: str


def to_replica(
    headers: CIMultiDictProxy[str], request_id: str, rank: int | None, via: Via | None = None
) -> CIMultiDict[str]:
    """The headers for the replica: without those of the hop, Host and length (our client sets them), with
    ``request_id``, with ``rank`` where we chose one and the caller did not, and with ``via`` added to what
    proxies before us said. Of a repeated Authorization the first counts; other repeats are kept.
    """
    passed = _without_hop(headers, _NOT_TO_REPLICA)
    if "TE" in headers and _takes_trailers(headers):
        passed["TE"], passed["Connection"] = "trailers", "TE"
    for name in _SINGLE:
        if len(values := passed.getall(name, [])) > 1:
            passed[name] = values[0]
    passed[REQUEST_ID] = request_id
    if rank is not None:
        passed.setdefault(RANK, str(rank))
    if via is not None:
        _tell_the_way(passed, via)
    return passed


def _takes_trailers(headers: CIMultiDictProxy[str]) -> bool:
    """Whether the client says that it wants trailers (RFC 9110, section 10.1.4); we pass them on to it."""
    return any(each.strip().lower() == "trailers" for te in headers.getall("TE") for each in te.split(","))


def _tell_the_way(headers: CIMultiDict[str], via: Via) -> None:
    """Adds ``via`` in the headers of RFC 9110 (section 7.6.3) and 7239, and in those that came before it."""
    node = f"[{via.address}]" if ":" in via.address else via.address
    host = via.host.replace("\\", "\\\\").replace('"', '\\"')
    _append(headers, "Forwarded", f'for="{node}";host="{host}";proto={via.scheme}')
    _append(headers, "X-Forwarded-For", via.address)
    headers.setdefault("X-Forwarded-Host", via.host)
    headers.setdefault("X-Forwarded-Proto", via.scheme)
    _append(headers, "Via", "1.1 warmroute")


def _append(headers: CIMultiDict[str], name: str, value: str) -> None:
    headers[name] = ", ".join([*headers.getall(name, []), value])


def to_client(headers: CIMultiDictProxy[str], ours: Mapping[str, str]) -> CIMultiDict[str]:
    """The headers for the client: without those of the hop, with ``ours`` in place of equal names."""
    passed = _without_hop(headers, HOP_BY_HOP)
    for name in [name for name in passed if name.lower().startswith(_OURS)]:
        passed.popall(name, None)
    passed.update(ours)
    return passed


def trailers_to_client(trailers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The fields behind an answer that a client may get there."""
    items = [(name.lower(), name, value) for name, value in trailers.items()]
    return CIMultiDict(
        (name, value)
        for low, name, value in items
        if low not in _NEVER_TRAILERS and not low.startswith(_OURS)
    )
