"""What stored, removed and cleared blocks do to the map, event by event."""

from typing import Any

import msgspec
import pytest

from events.schema import AllBlocksCleared, BlockRemoved, BlockStored, Event, canonical_hash, token_array
from indexer import blocks as blocks_module

PROMPT = list(range(28))  # Seven blocks of four tokens.


@pytest.fixture(autouse=True)
def tables_agree_at_the_end(rig: Any) -> Any:
    yield
    rig.check()
    rig.collect()
    rig.check()


def gpu(rig: Any, tokens: list[int] = PROMPT, **query: Any) -> dict[str, int]:
    """GPU tokens by instance."""
    return {instance: tiers[0] for instance, tiers in rig.held(tokens, **query).items()}


# presence


def test_stored_blocks_match_as_far_as_they_go(rig: Any, engine: Any) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT, 0, 5))
    assert gpu(rig) == {"A": 20}
    assert gpu(rig, PROMPT[:11]) == {"A": 8}
    assert gpu(rig, [9, *PROMPT[1:]]) == {"A": 0}
    assert gpu(rig, []) == {"A": 0}


def test_ev16_each_copy_needs_its_own_removal(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT))
    rig.say(a, hasher.stored(PROMPT, 6))
    rig.say(a, *hasher.removed(PROMPT, 6))
    assert gpu(rig) == {"A": 28}
    rig.say(a, *hasher.removed(PROMPT, 6))
    assert gpu(rig) == {"A": 24}
    assert rig.record(a).counters.duplicates == 1


def test_ev16_copies_within_one_batch_and_one_event_count_too(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    twice = hasher.stored(PROMPT[:4])
    rig.say(a, twice, twice, *hasher.removed(PROMPT[:4]))
    assert gpu(rig) == {"A": 4}
    rig.say(a, *hasher.removed(PROMPT[:4]))
    assert gpu(rig) == {"A": 0}


def test_ev16_a_clear_forgets_all_copies(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT), hasher.stored(PROMPT))
    rig.say(a, AllBlocksCleared())
    rig.say(a, hasher.stored(PROMPT))
    rig.say(a, *hasher.removed(PROMPT))
    assert gpu(rig) == {"A": 0}


def test_ev16_the_same_batch_again_raises_no_count(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    batch = rig.frame(a, hasher.stored(PROMPT))
    rig.ingest.step([batch])
    rig.ingest.step([batch, batch])
    rig.say(a, *hasher.removed(PROMPT))
    assert gpu(rig) == {"A": 0}


def test_ev16_the_removal_of_an_unknown_block_is_counted_and_does_nothing(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT))
    rig.say(
        a, BlockRemoved([canonical_hash(7), canonical_hash(b"x" * 32)]), *hasher.removed(PROMPT, medium="CPU")
    )
    assert gpu(rig) == {"A": 28}
    assert rig.record(a).counters.unknown_removed == 2 + 7


def test_more_copies_than_can_be_counted_stay_a_held_block(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, *[hasher.stored(PROMPT[:4])] * 300)
    rig.say(a, *hasher.removed(PROMPT[:4]) * 254)
    assert gpu(rig) == {"A": 4}


@pytest.mark.parametrize(
    "spelled", [2**63 + 5, -(2**63) + 5, b"\x00" * 3 + b"\x80\x00\x00\x00\x05", b"h" * 32]
)
def test_ev03_every_spelling_of_a_hash_is_removed_as_it_was_stored(rig: Any, spelled: int | bytes) -> None:
    a, engine_hash = rig.follow("A"), canonical_hash(spelled)
    rig.say(a, BlockStored(hashes=[engine_hash], parent=None, tokens=token_array(range(4)), block_size=4))
    assert gpu(rig) == {"A": 4}
    assert rig.record(a).hash_form == ("int" if isinstance(spelled, int) else "bytes")
    rig.say(a, BlockRemoved([engine_hash]))
    assert gpu(rig) == {"A": 0}


# order


