from __future__ import annotations

from multidict import CIMultiDict, CIMultiDictProxy

from router.headers import to_client, to_replica


def test_px10_headers_of_the_hop_stay_behind_and_repeated_ones_are_kept() -> None:
    came = CIMultiDict(
        [
            ("Host", "router:8080"),
            ("Content-Length", "5"),
            ("Authorization", "Bearer one"),
            ("authorization", "Bearer two"),
            ("Connection", "keep-alive, X-Hop"),
            ("X-Hop", "1"),
            ("TE", "trailers"),
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
        ("x-many", "a"),
        ("x-many", "b"),
        ("x-request-id", "mine"),
    ]


def test_a_chosen_rank_is_sent_in_place_of_the_clients() -> None:
    came = CIMultiDictProxy(CIMultiDict({"x-data-parallel-rank": "7"}))
    assert to_replica(came, "id", 1).getall("X-data-parallel-rank") == ["1"]
    assert to_replica(came, "id", None).getall("X-data-parallel-rank") == ["7"]


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
