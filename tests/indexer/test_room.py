"""A map without room: nothing is tried for ever, nothing is lost silently, and it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from events.inbox import StreamId
from events.publisher import encode
from events.schema import AllBlocksCleared
from events.signals import Connected, Disconnected, Frame, ReplayEnded
from indexer.bounds import Bounds, Eviction
from indexer.errors import MapFullError
from indexer.room import GROUP_SIGNALS, WAITS, Room

PROMPT = list(range(28))
MOST_TURNS = 2_000


def small(make_rig: Any, folder: Path, map_size: int, share: int = 4) -> Any:
    """A rig whose budget is the usual quarter of a small map, or another share."""
    rig = make_rig(folder, map_size=map_size)
    bounds = Bounds(map_size // share)
    rig.ingest._house.eviction, rig.ingest._group_bytes = Eviction(bounds), bounds.group_bytes
    return rig


def prompt(number: int, blocks: int) -> list[int]:
    """Tokens of a prompt that shares nothing with others; blocks of 4 tokens."""
    return list(range(number * 1_000_000, number * 1_000_000 + 4 * blocks))


def hear(rig: Any, stream: StreamId, hasher: Any, numbers: range, blocks: int) -> None:
    """Puts batches into the inbox, a prompt in each."""
    for number in numbers:
        rig.feed.inbox.put(*rig.frame(stream, hasher.stored(prompt(number, blocks))))


def work_off(rig: Any, stream: StreamId) -> None:
    """Turns until the inbox is empty."""
    for _ in range(MOST_TURNS):
        rig.ingest.work()
        if not rig.feed.inbox.depth(stream):
            return
    pytest.fail(f"{rig.feed.inbox.depth(stream)} batches still wait after {MOST_TURNS} turns")


def left_out(rig: Any, stream: StreamId) -> int:
    count = rig.record(stream).counters.skipped.get("no_room", 0)
    assert isinstance(count, int)
    return count


# deciding


def test_a_group_that_never_goes_in_is_tried_with_less_a_few_times_and_then_not_at_all() -> None:
    room = Room()
    tried: list[Any] = []
    for _ in range(20):
        signals = min(room.signals, 300)
        tried.append((signals, room.batches))
        if not room.lacked(signals, 40 if room.batches is None else room.batches):
            tried.append("wait")
    once = [(1, None), (1, 2), (1, 0), "wait"]
    assert tried[:10] == [(300, None), (18, None), *[(1, None), "wait"] * WAITS, *once[:2]]
    assert tried[8:] == (once * 5)[: len(tried) - 8]


def test_groups_grow_again_once_they_go_in() -> None:
    room = Room()
    room.lacked(512, 512)
    room.lacked(32, 32)
    sizes = []
    while room.signals < GROUP_SIGNALS:
        sizes.append(room.signals)
        room.had()
    assert sizes == sorted(sizes)
    assert len(sizes) < 100


# without room


def test_pe02_groups_are_as_small_as_the_budget_asks_for(make_rig: Any, engine: Any, tmp_path: Path) -> None:
    rig = small(make_rig, tmp_path, 1 << 20)
    a, hasher = rig.follow("A"), engine()
    hear(rig, a, hasher, range(100), 50)
    work_off(rig, a)
    assert rig.ingest.failures == 0
    assert (rig.record(a).state, rig.record(a).counters.batches, left_out(rig, a)) == ("live", 100, 0)
    rig.close()


def test_pe02_what_does_not_go_in_at_once_goes_in_a_little_at_a_time_and_in_order(
    make_rig: Any, engine: Any, tmp_path: Path
) -> None:
    rig = small(make_rig, tmp_path, 4 << 20)
    rig.ingest._group_bytes = 1 << 30
    a, hasher = rig.follow("A"), engine()
    hear(rig, a, hasher, range(50), 1_000)
    work_off(rig, a)
    assert rig.ingest.failures > 0
    assert (rig.record(a).state, left_out(rig, a)) == ("live", 0)
    assert rig.record(a).counters.batches == 50
    assert rig.record(a).counters.evicted > 0
    assert rig.held(prompt(49, 1_000)) == {"A": (4_000, 4_000, 4_000)}
    assert rig.feed.added[a] == 1  # No stream had to start over.
    rig.check()
    rig.close()


@pytest.mark.parametrize(("map_size", "blocks"), [(1 << 20, 9_000), (8 << 20, 70_000)])
def test_pe02_a_batch_that_can_never_go_in_is_left_out_and_the_rest_goes_on(
    make_rig: Any, engine: Any, tmp_path: Path, map_size: int, blocks: int
) -> None:
    rig = small(make_rig, tmp_path, map_size)
    a, hasher = rig.follow("A"), engine()
    b, other = rig.follow("B"), engine(1)
    hear(rig, a, hasher, range(1), blocks)
    hear(rig, a, hasher, range(1, 2), 10)
    hear(rig, b, other, range(2, 4), 10)
    work_off(rig, a)
    work_off(rig, b)
    assert (rig.record(a).state, left_out(rig, a), rig.record(a).sequence) == ("partial", 1, 1)
    assert "sequence 0" in rig.record(a).reason
    assert (rig.record(b).state, left_out(rig, b)) == ("live", 0)
    assert rig.held(prompt(0, 10))["A"] == (0, 0, 0)
    assert rig.held(prompt(1, 10))["A"] == (40, 40, 40)
    assert rig.held(prompt(3, 10))["B"] == (40, 40, 40)
    assert rig.ingest.trouble is None
    rig.check()
    rig.close()


def test_pe02_a_replay_of_more_than_there_is_room_for_is_left_out_in_part(
    make_rig: Any, engine: Any, tmp_path: Path
) -> None:
    """All frames that waited for a replay follow from the one signal of its end."""
    rig = small(make_rig, tmp_path, 2 << 20)
    a, hasher = rig.follow("A", replay_endpoint="tcp://127.0.0.1:5558"), engine()
    hear(rig, a, hasher, range(64), 1_000)
    work_off(rig, a)
    assert rig.ingest.machine(a).held == 64
    rig.feed.inbox.put(a, ReplayEnded(1))
    work_off(rig, a)
    assert rig.record(a).sequence == 63
    assert 0 < left_out(rig, a) < 64
    assert rig.record(a).state == "partial"
    assert rig.held(prompt(0, 1_000)) == {"A": (4_000, 4_000, 4_000)}
    rig.check()
    rig.close()


@pytest.mark.parametrize(("map_size", "pinned"), [(1 << 20, 50), (4 << 20, 250)])
def test_pe02_50_000_blocks_with_a_reader_that_pins_old_pages_lose_nothing_silently(
    make_rig: Any, engine: Any, tmp_path: Path, map_size: int, pinned: int
) -> None:
    rig = small(make_rig, tmp_path, map_size)
    a, hasher = rig.follow("A"), engine()
    stuck = 0
    for first in range(0, 500, pinned):
        pin = rig.writer.env.begin()
        hear(rig, a, hasher, range(first, first + pinned), 100)
        for _ in range(MOST_TURNS):
            if not rig.ingest.work():
                stuck += 1
                break
            if not rig.feed.inbox.depth(a):
                break
        assert rig.ingest.held(a) + rig.record(a).counters.batches == first + pinned
        pin.abort()
        work_off(rig, a)
    assert stuck > 0  # Sometimes nothing could be written at all.
    assert rig.record(a).counters.batches == 500
    lost = left_out(rig, a)
    assert (rig.record(a).state == "partial") == (lost > 0)
    rig.say(a, hasher.stored(prompt(500, 100)))
    assert rig.held(prompt(500, 100)) == {"A": (400, 400, 400)}
    assert rig.ingest.trouble is None
    rig.check()
    rig.close()


def test_while_nothing_can_be_written_each_turn_tries_a_bounded_number_of_times_and_forgets_nothing(
    make_rig: Any, engine: Any, tmp_path: Path
) -> None:
    rig = small(make_rig, tmp_path, 1 << 20)
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT))
    with rig.writer.env.begin():
        while rig.ingest.work():
            hear(rig, a, hasher, range(rig.sequences[a], rig.sequences[a] + 1), 10)
        before, waiting = rig.record(a), rig.feed.inbox.depth(a)
        failures = rig.ingest.failures
        for _ in range(20):
            rig.now += 1.0
            rig.ingest.work()
        assert rig.ingest.failures - failures <= 40
        assert (rig.record(a).blocks, rig.feed.inbox.depth(a)) == (before.blocks, waiting)
        assert "is full; give a larger --map-size" in rig.ingest.trouble
    work_off(rig, a)
    assert rig.ingest.trouble is None
    assert rig.record(a).counters.batches == rig.sequences[a]
    rig.check()
    rig.close()


def test_a_group_that_fails_leaves_streams_as_they_were_and_may_come_again(
    rig: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gap, replay and corrections included: nothing that the failed group brought is remembered."""
    a = rig.follow("A", replay_endpoint="tcp://127.0.0.1:5558")
    hasher = engine()
    rig.ingest.step([(a, ReplayEnded(1))])
    rig.say(a, hasher.stored(PROMPT, 0, 2))
    lost = rig.frame(a, hasher.stored(PROMPT, 2, 4))
    after = rig.frame(a, hasher.stored(PROMPT, 4))
    asks = len(rig.feed.asks)
    with monkeypatch.context() as patched:
        patched.setattr(
            "indexer.changes.Changes.flush", lambda _: (_ for _ in ()).throw(MapFullError("full"))
        )
        with pytest.raises(MapFullError):
            rig.ingest.step([after])
    machine = rig.ingest.machine(a)
    assert (machine.state, machine.gaps, machine.held, len(rig.feed.asks)) == ("live", 0, 0, asks)
    rig.ingest.step([lost, after])
    assert rig.record(a).state == "live"
    assert rig.held(PROMPT) == {"A": (28, 28, 28)}
    assert isinstance(after[1], Frame)