def test_ev18_a_child_counts_only_once_its_parent_is_known(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT, 2))
    assert gpu(rig) == {"A": 0}
    assert (rig.record(a).waiting, rig.record(a).blocks) == (5, 0)
    rig.say(a, hasher.stored(PROMPT, 0, 1))
    assert gpu(rig) == {"A": 4}
    rig.say(a, hasher.stored(PROMPT, 1, 2))
    assert gpu(rig) == {"A": 28}
    assert (rig.record(a).waiting, rig.record(a).blocks) == (0, 7)


def test_ev18_whatever_the_order_all_come_together(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    for number in (5, 3, 6, 1, 4, 2, 0):
        rig.say(a, hasher.stored(PROMPT, number, number + 1))
    assert gpu(rig) == {"A": 28}


def test_ev18_copies_of_waiting_blocks_are_counted_per_tier(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    tail = hasher.stored(PROMPT, 6)
    rig.say(a, tail, tail, hasher.stored(PROMPT, 6, medium="CPU"))
    rig.say(a, *hasher.removed(PROMPT, 6))
    rig.say(a, hasher.stored(PROMPT, 0, 6))
    assert rig.held(PROMPT) == {"A": (28, 28, 28)}
    rig.say(a, *hasher.removed(PROMPT, 6))
    assert rig.held(PROMPT) == {"A": (24, 28, 28)}
    rig.say(a, *hasher.removed(PROMPT, 6, medium="CPU"))
    assert rig.held(PROMPT) == {"A": (24, 24, 24)}


def test_ev18_a_waiting_block_that_was_removed_does_not_come_back(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT, 5))
    rig.say(a, *hasher.removed(PROMPT, 6))
    rig.say(a, hasher.stored(PROMPT, 0, 5))
    assert gpu(rig) == {"A": 24}
    assert rig.record(a).waiting == 0


def test_ev18_waiting_keeps_adapter_and_extra_keys(rig: Any, engine: Any, prompt: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    asked = prompt(tuple(PROMPT), "adapter", ((0, ("salt",)), (3, (["image", 2],))))
    rig.say(a, hasher.stored(asked, 1))
    rig.say(a, hasher.stored(asked, 0, 1))
    assert gpu(rig, lora_name="adapter", cache_salt="salt") == {"A": 12}  # No prompt can name the image.
    assert rig.record(a).blocks == 7


def test_waiting_is_bounded_and_what_does_not_fit_is_counted(
    rig: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "MAX_WAITING", 3)
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT, 1))
    assert rig.record(a).waiting == 3
    assert rig.record(a).counters.skipped == {"waiting_full": 3}
    rig.say(a, hasher.stored(PROMPT, 0, 1))
    assert gpu(rig) == {"A": 16}


def test_tokens_of_waiting_blocks_are_not_in_the_map(rig: Any, engine: Any) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored([0x12345678] * 8, 1))
    with rig.writer.env.begin() as txn:
        rows = [bytes(value) for _, value in txn.cursor(rig.writer.tables.waiting)]
    assert rows
    assert not any(b"\x12\x34\x56\x78" in row or b"\x78\x56\x34\x12" in row for row in rows)


# holes


def test_ix08_a_hole_ends_the_match_until_it_is_filled(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT))
    rig.say(a, *hasher.removed(PROMPT, 2, 3))
    assert gpu(rig) == {"A": 8}
    assert rig.record(a).orphans == 1
    rig.say(a, hasher.stored(PROMPT, 2, 3))
    assert gpu(rig) == {"A": 28}
    assert rig.record(a).orphans == 0


def test_ix08_a_hole_far_from_any_stride_is_found(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    long = list(range(100, 500))  # A hundred blocks.
    rig.say(a, hasher.stored(long))
    rig.say(a, *hasher.removed(long, 40, 41))
    assert gpu(rig, long) == {"A": 160}


def test_blocks_behind_a_wide_hole_find_their_way_back(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT))
    for number in (1, 2, 3):  # Head first: the worst order.
        rig.say(a, *hasher.removed(PROMPT, number, number + 1))
    assert gpu(rig) == {"A": 4}
    rig.say(a, hasher.stored(PROMPT, 1, 4))
    assert gpu(rig) == {"A": 28}


