"""``session`` and ``prefix-hash``: what their keys are, and where rendezvous hashing with a bound sends
them.
"""

from __future__ import annotations

import json
import random
from array import array
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from router.decision import Ask, Candidate
from router.policies.keyed import Keyed
from router.policies.prefix_hash import PrefixHash
from router.policies.rendezvous import in_order, most_requests
from router.policies.session import Session
from router.prompt import read_body
from router.seats import SEAT_FOR_S, Seats

RNG = random.Random(1)


def fleet(*requests: int) -> list[Candidate]:
    return [Candidate(replica=f"v{n}", rank=0, requests=count) for n, count in enumerate(requests)]


def request(headers: dict[str, str] | None = None, ids: list[int] | None = None, **body: Any) -> Keyed:
    posted = json.dumps(body).encode()
    return Keyed(
        headers=CIMultiDict(headers or {}),
        body=posted,
        read=read_body(posted),
        ids=None if ids is None else array("I", ids),
    )


def chat(*messages: tuple[str, Any], **fields: Any) -> Keyed:
    return request(messages=[{"role": role, "content": content} for role, content in messages], **fields)


# rendezvous hashing


def test_a_replica_that_joins_takes_only_its_share_and_one_that_leaves_gives_only_its_own() -> None:
    keys = [f"key {n}".encode() for n in range(5000)]
    eight, nine = fleet(*[0] * 8), fleet(*[0] * 9)
    before = {key: in_order(key, eight)[0].replica for key in keys}
    after = {key: in_order(key, nine)[0].replica for key in keys}
    moved = [key for key in keys if before[key] != after[key]]
    assert all(after[key] == "v8" for key in moved)
    assert 0.9 * 5000 / 9 < len(moved) < 1.1 * 5000 / 9
    counts = Counter(before.values())
    assert max(counts.values()) < 1.15 * 5000 / 8


@given(st.lists(st.integers(0, 200), min_size=1, max_size=12), st.binary(max_size=8))
def test_some_replica_always_has_room_and_the_first_is_one_of_them(requests: list[int], key: bytes) -> None:
    candidates = fleet(*requests)
    ranked = Session().rank(Ask(None, key=key), candidates, RNG)
    assert sorted(item.candidate.replica for item in ranked) == sorted(c.replica for c in candidates)
    assert all(item.cost == sum(item.terms.values()) and item.reason for item in ranked)
    assert ranked[0].candidate.requests < most_requests(candidates, 1.25, 4)


def test_no_key_can_drown_a_replica() -> None:
    requests = [0] * 8
    for sent in range(1, 1001):
        ranked = PrefixHash().rank(Ask(None, key=b"one prefix for all"), fleet(*requests), RNG)
        requests[int(ranked[0].candidate.replica[1:])] += 1
        assert max(requests) <= max(4, 1.25 * sent / 8 + 1)


def test_routers_that_share_nothing_send_a_key_to_the_same_replica() -> None:
    ours, theirs = fleet(0, 1, 2), list(reversed(fleet(2, 0, 1)))
    for n in range(50):
        ask = Ask(None, key=str(n).encode())
        chosen = {
            Session().rank(ask, seen, random.Random(s))[0].candidate.replica
            for s, seen in enumerate((ours, theirs))
        }
        assert len(chosen) == 1


# session


def test_a_turn_goes_where_the_turn_before_went_while_there_is_room() -> None:
    policy = Session()
    seat = in_order(b"s", fleet(0, 0, 0, 0))[-1].stream
    for requests in ((0, 0, 0, 0), (3, 3, 3, 3), (9, 9, 9, 9)):
        first = policy.rank(Ask(None, key=b"s", seat=seat), fleet(*requests), RNG)[0]
        assert first.candidate.stream == seat
        assert first.reason.startswith("session: where it was, ")
    crowded = [
        Candidate(replica=c.replica, rank=0, requests=40 * (c.stream == seat)) for c in fleet(0, 0, 0, 0)
    ]
    assert policy.rank(Ask(None, key=b"s", seat=seat), crowded, RNG)[0].candidate.stream != seat