class Stepper:
    """Steps of a rig; with ``fails`` each is tried in vain before it goes in."""

    def __init__(self, rig: Any, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig = rig
        self._fails = fails
        self._patch = monkeypatch

    def step(self, signals: list[Any]) -> None:
        if self._fails and signals:
            with self._patch.context() as patched:
                patched.setattr("indexer.changes.Changes.flush", _refuse)
                with pytest.raises(MapFullError):
                    self.rig.ingest.step(signals)
        self.rig.ingest.step(signals)

    def all(self) -> Any:
        """All that is known, but for the numbers of slots and generations."""
        plain = {"slot": 0, "generation": 0}
        records = [msgspec.structs.replace(each.record, **plain) for each in self.rig.reader.streams()]
        held = [
            (number, one.instance, one.rank, one.state, one.gpu)
            for number in range(8)
            for one in self.rig.reader.query("m", prompt(number, 6))
        ]
        return sorted(records, key=lambda record: record.id), sorted(held), self.rig.feed.asks


def _refuse(_: Any) -> None:
    raise MapFullError("full")


def life(chance: Random, hasher: Any, asks: list[Any], a: StreamId, b: StreamId) -> Iterator[list[Any]]:
    """What two engines say in random order: batches of several ranks, losses, clears, replays, cuts."""
    sequences = {a: -1, b: -1}
    for number in range(150):
        signals: list[Any] = []
        for _ in range(chance.randrange(1, 5)):
            stream = chance.choice([a, b])
            kind = chance.choice(["frame"] * 12 + ["gap", "cut", "restart", "end", "clear"])
            if kind == "cut":
                signals += [(stream, Disconnected()), (stream, Connected())]
                continue
            if kind == "end":
                asked = [ask.ask for each, ask in asks if each == stream]
                signals += [(stream, ReplayEnded(asked[-1]))] if asked else []
                continue
            sequences[stream] = 0 if kind == "restart" else sequences[stream] + (2 if kind == "gap" else 1)
            stored = hasher.stored(prompt(chance.randrange(8), 6), 0, chance.randrange(1, 7))
            removed = hasher.removed(prompt(chance.randrange(8), 6), chance.randrange(6))
            events = [AllBlocksCleared()] if kind == "clear" else [stored, *removed]
            rank = chance.choice([None, 0, 0, 1, 2]) if stream == b else None
            signals.append((stream, Frame(sequences[stream], encode(events, number, rank))))
        yield signals


@pytest.mark.parametrize("seed", range(4))
def test_a_life_in_which_each_group_fails_once_comes_to_the_same(
    make_rig: Any, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    told = []
    for fails in (False, True):
        rig = make_rig(tmp_path / str(fails))
        stepper = Stepper(rig, fails, monkeypatch)
        a, b = rig.follow("A", replay_endpoint="tcp://127.0.0.1:5558"), rig.follow("B")
        for number, signals in enumerate(life(Random(seed), engine(), rig.feed.asks, a, b)):
            rig.now += number % 3
            stepper.step(signals)
        rig.collect()
        rig.check()
        told.append(stepper.all())
        rig.close()
    assert told[0] == told[1]


def test_signals_that_are_put_back_keep_their_turn_their_order_and_their_weight(rig: Any) -> None:
    inbox = rig.feed.inbox
    for number in range(40):
        inbox.put("a", Frame(number, b"1234"))
        inbox.put("b", Frame(number, b"12"))
    taken = inbox.take(48, 0)
    inbox.put_back(taken)
    assert (inbox.depth("a"), inbox.depth("b"), inbox._bytes) == (40, 40, {"a": 160, "b": 80})
    order = [signal.sequence for stream, signal in inbox.take(1_000, 0) if stream == "a"]
    assert order == list(range(40))
    assert (inbox.depth("a"), inbox.depth("b"), inbox._bytes) == (0, 0, {"a": 0, "b": 0})