def test_a_new_branch_behind_a_hole_counts_once_the_hole_is_filled(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    branch = [*PROMPT[:12], *[7] * 8]
    rig.say(a, hasher.stored(PROMPT), *hasher.removed(PROMPT, 2, 3))
    rig.say(a, hasher.stored(branch, 3))
    assert rig.record(a).orphans == 2
    assert gpu(rig, branch) == {"A": 8}
    rig.say(a, hasher.stored(PROMPT, 2, 3))
    assert rig.record(a).orphans == 0
    assert gpu(rig, branch) == {"A": 20}


def test_nothing_is_left_when_all_was_removed_in_any_order(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT))
    for number in (3, 0, 6, 1, 5, 2, 4):
        rig.say(a, *hasher.removed(PROMPT, number, number + 1))
        rig.check()
    with rig.writer.env.begin() as txn:
        entries = [
            txn.stat(table)["entries"] for table in (*rig.writer.tables.by_slot, rig.writer.tables.blocks)
        ]
    assert not any(entries)


# tiers


def test_ev22_tiers_are_cumulative_and_go_one_by_one(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT))
    rig.say(a, hasher.stored(PROMPT, 0, 4, medium="CPU"))
    assert rig.held(PROMPT) == {"A": (28, 28, 28)}
    rig.say(a, *hasher.removed(PROMPT))
    assert rig.held(PROMPT) == {"A": (0, 16, 16)}
    rig.say(a, *hasher.removed(PROMPT, 0, 4, medium="CPU"))
    assert rig.held(PROMPT) == {"A": (0, 0, 0)}


def test_ev22_a_chain_over_several_tiers_counts_in_the_slowest_that_it_needs(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT, 0, 2))
    rig.say(a, hasher.stored(PROMPT, 2, 4, medium="CPU"))
    rig.say(a, hasher.stored(PROMPT, 4, 7, medium="STORAGE"))
    assert rig.held(PROMPT) == {"A": (8, 16, 28)}


@pytest.mark.parametrize("medium", ["DISK", "STORAGE", "SOMETHING_NEW"])
def test_ev22_an_unknown_medium_is_the_slowest(rig: Any, engine: Any, medium: str) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT, medium=medium))
    assert rig.held(PROMPT) == {"A": (0, 0, 28)}


def test_ev22_no_medium_is_the_gpu(rig: Any) -> None:
    a = rig.follow("A")
    payload = msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [0, 1, 2, 3], 4, None, None]], None])
    stream, frame = rig.frame(a)
    rig.ingest.step([(stream, msgspec.structs.replace(frame, payload=payload))])
    assert rig.held(PROMPT) == {"A": (4, 4, 4)}


def test_ev22_a_long_chain_with_a_block_in_memory_only_ends_on_the_gpu_there(rig: Any, engine: Any) -> None:
    """No block is missing altogether, so the stream has no holes; the GPU alone has one."""
    a, hasher = rig.follow("A"), engine()
    long = list(range(100, 500))
    rig.say(a, hasher.stored(long))
    rig.say(a, hasher.stored(long, 40, 41, medium="CPU"))
    rig.say(a, hasher.stored(long, 70, 71, medium="STORAGE"))
    rig.say(a, *hasher.removed(long, 40, 41), *hasher.removed(long, 70, 71))
    assert rig.held(long) == {"A": (160, 280, 400)}


