"""Each rule of the stream, one by one. ``Wire`` plays the engine's part; the clock is a number."""

from collections.abc import Iterable
from typing import Any

import pytest

from events.signals import Connected, Disconnected, Frame, Overflowed, Replayed, ReplayEnded, Signal
from events.stream import Action, Apply, AskReplay, Limits, Reset, Stream, digest_of

LIMITS = Limits()


def payload_of(sequence: int, process: str = "a") -> bytes:
    return f"{process}{sequence}".encode()


class Wire:
    """A stream, what it did, and the clock."""

    def __init__(self, has_replay: bool = True, **known: Any) -> None:
        self.stream = Stream(has_replay=has_replay, **known)
        self.now = 100.0
        self.done: list[Action] = []

    def hears(self, *signals: Signal) -> list[Action]:
        actions = [action for signal in signals for action in self.stream.on(signal, self.now)]
        self.done += actions
        return actions

    def live(self, *sequences: int, process: str = "a") -> list[Action]:
        return self.hears(*[Frame(number, payload_of(number, process)) for number in sequences])

    def replay(self, *sequences: int, process: str = "a", ends: bool = True) -> list[Action]:
        """Answers the last request."""
        ask = self.asks[-1].ask
        actions = self.hears(*[Replayed(ask, each, payload_of(each, process)) for each in sequences])
        return actions + (self.hears(ReplayEnded(ask)) if ends else [])

    def waits(self, seconds: float) -> list[Action]:
        self.now += seconds
        actions = self.stream.tick(self.now)
        self.done += actions
        return actions

    @property
    def asks(self) -> list[AskReplay]:
        return [action for action in self.done if isinstance(action, AskReplay)]

    @property
    def holds(self) -> list[str]:
        """The payloads applied since the last reset."""
        held: list[str] = []
        for action in self.done:
            if isinstance(action, Reset):
                held = []
            if isinstance(action, Apply):
                held.append(action.payload.decode())
        return held

    @property
    def resets(self) -> list[str]:
        return [action.reason for action in self.done if isinstance(action, Reset)]

    @property
    def state(self) -> str:
        return self.stream.state


def names(sequences: Iterable[int], process: str = "a") -> list[str]:
    return [payload_of(number, process).decode() for number in sequences]


def live_at(last: int, has_replay: bool = True) -> Wire:
    """A stream that has followed process ``a`` from its first batch."""
    wire = Wire(has_replay)
    wire.hears(Connected())
    if has_replay:
        wire.replay()
    wire.live(*range(last + 1))
    assert wire.state == "live"
    return wire


# the beginning


def test_a_new_stream_waits_for_its_connection() -> None:
    assert Wire().state == "connecting"
    assert Wire().waits(1_000) == []


def test_a_new_stream_asks_for_everything_once_connected() -> None:
    wire = Wire()
    assert wire.hears(Connected()) == [AskReplay(1, 0)]
    assert wire.state == "replaying"
    wire.replay(0, 1, 2)
    assert wire.state == "live"
    assert wire.holds == names(range(3))


def test_ev09_a_cold_start_at_sequence_700_asks_from_zero_and_applies_nothing_before() -> None:
    wire = Wire()
    wire.hears(Connected())
    wire.live(700, 701)
    assert wire.asks == [AskReplay(1, 0)]
    assert wire.holds == []
    wire.replay(*range(702))
    assert wire.holds == names(range(702))
    assert wire.state == "live"


def test_ev09_a_cold_start_at_sequence_700_without_replay_is_partial() -> None:
    wire = Wire(has_replay=False)
    assert wire.hears(Connected()) == []
    assert wire.state == "partial"
    wire.live(700, 701)
    assert wire.state == "partial"
    assert wire.stream.gaps == 1
    assert wire.holds == names([700, 701])


def test_without_replay_a_first_sequence_of_zero_is_the_whole_history() -> None:
    wire = Wire(has_replay=False)
    wire.hears(Connected())
    wire.live(0, 1)
    assert wire.state == "live"
    assert wire.holds == names([0, 1])


def test_live_frames_wait_while_the_first_replay_is_outstanding() -> None:
    wire = Wire()
    wire.hears(Connected())
    assert wire.live(2, 3) == []
    assert wire.stream.held == 2
    wire.replay(0, 1, 2)
    assert wire.holds == names(range(4))
    assert wire.stream.held == 0
    assert wire.stream.duplicates == 1


