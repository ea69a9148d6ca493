"""What goes at a bound: conversations from their ends, oldest first; what others build on stays."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from events.schema import BlockRemoved
from indexer.bounds import Bounds, Eviction
from indexer.changes import Changes
from indexer.layout import Name
from tests.indexer.rig_machine import RigMachine, run

COMMON = list(range(80))


def conversation(number: int, blocks: int = 20) -> list[int]:
    """Tokens after 20 blocks that all conversations begin with; blocks of 4 tokens."""
    return [*COMMON, *range(number * 1_000_000, number * 1_000_000 + 4 * blocks)]


def prompt(number: int, blocks: int = 10) -> list[int]:
    """Tokens of a prompt that shares nothing with others."""
    return list(range(number * 1_000_000, number * 1_000_000 + 4 * blocks))


def bound(rig: Any, **bounds: int) -> None:
    rig.ingest._house.eviction = Eviction(Bounds(**bounds))


def names_of(rig: Any) -> dict[bytes, Name]:
    with rig.writer.env.begin() as txn:
        return {bytes(key): Name.decode(bytes(value)) for key, value in txn.cursor(rig.writer.tables.names)}


@pytest.mark.parametrize("bounds", [{"stream_blocks": 200}, {"budget_bytes": 200_000}])
def test_ev26_what_conversations_begin_with_stays_and_the_oldest_ends_go(
    rig: Any, engine: Any, bounds: dict[str, int]
) -> None:
    a, hasher = rig.follow("A"), engine()
    bound(rig, **bounds)
    for number in range(1, 100):
        rig.say(a, hasher.stored(conversation(number), 0 if number == 1 else 20))
        assert rig.held(conversation(number))["A"] == (160, 160, 160), "the newest is matched whole"
    lengths = [rig.held(conversation(number))["A"][0] for number in range(1, 100)]
    assert lengths == sorted(lengths), "of no older one more is left"
    assert lengths[0] == len(COMMON)
    assert sum(len(COMMON) < length < 160 for length in lengths) <= 1, "one after the other, not all at once"
    assert rig.record(a).orphans == 0
    rig.check()


def test_a_conversation_that_goes_on_is_young_with_all_of_it(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(conversation(1)))
    rig.say(a, *(hasher.stored(conversation(number), 20) for number in range(2, 6)))
    rig.say(a, hasher.stored(conversation(1, 21), 40))
    rig.writer.evict(80)
    assert [rig.held(conversation(number))["A"][0] for number in range(1, 6)] == [160, 80, 80, 80, 80]
    rig.writer.evict(11)
    assert rig.held(conversation(1, 21))["A"][0] == 4 * 30
    rig.check()


def test_a_conversation_that_is_half_gone_is_the_next_to_go_unless_it_went_on(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, *(hasher.stored(prompt(number)) for number in range(4)))
    for left in (28, 16, 4):
        rig.writer.evict(3)
        assert [rig.held(prompt(number))["A"][0] for number in range(4)] == [left, 40, 40, 40]
    rig.say(a, hasher.stored(prompt(0), 1))
    rig.writer.evict(3)
    assert [rig.held(prompt(number))["A"][0] for number in range(4)] == [40, 28, 40, 40]
    rig.check()


def test_no_stream_is_drained_because_its_prompts_are_short(rig: Any, engine: Any) -> None:
    short, long = rig.follow("short"), rig.follow("long")
    for number in range(10):
        rig.say(short, *(engine(1).stored(prompt(100 + 10 * number + each, 1)) for each in range(10)))
        rig.say(long, engine(2).stored(prompt(number)))
    for _ in range(10):
        rig.writer.evict(10)
    assert (rig.record(short).blocks, rig.record(long).blocks) == (50, 50)
    rig.check()


def test_blocks_beside_the_main_group_go_with_it_not_before(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    full = {"group": 0, "group_kind": "full_attention"}
    window = {"group": 1, "group_kind": "sliding_window", "sliding_window": 9}
    for number in range(1, 6):
        start = 0 if number == 1 else 20
        for group in (full, window):
            rig.say(a, hasher.stored(conversation(number), start, **group))
    while (left := rig.record(a).blocks) > 2 * 40:
        rig.writer.evict(min(8, left - 2 * 40))
    assert rig.record(a).blocks == 2 * 40, "four branches of 20 blocks are gone, in both groups"
    assert rig.held(conversation(5))["A"][0] == 156, "in a window the last token is left out"
    assert rig.held(conversation(1))["A"][0] == 80
    while (left := rig.record(a).blocks) > 70:
        rig.writer.evict(left - 70)
    assert rig.held(conversation(5))["A"][0] == 4 * 35
    rig.check()


def test_copies_in_lower_tiers_go_with_the_block(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(conversation(1)), hasher.stored(conversation(1), medium="CPU"))
    rig.say(a, *hasher.removed(conversation(1), 20), hasher.stored(conversation(2), 20, medium="DISK"))
    rig.writer.evict(20)
    assert rig.held(conversation(1))["A"] == (80, 80, 80)
    assert rig.held(conversation(2))["A"] == (80, 80, 160)
    rig.check()


def test_what_stands_behind_a_hole_goes_and_the_hole_with_it(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(prompt(1)), BlockRemoved(hasher.hashes(prompt(1))[4:6]))
    rig.writer.evict(4)
    assert (rig.record(a).blocks, rig.record(a).orphans, len(names_of(rig))) == (4, 0, 4)
    rig.say(a, hasher.stored(prompt(2)))
    rig.writer.evict(4)
    assert rig.held(prompt(2))["A"][0] == 40, "what was before the hole is as old as what was behind it"
    assert len(names_of(rig)) == 10
    rig.check()


def test_a_turn_looks_at_a_bounded_number_of_blocks_and_the_next_goes_on(
    rig: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(prompt(1, 200)), hasher.stored(prompt(2, 200)))
    came: list[bytes] = []
    monkeypatch.setattr(Changes, "came", _counting(Changes.came, came))
    spared = []
    while rig.record(a).blocks > 200:
        before = len(came)
        rig.writer.evict(10)
        spared.append(len(came) - before)
    assert max(spared) <= 40
    assert sum(spared) == 199, "each of the 200 blocks before the end was passed once"
    assert rig.held(prompt(2, 200))["A"][0] == 800
    rig.check()


def _counting(came: Any, seen: list[bytes]) -> Any:
    def counted(changes: Changes, key: bytes) -> int:
        seen.append(key)
        age: int = came(changes, key)
        return age

    return counted


@pytest.mark.parametrize("kind", ["killed", "closed"])
def test_eviction_goes_on_after_a_restart(make_rig: Any, engine: Any, tmp_path: Path, kind: str) -> None:
    rig, hasher = make_rig(tmp_path), engine()
    a = rig.follow("A")
    rig.say(a, *(hasher.stored(prompt(number)) for number in range(4)))
    rig.writer.evict(3)
    rig.close() if kind == "closed" else rig.abandon()
    rig = make_rig(tmp_path)
    rig.check()
    for _ in range(40):
        rig.writer.evict(2)
    assert names_of(rig) == {}
    rig.check()
    rig.close()


# any engine, any bound

TRUNK = tuple(range(100, 180))
prompts = st.builds(
    lambda cut, branch, length: [*TRUNK[:cut], *[branch] * length],
    st.sampled_from([0, 16, 40, 80]),
    st.integers(1, 4),
    st.integers(4, 40),
)


class Bounded(RigMachine):
    """Two engines store, and remove in any order; the map forgets at any cap, of one or of all."""

    def __init__(self) -> None:
        super().__init__()
        self.hashers = {"A": self.engine(1), "B": self.engine(2)}
        self.removed: set[bytes] = set()

    @initialize()
    def start(self) -> None:
        self.streams = {name: self.rig.follow(name) for name in self.hashers}

    @rule(name=st.sampled_from("AB"), prompt=prompts, medium=st.sampled_from(["GPU", "GPU", "CPU"]))
    def store(self, name: str, prompt: list[int], medium: str) -> None:
        self.rig.say(self.streams[name], self.hashers[name].stored(prompt, medium=medium))
        self.removed -= set(self.hashers[name].hashes(prompt))

    @rule(name=st.sampled_from("AB"), prompt=prompts, cap=st.integers(10, 64))
    def store_at_a_cap(self, name: str, prompt: list[int], cap: int) -> None:
        """The newest is matched whole while the cap allows it."""
        tokens = [*prompt[: len(prompt) // 4 * 4], 9, 9, 9, len(names_of(self.rig)) + 1_000 * cap]
        bound(self.rig, stream_blocks=cap)
        new = (
            names_of(self.rig)
            .keys()
            .isdisjoint(
                self.rig.record(self.streams[name]).slot.to_bytes(2, "big") + b"\0" + each
                for each in self.hashers[name].hashes(tokens)[-1:]
            )
        )
        self.store(name, tokens, "GPU")
        for _ in range(10):
            self.rig.ingest.step([])
        assert self.rig.record(self.streams[name]).blocks <= cap
        bound(self.rig)
        if new and len(tokens) // 4 <= cap - 2:
            assert self.rig.held(tokens)[name][0] == len(tokens)
        self.agree()

    @rule(name=st.sampled_from("AB"), count=st.sampled_from([1, 3, 30]), seed=st.integers(0, 99))
    def remove(self, name: str, count: int, seed: int) -> None:
        slot = self.rig.record(self.streams[name]).slot.to_bytes(2, "big")
        held = sorted(key[3:] for key, each in names_of(self.rig).items() if each.held and key[:2] == slot)
        gone = random.Random(seed).sample(held, min(count, len(held)))
        self.rig.say(self.streams[name], BlockRemoved(gone), BlockRemoved(gone, medium="CPU"))
        self.removed |= set(gone)

    @rule(name=st.sampled_from([None, "A", "B"]), count=st.sampled_from([1, 2, 7, 40]))
    def evict(self, name: str | None, count: int) -> None:
        record = None if name is None else self.rig.writer.streams[self.streams[name]]
        before = names_of(self.rig)
        self.rig.writer.evict(count, record)
        held = sum(each.held for each in before.values()) - sum(
            each.held for each in names_of(self.rig).values()
        )
        assert 0 <= held <= count
        self.agree()

    @rule()
    def reopen(self) -> None:
        self.reopened()

    def agree(self) -> None:
        """No kept block has a parent that went, unless the engine itself removed it."""
        names = names_of(self.rig)
        for key, name in names.items():
            if name.held and name.parent and not names[key[:3] + name.parent].held:
                assert name.parent in self.removed
        self.rig.check()


def test_ev26_no_kept_block_has_an_evicted_parent_whatever_engines_do(make_rig: Any, engine: Any) -> None:
    run(Bounded, examples=40, steps=20, make_rig=make_rig, engine=engine)