def test_ev23_blocks_offloaded_by_hash_alone_are_copies_of_known_blocks(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    offload = BlockStored(
        hashes=hasher.hashes(PROMPT), parent=None, tokens=token_array([]), block_size=0, medium="CPU"
    )
    rig.say(a, hasher.stored(PROMPT), offload)
    rig.say(a, *hasher.removed(PROMPT))
    assert rig.held(PROMPT) == {"A": (0, 28, 28)}
    rig.say(a, *hasher.removed(PROMPT, medium="CPU"))
    assert rig.held(PROMPT) == {"A": (0, 0, 0)}
    assert rig.record(a).counters.skipped == {}


def offload_of(hashes: list[bytes], medium: str = "CPU", **fields: Any) -> BlockStored:
    """Blocks announced by hash alone."""
    empty = token_array([])
    return BlockStored(hashes=hashes, parent=None, tokens=empty, block_size=0, medium=medium, **fields)


def test_ev23_blocks_offloaded_before_they_are_known_count_once_they_are(
    rig: Any, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, offload_of(hasher.hashes(PROMPT)), offload_of(hasher.hashes(PROMPT)[:2], "DISK"))
    assert rig.held(PROMPT) == {"A": (0, 0, 0)}
    assert (rig.record(a).waiting, rig.record(a).blocks) == (7, 0)
    rig.check()
    rig.say(a, *hasher.removed(PROMPT, 6, medium="CPU"))
    rig.say(a, hasher.stored(PROMPT))
    assert (rig.record(a).waiting, rig.record(a).blocks) == (0, 7)
    assert rig.held(PROMPT) == {"A": (28, 28, 28)}
    rig.say(a, *hasher.removed(PROMPT))
    assert rig.held(PROMPT) == {"A": (0, 24, 24)}
    rig.say(a, *hasher.removed(PROMPT, medium="CPU"))
    assert rig.held(PROMPT) == {"A": (0, 0, 8)}
    assert rig.record(a).counters.skipped == {}
    assert not [each for each in caplog.records if each.levelname != "INFO"]


def test_ev23_an_offloaded_block_may_wait_for_its_content_and_that_for_its_parent(
    rig: Any, engine: Any
) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, offload_of(hasher.hashes(PROMPT)))
    rig.say(a, hasher.stored(PROMPT, 2))
    assert (rig.record(a).waiting, rig.record(a).blocks) == (7, 0)
    rig.check()
    rig.say(a, offload_of(hasher.hashes(PROMPT)[4:5]))
    rig.say(a, hasher.stored(PROMPT, 0, 2))
    assert rig.held(PROMPT) == {"A": (28, 28, 28)}
    rig.say(a, *hasher.removed(PROMPT), *hasher.removed(PROMPT, medium="CPU"))
    assert rig.held(PROMPT) == {"A": (0, 0, 0)}
    rig.say(a, hasher.stored(PROMPT, 0, 4))
    assert rig.held(PROMPT) == {"A": (16, 20, 20)}  # Of block 4 there is a second copy in memory.


def test_ev23_what_is_never_explained_is_bounded(
    rig: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "MAX_WAITING", 3)
    a, hasher = rig.follow("A"), engine()
    rig.say(a, offload_of(hasher.hashes(PROMPT)))
    assert rig.record(a).waiting == 3
    assert rig.record(a).counters.skipped == {"waiting_full": 4}


# what must not build prefixes


def test_ev20_a_token_span_larger_than_its_hashes_makes_no_keys(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    whole = hasher.stored(PROMPT)
    rig.say(a, msgspec.structs.replace(whole, hashes=whole.hashes[-1:]))
    assert gpu(rig) == {"A": 0}
    assert rig.record(a).counters.skipped == {"sparse": 1}
    rig.say(a, whole)
    assert gpu(rig) == {"A": 28}


def test_ev21_only_full_attention_builds_prefixes(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    local = {"group": 1, "group_kind": "chunked_local_attention"}
    rig.say(a, hasher.stored(PROMPT, **local))
    assert gpu(rig) == {"A": 0}
    rig.say(a, hasher.stored(PROMPT, group_kind="full_attention"))
    assert gpu(rig) == {"A": 28}
    rig.say(a, *hasher.removed(PROMPT, group=1))
    assert gpu(rig) == {"A": 28}
    assert rig.record(a).counters.skipped == {"attention_group": 14}
    assert rig.record(a).group_kinds == {0: "full_attention", 1: "chunked_local_attention"}


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention", None])
def test_ev21_kinds_that_keep_the_whole_prefix(rig: Any, engine: Any, kind: str | None) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT, group_kind=kind))
    assert gpu(rig) == {"A": 28}