def test_an_engine_that_has_said_nothing_is_live_with_nothing() -> None:
    wire = Wire()
    wire.hears(Connected())
    wire.replay()
    assert wire.state == "live"
    assert wire.stream.last is None
    assert wire.live(0) == [Apply(0, b"a0")]


# order


def test_frames_in_order_are_applied_and_digested() -> None:
    wire = live_at(2)
    assert wire.live(3) == [Apply(3, b"a3")]
    assert wire.stream.last == 3
    assert wire.stream.digest == digest_of(b"a3")


def test_the_same_frame_again_is_a_duplicate() -> None:
    wire = live_at(2)
    assert wire.live(2) == []
    assert wire.stream.duplicates == 1
    assert wire.resets == []


def test_ev09_a_gap_is_asked_for_from_the_first_missing_sequence() -> None:
    wire = live_at(2)
    assert wire.live(5) == [AskReplay(2, 3)]
    assert wire.state == "replaying"
    assert wire.stream.gaps == 1
    wire.live(6)
    wire.replay(3, 4, 5)
    assert wire.holds == names(range(7))
    assert wire.state == "live"


def test_ev09_a_gap_without_replay_is_partial_for_good() -> None:
    wire = live_at(2, has_replay=False)
    assert wire.live(5) == [Apply(5, b"a5")]
    wire.live(*range(6, 100))
    assert wire.state == "partial"
    assert "3 to 4" in wire.stream.reason
    assert wire.stream.lost
    assert wire.stream.gaps == 1


def test_ev11_one_gap_is_one_recovery_and_keeps_what_was_before_it() -> None:
    wire = live_at(2)
    wire.live(5)
    wire.replay(3, 4)
    wire.live(*range(6, 1_006))
    assert len(wire.asks) == 2
    assert wire.resets == []
    assert wire.holds == names(range(1_006))
    assert wire.state == "live"


def test_ev09_no_cool_down_follows_a_replay_that_went_well() -> None:
    wire = live_at(2)
    wire.live(5)
    wire.replay(3, 4)
    assert wire.live(8) == [AskReplay(3, 6)]


# replay


def test_ev08_a_replay_that_begins_earlier_than_asked_repeats_nothing() -> None:
    wire = live_at(5)
    wire.live(8)
    wire.replay(*range(8))
    assert wire.holds == names(range(9))
    assert wire.stream.duplicates == 6
    assert wire.state == "live"


def test_ev08_an_end_marker_that_never_comes_is_waited_for_within_bounds() -> None:
    wire = live_at(2)
    wire.live(8)
    wire.replay(3, 4, ends=False)
    wire.waits(LIMITS.replay_silence - 0.1)
    assert wire.state == "replaying"
    wire.waits(0.1)
    assert wire.state == "partial"
    assert wire.holds == names([0, 1, 2, 3, 4, 8])
    assert wire.stream.replays_failed == 1


def test_a_slow_replay_is_not_a_silent_one() -> None:
    wire = live_at(2)
    wire.live(20)
    for sequence in range(3, 20):
        assert wire.waits(LIMITS.replay_silence - 0.1) == []
        wire.replay(sequence, ends=False)
    wire.replay()
    assert wire.state == "live"
    assert wire.holds == names(range(21))


def test_answers_to_an_earlier_request_are_ignored() -> None:
    wire = live_at(2)
    wire.live(5)
    old = wire.asks[-1].ask
    wire.hears(Disconnected(), Connected())
    assert wire.hears(Replayed(old, 3, b"a3"), ReplayEnded(old)) == []
    assert wire.state == "unverified"


def test_an_answer_without_a_request_is_ignored() -> None:
    assert live_at(2).hears(Replayed(1, 3, b"a3"), ReplayEnded(1)) == []


def test_a_hole_in_a_replay_is_asked_for_again() -> None:
    wire = live_at(2)
    wire.live(8)
    assert wire.replay(3, 4, 6, 7, ends=False)[-1] == AskReplay(3, 5)
    wire.replay(5, 6, 7)
    assert wire.holds == names(range(9))
    assert wire.state == "live"


def test_a_hole_that_stays_is_given_up_as_lost() -> None:
    wire = live_at(2)
    wire.live(8)
    wire.replay(3, 4, 6, ends=False)
    wire.replay(6, 7)
    assert wire.state == "partial"
    assert wire.holds == names([0, 1, 2, 3, 4, 6, 7, 8])


