"""From signals to commits, without threads and sockets: registrations, restarts, bad input."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from events.publisher import encode
from events.signals import Connected, Disconnected, Frame, Replayed, ReplayEnded
from events.stream import DEFAULT_LIMITS
from indexer.errors import MapFullError, UnknownInstanceError
from indexer.followed import Followed
from indexer.registration import Registration

PROMPT = list(range(28))
REPLAY = {"replay_endpoint": "tcp://127.0.0.1:5558"}


def matched(rig: Any, **query: Any) -> tuple[str, float, int]:
    """State, weight and GPU tokens of the one stream of the model."""
    (one,) = rig.reader.query("m", PROMPT, **query)
    return one.state, one.weight, one.gpu


# registrations


def test_the_same_registration_again_changes_nothing(rig: Any, engine: Any) -> None:
    a = rig.follow("A", block_size=4)
    rig.say(a, engine().stored(PROMPT))
    before = rig.record(a)
    rig.ingest.follow(before.registration)
    assert rig.record(a) == before
    assert rig.feed.added[a] == 1
    assert matched(rig) == ("live", 1.0, 28)


def test_1_and_its_text_are_one_instance(rig: Any, engine: Any) -> None:
    one = rig.follow(1)
    rig.say(one, engine().stored(PROMPT))
    rig.ingest.follow(msgspec.structs.replace(rig.record(one).registration, instance_id="1"))
    assert matched(rig) == ("live", 1.0, 28)
    assert rig.feed.added[one] == 1
    rig.ingest.forget("1", "m")
    assert rig.reader.streams() == []


def test_other_aliases_change_only_the_names_of_the_model(rig: Any, engine: Any) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    rig.ingest.follow(msgspec.structs.replace(rig.record(a).registration, aliases=("new",)))
    assert rig.held(PROMPT, "new") == {"A": (28, 28, 28)}
    assert rig.feed.added[a] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"endpoint": "tcp://127.0.0.1:6000"},
        {"replay_endpoint": "tcp://127.0.0.1:6000"},
        {"model_name": "other"},
        {"block_size": 8},
        {"additional_salt": "tenant"},
        {"topic": "t"},
    ],
)
def test_a_registration_that_differs_replaces_the_stream(
    rig: Any, engine: Any, change: dict[str, Any]
) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    before = rig.record(a)
    wanted = msgspec.structs.replace(before.registration, **change)
    rig.ingest.follow(wanted)
    after = rig.record(a)
    assert (after.registration, after.sequence, after.blocks) == (wanted, None, 0)
    assert after.generation > before.generation
    assert (rig.feed.removed[a], rig.feed.added[a]) == (1, 2)
    assert rig.feed.sources[a].address == wanted.address
    assert not any(tiers[2] for tiers in rig.held(PROMPT, wanted.model_name).values())
    rig.collect()
    rig.check()


def test_ev13_a_stream_that_was_removed_starts_anew(make_rig: Any, engine: Any, tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    a = rig.follow("A")
    for number in range(7):
        rig.say(a, engine().stored(PROMPT, number, number + 1))
    rig.ingest.forget("A", "m")
    assert rig.follow("A") == a
    assert (rig.record(a).sequence, rig.record(a).digest, rig.record(a).counters.batches) == (None, None, 0)
    rig.say(a, engine().stored(PROMPT, 0, 2))
    assert matched(rig) == ("live", 1.0, 8)
    rig.abandon()
    rig = make_rig(tmp_path)
    assert rig.record(a).sequence == 0
    rig.close()


def test_what_is_not_registered_cannot_be_removed(rig: Any) -> None:
    rig.follow("A")
    rig.follow("A", dp_rank=1)
    for instance, model, rank in (("B", "m", None), ("A", "other", None), ("A", "m", 2)):
        with pytest.raises(UnknownInstanceError, match=instance):
            rig.ingest.forget(instance, model, rank)
    rig.ingest.forget("A", "m", 1)
    assert [status.record.id for status in rig.reader.streams()] == [("A", 0)]


def test_removing_an_instance_removes_all_its_ranks(rig: Any) -> None:
    for rank in range(3):
        rig.follow("A", dp_rank=rank)
    rig.follow("B")
    rig.ingest.forget("A", "m")
    assert [status.record.id for status in rig.reader.streams()] == [("B", 0)]
    assert list(rig.feed.sources) == [("B", 0)]


def test_signals_of_a_removed_stream_are_nobodys(rig: Any, engine: Any) -> None:
    a = rig.follow("A")
    late = rig.frame(a, engine().stored(PROMPT))
    rig.ingest.forget("A", "m")
    rig.ingest.step([late])
    assert rig.reader.streams() == []
    rig.check()


def test_a_command_that_nobody_waits_for_any_more_is_not_carried_out(rig: Any) -> None:
    gone: Future[None] = rig.ingest.register(
        Registration(instance_id="A", endpoint="tcp://127.0.0.1:1", model_name="m")
    )
    kept = rig.ingest.register(Registration(instance_id="B", endpoint="tcp://127.0.0.1:1", model_name="m"))
    assert gone.cancel()
    rig.ingest._carry_out_commands()
    assert kept.result(0) is None
    assert [status.record.id for status in rig.reader.streams()] == [("B", 0)]


# continuity


def test_a_restarted_indexer_credits_nothing_before_it_is_proven(
    make_rig: Any, engine: Any, tmp_path: Path
) -> None:
    rig = make_rig(tmp_path)
    a = rig.follow("A", **REPLAY)
    rig.ingest.step([(a, ReplayEnded(1))])
    first, second = (
        rig.frame(a, engine().stored(PROMPT, 0, 5))[1],
        rig.frame(a, engine().stored(PROMPT, 5))[1],
    )
    rig.ingest.step([(a, first), (a, second)])
    assert matched(rig) == ("live", 1.0, 28)
    rig.abandon()

    rig = make_rig(tmp_path)
    rig.ingest._follow_all()
    assert matched(rig) == ("unverified", 0.0, 28)
    rig.ingest.step([(a, Connected())])
    assert matched(rig)[:2] == ("unverified", 0.0)
    (stream, ask) = rig.feed.asks[-1]
    assert (stream, ask.start) == (a, 1)
    rig.ingest.step([(a, Replayed(ask.ask, 1, second.payload)), (a, ReplayEnded(ask.ask))])
    assert matched(rig) == ("live", 1.0, 28)
    assert rig.record(a).counters.batches == 2  # Nothing was applied twice.
    rig.close()


def test_pe01_a_persisted_stream_that_is_never_connected_loses_its_slot_in_the_end(
    rig: Any, engine: Any
) -> None:
    a = rig.follow("A", block_size=4)
    rig.say(a, engine().stored(PROMPT))
    rig.ingest._follow_all()
    rig.now += 1
    rig.ingest.step([])
    assert matched(rig) == ("unverified", 0.0, 28)
    slot = rig.record(a).slot
    rig.now += DEFAULT_LIMITS.away - 1
    rig.ingest.step([])
    assert rig.record(a).blocks == 7
    rig.now += 1
    rig.ingest.step([])
    assert (rig.record(a).blocks, rig.record(a).slot != slot) == (0, True)
    rig.collect()
    assert rig.reader.used_bytes() < 10 * 4096
    rig.check()


@pytest.mark.parametrize("again", ["another batch", "nothing", "later ones"])
def test_pe01_an_engine_that_restarted_meanwhile_loses_what_it_had(
    make_rig: Any, engine: Any, tmp_path: Path, again: str
) -> None:
    rig = make_rig(tmp_path)
    a = rig.follow("A", **REPLAY)
    rig.ingest.step([(a, ReplayEnded(1))])
    rig.say(a, engine().stored(PROMPT))
    rig.abandon()
    rig = make_rig(tmp_path)
    rig.ingest._follow_all()
    rig.ingest.step([(a, Connected())])
    ask = rig.feed.asks[-1][1].ask
    other = encode([engine().stored(PROMPT[::-1])], 9.0, None)
    replies = {
        "another batch": [Replayed(ask, 0, other), ReplayEnded(ask)],
        "nothing": [ReplayEnded(ask)],
        "later ones": [Replayed(ask, 1, other), ReplayEnded(ask)],
    }
    rig.ingest.step([(a, reply) for reply in replies[again]])
    assert matched(rig)[2] == 0
    assert rig.feed.asks[-1][1].start == 0
    rig.collect()
    rig.check()
    rig.close()


def test_ev14_history_that_is_lost_stays_lost_when_the_indexer_restarts(
    make_rig: Any, engine: Any, tmp_path: Path
) -> None:
    rig = make_rig(tmp_path)
    a = rig.follow("A", **REPLAY)
    late = rig.frame(a, engine().stored(PROMPT))[1]
    rig.ingest.step([(a, Replayed(1, 7, late.payload)), (a, ReplayEnded(1))])
    assert matched(rig) == ("partial", 0.5, 28)
    rig.abandon()
    rig = make_rig(tmp_path)
    rig.resume()
    ask = rig.feed.asks[-1][1].ask
    rig.ingest.step([(a, Replayed(ask, 7, late.payload)), (a, ReplayEnded(ask))])
    assert matched(rig) == ("partial", 0.5, 28)
    rig.close()


def test_a_restart_may_bring_another_block_size(rig: Any, engine: Any) -> None:
    a = rig.follow("A")
    rig.say(a, engine(1, 4).stored(PROMPT))
    rig.say(a, engine(1, 4).stored(PROMPT))
    rig.sequences[a] = 0
    rig.say(a, engine(1, 8).stored(PROMPT))
    assert matched(rig) == ("live", 1.0, 24)
    assert rig.record(a).block_size == 8


def test_a_restart_keeps_the_registered_block_size(rig: Any, engine: Any) -> None:
    a = rig.follow("A", block_size=4)
    rig.say(a, engine(1, 4).stored(PROMPT))
    rig.sequences[a] = 0
    rig.say(a, engine(1, 8).stored(PROMPT))
    assert rig.record(a).block_size == 4
    assert rig.record(a).counters.skipped == {"block_size": 3}


def test_a_silent_replay_shows_at_once_although_nothing_follows_from_it(rig: Any) -> None:
    a = rig.follow("A", **REPLAY)
    assert rig.record(a).state == "replaying"
    rig.now += 5.1
    rig.ingest.step([])
    record = rig.record(a)
    assert (record.state, record.lost) == ("partial", True)
    assert "silent" in record.reason


def test_a_lost_connection_is_offline_and_scores_nothing(rig: Any, engine: Any) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    rig.ingest.step([(a, Disconnected())])
    assert matched(rig) == ("offline", 0.0, 28)


# bad input


@pytest.mark.parametrize(
    "bad", [b"", b"\xc1", b"garbage", encode([], 1.0, None)[:-1], b"\x93\x01\x02", b"\x81\xa1x\x01"]
)
def test_ev04_a_payload_that_is_no_batch_costs_only_itself(rig: Any, engine: Any, bad: bytes) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT, 0, 3))
    rig.ingest.step([(a, Frame(1, bad))])
    rig.sequences[a] = 2
    rig.say(a, engine().stored(PROMPT, 3))
    record = rig.record(a)
    assert matched(rig) == ("partial", 0.5, 28)
    assert record.counters.skipped == {"payload": 1}
    assert (record.sequence, record.counters.batches) == (2, 3)
    assert rig.ingest.machine(a).gaps == 0


def test_ev04_one_bad_event_costs_only_itself(rig: Any, engine: Any) -> None:
    a = rig.follow("A")
    good = msgspec.msgpack.decode(
        encode([engine().stored(PROMPT, 0, 3), engine().stored(PROMPT, 3)], 1.0, None)
    )
    events = [good[1][0], ["OfTheFuture", 1], {"type": "BlockStored"}, 7, {"no": "type"}, good[1][1]]
    rig.ingest.step([(a, Frame(0, msgspec.msgpack.encode([1.0, events, None])))])
    assert matched(rig) == ("live", 1.0, 28)
    assert rig.record(a).counters.skipped == {"unknown_event": 1, "bad_event": 3}


def test_a_failing_group_applies_nothing_and_says_why(
    rig: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = rig.follow("A"), rig.follow("B")
    rig.say(a, engine().stored(PROMPT, 0, 2))

    def fail(*_: Any) -> None:
        raise MapFullError("full")

    monkeypatch.setattr(Followed, "note_state", fail)
    with pytest.raises(MapFullError):
        rig.ingest.step([rig.frame(b, engine().stored(PROMPT)), rig.frame(a, engine().stored(PROMPT, 2))])
    assert {name: tiers[0] for name, tiers in rig.held(PROMPT).items()} == {"A": 8, "B": 0}
    rig.check()


def test_replays_are_asked_for_only_after_the_commit(
    rig: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an answer could be about a state that the map never had."""
    a = rig.follow("A", **REPLAY)
    rig.ingest.step([(a, ReplayEnded(1))])
    rig.say(a, engine().stored(PROMPT))
    rig.sequences[a] = 5
    seen = []
    monkeypatch.setattr(rig.feed, "ask_replay", lambda *_: seen.append(rig.record(a).state))
    rig.say(a, engine().stored(PROMPT))
    assert seen == ["replaying"]