@pytest.mark.parametrize("kind", ["sliding_window", "chunked_local_attention", "mamba", "of_the_future"])
def test_ev21_kinds_that_do_not(rig: Any, engine: Any, kind: str) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT, group_kind=kind))
    assert gpu(rig) == {"A": 0}


def test_ev21_a_removal_in_a_group_never_heard_of_is_counted_only(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT), *hasher.removed(PROMPT, group=3))
    assert gpu(rig) == {"A": 28}
    assert rig.record(a).counters.unknown_removed == 7


def test_ev27_an_adapter_without_a_name_is_never_matched(rig: Any, engine: Any) -> None:
    a = rig.follow("A")
    rig.say(a, msgspec.structs.replace(engine().stored(PROMPT), lora_id=3))
    assert gpu(rig) == {"A": 0}
    assert rig.record(a).counters.skipped == {"lora_without_name": 7}


# who is who


def test_ev27_adapters_match_across_replicas_by_name(rig: Any, engine: Any, prompt: Any) -> None:
    a, b, c = rig.follow("A"), rig.follow("B"), rig.follow("C")
    adapted = prompt(tuple(PROMPT), "adapter")
    rig.say(a, msgspec.structs.replace(engine(1).stored(adapted), lora_id=1))
    rig.say(b, msgspec.structs.replace(engine(2).stored(adapted), lora_id=7))
    rig.say(c, engine(3).stored(PROMPT))
    assert gpu(rig, lora_name="adapter") == {"A": 28, "B": 28, "C": 0}
    assert gpu(rig, lora_name="other") == {"A": 0, "B": 0, "C": 0}
    assert gpu(rig) == {"A": 0, "B": 0, "C": 28}


def test_ev28_images_with_equal_tokens_do_not_match_past_their_block(
    rig: Any, engine: Any, prompt: Any
) -> None:
    a, b = rig.follow("A"), rig.follow("B")
    for stream, image in ((a, "cat"), (b, "dog")):
        rig.say(stream, engine().stored(prompt(tuple(PROMPT), None, ((2, ([image, 1],)),))))
    assert gpu(rig) == {"A": 8, "B": 8}
    keys = [rig.reader.name(name, 0, 0, each).key for name, each in _third_blocks(engine(), prompt)]
    assert keys[0] != keys[1]


def _third_blocks(hasher: Any, prompt: Any) -> list[tuple[str, bytes]]:
    return [
        (name, hasher.hashes(prompt(tuple(PROMPT), None, ((2, ([image, 1],)),)))[2])
        for name, image in (("A", "cat"), ("B", "dog"))
    ]


def test_ev29_salts_never_share_blocks(rig: Any, engine: Any, prompt: Any) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(prompt(tuple(PROMPT), None, ((0, ("one",)),))))
    assert gpu(rig, cache_salt="one") == {"A": 28}
    assert gpu(rig, cache_salt="two") == gpu(rig) == gpu(rig, cache_salt="") == {"A": 0}


def test_a_block_with_two_names_is_held_until_both_are_gone(rig: Any, engine: Any, prompt: Any) -> None:
    """Engines before 0.17 hash salts and images, and do not announce them: two hashes mean one block."""
    a, hasher = rig.follow("A"), engine(announces=False)
    salted = [prompt(tuple(PROMPT), None, ((0, (salt,)),)) for salt in ("one", "two", "three")]
    for each in salted:
        rig.say(a, hasher.stored(each))
    rig.say(a, hasher.stored(salted[0], 0, 2, medium="CPU"))
    rig.check()
    assert (gpu(rig), rig.record(a).shared) == ({"A": 28}, 7)
    rig.say(a, *hasher.removed(salted[1]), *hasher.removed(salted[0], 3, 4))
    rig.check()
    assert gpu(rig) == {"A": 28}
    rig.say(a, *hasher.removed(salted[2], 3, 4))
    assert (gpu(rig), rig.record(a).shared) == ({"A": 12}, 6)
    rig.say(a, *hasher.removed(salted[2]), *hasher.removed(salted[0]))
    assert rig.held(PROMPT) == {"A": (0, 8, 8)}
    assert rig.record(a).shared == 0