def test_ev14_a_replay_that_no_longer_reaches_back_leaves_the_stream_partial() -> None:
    wire = live_at(2)
    wire.live(8)
    wire.replay(6, 7, 8)
    assert wire.state == "partial"
    assert "3 to 5" in wire.stream.reason
    assert wire.holds == names([0, 1, 2, 6, 7, 8])
    assert wire.resets == []


def test_ev14_a_first_replay_that_no_longer_reaches_back_leaves_the_stream_partial() -> None:
    wire = Wire()
    wire.hears(Connected())
    wire.replay(6, 7)
    assert wire.state == "partial"
    assert wire.holds == names([6, 7])


def test_ev14_a_cleared_cache_makes_a_partial_stream_whole() -> None:
    wire = live_at(2)
    wire.live(8)
    wire.replay(6, 7, 8)
    wire.live(9)
    wire.stream.cleared(9)
    assert wire.state == "live"
    assert not wire.stream.lost


def test_a_clear_in_the_middle_of_a_replay_makes_it_whole_when_it_ends() -> None:
    wire = Wire()
    wire.hears(Connected())
    wire.replay(6, 7, ends=False)
    wire.stream.cleared(7)
    assert wire.state == "replaying"
    wire.replay()
    assert wire.state == "live"


def test_a_clear_before_a_hole_does_not_hide_it() -> None:
    wire = live_at(2)
    wire.live(4)
    wire.live(6)
    wire.replay(3, ends=False)
    actions = wire.waits(LIMITS.replay_silence)
    assert actions == [Apply(4, b"a4"), Apply(6, b"a6")]
    wire.stream.cleared(4)
    assert wire.state == "partial"
    wire.stream.cleared(6)
    assert wire.state == "live"


def test_ev11_a_gap_that_no_replay_fills_is_asked_for_a_few_times_only() -> None:
    wire = live_at(2)
    wire.live(5)
    for _ in range(20):
        wire.replay()
    assert len(wire.asks) <= 2 + LIMITS.replay_holes
    assert wire.state == "partial"
    assert wire.holds == names([0, 1, 2, 5])


def test_ev11_what_came_behind_a_gap_that_no_replay_fills_keeps_its_order() -> None:
    wire = live_at(2)
    wire.live(5, 6, 7)
    for _ in range(20):
        wire.replay()
    assert wire.holds == names([0, 1, 2, 5, 6, 7])


# silence and cool-down


def silent_at(last: int) -> Wire:
    """A stream whose replay endpoint did not answer for one gap, [last + 1]."""
    wire = live_at(last)
    wire.live(last + 2)
    wire.waits(LIMITS.replay_silence)
    assert wire.state == "partial"
    return wire


def test_a_silent_replay_is_given_up_and_the_held_frames_are_applied() -> None:
    wire = live_at(2)
    wire.live(5, 6)
    assert wire.waits(LIMITS.replay_silence) == [Apply(5, b"a5"), Apply(6, b"a6")]
    assert wire.state == "partial"
    assert "silent" in wire.stream.reason or "lost" in wire.stream.reason


def test_ev09_the_cool_down_after_a_failed_replay_holds_back_further_requests() -> None:
    wire = silent_at(2)
    assert wire.live(9) == [Apply(9, b"a9")]
    assert len(wire.asks) == 2
    assert wire.waits(LIMITS.cool_down - 0.1) == []
    assert wire.waits(0.1) == [AskReplay(3, 0)]


def test_ev14_after_the_cool_down_everything_is_rebuilt_from_a_full_replay() -> None:
    wire = silent_at(2)
    wire.waits(LIMITS.cool_down)
    wire.live(5)
    assert wire.state == "partial"
    wire.replay(*range(6))
    assert wire.resets == ["rebuilt from a full replay"]
    assert wire.holds == names(range(6))
    assert wire.state == "live"


def test_a_rebuild_that_does_not_reach_back_changes_nothing() -> None:
    wire = silent_at(2)
    wire.waits(LIMITS.cool_down)
    wire.live(5)
    wire.replay(3, 4, 5)
    assert wire.resets == []
    assert wire.state == "partial"
    assert wire.holds == names([0, 1, 2, 4, 5])
    assert wire.stream.held == 0


