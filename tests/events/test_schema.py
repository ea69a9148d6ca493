"""Decoding: what real engines sent, every encoding of 38 releases, and whatever else may come."""

import ast
import base64
import json
import sys
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.schema import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Decoder,
    Event,
    PayloadError,
    canonical_hash,
    canonical_hashes,
    decode,
    display_hash,
    token_array,
    token_bytes,
)

CAPTURES = Path(__file__).parents[1] / "data/vllm-events"
FIXTURES = [json.loads(line) for line in (CAPTURES / "history_fixtures.jsonl").read_text().splitlines()]
STORED_SLOTS = [
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality"),
    *("ownership", "session_id"),
]
REMOVED_SLOTS = ["block_hashes", "medium", "group_idx", "locality", "ownership"]
SLOTS = {"BlockStored": STORED_SLOTS, "BlockRemoved": REMOVED_SLOTS, "AllBlocksCleared": []}

pack = msgspec.msgpack.encode


def batch_of(*events: Any) -> bytes:
    return pack([1.5, list(events), 0])


def one(event: Any) -> Event:
    batch = decode(batch_of(event))
    assert batch.rejected == []
    (decoded,) = batch.events
    return decoded


def captured(name: str) -> list[bytes]:
    lines = [json.loads(line) for line in (CAPTURES / f"{name}.jsonl").read_text().splitlines()]
    return [base64.b64decode(line["f"][2]) for line in lines if line["k"] == "ev"]


def fields(event: Any) -> tuple[str, dict[str, Any]]:
    """An event of either encoding as its type and named fields, absent ones left out."""
    if isinstance(event, dict):
        return event["type"], event
    kind, *slots = event
    return kind, dict(zip(SLOTS[kind], slots, strict=False))


def expected(event: Any) -> Event:
    """What the decoder must make of an event, spelt out independently of it."""
    kind, said = fields(event)

    def known(value: int | bytes) -> bytes:
        return b"\0" + value if isinstance(value, bytes) else (value % 2**64).to_bytes(8, "big")

    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    hashes = [known(value) for value in said["block_hashes"]]
    if kind == "BlockRemoved":
        return BlockRemoved(hashes, said.get("medium") or "GPU", said.get("group_idx") or 0)
    parent, extra = said["parent_block_hash"], said.get("extra_keys")
    return BlockStored(
        hashes=hashes,
        parent=None if parent is None else known(parent),
        tokens=array("I", said["token_ids"]),
        block_size=said["block_size"],
        lora_id=said.get("lora_id"),
        lora_name=said.get("lora_name"),
        medium=said.get("medium") or "GPU",
        extra_keys=[list(key) if key else None for key in extra] if extra and any(extra) else None,
        group=said.get("group_idx") or 0,
        group_kind=said.get("kv_cache_spec_kind"),
        sliding_window=said.get("kv_cache_spec_sliding_window"),
    )


# real payloads


@pytest.mark.parametrize(
    "fixture", FIXTURES, ids=[f"{each['first_seen_version']}-{each['case']}" for each in FIXTURES]
)
def test_payloads_of_every_release_decode_to_the_fields_they_were_made_of(fixture: dict[str, Any]) -> None:
    timestamp, events, *rank = ast.literal_eval(fixture["decoded"])
    batch = decode(base64.b64decode(fixture["payload"]))
    assert batch == Batch(timestamp, [expected(event) for event in events], rank[0] if rank else None)


@pytest.mark.parametrize("name", ["main", "bytes_cbor", "lora", "v023", "connect", "dp2"])
def test_every_captured_event_decodes_to_what_a_plain_decoder_sees(name: str) -> None:
    decoder = Decoder()
    payloads = captured(name)
    assert payloads
    for payload in payloads:
        timestamp, events, rank = msgspec.msgpack.decode(payload)
        assert decoder.decode(payload) == Batch(timestamp, [expected(event) for event in events], rank)


# EV-01 and EV-02: shapes

