"""Which headers pass through a proxy (RFC 9110, section 7.6.1), both ways."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import msgspec
from multidict import CIMultiDict, CIMultiDictProxy, istr

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
# Names as istr: multidict has to fold their case once only.
REQUEST_ID: str = istr("X-Request-Id")
RANK: str = istr("X-data-parallel-rank")
CONNECTION, CONTENT_LENGTH, DATE = map(istr, ("Connection", "Content-Length", "Date"))
EXPECT, HOST, TE, TRAILER = map(istr, ("Expect", "Host", "TE", "Trailer"))
TRANSFER_ENCODING, UPGRADE = map(istr, ("Transfer-Encoding", "Upgrade"))
_AUTHORIZATION, _FORWARDED, _VIA = map(istr, ("Authorization", "Forwarded", "Via"))
_FORWARDED_FOR, _FORWARDED_HOST, _FORWARDED_PROTO = map(
    istr, ("X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto")
)
_NOT_TO_CLIENT = tuple(map(istr, sorted(HOP_BY_HOP)))
_NOT_TO_REPLICA = (*_NOT_TO_CLIENT, *map(istr, ("host", "content-length", "expect")), REQUEST_ID)
_OURS = "x-warmroute-"
MAX_REQUEST_ID_CHARS = 256


_NEVER_TRAILERS = HOP_BY_HOP | {
    *("host", "content-length", "content-encoding", "content-type", "content-range"),
    *("authorization", "set-cookie", "www-authenticate", "authentication-info", "location", "retry-after"),
    *("age", "cache-control", "date", "expires", "vary", "warning", "etag", "last-modified"),
    REQUEST_ID.lower(),
}
"""What decides how an answer is read, kept or followed counts in its head alone (RFC 9110, section 6.5.1)."""
_NEVER_TRAILERS_OF_A_REQUEST = _NEVER_TRAILERS | {
    *("expect", "max-forwards", "pragma", "range", "if-match", "if-none-match", "if-range"),
    *("if-modified-since", "if-unmodified-since", "accept", "accept-encoding", "accept-language"),
    *("cookie", "x-api-key", "api-key", "forwarded", "via", "x-real-ip", "origin", "referer", "user-agent"),
    *("traceparent", "tracestate", "baggage", "x-vllm-priority", RANK.lower()),
}
"""What decides how a request is read, who asks, where it goes and what is answered does so, too."""


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's request id, or one of ours where there is none that is printable ASCII of sensible length:
    it is shown in answers, decisions, spans and recordings.
    """
    given = headers.get(REQUEST_ID)
    if given and given.isascii() and given.isprintable() and len(given) <= MAX_REQUEST_ID_CHARS:
        return given
    # Not uuid4, which asks the system for its bytes: an id has to be new, not secret.
    return random.getrandbits(128).to_bytes(16).hex()


def shown(text: str) -> str:
    """``text`` of a client as JSON and spans can carry it: bytes that were no UTF-8 become question marks."""
    return text.encode("utf-8", "replace").decode()


def _without(headers: CIMultiDictProxy[str], left_out: Iterable[str]) -> CIMultiDict[str]:
    """The headers but for ``left_out``, and for those that ``Connection`` names."""
    passed = headers.copy()
    for value in headers.getall(CONNECTION, ()):
        for name in value.split(","):
            passed.popall(name.strip(), None)
    for name in left_out:
        if name in passed:
            del passed[name]
    return passed


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
    passed = _without(headers, _NOT_TO_REPLICA)
    if TE in headers and _takes_trailers(headers):
        passed[TE], passed[CONNECTION] = "trailers", "TE"
    if len(keys := passed.getall(_AUTHORIZATION, [])) > 1:
        passed[_AUTHORIZATION] = keys[0]
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
    _append(headers, _FORWARDED, f'for="{node}";host="{host}";proto={via.scheme}')
    _append(headers, _FORWARDED_FOR, via.address)
    headers.setdefault(_FORWARDED_HOST, via.host)
    headers.setdefault(_FORWARDED_PROTO, via.scheme)
    _append(headers, _VIA, "1.1 warmroute")


def _append(headers: CIMultiDict[str], name: str, value: str) -> None:
    said = headers.getall(name, None)
    headers[name] = value if said is None else ", ".join([*said, value])


def to_client(headers: CIMultiDictProxy[str], ours: Mapping[str, str]) -> CIMultiDict[str]:
    """The headers for the client: without those of the hop, with ``ours`` in place of equal names."""
    passed = _without(headers, _NOT_TO_CLIENT)
    if _OURS in "\n".join(passed).lower():
        for name in [name for name in passed if name.lower().startswith(_OURS)]:
            passed.popall(name, None)
    passed.update(ours)
    return passed


def trailers_to_client(trailers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The fields behind an answer that a client may get there."""
    return _trailers(trailers, _NEVER_TRAILERS) if trailers else CIMultiDict()


def trailers_to_replica(
    trailers: CIMultiDictProxy[str], headers: CIMultiDict[str]
) -> CIMultiDict[str] | None:
    """The fields behind a request that a replica may get there: engines' web servers (uvicorn) take them for
    headers. So none that is among the ``headers`` it gets, and none that we decide about.
    """
    if not trailers:
        return None
    passed = _trailers(trailers, _NEVER_TRAILERS_OF_A_REQUEST)
    for name in [name for name in passed if name in headers]:
        passed.popall(name, None)
    return passed


def _trailers(trailers: CIMultiDictProxy[str], never: frozenset[str]) -> CIMultiDict[str]:
    items = [(name.lower(), name, value) for name, value in trailers.items()]
    return CIMultiDict(
        (name, value)
        for low, name, value in items
        if low not in never and not low.startswith((_OURS, "x-forwarded-"))
    )