@pytest.mark.parametrize("replies", [[0, 1, 2], [0, 1, 2, 4]], ids=["breaks off", "has a hole"])
def test_ev11_a_rebuild_takes_nothing_away_before_it_is_whole(replies: list[int]) -> None:
    wire = silent_at(2)
    wire.waits(LIMITS.cool_down)
    wire.live(5)
    wire.replay(*replies, ends=False)
    wire.waits(LIMITS.replay_silence)
    assert wire.resets == []
    assert wire.state == "partial"
    assert wire.holds == names([0, 1, 2, 4, 5])


def test_a_rebuild_larger_than_may_be_held_is_given_up() -> None:
    wire = silent_at(2)
    wire.waits(LIMITS.cool_down)
    wire.replay(*range(LIMITS.held_frames + 1))
    assert wire.resets == []
    assert wire.state == "partial"


def test_an_endpoint_that_stays_silent_is_asked_less_and_less_often_and_for_ever() -> None:
    wire = silent_at(2)
    waited = []
    for _ in range(2_000):
        since = wire.now
        while not wire.waits(1.0):
            assert wire.now - since <= LIMITS.cool_down_max
        waited.append(wire.now - since)
        wire.waits(LIMITS.replay_silence)
    assert waited[:4] == [5, 10, 20, 40]
    assert set(waited[7:]) == {LIMITS.cool_down_max}
    assert wire.resets == []


def test_op10_a_replay_that_breaks_off_again_and_again_is_not_fetched_for_ever() -> None:
    wire = live_at(2)
    wire.live(9)
    wire.replay(3, ends=False)
    for _ in range(100):
        asked = len(wire.asks)
        wire.waits(LIMITS.cool_down_max)
        if len(wire.asks) > asked:
            wire.replay(0, 1, 2, 3, ends=False)
    assert len(wire.asks) <= 2 + LIMITS.replay_holes
    assert len(wire.resets) < LIMITS.replay_holes
    assert wire.state == "partial"


def test_a_first_replay_that_is_silent_is_asked_again_and_makes_the_stream_live() -> None:
    wire = Wire()
    wire.hears(Connected())
    wire.waits(LIMITS.replay_silence)
    assert wire.state == "partial"
    assert wire.waits(LIMITS.cool_down) == [AskReplay(2, 0)]
    wire.replay(0, 1)
    assert wire.state == "live"
    assert not wire.stream.lost


# a gap that was a restart


def overtaken(process: str) -> Wire:
    """Sequences 4 to 8 were not heard; the replay that fills the gap is of ``process``."""
    wire = live_at(3)
    wire.live(9, process=process)
    wire.replay(*range(4, 10), process=process)
    assert wire.state == "live"
    assert wire.waits(LIMITS.confirm_after - 1) == []
    return wire


def test_ev12_a_restart_that_nobody_saw_and_that_looks_like_a_gap_is_found_by_the_batch_before_it() -> None:
    wire = overtaken("b")
    assert wire.waits(1) == [AskReplay(3, 3)]
    wire.live(10, process="b")
    assert wire.holds[-1] == "b10", "nothing is held up meanwhile"
    wire.replay(3, process="b", ends=False)
    assert wire.resets == ["another batch has sequence 3 now"]
    wire.replay(*range(11), process="b")
    assert wire.holds == names(range(11), "b")
    assert wire.state == "live"


def test_ev12_a_gap_that_was_one_is_confirmed_once_and_changes_nothing() -> None:
    wire = overtaken("a")
    assert wire.waits(1) == [AskReplay(3, 3)]
    wire.replay(2, 3, 4, 5)
    assert (wire.resets, wire.state) == ([], "live")
    assert wire.waits(1_000) == []
    assert wire.holds == names(range(10))


def test_ev12_a_confirmation_that_cannot_be_had_changes_nothing() -> None:
    for answers in ((), (5, 6)):
        wire = overtaken("a")
        wire.waits(1)
        wire.replay(*answers, ends=bool(answers))
        assert wire.waits(LIMITS.replay_silence) == []
        assert wire.waits(1_000) == []
        assert (wire.resets, wire.state) == ([], "live")


def test_ev12_another_gap_before_the_confirmation_keeps_the_first_batch_to_be_asked_for() -> None:
    wire = overtaken("b")
    wire.waits(1)
    wire.live(20, process="b")
    late = Replayed(3, 3, payload_of(3, "b"))
    assert wire.hears(late) == [], "the answer to a request that was replaced"
    wire.replay(*range(10, 20), process="b")
    assert wire.waits(LIMITS.confirm_after) == [AskReplay(5, 3)]
    wire.replay(3, process="b", ends=False)
    assert len(wire.resets) == 1