STORED = ["BlockStored", [1, 2], 9, [1, 2, 3, 4], 2, 3, "cpu", "sql", [["sql"], None], 1, "mla_attention", 64]
STORED_MAP = {"type": "BlockStored", **dict(zip(STORED_SLOTS, STORED[1:], strict=False))}
REMOVED = ["BlockRemoved", [1], "CPU", 1]
REMOVED_MAP = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "group_idx": 1}
EVENTS = [
    BlockStored(
        [canonical_hash(1), canonical_hash(2)],
        canonical_hash(9),
        token_array([1, 2, 3, 4]),
        2,
        3,
        "sql",
        "CPU",
        [["sql"], None],
        1,
        "mla_attention",
        64,
    ),
    BlockRemoved([canonical_hash(1)], "CPU", 1),
    AllBlocksCleared(),
]


ARRAYS: list[Any] = [STORED, REMOVED, ["AllBlocksCleared"]]
MAPS: list[Any] = [STORED_MAP, REMOVED_MAP, {"type": "AllBlocksCleared"}]
LATER = [[*STORED, None, None, None, "new"], {**REMOVED_MAP, "new": {"a": 1}}, ["AllBlocksCleared", 1, "x"]]


@pytest.mark.parametrize(
    "payload",
    [
        pack([1.5, ARRAYS, 0]),
        pack([1.5, MAPS, 0]),
        pack({"ts": 1.5, "events": MAPS, "data_parallel_rank": 0}),
        pack({"data_parallel_rank": 0, "new": [1], "events": ARRAYS, "ts": 1.5}),
        pack([1.5, [STORED, REMOVED_MAP, ["AllBlocksCleared"]], 0]),
        pack([1.5, [STORED_MAP, REMOVED, {"type": "AllBlocksCleared"}], 0, "surplus", {}]),
        pack([1.5, LATER, 0]),
    ],
    ids=["arrays", "maps", "map of maps", "map of arrays", "mixed", "surplus slots", "unknown keys"],
)
def test_ev01_arrays_maps_and_mixtures_of_them_are_the_same_events(payload: bytes) -> None:
    assert decode(payload) == Batch(1.5, EVENTS, 0)


@pytest.mark.parametrize("kind", [None, 7, ["BlockStored"], b"BlockStored"])
def test_ev01_a_map_without_a_string_type_is_skipped_alone(kind: Any) -> None:
    batch = decode(batch_of(STORED_MAP, {**REMOVED_MAP, "type": kind}, REMOVED_MAP))
    assert batch.events == EVENTS[:2]
    assert [each.reason for each in batch.rejected] == ["bad_event"]


def test_one_decoder_follows_an_engine_from_arrays_to_maps_and_back() -> None:
    decoder = Decoder()
    shapes = [STORED, STORED_MAP, STORED_MAP, STORED, STORED]
    assert [decoder.decode(batch_of(shape)).events for shape in shapes] == [EVENTS[:1]] * 5


absent = object()
OPTIONAL: dict[str, list[Any]] = {
    "lora_id": [None, 0, 5],
    "medium": [None, "GPU", "STORAGE"],
    "lora_name": [None, "sql"],
    "extra_keys": [None, [None, None], [["salt"], None]],
    "group_idx": [None, 0, 255],
    "kv_cache_spec_kind": [None, "full_attention", "a kind of tomorrow"],
    "kv_cache_spec_sliding_window": [None, 128],
    "locality": [None, "local", {"node": 1}],
    "ownership": [None, "shared", 3],
    "session_id": [None, "s-1"],
}
REQUIRED = {"block_hashes": [7, 2**63], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 2}


@given(st.integers(4, 13), st.tuples(*[st.sampled_from(values) for values in OPTIONAL.values()]))
@settings(deadline=None)
def test_ev02_stores_of_five_to_fourteen_slots_decode(slots: int, optional: tuple[Any, ...]) -> None:
    said = [*REQUIRED.values(), *optional]
    event = ["BlockStored", *said[:slots]]
    assert one(event) == expected(event)


unknown_keys = st.dictionaries(
    st.text(max_size=8).filter(lambda key: key not in STORED_SLOTS and key != "type"),
    st.none() | st.integers(-5, 5) | st.text(max_size=3) | st.lists(st.none()),
    max_size=2,
)