def test_ev30_replicas_with_hash_seeds_of_their_own_match_alike(rig: Any, engine: Any) -> None:
    a, b = rig.follow("A"), rig.follow("B")
    one, two = engine(1), engine(2)
    rig.say(a, one.stored(PROMPT))
    rig.say(b, two.stored(PROMPT, 0, 4))
    assert gpu(rig) == {"A": 28, "B": 16}
    rig.say(a, *two.removed(PROMPT))  # Another engine's names mean nothing here.
    assert gpu(rig) == {"A": 28, "B": 16}


def test_ix01_a_clear_takes_one_replica_and_what_follows_counts(rig: Any, engine: Any) -> None:
    a, b, hasher = rig.follow("A"), rig.follow("B"), engine()
    rig.say(a, hasher.stored(PROMPT))
    rig.say(b, hasher.stored(PROMPT))
    generation = rig.record(a).generation
    rig.say(a, AllBlocksCleared(), hasher.stored(PROMPT, 0, 3))
    assert gpu(rig) == {"A": 12, "B": 28}
    assert rig.record(a).generation > generation
    counters = rig.record(a).counters
    assert (counters.cleared, counters.stored, counters.batches) == (1, 7 + 3, 2)
    rig.collect()
    assert gpu(rig) == {"A": 12, "B": 28}


def test_ix01_a_clear_keeps_no_waiting_block(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT, 1))
    rig.say(a, AllBlocksCleared())
    rig.say(a, hasher.stored(PROMPT, 0, 1))
    assert gpu(rig) == {"A": 4}
    assert rig.record(a).waiting == 0


def test_ix05_a_removal_touches_only_the_sender(rig: Any, engine: Any) -> None:
    hasher = engine()
    a, b, other = rig.follow("A"), rig.follow("B"), rig.follow("C", "other model")
    for stream in (a, b, other):
        rig.say(stream, hasher.stored(PROMPT))
    rig.say(a, *hasher.removed(PROMPT))
    assert gpu(rig) == {"A": 0, "B": 28}
    assert gpu(rig, model="other model") == {"C": 28}


def test_ix06_each_block_size_matches_at_its_own_grain_in_tokens(rig: Any, engine: Any) -> None:
    a, b = rig.follow("A"), rig.follow("B")
    rig.say(a, engine(1, 4).stored(PROMPT))
    rig.say(b, engine(1, 8).stored(PROMPT))
    assert gpu(rig) == {"A": 28, "B": 24}
    assert [one.block_size for one in rig.reader.query("m", PROMPT)] == [4, 8]


def test_ix06_blocks_of_another_size_than_registered_are_refused_and_counted(rig: Any, engine: Any) -> None:
    a = rig.follow("A", block_size=8)
    rig.say(a, engine(1, 4).stored(PROMPT), engine(1, 8).stored(PROMPT))
    assert gpu(rig) == {"A": 24}
    assert rig.record(a).counters.skipped == {"block_size": 7}


def test_a_salt_of_the_registration_keeps_replicas_apart(rig: Any, engine: Any) -> None:
    a, b = rig.follow("A", additional_salt="tenant"), rig.follow("B")
    rig.say(a, engine().stored(PROMPT))
    rig.say(b, engine().stored(PROMPT, 0, 2))
    assert gpu(rig) == {"A": 28, "B": 8}
    keys = [rig.reader.name(each, 0, 0, engine().hashes(PROMPT)[0]).key for each in "AB"]
    assert keys[0] != keys[1]