def test_ev12_a_connection_lost_before_the_confirmation_is_proven_as_any() -> None:
    wire = overtaken("a")
    wire.hears(Disconnected())
    assert wire.waits(100) == []
    wire.hears(Connected())
    wire.replay(9)
    assert wire.waits(1_000) == []
    assert wire.state == "live"


# away


def test_pe01_what_could_not_be_proven_by_a_deadline_is_forgotten() -> None:
    wire = Wire(last=5, digest=digest_of(b"5"))
    assert wire.waits(0.0) == []
    assert wire.waits(LIMITS.away - 1) == []
    assert wire.state == "unverified"
    (reset,) = wire.waits(1.0)
    assert isinstance(reset, Reset)
    assert wire.state == "offline"
    assert wire.waits(10 * LIMITS.away) == [], "once"
    assert wire.hears(Connected()) == [AskReplay(1, 0)]
    wire.replay(0, 1)
    assert wire.state == "live"


def test_pe01_time_away_counts_from_the_loss_and_a_connection_ends_it() -> None:
    wire = live_at(3)
    wire.waits(10 * LIMITS.away)
    assert wire.resets == []
    for _ in range(3):
        wire.hears(Disconnected())
        wire.waits(0.0)
        assert wire.waits(LIMITS.away - 1) == []
        wire.hears(Connected())
        wire.replay(3)
        assert wire.state == "live"
    wire.hears(Disconnected())
    wire.waits(0.0)
    assert len(wire.waits(LIMITS.away)) == 1
    assert wire.stream.last is None


# held frames, overflow


def test_held_frames_are_bounded_in_number_and_what_was_dropped_is_asked_for() -> None:
    wire = Wire(limits=Limits(held_frames=3))
    wire.hears(Connected())
    wire.live(*range(1, 9))
    assert wire.stream.held == 3
    assert wire.replay(0)[-1] == AskReplay(2, 4)
    wire.replay(*range(4, 9))
    assert wire.holds == names(range(9))
    assert wire.state == "live"


def test_held_frames_are_bounded_in_bytes() -> None:
    wire = Wire(limits=Limits(held_bytes=100))
    wire.hears(Connected())
    wire.hears(*[Frame(number, bytes(40)) for number in range(10)])
    assert wire.stream.held == 2


def test_frames_dropped_while_the_engine_proved_to_be_another_are_asked_for() -> None:
    wire = live_at(5)
    wire = Wire(last=5, digest=digest_of(b"a5"), limits=Limits(held_frames=2))
    wire.hears(Connected())
    wire.live(0, 1, 2, process="b")
    actions = wire.replay()
    assert actions[0] == Reset("the engine knows no sequence 5")
    assert wire.state != "live"
    wire.replay(2, process="b")
    assert wire.holds == names(range(3), "b")
    assert wire.state == "live"


def test_op06_an_overflow_is_a_gap_that_is_asked_for_at_once() -> None:
    wire = live_at(2)
    assert wire.hears(Overflowed()) == [AskReplay(2, 3)]
    wire.live(9)
    wire.replay(*range(3, 10))
    assert wire.holds == names(range(10))
    assert wire.state == "live"


def test_op06_an_overflow_during_a_replay_is_asked_for_after_it() -> None:
    wire = live_at(2)
    wire.live(5)
    assert wire.hears(Overflowed()) == []
    assert wire.replay(3, 4)[-1] == AskReplay(3, 6)
    assert wire.state == "replaying"


def test_op06_an_overflow_during_a_replay_that_falls_silent_is_not_forgotten() -> None:
    wire = live_at(2)
    wire.live(4)
    wire.hears(Overflowed())
    wire.waits(LIMITS.replay_silence)
    wire.stream.cleared(4)
    assert wire.state == "partial"


def test_op06_an_overflow_without_replay_is_a_loss() -> None:
    wire = live_at(2, has_replay=False)
    assert wire.hears(Overflowed()) == []
    assert wire.state == "partial"
    assert wire.stream.lost


def test_op06_overflows_in_a_cool_down_ask_for_nothing() -> None:
    wire = silent_at(2)
    assert wire.hears(Overflowed(), Overflowed()) == []
    assert wire.state == "partial"