@given(
    st.fixed_dictionaries({key: st.sampled_from([absent, *values]) for key, values in OPTIONAL.items()}),
    unknown_keys,
    st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_ev02_stores_as_maps_decode_whatever_is_absent_null_or_unknown(
    optional: dict[str, Any], unknown: dict[str, Any], random: Any
) -> None:
    said = {key: value for key, value in optional.items() if value is not absent}
    items = list({"type": "BlockStored", **REQUIRED, **said, **unknown}.items())
    random.shuffle(items)
    assert one(dict(items)) == expected({"type": "BlockStored", **REQUIRED, **said})


@pytest.mark.parametrize("size", range(2, 6))
def test_ev02_removals_of_any_length_decode(size: int) -> None:
    event = ["BlockRemoved", [5], "CPU", 2, "local", "shared"][:size]
    assert one(event) == expected(event)


# EV-03: hashes


@pytest.mark.parametrize(
    ("stored", "removed"),
    [
        (2**63 + 5, 2**63 + 5),
        (2**63 + 5, 2**63 + 5 - 2**64),
        (-3, 2**64 - 3),
        (b"12345678", b"12345678"),
        (b"\xff" * 32, b"\xff" * 32),
    ],
)
def test_ev03_a_removal_names_the_same_hash_as_its_store(stored: int | bytes, removed: int | bytes) -> None:
    store = one(["BlockStored", [stored], None, [1], 1])
    child = one(["BlockStored", [1], stored, [1], 1])
    removal = one(["BlockRemoved", [removed]])
    assert isinstance(store, BlockStored)
    assert isinstance(child, BlockStored)
    assert isinstance(removal, BlockRemoved)
    assert store.hashes == removal.hashes == [child.parent]


@given(st.integers(-(2**63), 2**64 - 1), st.binary(min_size=8, max_size=64))
@settings(deadline=None)
def test_ev03_an_int_and_a_bytes_hash_are_never_one(number: int, raw: bytes) -> None:
    assert canonical_hash(number) != canonical_hash(raw)
    assert canonical_hash(number) != canonical_hash((number % 2**64).to_bytes(8, "big"))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
@settings(deadline=None)
def test_ev03_different_ints_are_different_hashes(one: int, other: int) -> None:
    assert (canonical_hash(one) == canonical_hash(other)) == (one == other)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(2**64 - 1, str(2**64 - 1)), (-1, str(2**64 - 1)), (5, "5"), (b"\x00\xff" * 4, "0x" + "00ff" * 4)],
)
def test_ev03_people_see_which_form_a_hash_has(value: int | bytes, shown: str) -> None:
    assert display_hash(canonical_hash(value)) == shown


@pytest.mark.parametrize("raw", [b"", b"1234567", b"x" * 65])
def test_raw_hashes_of_no_known_size_cost_their_event(raw: bytes) -> None:
    batch = decode(batch_of(["BlockRemoved", [raw]], REMOVED))
    assert batch.events == [EVENTS[1]]
    assert "bytes" in batch.rejected[0].detail


# fields


@pytest.mark.parametrize("encoding", [list, dict])
@pytest.mark.parametrize(
    ("said", "decoded"),
    [
        (["img-1"], ["img-1"]),
        ([["img-1", 12], "salt"], [["img-1", 12], "salt"]),
        ([b"\1\2"], [b"\1\2"]),
        ("img-1", ["img-1"]),
        (b"\1\2", [b"\1\2"]),
    ],
)
def test_ev28_extra_keys_decode_as_string_pair_and_bytes(encoding: Any, said: Any, decoded: Any) -> None:
    event: Any = ["BlockStored", [1, 2], None, [1, 2], 1, None, None, None, [said, None]]
    if encoding is dict:
        event = {"type": "BlockStored", **dict(zip(STORED_SLOTS, event[1:], strict=False))}
    store = one(event)
    assert isinstance(store, BlockStored)
    assert store.extra_keys == [decoded, None]


@pytest.mark.parametrize("said", [None, [], [None, None], [[], []], [None, []]])
def test_ev28_no_extra_key_is_one_thing_however_it_is_said(said: Any) -> None:
    store = one(["BlockStored", [1, 2], None, [1, 2], 1, None, None, None, said])
    assert isinstance(store, BlockStored)
    assert store.extra_keys is None


@pytest.mark.parametrize(
    ("said", "medium"), [(None, "GPU"), ("", "GPU"), ("gpu", "GPU"), ("cpu", "CPU"), ("Disk", "DISK")]
)
def test_a_medium_that_is_not_said_is_the_gpu(said: str | None, medium: str) -> None:
    removal = one(["BlockRemoved", [1], said])
    assert isinstance(removal, BlockRemoved)
    assert removal.medium == medium


