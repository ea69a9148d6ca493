"""Content keys: the value that others know, and all that must never mix."""

import struct
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from events.schema import decode, token_array
from indexer.keys import block_keys, extra_bytes, keys_behind, local_hashes, next_key, prompt_extras, root_key

TOKENS = list(range(1, 33))
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
extra_keys = st.lists(
    st.text(max_size=8) | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=8), max_size=3
)


def keys(
    ids: list[int] | None = None,
    *,
    model: str = "m",
    block_size: int = 16,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    additional_salt: str | None = None,
    epoch: int = 0,
) -> list[bytes]:
    """Keys of a prompt, with one thing changed."""
    root = root_key(model, lora_name, block_size, additional_salt, epoch)
    prompt = token_array(TOKENS if ids is None else ids)
    return keys_behind(root, prompt, block_size, prompt_extras(cache_salt))


def test_local_hashes_are_dynamos_of_the_tokens_as_little_endian_u32() -> None:
    # What Dynamo expects of the tokens 1 to 4 and 5 to 8 (lib/llm/src/tokens.rs, HASH_1_4, HASH_5_8).
    dynamos = [14643705804678351452, 16777012769546811212]
    assert [int.from_bytes(value, "big") for value in local_hashes(token_array(range(1, 9)), 4)] == dynamos
    large = [2**32 - 1, 0, 2**31, 1]
    expected = xxhash.xxh3_64_intdigest(struct.pack("<4I", *large), seed=1337)
    assert int.from_bytes(local_hashes(token_array(large), 4)[0], "big") == expected


def test_only_whole_blocks_have_keys() -> None:
    for count in (0, 1, 15, 16, 17, 31, 32, 33):
        assert len(keys(list(range(count)))) == count // 16
        assert len(local_hashes(token_array(range(count)), 16)) == count // 16


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"lora_name": "adapter"},
        {"block_size": 8},
        {"cache_salt": "salt"},
        {"additional_salt": "salt"},
    ],
)
def test_model_adapter_block_size_and_salts_never_share_a_key(change: dict[str, Any]) -> None:
    assert not set(keys()) & set(keys(**change))


def test_what_stands_apart_cannot_be_confused() -> None:
    """The same text in another place is another key."""
    places = ("model", "lora_name", "cache_salt", "additional_salt")
    seen = [keys(**{"model": "m", place: "x"})[0] for place in places]
    seen += [
        keys(model="m", lora_name="x", cache_salt="y")[0],
        keys(model="m", lora_name="y", cache_salt="x")[0],
    ]
    seen += [keys(model="mx")[0], keys(model="mx", lora_name="x")[0], keys(model="m", lora_name="xx")[0]]
    assert len(set(seen)) == len(seen)


def test_ev27_adapters_match_by_name_and_never_the_base_model() -> None:
    base, one, two = (root_key("m", name, 16) for name in (None, "one", "two"))
    assert len({base, one, two}) == 3
    assert root_key("other", "one", 16) != one
    assert root_key("m", "", 16) == base
    assert root_key("m", "one", 16) == one


def test_ev27_the_adapters_name_is_left_out_of_the_extra_keys() -> None:
    assert extra_bytes(["one"], "one") == b""
    assert extra_bytes(["one", "salt"], "one") == extra_bytes(["salt"])
    # Only the leading one, and only its own: a salt may be spelt like it.
    assert extra_bytes(["one", "one"], "one") == extra_bytes(["one"])
    assert extra_bytes(["salt", "one"], "one") == extra_bytes(["salt", "one"]) != extra_bytes(["salt"])
    assert extra_bytes(["one"]) != b""


def test_ev28_images_with_equal_tokens_part_at_their_block_and_stay_apart() -> None:
    root, locals_ = root_key("m", None, 4), local_hashes(token_array(TOKENS), 4)
    cat = block_keys(root, locals_, [b"", b"", extra_bytes([["cat", 3]])])
    dog = block_keys(root, locals_, [b"", b"", extra_bytes([["dog", 3]])])
    moved = block_keys(root, locals_, [b"", b"", extra_bytes([["cat", 4]])])
    assert cat[:2] == dog[:2] == block_keys(root, locals_)[:2]
    for others in (dog, moved, block_keys(root, locals_)):
        assert not set(cat[2:]) & set(others[2:])


@pytest.mark.parametrize(
    ("announced", "same_as"),
    [
        ("image", ["image"]),
        (["image", 7], ["image", 7]),
        ([["image", 7]], [("image", 7)]),
        (b"\x00\xff", [b"\x00\xff"]),
    ],
)
def test_ev28_every_spelling_of_extra_keys_decodes_to_one_form(announced: Any, same_as: list[Any]) -> None:
    stored = ["BlockStored", [1], None, [1, 2], 2, None, None, None, [announced]]
    batch = decode(msgspec.msgpack.encode([1.0, [stored], None]))
    assert not batch.rejected
    assert extra_bytes(batch.events[0].extra_keys[0]) == extra_bytes(same_as)


def test_ev28_extra_keys_of_other_types_are_other_keys() -> None:
    spellings: list[list[Any]] = [["1"], [1], [b"1"], [["1"]], [None], [1.0], [["1", 0]], ["1", 0]]
    assert len({extra_bytes(each) for each in spellings}) == len(spellings)


def test_the_order_in_which_a_map_was_written_is_no_part_of_a_key() -> None:
    assert (
        extra_bytes([{"a": 1, "b": 2}]) == extra_bytes([{"b": 2, "a": 1}]) != extra_bytes([{"a": 2, "b": 1}])
    )


def test_ev29_salts_part_at_block_0_and_an_empty_one_is_none() -> None:
    plain, a, b = keys(), keys(cache_salt="A"), keys(cache_salt="B")
    assert not set(a) & set(b)
    assert not set(a) & set(plain)
    assert keys(cache_salt="") == keys(cache_salt=None) == plain


def test_ev29_a_salt_as_asked_for_is_the_salt_as_announced() -> None:
    announced = block_keys(
        root_key("m", "one", 16), local_hashes(token_array(TOKENS), 16), [extra_bytes(["one", "A"], "one")]
    )
    assert keys(lora_name="one", cache_salt="A") == announced


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_empty_extra_keys_are_none(nothing: Any) -> None:
    assert extra_bytes(nothing) == b""
    assert extra_bytes(nothing, "adapter") == b""


@settings(deadline=None)
@given(tokens, st.lists(extra_keys, max_size=9))
def test_block_keys_are_the_fold_of_next_key(ids: list[int], extras: list[list[Any]]) -> None:
    locals_ = local_hashes(token_array(ids), 4)
    canonical = [extra_bytes(keys_) for keys_ in extras]
    before, folded = root_key("m", None, 4), []
    for number, local in enumerate(locals_):
        before = next_key(before, local, canonical[number] if number < len(canonical) else b"")
        folded.append(before)
    assert block_keys(root_key("m", None, 4), locals_, canonical) == folded
    assert block_keys(root_key("m", None, 4), locals_) == block_keys(root_key("m", None, 4), locals_, [])


@settings(deadline=None)
@given(tokens, tokens, st.sampled_from([1, 2, 3, 16]))
def test_keys_are_equal_exactly_as_far_as_the_prompts_are(one: list[int], two: list[int], size: int) -> None:
    common = 0
    while common < min(len(one), len(two)) and one[common] == two[common]:
        common += 1
    first, second = keys(one, block_size=size), keys(two, block_size=size)
    shared = common // size
    assert first[:shared] == second[:shared]
    assert not set(first[shared:]) & set(second[shared:])