def test_an_overflow_while_offline_is_left_to_the_proof_after_the_connect() -> None:
    wire = live_at(2)
    wire.hears(Disconnected())
    assert wire.hears(Overflowed()) == []
    assert wire.hears(Connected()) == [AskReplay(2, 2)]
    assert wire.replay(2) == []
    assert wire.state == "live"


# connection


def test_a_lost_connection_is_offline_and_asks_for_nothing() -> None:
    wire = live_at(2)
    wire.live(5)
    assert wire.hears(Disconnected()) == []
    assert wire.state == "offline"
    assert wire.stream.held == 0
    assert wire.waits(1_000) == []
    assert wire.holds == names(range(3))


def test_what_the_old_connection_still_held_is_left_to_the_next() -> None:
    wire = live_at(2)
    wire.hears(Disconnected())
    assert wire.live(3, 9, 0) == []
    assert wire.state == "offline"
    wire.hears(Connected())
    wire.replay(2, 3)
    assert wire.holds == names(range(4))


def test_an_engine_that_went_on_is_proven_by_the_last_batch_and_nothing_is_dropped() -> None:
    wire = live_at(2)
    wire.hears(Disconnected())
    assert wire.hears(Connected()) == [AskReplay(2, 2)]
    assert wire.state == "unverified"
    wire.live(5)
    wire.replay(2, 3, 4)
    assert wire.state == "live"
    assert wire.resets == []
    assert wire.holds == names(range(6))


def test_an_idle_engine_is_proven_by_the_last_batch_alone() -> None:
    wire = live_at(2)
    wire.hears(Disconnected(), Connected())
    wire.replay(2)
    assert wire.state == "live"
    assert wire.resets == []


def test_a_persisted_stream_is_unverified_until_it_is_proven() -> None:
    wire = Wire(last=7, digest=digest_of(b"a7"))
    assert wire.state == "unverified"
    assert wire.hears(Connected()) == [AskReplay(1, 7)]
    wire.replay(7, 8)
    assert wire.state == "live"
    assert wire.holds == ["a8"]


def test_a_persisted_loss_is_still_a_loss_after_the_proof() -> None:
    wire = Wire(last=7, digest=digest_of(b"a7"), lost=True)
    wire.hears(Connected())
    wire.replay(7)
    assert wire.state == "partial"
    wire.live(8)
    wire.stream.cleared(8)
    assert wire.state == "live"


# EV-12: restarts


def test_ev12_a_sequence_that_goes_back_to_zero_drops_what_was_held_first() -> None:
    for has_replay in (True, False):
        wire = live_at(500, has_replay)
        first, second = wire.live(0, process="b")
        assert isinstance(first, Reset)
        assert second == Apply(0, b"b0")
        assert wire.state == "live"
        assert wire.stream.restarts == 1
        assert wire.live(1, process="b") == [Apply(1, b"b1")]


def test_ev12_a_restart_whose_first_frames_were_lost_is_replayed_from_zero() -> None:
    wire = live_at(500)
    reset, ask = wire.live(3, process="b")
    assert isinstance(reset, Reset)
    assert ask == AskReplay(2, 0)
    wire.replay(0, 1, 2, 3, process="b")
    assert wire.holds == names(range(4), "b")
    assert wire.state == "live"


def test_ev12_a_restart_whose_first_frames_were_lost_is_partial_without_replay() -> None:
    wire = live_at(500, has_replay=False)
    wire.live(3, process="b")
    assert wire.holds == ["b3"]
    assert wire.state == "partial"


def test_ev12_another_batch_under_the_last_sequence_is_a_restart() -> None:
    wire = live_at(5)
    wire.live(5, process="b")
    assert wire.holds == []
    wire.replay(*range(6), process="b")
    assert wire.holds == names(range(6), "b")


def test_ev12_a_restart_that_overtook_the_old_sequence_while_offline_is_found_by_the_digest() -> None:
    wire = live_at(5)
    wire.hears(Disconnected(), Connected())
    wire.live(10, process="b")
    reset, ask = wire.replay(*range(5, 11), process="b")
    assert reset == Reset("another batch has sequence 5 now")
    assert ask == AskReplay(3, 0)
    assert wire.holds == []
    wire.replay(*range(11), process="b")
    assert wire.holds == names(range(11), "b")
    assert wire.state == "live"


def test_ev12_a_restart_that_is_silent_is_found_by_the_end_marker_alone() -> None:
    wire = live_at(5)
    wire.hears(Disconnected(), Connected())
    assert wire.replay() == [Reset("the engine knows no sequence 5"), AskReplay(3, 0)]
    wire.replay()
    assert wire.holds == []
    assert wire.state == "live"