def test_tokens_are_u32_little_endian_bytes_for_hashing() -> None:
    assert token_bytes(token_array([1, 2**32 - 1])) == b"\1\0\0\0\xff\xff\xff\xff"
    assert token_bytes(token_array([])) == b""
    for outside in (-1, 2**32):
        with pytest.raises(ValueError, match="token id"):
            token_array([1, outside])


# bad events

BAD_EVENTS: list[Any] = [
    None,
    7,
    "BlockStored",
    [],
    {},
    ["BlockStored"],
    ["BlockStored", [1], None, [1]],
    ["BlockStored", ["1"], None, [1], 1],
    ["BlockStored", [1.5], None, [1], 1],
    ["BlockStored", [1], "parent", [1], 1],
    ["BlockStored", [1], None, [-1], 1],
    ["BlockStored", [1], None, [2**32], 1],
    ["BlockStored", [1], None, [2**64 - 1], 1],
    ["BlockStored", [1], None, [True], 1],
    ["BlockStored", [1], None, [1], -1],
    ["BlockStored", [1], None, [1], 1, "lora"],
    ["BlockStored", [1], None, [1], 1, None, 5],
    ["BlockStored", [1], None, [1], 1, None, None, None, [[{1: 2}]]],
    ["BlockStored", [1], None, [1], 1, None, None, None, None, 256],
    ["BlockStored", [1], None, [1], 1, None, None, None, None, -1],
    ["BlockStored", [1], None, [1], 1, None, None, None, None, 0, "x" * 65],
    ["BlockRemoved"],
    ["BlockRemoved", None],
    ["BlockRemoved", [b"short"]],
    {"type": "BlockRemoved"},
    {"type": "BlockStored", "block_hashes": [1]},
    {"block_hashes": [1]},
    [["AllBlocksCleared"]],
]
UNKNOWN_EVENTS: list[Any] = [["BlockMoved", 1], {"type": "BlockMoved"}, ["", 1], {"type": "x" * 500}]


@pytest.mark.parametrize("bad", BAD_EVENTS, ids=repr)
def test_a_bad_event_costs_only_itself(bad: Any) -> None:
    batch = decode(batch_of(STORED, bad, REMOVED_MAP))
    assert batch.events == EVENTS[:2]
    assert [each.reason for each in batch.rejected] == ["bad_event"]
    assert batch.rejected[0].detail


@pytest.mark.parametrize("bad", UNKNOWN_EVENTS, ids=["array", "map", "no name", "long name"])
def test_an_unknown_event_is_told_from_a_bad_one(bad: Any) -> None:
    batch = decode(batch_of(bad, STORED))
    assert batch.events == EVENTS[:1]
    assert [each.reason for each in batch.rejected] == ["unknown_event"]
    assert len(batch.rejected[0].detail) < 120


MIXED: list[tuple[Any, str | None]] = [
    *[(event, None) for event in (STORED, STORED_MAP, REMOVED, REMOVED_MAP)],
    *[(event, "bad_event") for event in BAD_EVENTS],
    *[(event, "unknown_event") for event in UNKNOWN_EVENTS],
]


@given(st.lists(st.sampled_from(MIXED), max_size=12))
@settings(deadline=None)
def test_of_a_mixed_batch_exactly_the_good_events_remain_in_order(
    items: list[tuple[Any, str | None]],
) -> None:
    batch = decode(pack([2.5, [event for event, _ in items]]))
    assert batch.events == [expected_upper(event) for event, reason in items if reason is None]
    assert [each.reason for each in batch.rejected] == [reason for _, reason in items if reason]
    assert batch.timestamp == 2.5
    assert batch.rank is None


def expected_upper(event: Any) -> Event:
    return EVENTS[0] if event in (STORED, STORED_MAP) else EVENTS[1]


