from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from router.headers import Via, request_id_of, to_client, to_replica


def test_px10_headers_of_the_hop_stay_behind_and_repeated_ones_are_kept() -> None:
    came = CIMultiDict(
        [
            ("Host", "router:8080"),
            ("Content-Length", "5"),
            ("Authorization", "Bearer one"),
            ("authorization", "Bearer two"),
            ("Connection", "keep-alive, X-Hop"),
            ("X-Hop", "1"),
            ("TE", "trailers, gzip"),
            ("Upgrade", "h2c"),
            ("Transfer-Encoding", "chunked"),
            ("Expect", "100-continue"),
            ("X-Many", "a"),
            ("X-Many", "b"),
            ("x-request-id", "mine"),
        ]
    )
    sent = to_replica(CIMultiDictProxy(came), "mine", None)
    assert sorted((name.lower(), value) for name, value in sent.items()) == [
        ("authorization", "Bearer one"),
        ("connection", "TE"),
        ("te", "trailers"),
        ("x-many", "a"),
        ("x-many", "b"),
        ("x-request-id", "mine"),
    ]


@pytest.mark.parametrize("chosen", [1, None])
def test_a_rank_that_the_client_asks_for_stays_and_else_the_chosen_one_is_sent(chosen: int | None) -> None:
    came = CIMultiDictProxy(CIMultiDict({"x-data-parallel-rank": "7"}))
    assert to_replica(came, "id", chosen).getall("X-data-parallel-rank") == ["7"]
    nothing = to_replica(CIMultiDictProxy(CIMultiDict()), "id", chosen)
    assert nothing.getall("X-data-parallel-rank", []) == ([] if chosen is None else ["1"])


@pytest.mark.parametrize("given", ["\udce9", "é", "a\tb", "", "x" * 257])
def test_a_request_id_that_cannot_be_shown_is_replaced_by_one_of_ours(given: str) -> None:
    made = request_id_of({"X-Request-Id": given})
    assert made != given
    assert len(made) == 32
    assert request_id_of({"X-Request-Id": "abc-1"}) == "abc-1"


def test_the_client_gets_the_replicas_headers_with_ours_in_place_of_equal_ones() -> None:
    came = CIMultiDict(
        [
            ("Content-Type", "text/event-stream; charset=utf-8"),
            ("Set-Cookie", "a=1"),
            ("Set-Cookie", "b=2"),
            ("Transfer-Encoding", "chunked"),
            ("x-warmroute-replica", "forged"),
            ("X-Request-Id", "theirs"),
        ]
    )
    sent = to_client(CIMultiDictProxy(came), {"x-warmroute-policy": "p", "X-Request-Id": "ours"})
    assert sorted(sent.items()) == [
        ("Content-Type", "text/event-stream; charset=utf-8"),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
        ("X-Request-Id", "ours"),
        ("x-warmroute-policy", "p"),
    ]


def told(via: Via, *came: tuple[str, str]) -> dict[str, list[str]]:
    sent = to_replica(CIMultiDictProxy(CIMultiDict(came)), "id", None, via)
    return {name.lower(): sent.getall(name) for name in sent if name.lower() != "x-request-id"}


def test_px10_replicas_are_told_where_a_request_came_from() -> None:
    assert told(Via("10.0.0.9", "http", "api.local:8080")) == {
        "forwarded": ['for="10.0.0.9";host="api.local:8080";proto=http'],
        "x-forwarded-for": ["10.0.0.9"],
        "x-forwarded-host": ["api.local:8080"],
        "x-forwarded-proto": ["http"],
        "via": ["1.1 warmroute"],
    }


def test_px10_what_proxies_before_us_said_stays_in_front() -> None:
    came = (
        ("X-Forwarded-For", "1.1.1.1"),
        ("x-forwarded-for", "2.2.2.2"),
        ("X-Forwarded-Host", "outer"),
        ("X-Forwarded-Proto", "https"),
        ("Forwarded", "for=1.1.1.1"),
        ("Via", "2 edge"),
    )
    assert told(Via("::1", "http", 'a"b\\c'), *came) == {
        "forwarded": ['for=1.1.1.1, for="[::1]";host="a\\"b\\\\c";proto=http'],
        "x-forwarded-for": ["1.1.1.1, 2.2.2.2, ::1"],
        "x-forwarded-host": ["outer"],
        "x-forwarded-proto": ["https"],
        "via": ["2 edge, 1.1 warmroute"],
    }


def test_px10_a_client_cannot_have_the_way_taken_out() -> None:
    way = told(
        Via("10.0.0.9", "http", "h"), ("Connection", "X-Forwarded-For, Forwarded"), ("X-Forwarded-For", "x")
    )
    assert way["x-forwarded-for"] == ["10.0.0.9"]