def test_ev12_a_replay_that_begins_after_the_last_sequence_proves_nothing() -> None:
    wire = live_at(5)
    wire.hears(Disconnected(), Connected())
    actions = wire.replay(8, 9, process="b")
    assert isinstance(actions[0], Reset)
    assert wire.holds == []


def test_ev12_a_new_process_seen_live_before_its_replay_starts_at_once() -> None:
    wire = live_at(5)
    wire.hears(Disconnected(), Connected())
    assert wire.live(0, 1, process="b") == []
    actions = wire.replay()
    assert isinstance(actions[0], Reset)
    assert wire.holds == names([0, 1], "b")
    assert wire.state == "live"
    assert len(wire.asks) == 2


def test_ev12_without_replay_only_the_very_next_sequence_proves_that_the_engine_went_on() -> None:
    wire = live_at(5, has_replay=False)
    wire.hears(Disconnected(), Connected())
    assert wire.state == "unverified"
    assert wire.live(6) == [Apply(6, b"a6")]
    assert wire.state == "live"
    assert wire.resets == []


@pytest.mark.parametrize("sequence", [0, 3, 5, 7, 500])
def test_ev12_without_replay_any_other_sequence_after_a_reconnect_is_a_restart(sequence: int) -> None:
    wire = live_at(5, has_replay=False)
    wire.hears(Disconnected(), Connected())
    wire.live(sequence, process="b")
    assert len(wire.resets) == 1
    assert wire.holds == names([sequence], "b")
    assert wire.state == ("live" if sequence == 0 else "partial")


def test_ev12_without_replay_the_next_sequence_after_an_overflow_proves_nothing() -> None:
    wire = live_at(5, has_replay=False)
    wire.hears(Disconnected(), Connected(), Overflowed())
    wire.live(6, process="b")
    assert len(wire.resets) == 1
    assert wire.state == "partial"


@pytest.mark.parametrize("has_replay", [True, False])
def test_what_cannot_be_proven_by_the_deadline_is_dropped(has_replay: bool) -> None:
    wire = live_at(5, has_replay)
    wire.hears(Disconnected(), Connected())
    spent = 0.0
    while not wire.resets:
        wire.waits(0.5)
        spent += 0.5
        assert wire.state == "unverified" or wire.resets
    assert LIMITS.verify_deadline <= spent <= LIMITS.verify_deadline + 1
    assert wire.holds == []


def test_a_proof_that_is_silent_at_first_is_asked_again_and_drops_nothing() -> None:
    wire = live_at(5)
    wire.hears(Disconnected(), Connected())
    wire.waits(LIMITS.replay_silence)
    assert wire.state == "unverified"
    wire.live(6)
    assert wire.waits(LIMITS.cool_down) == [AskReplay(3, 5)]
    wire.replay(5, 6)
    assert wire.state == "live"
    assert wire.resets == []
    assert wire.holds == names(range(7))


# damage


def test_a_damaged_batch_makes_a_live_stream_partial_and_is_not_fetched_again() -> None:
    wire = live_at(5)
    wire.stream.damaged("unreadable")
    assert wire.state == "partial"
    assert wire.stream.reason == "unreadable"
    wire.live(6, 7)
    assert wire.waits(1_000) == []
    assert wire.state == "partial"


def test_damage_during_a_replay_shows_when_it_ends() -> None:
    wire = Wire()
    wire.hears(Connected())
    wire.replay(0, 1, ends=False)
    wire.stream.damaged("unreadable")
    wire.replay(2)
    assert wire.state == "partial"


def test_a_restart_forgets_the_losses_of_the_process_before() -> None:
    wire = live_at(5)
    wire.live(9)
    wire.waits(LIMITS.replay_silence)
    assert wire.stream.lost
    wire.live(0, process="b")
    assert wire.state == "live"
    wire.stream.damaged("unreadable")
    wire.live(1, process="b")
    wire.stream.cleared(1)
    assert wire.state == "live"


# what must not stay behind


def test_frames_held_of_the_old_process_are_not_applied_to_the_new() -> None:
    wire = live_at(2)
    wire.live(8, 9)
    wire.live(0, process="b")
    assert wire.holds == ["b0"]
    assert wire.stream.held == 0
    assert wire.state == "live"


