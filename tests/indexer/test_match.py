"""The jump search against looking at every block."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.match import match

MANY = 96
SIZES = [0, 1, 2, 3, 4, 5, 31, 32, 33, 64, 101]


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


class Holdings:
    """Which slots hold which blocks of one prompt, and how often that was looked up."""

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = {key(number): bitmap for number, bitmap in enumerate(blocks)}
        self.keys = list(self.blocks)
        self.looked_up: Counter[bytes] = Counter()

    def lookup(self, asked: bytes) -> int:
        self.looked_up[asked] += 1
        return self.blocks[asked]

    def block_by_block(self, slots: int) -> dict[int, int]:
        """Leading blocks by slot, naively."""
        matched = {}
        for slot in range(slots.bit_length()):
            count = 0
            while count < len(self.keys) and self.blocks[self.keys[count]] >> slot & 1:
                count += 1
            if count and slots >> slot & 1:
                matched[slot] = count
        return matched


@st.composite
def monotone(draw: st.DrawFn, slots: int = 5) -> Holdings:
    """Every slot holds a leading run."""
    size = draw(st.sampled_from(SIZES) | st.integers(0, 100))
    runs = draw(st.lists(st.integers(0, size), min_size=slots, max_size=slots))
    return Holdings([sum((number < run) << slot for slot, run in enumerate(runs)) for number in range(size)])


@st.composite
def anyhow(draw: st.DrawFn) -> Holdings:
    """Long runs with holes anywhere, as well as nothing."""
    holdings = draw(monotone())
    size = len(holdings.keys)
    holes = draw(st.lists(st.tuples(st.integers(0, max(0, size - 1)), st.integers(0, 31)), max_size=6))
    for number, slots in holes[: size * 6]:
        holdings.blocks[key(number)] &= ~slots
    return holdings


@settings(deadline=None)
@given(monotone(), st.integers(0, 31), st.integers(0, 31))
def test_leading_runs_match_as_block_by_block(holdings: Holdings, slots: int, holey: int) -> None:
    assert match(holdings.lookup, holdings.keys, slots, holey) == holdings.block_by_block(slots)


@settings(deadline=None)
@given(anyhow(), st.integers(0, 31))
def test_holes_end_the_match_of_slots_that_may_have_them(holdings: Holdings, slots: int) -> None:
    assert match(holdings.lookup, holdings.keys, slots, holey=slots) == holdings.block_by_block(slots)


@settings(deadline=None)
@given(anyhow(), st.integers(0, 31))
def test_only_slots_said_to_have_holes_need_to_be_walked(holdings: Holdings, slots: int) -> None:
    holey = 0
    for slot in range(5):
        runs = [bitmap >> slot & 1 for bitmap in holdings.blocks.values()]
        holey |= (runs != sorted(runs, reverse=True)) << slot
    assert match(holdings.lookup, holdings.keys, slots, holey) == holdings.block_by_block(slots)


@settings(max_examples=20, deadline=None)
@given(monotone(slots=MANY))
def test_many_slots_match_as_block_by_block(holdings: Holdings) -> None:
    everyone = (1 << MANY) - 1
    assert match(holdings.lookup, holdings.keys, everyone) == holdings.block_by_block(everyone)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("end", SIZES)
def test_every_end_in_every_length_is_found(size: int, end: int) -> None:
    holdings = Holdings([(number < end) | 2 for number in range(size)])
    assert match(holdings.lookup, holdings.keys, 3) == holdings.block_by_block(3)


def test_slots_that_nobody_asked_about_are_left_out() -> None:
    holdings = Holdings([0b111] * 40)
    assert match(holdings.lookup, holdings.keys, 0b010) == {1: 40}
    assert match(holdings.lookup, holdings.keys, 0) == {}
    assert match(holdings.lookup, [], 0b111) == {}


def test_a_prompt_that_all_hold_costs_a_look_at_its_first_block_and_its_last() -> None:
    holdings = Holdings([(1 << MANY) - 1] * 3_750)
    match(holdings.lookup, holdings.keys, (1 << MANY) - 1)
    assert holdings.looked_up == {key(0): 1, key(3_749): 1}


def test_one_end_costs_one_search_by_halves() -> None:
    holdings = Holdings([int(number < 1_000) for number in range(3_750)])
    assert match(holdings.lookup, holdings.keys, 1) == {0: 1_000}
    assert holdings.looked_up.total() <= 2 + 12


def test_ix08_a_hole_ends_the_match_until_it_is_filled() -> None:
    holdings = Holdings([1, 1, 0, 1, 1, 1, 1])
    assert match(holdings.lookup, holdings.keys, 1, holey=1) == {0: 2}
    holdings.blocks[key(2)] = 1
    assert match(holdings.lookup, holdings.keys, 1, holey=1) == {0: 7}
