"""Ports that several data-parallel ranks share: a batch says whose it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.publisher import encode
from events.schema import AllBlocksCleared, Event
from events.signals import Frame, Replayed, ReplayEnded, Signal
from indexer.errors import MapError, UnknownInstanceError
from indexer.followed import MAX_RANK, MAX_RANKS
from indexer.layout import MAX_SLOTS
from indexer.registration import Registration

PROMPT = list(range(28))
OTHER = list(range(500, 528))
CLEARED = AllBlocksCleared()
REPLAY = {"replay_endpoint": "tcp://127.0.0.1:5558"}


class Port:
    """What is said on a port: batches of ranks, each with the next sequence."""

    def __init__(self, rig: Any, name: str = "A", **fields: Any) -> None:
        self.rig = rig
        self.name = name
        self.stream = rig.follow(name, **fields)
        self.sequence = 0
        if "replay_endpoint" in fields:
            rig.ingest.step([(self.stream, ReplayEnded(self.asked))])

    @property
    def asked(self) -> int:
        return int(self.rig.feed.asks[-1][1].ask)

    def frame(self, rank: int | None, *events: Event) -> tuple[Any, Signal]:
        number, self.sequence = self.sequence, self.sequence + 1
        return self.stream, Frame(number, encode(events, number, rank))

    def say(self, rank: int | None, *events: Event) -> None:
        self.rig.ingest.step([self.frame(rank, *events)])

    def held(self, tokens: list[int] = PROMPT) -> dict[int, int]:
        """Tokens by rank, of this replica."""
        found = self.rig.reader.query("m", tokens)
        return {one.rank: one.disk for one in found if one.instance == self.name}

    def record(self, rank: int) -> Any:
        return self.rig.record((self.name, rank))

    def states(self) -> set[str]:
        return {one.state for one in self.rig.reader.query("m", PROMPT) if one.instance == self.name}


def test_ev06_each_rank_of_a_shared_port_is_a_stream_of_its_own(rig: Any, engine: Any) -> None:
    port = Port(rig)
    port.say(0, engine().stored(PROMPT))
    port.say(2, engine(1).stored(PROMPT, 0, 3))
    port.say(3, engine(2).stored(OTHER))
    port.say(2, engine(1).stored(PROMPT, 3, 5))
    assert port.held() == {0: 28, 2: 20, 3: 0}
    assert port.held(OTHER) == {0: 0, 2: 0, 3: 28}
    assert port.states() == {"live"}
    assert [port.record(rank).sequence for rank in (0, 2, 3)] == [3, 3, 2]
    rig.check()


def test_ev06_a_clear_or_a_removal_of_one_rank_is_of_that_rank_only(rig: Any, engine: Any) -> None:
    port = Port(rig)
    for rank in (0, 1, 2):
        port.say(rank, engine().stored(PROMPT))
    port.say(1, *engine().removed(PROMPT, 5))
    port.say(2, CLEARED)
    assert port.held() == {0: 28, 1: 20, 2: 0}
    port.say(2, engine().stored(PROMPT))
    port.say(0, CLEARED)
    assert port.held() == {0: 0, 1: 20, 2: 28}
    rig.collect()
    rig.check()


def test_ev06_a_port_of_one_rank_is_the_registered_ranks_whatever_number_it_gives_itself(
    rig: Any, engine: Any
) -> None:
    """Behind an external load balancer each rank is a server of its own, numbered within the deployment."""
    port = Port(rig)
    port.say(3, engine().stored(PROMPT))
    port.say(3, engine().stored(OTHER))
    port.say(None, engine().stored(list(range(900, 904))))
    assert port.held() == {0: 28}
    rig.resume()
    port.say(3, *engine().removed(OTHER))
    assert port.held() == {0: 28}


def test_ev06_what_was_taken_for_the_registered_ranks_is_handed_over_when_the_port_is_shared(
    rig: Any, engine: Any
) -> None:
    port = Port(rig)
    port.say(2, engine().stored(PROMPT))
    generation = port.record(0).generation
    rig.ingest.step([port.frame(2, engine().stored(OTHER)), port.frame(1, engine(1).stored(PROMPT, 0, 2))])
    assert port.held() == {0: 0, 1: 8, 2: 28}
    assert port.held(OTHER) == {0: 0, 1: 0, 2: 28}
    assert port.record(2).generation == generation != port.record(0).generation
    port.say(0, engine(2).stored(PROMPT))
    port.say(2, *engine().removed(PROMPT))
    assert port.held() == {0: 28, 1: 8, 2: 0}
    rig.check()


def test_ev06_a_restart_of_the_port_forgets_all_ranks_and_those_that_only_events_named_go(
    rig: Any, engine: Any
) -> None:
    port, other = Port(rig), rig.follow("B")
    rig.say(other, engine().stored(PROMPT))
    port.say(0, engine().stored(PROMPT))
    port.say(1, engine().stored(PROMPT))
    port.sequence = 0
    port.say(0, engine(5).stored(OTHER))
    assert port.held() == {0: 0}
    assert port.held(OTHER) == {0: 28}
    assert rig.held(PROMPT)["B"][0] == 28
    rig.collect()
    rig.check()


def test_ev06_a_gap_is_a_gap_of_all_ranks_until_all_have_cleared(rig: Any, engine: Any) -> None:
    port = Port(rig)
    port.say(0, engine().stored(PROMPT))
    port.say(1, engine().stored(PROMPT))
    port.sequence += 1
    port.say(1, engine().stored(OTHER))
    assert port.states() == {"partial"}
    assert {port.record(rank).lost_at for rank in (0, 1)} == {rig.now}
    port.say(1, CLEARED)
    assert port.states() == {"partial"}, "what was lost may have been the other's"
    port.say(0, CLEARED)
    assert port.states() == {"live"}


def test_ev06_what_all_ranks_hold_is_unverified_after_a_restart_of_ours_and_then_goes_on(
    rig: Any, engine: Any
) -> None:
    port = Port(rig, **REPLAY)
    port.say(0, engine().stored(PROMPT))
    port.say(1, engine().stored(PROMPT))
    last = port.frame(2, engine().stored(PROMPT))
    rig.ingest.step([last])
    rig.resume()
    assert port.states() == {"unverified"}
    assert rig.feed.asks[-1][1].start == 2
    payload = last[1].payload  # type: ignore[union-attr]
    rig.ingest.step([(port.stream, Replayed(1, 2, payload)), (port.stream, ReplayEnded(1))])
    assert port.states() == {"live"}
    assert port.held() == {0: 28, 1: 28, 2: 28}
    port.say(1, *engine().removed(PROMPT, 1))
    assert port.held() == {0: 28, 1: 4, 2: 28}
    assert set(rig.feed.sources) == {port.stream}, "one socket"


def test_ev06_after_a_kill_the_sequence_and_the_blocks_of_all_ranks_are_of_one_commit(
    make_rig: Any, engine: Any, tmp_path: Path
) -> None:
    rig = make_rig(tmp_path)
    port = Port(rig)
    port.say(2, engine().stored(PROMPT))
    port.say(1, engine().stored(PROMPT, 0, 3))
    with pytest.raises(MapError), monkey_full(rig):
        rig.ingest.step([port.frame(1, engine().stored(PROMPT, 3)), port.frame(3, engine().stored(OTHER))])
    rig.abandon()
    again = make_rig(tmp_path)
    again.resume()
    port.rig, port.sequence = again, 2
    assert port.held() == {0: 0, 1: 12, 2: 28}
    assert port.record(0).sequence == 1
    port.say(1, engine().stored(PROMPT, 3))
    assert port.held() == {0: 0, 1: 28, 2: 28}
    assert port.states() == {"live"}
    again.check()
    again.close()


@contextmanager
def monkey_full(rig: Any) -> Iterator[None]:
    """The next commit fails at its very end."""
    group = rig.writer.group

    @contextmanager
    def failing() -> Iterator[Any]:
        with group() as one:
            yield one
            raise MapError("no room")

    rig.writer.group = failing
    try:
        yield
    finally:
        rig.writer.group = group


def test_ev06_ranks_seen_only_in_events_go_with_their_replica(rig: Any, engine: Any) -> None:
    port = Port(rig)
    for rank in range(4):
        port.say(rank, engine().stored(PROMPT))
    with pytest.raises(UnknownInstanceError):
        rig.ingest.forget("A", "m", 3)
    rig.ingest.forget("A", "m")
    assert rig.reader.streams() == []
    assert rig.feed.sources == {}
    rig.ingest.step([port.frame(2, engine().stored(PROMPT))])
    assert rig.reader.query("m", PROMPT) == []
    rig.collect()
    rig.check()


def test_ev06_another_registration_of_the_port_ends_its_ranks_and_other_aliases_reach_them(
    rig: Any, engine: Any
) -> None:
    port = Port(rig)
    port.say(0, engine().stored(PROMPT))
    port.say(1, engine().stored(PROMPT))
    named = Registration(instance_id="A", endpoint="tcp://127.0.0.1:5557", model_name="m", aliases=("n",))
    rig.ingest.follow(named)
    assert {one.rank for one in rig.reader.query("n", PROMPT)} == {0, 1}
    rig.ingest.follow(Registration(instance_id="A", endpoint="tcp://127.0.0.1:6000", model_name="m"))
    assert port.held() == {0: 0}


def test_ev06_a_rank_that_gets_a_port_of_its_own_is_that_ports(rig: Any, engine: Any) -> None:
    port = Port(rig)
    port.say(0, engine().stored(PROMPT))
    port.say(1, engine().stored(PROMPT))
    own = rig.follow("A", dp_rank=1)
    rig.say(own, engine().stored(PROMPT, 0, 2))
    assert port.held() == {0: 28, 1: 8}
    port.say(1, engine().stored(OTHER))
    assert port.held(OTHER) == {0: 0, 1: 0}
    assert port.record(0).counters.skipped == {"rank": 1}
    assert port.record(0).state == "partial"
    assert port.record(1).state != "unverified"
    rig.check()


@pytest.mark.parametrize("rank", [-1, MAX_RANK + 1, 1 << 62])
def test_ev06_a_rank_that_can_be_none_is_counted_and_makes_no_stream(
    rig: Any, engine: Any, rank: int
) -> None:
    port = Port(rig)
    port.say(0, engine().stored(PROMPT))
    port.say(rank, engine().stored(OTHER))
    assert port.held(OTHER) == {0: 0}
    assert port.record(0).counters.skipped == {"rank": 1}
    assert port.states() == {"partial"}


def test_ev06_invented_ranks_are_bounded_in_number_and_leave_room_for_replicas(rig: Any, engine: Any) -> None:
    port = Port(rig)
    rig.ingest.step([port.frame(rank, engine().stored(PROMPT)) for rank in range(MAX_RANKS + 20)])
    assert len(port.held()) == MAX_RANKS + 1
    assert port.record(0).counters.skipped == {"rank": 19}
    for number in range(1, 10):
        more = Port(rig, f"B{number}")
        rig.ingest.step([more.frame(rank, engine().stored(PROMPT)) for rank in range(MAX_RANKS)])
    assert len(rig.reader.streams()) < MAX_SLOTS // 2 + 10, "what is registered has its slots all the same"
    rig.follow("C")


def test_ev06_answers_correct_the_rank_that_they_are_of(rig: Any, engine: Any) -> None:
    port = Port(rig)
    port.say(0, engine().stored(PROMPT))
    port.say(1, engine().stored(PROMPT))
    rig.ingest.purge(("A", 1))
    rig.ingest.step([])
    assert port.held() == {0: 28, 1: 0}


RANKS = st.sampled_from([None, 0, 1, 2, 5])
STEPS = st.lists(
    st.tuples(RANKS, st.sampled_from(["store", "remove", "clear", "resume"]), st.integers(0, 3)),
    min_size=1,
    max_size=25,
)


class Model:
    """Prompts held, by rank: the registered rank's are those of the first number until there is a second."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.held: dict[int, set[int]] = {0: set()}
        self.shared = False

    def of(self, rank: int | None) -> set[int]:
        if rank is None:
            return self.held[0]
        self.first = rank if self.first is None else self.first
        if rank != self.first and not self.shared:
            self.shared = True
            self.held = {self.first: self.held[0], **({} if self.first == 0 else {0: set()})}
        return self.held.setdefault(rank, set()) if self.shared else self.held[0]


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_ev06_whatever_ranks_say_on_one_port_each_holds_what_its_own_batches_say(
    tmp_path_factory: Any, make_rig: Any, engine: Any, steps: list[tuple[int | None, str, int]]
) -> None:
    rig = make_rig(tmp_path_factory.mktemp("map"))
    port, model = Port(rig), Model()
    prompts = [list(range(100 * number, 100 * number + 8)) for number in range(4)]
    for rank, what, number in steps:
        if what == "resume":
            rig.resume()
            continue
        held = model.of(rank)
        if what == "store":
            port.say(rank, *([] if number in held else [engine().stored(prompts[number])]))
            held.add(number)
        elif what == "remove":
            port.say(rank, *(engine().removed(prompts[number]) if number in held else []))
            held.discard(number)
        else:
            port.say(rank, CLEARED)
            held.clear()
    for number, prompt in enumerate(prompts):
        wanted = {rank: 8 * (number in held) for rank, held in model.held.items()}
        assert port.held(prompt) == wanted
    rig.check()
    rig.close()