def test_ranks_of_one_replica_are_streams_of_their_own(rig: Any, engine: Any) -> None:
    zero, one = rig.follow("A"), rig.follow("A", dp_rank=1)
    rig.say(zero, engine().stored(PROMPT, 0, 2))
    rig.say(one, engine().stored(PROMPT))
    assert {(each.rank, each.gpu) for each in rig.reader.query("m", PROMPT)} == {(0, 8), (1, 28)}
    rig.say(one, AllBlocksCleared())
    assert {(each.rank, each.gpu) for each in rig.reader.query("m", PROMPT)} == {(0, 8), (1, 0)}


def test_an_alias_is_the_model_it_stands_for(rig: Any, engine: Any) -> None:
    a = rig.follow("A", aliases=("short", "long"))
    rig.say(a, engine().stored(PROMPT))
    assert gpu(rig) == gpu(rig, model="short") == gpu(rig, model="long") == {"A": 28}
    assert gpu(rig, model="unknown") == {}


# engines that contradict themselves: the map may be wrong about them, never broken


def chain(*hashes: int, parent: int | None = None) -> BlockStored:
    """Blocks under chosen engine hashes; the tokens follow from the hashes."""
    return BlockStored(
        hashes=[canonical_hash(each) for each in hashes],
        parent=None if parent is None else canonical_hash(parent),
        tokens=token_array([each for each in hashes for _ in range(4)]),
        block_size=4,
    )


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([chain(1, parent=1), chain(1)], id="its own parent"),
        pytest.param([chain(1, parent=2), chain(2, parent=1), chain(1)], id="each other's parent"),
        pytest.param([chain(2, parent=1), chain(2), chain(1)], id="waits, then starts a prompt"),
        pytest.param([chain(1, 1, 1)], id="one hash three times in a chain"),
        pytest.param([chain(1, 2), chain(2, 1)], id="the other way round"),
        pytest.param([chain(1, 2), chain(3, 2)], id="two parents"),
        pytest.param([chain(2), chain(2, 3, parent=1), chain(1)], id="known under another parent"),
    ],
)
def test_a_contradiction_breaks_nothing(rig: Any, events: list[Event]) -> None:
    a = rig.follow("A")
    for event in events:
        rig.say(a, event)
        rig.check()
    rig.say(a, *[BlockRemoved([canonical_hash(each)]) for each in (1, 2, 3)] * 5)
    assert rig.record(a).blocks == 0


def test_blocks_behind_one_that_is_known_with_other_content_follow_what_is_known(rig: Any) -> None:
    a = rig.follow("A")
    rig.say(a, chain(1, 2))
    rig.say(a, chain(3, 2, 4, 5))
    assert gpu(rig, [each for each in (1, 2, 4, 5) for _ in range(4)]) == {"A": 16}
    assert gpu(rig, [each for each in (3, 2, 4, 5) for _ in range(4)]) == {"A": 4}
    assert rig.record(a).counters.contradictions == 1


def test_blocks_behind_one_that_is_known_need_not_wait_for_its_other_parent(rig: Any) -> None:
    a = rig.follow("A")
    rig.say(a, chain(2))
    rig.say(a, chain(2, 3, parent=1))
    assert rig.record(a).waiting == 0
    assert gpu(rig, [2] * 4 + [3] * 4) == {"A": 8}


def test_extra_keys_that_do_not_belong_to_the_blocks_one_by_one_make_no_keys(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    whole = hasher.stored(PROMPT)
    rig.say(a, msgspec.structs.replace(whole, extra_keys=[["image"]]))
    assert gpu(rig) == {"A": 0}
    assert rig.record(a).counters.skipped == {"extra_keys": 7}


def test_a_chain_that_names_one_block_twice_counts_two_copies(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    first = hasher.stored(PROMPT[:4])
    twice = msgspec.structs.replace(first, hashes=first.hashes * 2, tokens=first.tokens * 2)
    rig.say(a, twice)
    rig.say(a, *hasher.removed(PROMPT[:4]))
    assert gpu(rig) == {"A": 4}
    rig.say(a, *hasher.removed(PROMPT[:4]))
    assert gpu(rig) == {"A": 0}
