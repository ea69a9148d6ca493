"""What the map may hold: budgets, caps, and what happens when there is no room all the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from events.schema import BlockRemoved, BlockStored
from indexer.bounds import CAP_SLACK, EVICT_ABOVE, EVICT_BELOW, EVICT_SHARE, EVICT_STEP, Bounds, Eviction
from indexer.changes import Changes
from indexer.errors import SettingsError
from indexer.layout import WAITING_TTL_S, StreamRecord, age_key
from indexer.registration import Registration
from indexer.settings import IndexerSettings

PROMPT = list(range(28))


def record(instance: str, blocks: int) -> StreamRecord:
    registration = Registration(instance_id=instance, endpoint="tcp://127.0.0.1:1", model_name="m")
    return StreamRecord(slot=0, generation=1, registration=registration, blocks=blocks)


def prompt(number: int, blocks: int = 10) -> list[int]:
    """Tokens of a prompt that shares nothing with others; blocks of 4 tokens."""
    return list(range(number * 1_000_000, number * 1_000_000 + 4 * blocks))


def bound(rig: Any, **bounds: int) -> None:
    rig.ingest._house.eviction = Eviction(Bounds(**bounds))


# deciding


def test_nothing_goes_while_every_bound_holds() -> None:
    eviction = Eviction(Bounds(budget_bytes=1_000, stream_blocks=10))
    assert eviction.next(int(1_000 * EVICT_ABOVE), [record("a", 10), record("b", 0)]) is None


def test_a_stream_over_its_cap_loses_what_is_over_in_steps() -> None:
    over, far_over = record("a", 12), record("b", 10 + 2 * EVICT_STEP)
    eviction = Eviction(Bounds(stream_blocks=10))
    assert eviction.next(0, [over]) == (2, over)
    assert eviction.next(0, [far_over]) == (EVICT_STEP, far_over)


def test_at_a_large_cap_somewhat_more_goes_than_is_over() -> None:
    cap = 10 * CAP_SLACK
    over, at_the_cap = record("a", cap + 1), record("b", cap)
    assert Eviction(Bounds(stream_blocks=cap)).next(0, [over]) == (11, over)
    assert Eviction(Bounds(stream_blocks=cap)).next(0, [at_the_cap]) is None


def test_over_the_budget_the_oldest_go_until_well_below() -> None:
    held = [record("a", 10 * EVICT_STEP), record("b", 20 * EVICT_STEP)]
    eviction = Eviction(Bounds(budget_bytes=1_000))
    between = int(1_000 * (EVICT_ABOVE + EVICT_BELOW) / 2)
    assert eviction.next(between, held) is None
    assert eviction.next(950, held) == (EVICT_STEP, None)
    assert eviction.next(between, held) == (EVICT_STEP, None)
    assert eviction.next(int(1_000 * EVICT_BELOW), held) is None
    assert eviction.next(between, held) is None


def test_of_a_small_map_a_share_goes_at_once() -> None:
    held = [record("a", 10 * EVICT_SHARE), record("b", 20 * EVICT_SHARE)]
    assert Eviction(Bounds(budget_bytes=1_000)).next(950, held) == (31, None)


def test_a_budget_that_leaves_no_room_to_work_is_refused() -> None:
    with pytest.raises(SettingsError, match="at most half"):
        IndexerSettings(map_size=1 << 22, map_budget=1 << 22).check()
    IndexerSettings(map_size=1 << 22).check()


# forgetting


def test_what_is_not_collected_yet_goes_first_then_the_oldest_of_all_streams(rig: Any, engine: Any) -> None:
    a, b = rig.follow("A"), rig.follow("B")
    rig.say(a, engine(1).stored(prompt(1)))
    rig.say(b, engine(2).stored(prompt(2)), engine(2).stored(prompt(3)))
    rig.say(a, engine(1).stored(prompt(4)))
    rig.ingest.forget("A", "m")
    rig.writer.forget(15)
    rig.writer.evict(3)
    assert rig.held(prompt(2)) == {"B": (28, 28, 28)}, "the retired slot's older blocks are passed over"
    rig.writer.forget(100)
    assert rig.record(b).blocks == 17
    rig.writer.forget(13)
    assert (rig.held(prompt(2)), rig.held(prompt(3))) == ({"B": (0, 0, 0)}, {"B": (16, 16, 16)})
    rig.check()
    with rig.writer.env.begin() as txn:
        assert txn.stat(rig.writer.tables.ages)["entries"] == 4


def test_a_stream_over_its_cap_loses_none_of_the_others_blocks(rig: Any, engine: Any) -> None:
    a, b = rig.follow("A"), rig.follow("B")
    rig.say(a, engine(1).stored(prompt(1)))
    rig.say(b, engine(2).stored(prompt(2)), engine(2).stored(prompt(3)))
    rig.writer.evict(10, rig.writer.streams[b])
    assert rig.held(prompt(1))["A"] == (40, 40, 40)
    assert rig.held(prompt(2))["B"] == (0, 0, 0)
    assert rig.held(prompt(3))["B"] == (40, 40, 40)


def test_ev26_a_producer_that_never_removes_is_bounded_oldest_first(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    bound(rig, stream_blocks=100)
    for number in range(50):
        rig.say(a, hasher.stored(prompt(number), medium="CPU"))
        assert rig.record(a).blocks <= 100
    rig.check()
    assert 400 <= rig.record(a).counters.evicted <= 400 + 100 // CAP_SLACK
    held = [number for number in range(50) if rig.held(prompt(number))["A"][1] == 40]
    assert held == list(range(41, 50))
    assert rig.held(prompt(40))["A"][1] == 4 * (rig.record(a).blocks - 90), "its end went, for some slack"


def test_ev26_a_cap_is_kept_behind_any_number_of_older_blocks_of_others(
    rig: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.changes.MAX_AGES_READ", 10)
    others = [rig.follow(name) for name in "ABC"]
    for other in others:
        rig.say(other, *(engine().stored(prompt(number)) for number in range(9)))
    a, hasher = rig.follow("D"), engine()
    bound(rig, stream_blocks=100)
    for number in range(30):
        rig.say(a, hasher.stored(prompt(number)))
    rig.ingest.step([])
    assert 100 - 100 // CAP_SLACK <= rig.record(a).blocks <= 100
    assert rig.held(prompt(29))["D"] == (40, 40, 40)
    assert rig.held(prompt(19))["D"] == (0, 0, 0)
    assert [rig.record(other).blocks for other in others] == [90, 90, 90]
    looked = []
    look = Changes.ages

    def counted(self: Changes, start: int) -> Generator[tuple[int, bytes], None, None]:
        looked.append(start)
        return look(self, start)

    monkeypatch.setattr(Changes, "ages", counted)
    rig.say(a, hasher.stored(prompt(30)))
    assert len(looked) <= 3, "what was passed once is not looked at again"
    assert rig.record(a).blocks <= 100
    rig.check()


def test_eviction_takes_every_copy_and_keeps_the_chain_right(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT), hasher.stored(PROMPT), hasher.stored(PROMPT, medium="CPU"))
    rig.writer.evict(3)
    rig.check()
    assert rig.record(a).orphans == 0
    assert rig.held(PROMPT) == {"A": (16, 16, 16)}
    rig.say(a, hasher.stored(PROMPT, 4))
    rig.check()
    assert rig.held(PROMPT) == {"A": (28, 28, 28)}


def test_a_removal_of_what_was_evicted_is_nothing(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT))
    rig.writer.evict(7, rig.writer.streams[a])
    rig.say(a, *hasher.removed(PROMPT))
    rig.check()
    assert rig.record(a).counters.unknown_removed == 7
    with rig.writer.env.begin() as txn:
        assert txn.stat(rig.writer.tables.ages)["entries"] == 0


def test_every_held_block_has_its_place_in_the_order(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT, 3), hasher.stored(PROMPT, 0, 3), *hasher.removed(PROMPT, 4, 6))
    with rig.writer.env.begin() as txn:
        ages = {bytes(key) for key, _ in txn.cursor(rig.writer.tables.ages)}
        names = [rig.reader.name("A", 0, 0, engine_hash) for engine_hash in hasher.hashes(PROMPT)]
    assert ages == {age_key(name.age) for name in names if name is not None and name.held}
    assert len(ages) == 5


def test_pe02_a_budget_is_kept_under_any_number_of_blocks(make_rig: Any, engine: Any, tmp_path: Path) -> None:
    rig = make_rig(tmp_path, map_size=4 << 20)
    bound(rig, budget_bytes=1 << 20)
    a, hasher = rig.follow("A"), engine()
    for number in range(500):
        rig.say(a, hasher.stored(prompt(number, 100)))
        assert rig.writer.used_bytes() < 1 << 20
    assert rig.held(prompt(499, 100)) == {"A": (400, 400, 400)}
    assert rig.ingest.failures == 0
    rig.check()


def test_a_block_whose_parent_never_comes_waits_no_longer_than_told(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(prompt(1), 1), hasher.stored(prompt(2), 9))
    rig.now += WAITING_TTL_S - 1
    rig.say(a, hasher.stored(prompt(3), 2), hasher.stored(prompt(2), 0, 9))
    assert rig.record(a).waiting == 17
    rig.now += 61
    rig.say(a)
    assert (rig.record(a).waiting, rig.record(a).counters.skipped) == (8, {"parent_unknown": 9})
    assert rig.held(prompt(2))["A"] == (40, 40, 40)
    rig.say(a, hasher.stored(prompt(3), 0, 2), hasher.stored(prompt(1), 0, 1))
    assert rig.held(prompt(3))["A"] == (40, 40, 40)
    assert rig.held(prompt(1))["A"] == (4, 4, 4)
    rig.check()


def test_blocks_that_wait_are_looked_through_in_steps(
    rig: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.writer.COLLECT_STEP", 10)
    a, b = rig.follow("A"), rig.follow("B")
    rig.say(a, engine(1).stored(prompt(1, 35), 1))
    rig.say(b, engine(2).stored(prompt(2, 12), 1))
    rig.now += WAITING_TTL_S + 61
    left = []
    while rig.record(a).waiting + rig.record(b).waiting:
        rig.ingest.step([])
        left.append(rig.record(a).waiting + rig.record(b).waiting)
    assert left == [35, 25, 15, 5, 0]
    rig.check()


def test_pe02_blocks_that_wait_go_first_and_are_within_the_budget(
    make_rig: Any, engine: Any, tmp_path: Path
) -> None:
    rig = make_rig(tmp_path, map_size=4 << 20)
    bound(rig, budget_bytes=1 << 20)
    a, b = rig.follow("A"), rig.follow("B")
    rig.say(b, engine(2).stored(prompt(1)))
    for number in range(2, 150):
        rig.say(a, engine(1).stored(prompt(number, 101), 1))
        assert rig.writer.used_bytes() < 1 << 20
    assert 0 < rig.record(a).waiting < 14_800
    assert rig.record(a).counters.skipped["no_room"] > 0
    assert rig.held(prompt(1))["B"] == (40, 40, 40)
    assert rig.ingest.failures == 0
    rig.check()
    rig.close()


def test_ix13_file_and_pages_stay_flat_over_200_000_blocks_with_a_constant_live_set(
    make_rig: Any, engine: Any, tmp_path: Path
) -> None:
    rig = make_rig(tmp_path, map_size=64 << 20)
    a, b = rig.follow("A"), rig.follow("B")
    live: deque[BlockStored] = deque()
    files, pages = [], []
    for number in range(200):
        live.append(engine().stored(prompt(number, 500)))
        old = [BlockRemoved(live.popleft().hashes[::-1])] if number >= 10 else []
        for stream in (a, b):
            rig.say(stream, *old, live[-1])
        files.append((tmp_path / "data.mdb").stat().st_size)
        pages.append(rig.writer.used_bytes())
    assert rig.record(a).blocks == rig.record(b).blocks == 5_000
    assert max(files[100:]) <= max(files[20:100]) * 1.05
    assert max(pages[100:]) <= max(pages[20:100]) * 1.05
    rig.check()
    rig.close()


def test_ix13_blocks_of_a_token_are_warned_of_and_others_are_not(
    rig: Any, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fine, tiny = rig.follow("fine"), rig.follow("tiny")
    rig.say(fine, engine(block_size=4).stored(PROMPT))
    assert (rig.record(fine).notes, "entries of blocks" in caplog.text) == ([], False)
    rig.say(tiny, engine(block_size=1).stored(PROMPT))
    rig.say(tiny, engine(block_size=1).stored(prompt(1)))
    assert caplog.text.count("tiny rank 0: blocks of 1 tokens make 16 times the entries") == 1
    (note,) = rig.record(tiny).notes
    assert "blocks of 1 tokens" in note
    assert rig.held(PROMPT)["tiny"] == (28, 28, 28)


def test_ix13_the_file_stops_growing_under_churn(make_rig: Any, engine: Any, tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    streams = [(rig.follow(f"A{number}"), engine(number)) for number in range(8)]

    def churn(first: int, rounds: int) -> int:
        for number in range(first, first + rounds):
            for stream, hasher in streams:
                old = [] if number < 10 else hasher.removed(prompt(number - 10, 50))
                rig.say(stream, *old, hasher.stored(prompt(number, 50)))
        return (tmp_path / "data.mdb").stat().st_size

    after_20 = churn(0, 20)
    assert churn(20, 60) <= after_20 * 1.1
    rig.check()