# bad payloads


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def store_with(key: bytes) -> bytes:
    """A batch of one store whose extra keys hold the raw msgpack ``key``."""
    slots = [pack(slot) for slot in ("BlockStored", [1], None, [1], 1, None, None, None)]
    return b"\x92" + pack(1.5) + b"\x91\x99" + b"".join(slots) + b"\x91" + key


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"garbage",
        b"\x93",
        pack(None),
        pack([]),
        pack([1.5]),
        pack([None, []]),
        pack(["now", []]),
        pack([1.5, None]),
        pack([1.5, {}]),
        pack([1.5, [], "zero"]),
        pack({"ts": 1.5}),
        pack({"events": []}),
        batch_of(STORED) + b"\0",
        batch_of(STORED)[:-1],
        b"\x92" + pack(1.5) + b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x92" + pack(1.5) + b"\x91\xc6\xff\xff\xff\xff",
        b"\x92" + pack(1.5) + b"\x91\x81\x80\x01",
        b"\x92" + pack(1.5) + b"\x91\xa2\xff\xfe",
        nested(100_000),
        b"\x92" + pack(1.5) + b"\x91" + nested(100_000),
        store_with(nested(100_000)),
        store_with(b"\x91\xc7\x0c\xff" + b"\xff" * 12),
    ],
)
def test_ev04_what_is_no_batch_is_a_payload_error_and_nothing_else(payload: bytes) -> None:
    for decoder in (Decoder(), warmed_up(STORED), warmed_up(STORED_MAP)):
        with pytest.raises(PayloadError, match=r"no event batch|an empty payload"):
            decoder.decode(payload)
        assert decoder.decode(batch_of(STORED)).events == EVENTS[:1]


def warmed_up(event: Any) -> Decoder:
    decoder = Decoder()
    decoder.decode(batch_of(event))
    return decoder


def test_unknown_map_keys_nested_beyond_all_depth_are_a_payload_error() -> None:
    pairs = b"".join(
        pack(key) + pack(value) for key, value in [("type", "BlockRemoved"), ("block_hashes", [1])]
    )
    event = b"\x83" + pairs + pack("new") + nested(1_000_000)
    with pytest.raises(PayloadError):
        decode(b"\x92" + pack(1.5) + b"\x91" + event)


def test_nesting_near_the_recursion_limit_is_decoded_or_refused() -> None:
    refused = 0
    limit = sys.getrecursionlimit()  # Of Python 3.11; newer ones look at how much stack is left.
    for depth in (*range(limit - 200, limit + 20), 1_000_000):
        try:
            batch = Decoder().decode(store_with(b"\x91" + nested(depth)))
        except PayloadError:
            refused += 1
        else:
            assert len(batch.events) + len(batch.rejected) == 1
    assert 0 < refused <= 220


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
keys = st.text(max_size=4) | st.sampled_from(["type", *STORED_SLOTS])
anything = st.recursive(
    scalars | st.text(max_size=4) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
eventlike = st.builds(
    lambda kind, slots: [kind, *slots],
    st.sampled_from(["BlockStored", "BlockRemoved"]),
    st.lists(anything, max_size=9),
)


@given(anything | st.tuples(st.floats(), st.lists(anything | eventlike, max_size=4)))
@settings(deadline=None)
def test_any_msgpack_value_is_a_batch_or_a_payload_error(value: Any) -> None:
    survives(pack(value))


GOOD = batch_of(STORED, REMOVED_MAP, STORED_MAP, ["AllBlocksCleared"])
places = st.integers(0, len(GOOD) - 1)


@given(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=4), places)
@settings(max_examples=500, deadline=None)
def test_damaged_bytes_are_a_batch_or_a_payload_error(damage: list[tuple[int, int]], length: int) -> None:
    payload = bytearray(GOOD)
    for at, value in damage:
        payload[at] = value
    survives(bytes(payload))
    survives(bytes(payload[:length]))


@given(st.binary(max_size=40))
@settings(deadline=None)
def test_random_bytes_are_a_batch_or_a_payload_error(payload: bytes) -> None:
    survives(payload)


def survives(payload: bytes) -> None:
    try:
        batch = decode(payload)
    except PayloadError:
        return
    raw = msgspec.msgpack.decode(payload)
    said = raw["events"] if isinstance(raw, dict) else raw[1]
    assert len(batch.events) + len(batch.rejected) == len(said)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [0, 1, (1 << 64) - 1],
        [1, -1, -(1 << 63)],
        [b"12345678", 7, b"x" * 32],
        [1 << 64],
    ],
)
def test_many_hashes_get_the_form_that_each_of_them_has(values: list[int | bytes]) -> None:
    assert canonical_hashes(values) == [canonical_hash(value) for value in values]


def test_one_hash_that_is_none_spoils_the_list() -> None:
    with pytest.raises(ValueError, match="a block hash of 3 bytes"):
        canonical_hashes([1, b"123"])