def test_a_session_whose_replica_is_gone_goes_by_its_key() -> None:
    ranked = Session().rank(Ask(None, key=b"s", seat=("gone", 0)), fleet(0, 0, 0), RNG)
    assert [item.candidate for item in ranked] == in_order(b"s", fleet(0, 0, 0))


def test_rq10_new_sessions_spread_and_second_turns_stick() -> None:
    policy, seats, firsts = Session(), Seats(), {}
    for turn in range(2):
        for number in range(400):
            key = str(number).encode()
            ranked = policy.rank(Ask(None, key=key, seat=seats.of(key)), fleet(0, 0, 0, 0), RNG)
            seats.take(key, ranked[0].candidate.stream)
            if turn == 0:
                firsts[key] = ranked[0].candidate.replica
            else:
                assert firsts[key] == ranked[0].candidate.replica
    assert max(Counter(firsts.values()).values()) < 1.3 * 100


def test_the_first_place_that_names_a_session_counts() -> None:
    policy = Session(keys=("header:X-Session-ID", "cookie:sid", "field:metadata.session", "field:user"))
    body: dict[str, Any] = {"prompt": "x", "user": "u", "metadata": {"session": 7}}
    headers = {"x-session-id": "h", "Cookie": "a=b; sid=c"}
    assert policy.key(request(headers, **body)) == b"header:X-Session-ID=h"
    assert policy.key(request({"cookie": headers["Cookie"]}, **body)) == b"cookie:sid=c"
    assert policy.key(request(**body)) == b"field:metadata.session=7"
    assert policy.key(request(prompt="x", user="u", metadata=[1])) == b"field:user=u"
    assert policy.key(request(prompt="x", user=True)) is None
    assert policy.key(request({"Cookie": "\x00;=;;"}, prompt="x", user="")) is None


@pytest.mark.parametrize("keys", [(), ("user",), ("field:",), ("query:x",)])
def test_places_that_are_none_are_refused(keys: tuple[str, ...]) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"keys|length"):
        msgspec.convert({"keys": keys}, Session)


def test_seats_are_bounded_and_the_longest_quiet_go_first() -> None:
    now = 0.0
    seats = Seats(2, lambda: now)
    for key in (b"a", b"b", b"a", b"c"):
        seats.take(key, ("v0", 0))
    assert [seats.of(key) is not None for key in (b"a", b"b", b"c")] == [True, False, True]
    now = SEAT_FOR_S + 1
    assert seats.of(b"a") is None
    assert len(seats) == 0


# prefix-hash


def test_what_comes_behind_the_boundary_does_not_count() -> None:
    first = [("system", "be brief"), ("user", "a question")]
    key = PrefixHash().key(chat(*first))
    assert key is not None
    assert PrefixHash().key(chat(*first, ("assistant", "yes"), ("user", "and?"))) == key
    assert PrefixHash().key(chat(*first, temperature=0.5, max_tokens=9, stream=True)) == key
    assert PrefixHash().key(chat(("system", "be brief"), ("user", "another"))) != key
    assert PrefixHash().key(chat(*first, tools=[{"type": "function"}])) != key
    assert PrefixHash().key(chat(*first, cache_salt="s")) != key
    system_only = PrefixHash(messages=0)
    assert system_only.key(chat(*first)) == system_only.key(chat(("system", "be brief"), ("user", "another")))
    assert system_only.key(chat(*first)) != system_only.key(chat(("system", "be long"), ("user", "another")))


def test_dates_times_and_ids_do_not_change_the_prefix() -> None:
    def told(date: str, time: str, number: str) -> Keyed:
        return chat(
            ("system", f"Today is {date}, {time}. Session {number}. You are helpful."), ("user", "hi")
        )

    monday = told("2026-11-29", "17:05", "6f1c2b9e-3c1d-4d1c-9d55-0d7f6c0f2f10")
    tuesday = told("2026-11-30T08:00:01Z", "9:30 am", "00000000-0000-0000-0000-000000000000")
    assert PrefixHash().key(monday) == PrefixHash().key(tuesday)
    assert PrefixHash(volatile=()).key(monday) != PrefixHash(volatile=()).key(tuesday)
    mine = PrefixHash(volatile=(r"Today is [^.]*\.", r"Session \S+"))
    assert mine.key(monday) == mine.key(tuesday)


