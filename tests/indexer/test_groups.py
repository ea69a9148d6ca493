"""Attention groups: windows restrict a hit, what cannot be judged is told; a hybrid engine in miniature."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from events.schema import AllBlocksCleared, BlockRemoved, BlockStored, Event, token_array
from indexer.explain import explain
from indexer.groups import blocks_needed
from indexer.match import restrict
from tests.indexer.rig_machine import RigMachine, run

PROMPT = list(range(29))  # Seven blocks of four tokens, and one token to compute.
FULL = {"group": 0, "group_kind": "full_attention"}
WINDOW = {"group": 1, "group_kind": "sliding_window", "sliding_window": 9}  # Two blocks.


@pytest.fixture
def rig(rig: Any) -> Any:
    """All tables agree at the end."""
    yield rig
    rig.check()
    rig.collect()
    rig.check()


def tail(stored: BlockStored, count: int) -> BlockStored:
    """As a window group announces them: its last blocks, over all the tokens."""
    extras = stored.extra_keys and stored.extra_keys[-count:]
    return msgspec.structs.replace(stored, hashes=stored.hashes[-count:], extra_keys=extras)


def gpu(rig: Any, tokens: list[int] = PROMPT, **query: Any) -> int:
    return rig.held(tokens, **query)["A"][0]


def test_a_hit_needs_what_a_window_reaches_back_to(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT, **FULL), tail(hasher.stored(PROMPT, **WINDOW), 3))
    assert rig.record(a).restrictions == {1: 9}
    assert gpu(rig) == 28
    assert gpu(rig, PROMPT[:25]) == 24  # Blocks 4 and 5.
    assert gpu(rig, PROMPT[:21]) == 0  # Block 3 would be needed.
    rig.say(a, *hasher.removed(PROMPT, 5, 6, group=1))
    assert gpu(rig) == 0
    assert gpu(rig, PROMPT, lora_name="adapter") == 0


def test_a_hit_shorter_than_the_window_needs_all_of_it(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT, **FULL), hasher.stored(PROMPT, 0, 1, **WINDOW))
    assert gpu(rig) == 4
    rig.say(a, hasher.stored(PROMPT, 4, **WINDOW))
    assert gpu(rig) == 28
    rig.say(a, *hasher.removed(PROMPT, 6, 7, **{"group": 0}))
    assert gpu(rig) == 24


def test_a_window_never_makes_a_hit_longer(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT, 0, 2, **FULL), hasher.stored(PROMPT, **WINDOW))
    assert gpu(rig) == 8
    assert rig.record(a).waiting == 5
    rig.say(a, *hasher.removed(PROMPT, **{"group": 0}))
    assert gpu(rig) == 0


def test_the_last_token_is_left_out_before_the_window_is_looked_at(rig: Any, engine: Any) -> None:
    """Engines look for a hit without the last token: that needs an earlier block of the window."""
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT, **FULL), tail(hasher.stored(PROMPT, **WINDOW), 2))
    assert gpu(rig) == 28
    assert gpu(rig, PROMPT[:28]) == 0  # At most 24, and that needs block 4.


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("together", [True, False])
def test_the_order_of_groups_does_not_matter(
    rig: Any, engine: Any, order: tuple[int, int], together: bool
) -> None:
    a, hasher = rig.follow("A"), engine()
    events = [hasher.stored(PROMPT, **FULL), tail(hasher.stored(PROMPT, **WINDOW), 2)]
    for said in [[events[each] for each in order]] if together else [[events[each]] for each in order]:
        rig.say(a, *said)
        rig.check()
    assert gpu(rig) == 28
    assert (rig.record(a).waiting, rig.record(a).blocks) == (0, 9)


def test_a_window_block_that_waits_can_be_removed(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT, **WINDOW), *hasher.removed(PROMPT, 6, 7, group=1))
    assert rig.record(a).waiting == 6
    rig.say(a, hasher.stored(PROMPT, **FULL))
    assert (gpu(rig), rig.record(a).counters.unknown_removed) == (24, 0)


def test_a_window_block_waits_with_its_block_for_the_parent(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT, 2, **FULL), hasher.stored(PROMPT, 2, **WINDOW))
    assert (gpu(rig), rig.record(a).waiting) == (0, 10)
    rig.say(a, hasher.stored(PROMPT, 0, 2, **FULL))
    assert (gpu(rig), rig.record(a).waiting) == (28, 0)


def test_every_full_group_has_to_hold_the_prefix(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    other = {"group": 2, "group_kind": "mla_attention"}
    rig.say(a, hasher.stored(PROMPT, **FULL), hasher.stored(PROMPT, **other))
    assert gpu(rig) == 28
    rig.say(a, *hasher.removed(PROMPT, 3, 4, group=2))
    assert gpu(rig) == 12
    rig.say(a, *hasher.removed(PROMPT, group=2), hasher.stored(PROMPT, 3, 4, **other))
    assert gpu(rig) == 0
    rig.say(a, hasher.stored(PROMPT, **other), *hasher.removed(PROMPT, 1, group=0))
    assert gpu(rig) == 4


def test_windows_have_tiers_of_their_own(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    empty = token_array([])
    offload = BlockStored(hasher.hashes(PROMPT), None, empty, 0, medium="CPU", group=1)
    rig.say(a, hasher.stored(PROMPT, **FULL), hasher.stored(PROMPT, 0, 4, **WINDOW), offload)
    assert rig.held(PROMPT) == {"A": (16, 28, 28)}
    rig.say(a, *hasher.removed(PROMPT, group=1, medium="CPU"))
    assert rig.held(PROMPT) == {"A": (16, 16, 16)}


def test_streams_of_one_model_may_differ_in_their_groups(rig: Any, engine: Any) -> None:
    a, b, hasher = rig.follow("A"), rig.follow("B"), engine()
    rig.say(a, hasher.stored(PROMPT, **FULL), hasher.stored(PROMPT, 0, 5, **WINDOW))
    rig.say(b, hasher.stored(PROMPT))
    assert rig.held(PROMPT) == {"A": (20, 20, 20), "B": (28, 28, 28)}


def test_a_clear_and_a_reopened_map_keep_groups_right(tmp_path: Path, make_rig: Any, engine: Any) -> None:
    rig, hasher = make_rig(tmp_path / "map"), engine()
    a = rig.follow("A")
    rig.say(a, hasher.stored(PROMPT, **FULL), hasher.stored(PROMPT, 0, 5, **WINDOW))
    sequences = rig.sequences
    rig.close()
    rig = make_rig(tmp_path / "map")
    rig.sequences = sequences
    rig.resume()
    rig.say(a, *hasher.removed(PROMPT, 4, 5, group=1))
    assert gpu(rig) == 16
    rig.say(a, AllBlocksCleared(), hasher.stored(PROMPT, **FULL))
    rig.collect()
    rig.check()
    assert gpu(rig) == 28  # No window was announced since.
    assert rig.record(a).blocks == 7
    rig.close()


def test_ev20_tokens_of_a_window_group_are_never_cut_into_blocks(rig: Any, engine: Any) -> None:
    """One hash with seven blocks of tokens: the hash says which block it is, not its place."""
    a, hasher = rig.follow("A"), engine()
    last = tail(hasher.stored(PROMPT, **WINDOW), 1)
    assert (len(last.hashes), len(last.tokens)) == (1, 28)
    rig.say(a, last, hasher.stored(PROMPT[:4], **FULL))
    assert gpu(rig) == 0
    first = msgspec.structs.replace(hasher.stored(PROMPT, **WINDOW), hashes=hasher.hashes(PROMPT)[:1])
    rig.say(a, first)
    assert gpu(rig) == 4
    assert rig.record(a).counters.skipped == {}


def test_ev21_removals_in_a_window_group_leave_the_prefix_of_the_full_one(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT, **FULL), hasher.stored(PROMPT, **WINDOW))
    rig.say(a, *hasher.removed(PROMPT, group=1))
    assert rig.reader.name("A", 0, 0, hasher.hashes(PROMPT)[6]).copies == (1, 0, 0)
    rig.say(a, tail(hasher.stored(PROMPT, **WINDOW), 2))
    assert gpu(rig) == 28


def test_ev21_a_removal_of_a_group_whose_kind_was_never_said_is_counted(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT, **FULL), hasher.stored(PROMPT, **WINDOW))
    rig.say(a, *hasher.removed(PROMPT, group=4))
    assert gpu(rig) == 28
    assert rig.record(a).counters.unknown_removed == 7


UNJUDGED = [
    {"group_kind": "mamba"},
    {"group_kind": "cross_attention"},
    {"group_kind": "chunked_local_attention"},
    {"group_kind": "sliding_window"},  # How wide?
    {"group_kind": "sliding_window", "sliding_window": 8, "block_size": 8},
    {"group_kind": "full_attention", "block_size": 8},
    {"group_kind": "sliding_window", "sliding_window": 8, "group": 255},
]


@pytest.mark.parametrize("fields", UNJUDGED)
def test_ev21_a_group_that_cannot_be_judged_is_told_of(rig: Any, engine: Any, fields: dict[str, Any]) -> None:
    a, hasher = rig.follow("A"), engine()
    strange = msgspec.structs.replace(hasher.stored(PROMPT), **{"group": 3, **fields})
    rig.say(a, hasher.stored(PROMPT, **FULL), strange, strange)
    assert gpu(rig) == 28
    record = rig.record(a)
    assert record.restrictions == {}
    assert record.unjudged == {strange.group: strange.group_kind}
    assert [str(strange.group_kind) in note for note in record.notes] == [True]
    assert sum(record.counters.skipped.values()) == 14
    rig.say(a, BlockRemoved(strange.hashes, group=strange.group))
    assert gpu(rig) == 28


def test_another_block_size_in_another_group_is_not_taken_for_the_streams(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    other = msgspec.structs.replace(hasher.stored(PROMPT), group=3, group_kind="full_attention", block_size=8)
    rig.say(a, hasher.stored(PROMPT, **FULL), *[other] * 20)
    assert (gpu(rig), rig.record(a).block_size) == (28, 4)


def test_a_hit_that_windows_shorten_is_explained(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT, **FULL), hasher.stored(PROMPT, 0, 5, **WINDOW))
    told = explain(rig.reader, "m", PROMPT)["replicas"][0]
    assert told["matched_blocks"] == 5
    assert "attention group 1 (sliding_window, 9 tokens)" in told["why"]
    assert [step["missing_in_groups"] for step in told["steps"]] == [[]] * 5 + [[1]] * 2
    whole = explain(rig.reader, "m", PROMPT[:21])["replicas"][0]
    assert whole["why"] == "all whole blocks of the prompt are held"
    capped = explain(rig.reader, "m", PROMPT[:20])["replicas"][0]
    assert (capped["matched_blocks"], capped["why"]) == (4, "all whole blocks of the prompt are held")


@pytest.mark.parametrize(
    ("window", "block_size", "blocks"),
    [(1, 4, 1), (4, 4, 1), (5, 4, 1), (6, 4, 2), (128, 16, 8), (None, 4, None)],
)
def test_a_window_reaches_back_over_whole_blocks(
    window: int | None, block_size: int, blocks: int | None
) -> None:
    assert blocks_needed(window, block_size) == blocks


@settings(max_examples=300, deadline=None)
@given(
    length=st.integers(0, 12),
    needs=st.dictionaries(st.integers(0, 3), st.none() | st.integers(1, 5), max_size=3),
    held=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 11))),
)
def test_the_restricted_hit_is_the_longest_that_has_all_it_needs(
    length: int, needs: dict[int, int | None], held: set[tuple[int, int]]
) -> None:
    def fits(hit: int) -> bool:
        return all(
            (group, number) in held
            for group, need in needs.items()
            for number in range(0 if need is None else max(0, hit - need), hit)
        )

    longest = max(hit for hit in range(length + 1) if fits(hit))
    assert restrict(lambda group, number: (group, number) in held, length, needs) == longest


# an engine with several groups

LAYOUTS = [
    [("full_attention", None), ("sliding_window", 6)],
    [("sliding_window", 13), ("full_attention", None)],
    [("sliding_window_mla", 9), ("mla_attention", None), ("sliding_window", 1)],
    [("full_attention", None), ("full_attention", None), ("sliding_window", 5)],
]
TRUNK = list(range(100, 164))
prompts = st.builds(
    lambda cut, branch, length: TRUNK[:cut] + [branch] * length,
    st.sampled_from([0, 4, 16, 30, 64]),
    st.integers(1, 2),
    st.integers(1, 20),
)
MEDIA = ("GPU", "CPU")


class HybridEngine(RigMachine):
    """Prompts are computed and cached, group by group; blocks of any group go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.hasher = self.engine(7)
        self.copies: Counter[tuple[int, str, bytes]] = Counter()
        self.asked: list[list[int]] = [TRUNK]

    @initialize(layout=st.sampled_from(LAYOUTS))
    def start(self, layout: list[tuple[str, int | None]]) -> None:
        self.layout = layout
        self.stream = self.rig.follow("A")

    def fields(self, group: int) -> dict[str, Any]:
        kind, window = self.layout[group]
        return {"group": group, "group_kind": kind, "sliding_window": window}

    def hit(self, prompt: list[int], media: tuple[str, ...] = ("GPU",)) -> int:
        """From the definition: the longest hit that has what it needs in every group, in blocks."""
        hashes = self.hasher.hashes(prompt)
        for hit in range((len(prompt) - 1) // 4, 0, -1):
            if all(
                any(self.copies[group, medium, hashes[number]] for medium in media)
                for group, (_, window) in enumerate(self.layout)
                for number in range(0 if window is None else max(0, hit - max(1, -(-(window - 1) // 4))), hit)
            ):
                return hit
        return 0

    def say(self, *events: Event) -> None:
        self.rig.say(self.stream, *events)
        self.rig.check()
        for prompt in self.asked[-6:]:
            expected = [4 * self.hit(prompt, media) for media in (("GPU",), MEDIA, MEDIA)]
            assert self.rig.held(prompt)["A"] == tuple(expected), prompt

    @rule(
        prompt=prompts,
        reads=st.sampled_from([True] * 4 + [False]),
        step=st.integers(1, 9),
        seed=st.integers(0, 9),
    )
    def compute(self, prompt: list[int], reads: bool, step: int, seed: int) -> None:
        """In steps of some blocks; window groups leave out what they no longer reach."""
        self.asked.append(prompt)
        start, count, chance = self.hit(prompt) if reads else 0, len(prompt) // 4, random.Random(seed)
        while start < count:
            stop = min(count, start + step)
            events = []
            for group, (_, window) in enumerate(self.layout):
                stored = self.hasher.stored(prompt, start, stop, **self.fields(group))
                kept = [True] * len(stored.hashes)
                if window is not None:
                    left_out = chance.randrange(len(kept) + 1)
                    kept = [number >= left_out or chance.random() < 0.2 for number in range(len(kept))]
                hashes = [each for each, keep in zip(stored.hashes, kept, strict=True) if keep]
                self.copies.update((group, "GPU", each) for each in hashes)
                events.append(msgspec.structs.replace(stored, hashes=hashes))
            self.say(*events)
            start = stop

    @rule(count=st.sampled_from([1, 2, 5, 40]), seed=st.integers(0, 99))
    def evict(self, count: int, seed: int) -> None:
        held = sorted(each for each, copies in self.copies.items() if copies)
        gone = random.Random(seed).sample(held, min(count, len(held)))
        self.copies.subtract(gone)
        self.say(*(BlockRemoved([each], medium=medium, group=group) for group, medium, each in gone))

    @rule(prompt=prompts, group=st.integers(0, 2))
    def offload(self, prompt: list[int], group: int) -> None:
        """By hash alone, what is there or not: what is not known counts when it is."""
        group %= len(self.layout)
        hashes = self.hasher.hashes(prompt)
        known = [each for each in hashes if any(self.copies[other, "GPU", each] for other in range(3))]
        self.copies.update((group, "CPU", each) for each in known)
        if known:
            self.say(BlockStored(known, None, token_array([]), 0, medium="CPU", group=group))

    @rule()
    def clear(self) -> None:
        self.copies.clear()
        self.say(AllBlocksCleared())

    @rule()
    def reopen(self) -> None:
        self.reopened()
        self.say()


def test_ev21_a_hybrid_engine_hits_what_the_map_says_whatever_it_evicts(make_rig: Any, engine: Any) -> None:
    run(HybridEngine, examples=40, steps=20, make_rig=make_rig, engine=engine)