def test_a_restart_ends_the_cool_down_of_the_process_before() -> None:
    wire = silent_at(2)
    wire.live(0, process="b")
    assert wire.waits(1_000) == []
    assert wire.live(3, process="b") == [AskReplay(3, 1)]


def test_a_connection_ends_the_cool_down_of_the_one_before() -> None:
    wire = silent_at(2)
    wire.hears(Disconnected())
    assert wire.waits(1_000) == []
    wire.hears(Connected())
    wire.replay(4)
    assert wire.live(7) == [AskReplay(4, 5)]
    wire.waits(LIMITS.replay_silence)
    assert wire.waits(LIMITS.cool_down) == [AskReplay(5, 0)]


def test_a_connection_gives_a_replay_that_broke_off_new_tries() -> None:
    wire = live_at(2)
    wire.live(9)
    wire.replay(3, ends=False)
    for _ in range(LIMITS.replay_holes):
        wire.waits(LIMITS.replay_silence)
        if wire.waits(LIMITS.cool_down_max):
            wire.replay(0, 1, ends=False)
    assert wire.waits(10_000) == []
    wire.hears(Disconnected(), Connected())
    wire.replay(9, ends=False)
    wire.waits(LIMITS.replay_silence)
    assert wire.waits(LIMITS.cool_down) == [AskReplay(wire.asks[-1].ask, 0)]


def test_a_replay_that_went_well_ends_the_series_of_failures() -> None:
    wire = silent_at(2)
    wire.waits(LIMITS.cool_down)
    wire.replay(0, 1, 2, 3, 4)
    wire.live(9)
    wire.waits(LIMITS.replay_silence)
    assert wire.waits(LIMITS.cool_down) == [AskReplay(wire.asks[-1].ask, 0)]


def test_a_silent_restart_leaves_neither_loss_nor_digest() -> None:
    wire = live_at(2)
    wire.live(8)
    wire.replay(8)
    wire.hears(Disconnected(), Connected())
    wire.replay()
    assert wire.stream.last is None
    assert wire.stream.digest is None
    wire.replay()
    assert wire.state == "live"
    assert not wire.stream.lost


def test_a_new_start_after_a_silent_one_forgets_its_loss() -> None:
    wire = Wire()
    wire.hears(Connected())
    wire.waits(LIMITS.replay_silence)
    assert wire.stream.lost
    wire.hears(Disconnected(), Connected())
    wire.replay()
    assert wire.state == "live"


def test_what_is_dropped_at_the_deadline_without_replay_leaves_the_stream_partial() -> None:
    wire = live_at(2, has_replay=False)
    wire.hears(Disconnected(), Connected())
    wire.waits(LIMITS.verify_deadline)
    assert wire.state == "partial"
    assert wire.waits(1_000) == []
    assert wire.live(7) == [Apply(7, b"a7")]


def test_the_bytes_of_held_frames_are_free_again_when_they_are_applied_or_dropped() -> None:
    wire = Wire(limits=Limits(held_bytes=10))
    for _ in range(3):
        wire.hears(Connected())
        wire.live(*range(1, 6))
        assert wire.stream.held == 5
    wire.replay(0)
    assert wire.stream.held == 0
    wire.live(*range(7, 12))
    assert wire.stream.held == 4
    wire.waits(LIMITS.replay_silence)
    assert wire.stream.held == 0


def test_a_hole_behind_the_proof_is_asked_for_again() -> None:
    wire = live_at(2)
    wire.hears(Disconnected(), Connected())
    assert wire.replay(2, ends=False) == []
    assert wire.state == "replaying"
    assert wire.replay(4, ends=False) == [AskReplay(3, 3)]


def test_ev11_a_replay_that_loses_every_second_reply_is_asked_a_few_times_only() -> None:
    wire = live_at(0)
    wire.live(40)
    for sequence in range(1, 39, 2):
        wire.replay(sequence, sequence + 2, ends=False)
    wire.replay(39)
    assert len(wire.asks) <= 2 + LIMITS.replay_holes
    assert wire.state == "partial"
    wire.live(50)
    wire.replay(41, 43, ends=False)
    assert wire.asks[-1].start == 42


def test_a_clock_that_ticks_without_need_does_nothing() -> None:
    for wire in (live_at(2), live_at(2, has_replay=False)):
        state = wire.state
        assert [wire.waits(100) for _ in range(100)] == [[]] * 100
        assert wire.state == state
