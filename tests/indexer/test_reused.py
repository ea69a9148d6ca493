"""Engines that announce again what they merely reused, as requests with `kv_cache_report_mode: full` ask for.

A second announcement of a block may mean a second copy in the cache, with a removal of its own, or nothing.
"""

import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from events.schema import BlockRemoved, Event
from indexer.layout import Name

PROMPT = list(range(29))  # Seven blocks of four tokens, and one token to compute.
LONGER = [*PROMPT, *range(500, 520)]
OTHER = [*PROMPT, *range(700, 720)]


def gpu(rig: Any, tokens: list[int] = PROMPT) -> int:
    return rig.held(tokens)["A"][0]


def name(rig: Any, engine_hash: bytes) -> Name:
    found: Name = rig.reader.name("A", 0, 0, engine_hash)
    return found


def prove(rig: Any, stream: Any, hasher: Any) -> None:
    """Twice a chain is announced from its start, and new blocks behind it with it."""
    rig.say(stream, hasher.stored(PROMPT))
    for longer in (LONGER, OTHER):
        rig.say(stream, hasher.stored(PROMPT), hasher.stored(longer, 7))
    assert rig.record(stream).reports_reused


def test_reused_blocks_that_are_announced_again_leave_with_their_removal(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    prove(rig, a, hasher)
    for _ in range(300):
        rig.say(a, hasher.stored(PROMPT))
    assert gpu(rig) == 28
    rig.say(a, *hasher.removed(PROMPT, 5))
    assert gpu(rig) == 20
    rig.say(a, hasher.stored(PROMPT, 5))
    assert gpu(rig) == 28
    rig.check()


def test_a_second_copy_counts_beside_announcements_of_reuse(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    prove(rig, a, hasher)
    rig.say(a, hasher.stored(PROMPT, 6), hasher.stored(PROMPT))
    assert (name(rig, hasher.hashes(PROMPT)[6]).copies, name(rig, hasher.hashes(PROMPT)[6]).again) == (
        (5, 0, 0),
        3,
    )
    rig.say(a, *hasher.removed(PROMPT, 6))
    assert gpu(rig) == 28
    rig.say(a, *hasher.removed(PROMPT, 6))
    assert gpu(rig) == 24


def test_a_prompt_computed_anew_is_a_second_copy_of_all_its_blocks(rig: Any, engine: Any) -> None:
    """As with `prompt_logprobs`: one event from the start of the prompt, its new blocks with it."""
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT))
    for _ in range(3):
        rig.say(a, hasher.stored(LONGER))
        rig.say(a, hasher.stored([*LONGER, *range(4)], 12))  # The next batch: what was generated.
    assert not rig.record(a).reports_reused
    rig.say(a, *hasher.removed(LONGER) * 3)
    assert gpu(rig) == 28
    rig.say(a, *hasher.removed(PROMPT))
    assert gpu(rig) == 0


def test_a_prompt_computed_anew_in_parts_is_no_report(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT))
    for _ in range(3):
        rig.say(a, hasher.stored(PROMPT, 0, 4), hasher.stored(PROMPT, 4))
    assert not rig.record(a).reports_reused


def test_a_ghost_from_before_reuse_was_proven_goes_the_next_time(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT))
    rig.say(a, hasher.stored(PROMPT))
    rig.say(a, *hasher.removed(PROMPT))
    assert gpu(rig) == 28  # Wrong, and not to be known yet.
    prove(rig, a, hasher)
    rig.say(a, *hasher.removed(PROMPT))
    assert gpu(rig) == 0


def test_reports_in_window_groups_add_nothing_that_was_not_held(rig: Any, engine: Any) -> None:
    """An engine reports a whole prefix in each group, though it holds the window's tail only."""
    a, hasher = rig.follow("A"), engine()
    window = {"group": 1, "group_kind": "sliding_window", "sliding_window": 9}
    rig.say(a, hasher.stored(PROMPT), hasher.stored(PROMPT, 5, **window))
    for longer in (LONGER, OTHER):
        rig.say(a, hasher.stored(PROMPT), hasher.stored(longer, 7), hasher.stored(longer, 7, **window))
    rig.say(a, hasher.stored(PROMPT), hasher.stored(PROMPT, **window))
    assert gpu(rig) == 28
    assert gpu(rig, PROMPT[:17]) == 0
    assert rig.record(a).counters.skipped == {"reused": 5}
    rig.say(a, *hasher.removed(PROMPT, 5, group=1))
    assert gpu(rig) == 0
    rig.check()


TRUNK = list(range(100, 160))
prompts = st.builds(
    lambda cut, branch, length: TRUNK[:cut] + [branch] * length,
    st.sampled_from([8, 16, 30, 60]),
    st.integers(1, 3),
    st.integers(0, 12),
)
steps = st.lists(
    st.tuples(st.just("ask"), prompts, st.booleans())
    | st.tuples(st.just("evict"), st.integers(0, 99), st.integers(1, 9)),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps=steps)
def test_copies_are_right_where_both_second_copies_and_reports_of_reuse_come(
    steps: list[Any], tmp_path_factory: Any, make_rig: Any, engine: Any
) -> None:
    """EV-16: a block is held until the engine removes the last of its copies, no longer."""
    rig, hasher = make_rig(tmp_path_factory.mktemp("map") / "map"), engine()
    stream = rig.follow("A")
    prove(rig, stream, hasher)
    copies: Counter[bytes] = Counter({each for longer in (LONGER, OTHER) for each in hasher.hashes(longer)})
    for what, *how in steps:
        events: list[Event] = []
        if what == "ask":
            prompt, reports = how
            hashes = hasher.hashes(prompt)
            usable = hashes[: (len(prompt) - 1) // 4]
            hit = next((number for number, each in enumerate(usable) if not copies[each]), len(usable))
            if hit and reports:
                events.append(hasher.stored(prompt, 0, hit))
            if hit < len(hashes):  # With a prompt of whole blocks, the last is computed again.
                events.append(hasher.stored(prompt, hit))
                copies.update(hashes[hit:])
        else:
            held = sorted(copies.elements())
            for each in random.Random(how[0]).sample(held, min(how[1], len(held))):
                copies[each] -= 1
                events.append(BlockRemoved([each]))
        if events:
            rig.say(stream, *events)
        held = {each for each, count in copies.items() if count}
        for each in {*hasher.hashes(TRUNK), *held}:
            found = rig.reader.name("A", 0, 0, each)
            assert (found is not None and found.held) == (each in held)
    rig.check()
    rig.close()