@pytest.mark.parametrize("in_parts", [False, True])
def test_times_and_ids_do_not_count_at_the_beginning_of_a_line_either(in_parts: bool) -> None:
    """Where JSON writes a line break as a letter."""

    def told(time: str, number: str) -> Keyed:
        text = f"You are helpful.\n{time}\n\t{number}\nBe brief."
        return chat(("system", [{"type": "text", "text": text}] if in_parts else text))

    id_a, id_b = "6f1c2b9e-3c1d-4d1c-9d55-0d7f6c0f2f10", "00000000-0000-0000-0000-000000000000"
    assert PrefixHash().key(told("17:05", id_a)) == PrefixHash().key(told("9:30 am", id_b))
    assert PrefixHash(volatile=()).key(told("17:05", id_a)) != PrefixHash(volatile=()).key(told("9:30", id_a))


def test_a_text_ends_after_as_many_characters_as_the_tokens_have() -> None:
    policy = PrefixHash(tokens=10)
    assert policy.key(request(prompt="x" * 40 + "a")) == policy.key(request(prompt="x" * 40 + "b"))
    assert policy.key(request(prompt="x" * 39 + "a")) != policy.key(request(prompt="x" * 39 + "b"))
    assert policy.key(request(prompt=["x" * 50, "y"])) == policy.key(request(prompt="x" * 50))


def test_token_ids_count_where_they_are_given_or_asked_for() -> None:
    policy = PrefixHash(tokens=3)
    given_ids = request(prompt=[1, 2, 3, 4], ids=[1, 2, 3, 4])
    assert policy.key(given_ids) == policy.key(request(prompt=[1, 2, 3, 9], ids=[1, 2, 3, 9]))
    by_tokens = PrefixHash(boundary="tokens", tokens=3)
    body = [("user", "hello")]
    assert by_tokens.key(chat(*body)) is None
    one = msgspec.structs.replace(chat(*body), ids=array("I", [1, 2, 3, 4]))
    assert by_tokens.key(one) == policy.key(given_ids)


def test_a_chat_with_images_counts_as_far_as_the_first_one() -> None:
    def seen(picture: str, *before: str, behind: str = "what is it?", ids: list[int] | None = None) -> Keyed:
        parts = [{"type": "text", "text": text} for text in before]
        image = {"type": "image_url", "image_url": {"url": picture}}
        user = ("user", [*parts, image, {"type": "text", "text": behind}])
        found = chat(("system", "be brief"), user, ("assistant", None), ("user", "and?"))
        return found if ids is None else msgspec.structs.replace(found, ids=array("I", ids))

    policy = PrefixHash(boundary="tokens", tokens=9)
    cat = policy.key(seen("cat", "look at this"))
    assert cat is not None
    assert policy.key(seen("dog", "look at this", behind="and this?")) == cat
    assert policy.key(seen("cat", "look at that")) != cat
    assert policy.key(seen("cat")) != cat
    assert PrefixHash(boundary="tokens", tokens=4).key(seen("cat", "look at this")) == PrefixHash(
        boundary="tokens", tokens=4
    ).key(seen("dog", "look elsewhere")), "no more than the tokens' characters"
    known = policy.key(seen("cat", ids=[1, 2, 3]))
    assert known == policy.key(seen("dog", ids=[1, 2, 3])) != policy.key(seen("cat", ids=[1, 2, 4]))
    nothing = {"type": "image_url", "image_url": {"url": "cat"}}
    assert policy.key(chat(("user", [nothing, {"type": "text", "text": "?"}]))) is None
    assert policy.key(chat(("user", [nothing]), cache_salt="s")) is None
    assert policy.key(chat(("user", 5))) is None


@pytest.mark.parametrize("messages", [5, ["text"], [{"role": 3}], None])
def test_messages_of_no_known_form_have_no_key(messages: Any) -> None:
    assert PrefixHash().key(request(messages=messages)) is None


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"volatile: '\(' is no regular expression"):
        msgspec.convert({"volatile": ["("]}, PrefixHash)
