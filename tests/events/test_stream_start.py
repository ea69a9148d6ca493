"""What a stream makes of the start time of its engine's process."""

from typing import Any

import pytest

from events.signals import Connected, Disconnected, Frame, Replayed, ReplayEnded
from events.stream import Apply, AskReplay, Reset, Stream, digest_of

STARTED, LATER = 1_700_000_000.0, 1_700_000_500.0


def known(*, replay: bool, started_at: float | None = STARTED, lost: bool = False) -> Stream:
    """A stream that had applied up to sequence 5, on a new connection made at second 10."""
    stream = Stream(has_replay=replay, last=5, digest=digest_of(b"5"), lost=lost, started_at=started_at)
    stream.on(Connected(), 10.0)
    return stream


def applied(actions: list[Any]) -> list[int]:
    return [action.sequence for action in actions if isinstance(action, Apply)]


def resets(actions: list[Any]) -> bool:
    return any(isinstance(action, Reset) for action in actions)


@pytest.mark.parametrize("replay", [True, False])
def test_ev12_another_start_time_is_a_restart_at_once(replay: bool) -> None:
    stream = known(replay=replay)
    actions = stream.process_started(LATER, 11.0)
    assert isinstance(actions[0], Reset)
    assert "start time" in actions[0].reason
    assert (stream.last, stream.started_at, stream.restarts) == (None, LATER, 1)
    assert actions[1:] == ([AskReplay(2, 0)] if replay else [])


def test_ev12_a_live_stream_whose_process_is_another_now_forgets() -> None:
    stream = Stream(has_replay=False)
    stream.on(Connected(), 10.0)
    stream.on(Frame(0, b"0"), 11.0)
    assert stream.process_started(STARTED, 12.0) == []
    assert stream.state == "live"
    assert resets(stream.process_started(LATER, 22.0))


def test_the_same_start_time_makes_a_stream_without_a_replay_endpoint_partial() -> None:
    stream = known(replay=False)
    assert stream.process_started(STARTED, 11.0) == []
    assert (stream.state, stream.last, stream.lost, stream.losses) == ("partial", 5, True, 1)
    assert stream.tick(100.0) == []
    assert stream.state == "partial"


def test_the_very_next_sequence_then_shows_that_nothing_was_missed() -> None:
    stream = known(replay=False)
    stream.process_started(STARTED, 11.0)
    assert applied(stream.on(Frame(6, b"6"), 12.0)) == [6]
    assert (stream.state, stream.lost) == ("live", False)


def test_ev12_the_very_next_sequence_of_another_process_is_believed_until_its_start_time_is_told() -> None:
    stream = known(replay=False)
    assert applied(stream.on(Frame(6, b"of another"), 10.1)) == [6]
    assert stream.state == "live"
    assert resets(stream.process_started(LATER, 10.4, 10.3))
    assert (stream.state, stream.last, stream.started_at) == ("partial", None, LATER)


def test_another_reconnect_meanwhile_loses_nothing_more() -> None:
    stream = known(replay=False)
    stream.process_started(STARTED, 11.0)
    stream.on(Disconnected(), 12.0)
    stream.on(Connected(), 13.0)
    assert applied(stream.on(Frame(6, b"6"), 14.0)) == [6]
    assert (stream.state, stream.lost) == ("live", False)


def test_a_gap_after_the_same_start_time_is_a_loss() -> None:
    stream = known(replay=False)
    stream.process_started(STARTED, 11.0)
    assert applied([*stream.on(Frame(8, b"8"), 12.0), *stream.on(Frame(9, b"9"), 13.0)]) == [8, 9]
    assert (stream.state, stream.lost) == ("partial", True)


def test_what_was_lost_before_stays_lost() -> None:
    stream = known(replay=False, lost=True)
    stream.process_started(STARTED, 11.0)
    assert applied(stream.on(Frame(6, b"6"), 12.0)) == [6]
    assert (stream.state, stream.lost) == ("partial", True)


def test_a_later_sequence_waits_for_the_start_time_and_is_then_a_gap() -> None:
    stream = known(replay=False)
    assert stream.on(Frame(9, b"9"), 10.5) == []
    assert stream.state == "unverified"
    actions = stream.process_started(STARTED, 11.0)
    assert (applied(actions), resets(actions)) == ([9], False)
    assert stream.state == "partial"


def test_a_later_sequence_of_another_process_is_applied_after_the_reset() -> None:
    stream = known(replay=False)
    stream.on(Frame(9, b"9"), 10.5)
    actions = stream.process_started(LATER, 11.0)
    assert isinstance(actions[0], Reset)
    assert applied(actions) == [9]


def test_an_earlier_sequence_is_a_restart_without_waiting() -> None:
    stream = known(replay=False)
    assert resets(stream.on(Frame(2, b"2"), 10.5))


def test_a_start_time_that_never_comes_is_a_restart_at_the_deadline() -> None:
    stream = known(replay=False)
    stream.on(Frame(9, b"9"), 10.5)
    assert stream.tick(39.0) == []
    actions = stream.tick(40.0)
    assert (resets(actions), applied(actions)) == (True, [9])


def test_a_sequence_that_steps_back_after_the_same_start_time_is_a_restart() -> None:
    stream = known(replay=False)
    stream.process_started(STARTED, 11.0)
    assert resets(stream.on(Frame(0, b"another"), 12.0))


def test_ev14_a_truncated_replay_of_the_same_process_makes_it_partial() -> None:
    stream = known(replay=True)
    stream.process_started(STARTED, 10.1)
    assert stream.state == "unverified"
    assert applied(stream.on(Replayed(1, 8, b"8"), 11.0)) == [8]
    stream.on(ReplayEnded(1), 11.1)
    assert (stream.state, stream.last, stream.restarts) == ("partial", 8, 0)


def test_ev14_a_truncated_replay_waits_for_the_start_time() -> None:
    stream = known(replay=True)
    assert stream.on(Replayed(1, 8, b"8"), 10.1) == []
    assert stream.on(ReplayEnded(1), 10.2) == []
    assert stream.on(Frame(9, b"9"), 10.3) == []
    assert stream.process_started(STARTED, 11.0) == [AskReplay(2, 6)]
    assert applied(stream.on(Replayed(2, 8, b"8"), 12.0)) == [8]
    assert applied(stream.on(ReplayEnded(2), 12.1)) == [9]
    assert (stream.state, stream.restarts) == ("partial", 0)


def test_a_truncated_replay_of_another_process_is_a_restart() -> None:
    stream = known(replay=True)
    stream.on(Replayed(1, 8, b"8"), 10.1)
    actions = stream.process_started(LATER, 11.0)
    assert isinstance(actions[0], Reset)
    assert actions[1:] == [AskReplay(2, 0)]


def test_a_truncated_replay_is_a_restart_when_no_start_time_was_ever_known() -> None:
    stream = known(replay=True, started_at=None)
    assert resets(stream.on(Replayed(1, 8, b"8"), 10.1))


def test_a_truncated_replay_is_a_restart_when_the_start_time_does_not_come() -> None:
    stream = known(replay=True)
    stream.on(Replayed(1, 8, b"8"), 10.1)
    assert resets(stream.tick(40.0))


def test_the_digest_is_believed_over_the_start_time() -> None:
    stream = known(replay=True)
    stream.process_started(STARTED, 10.1)
    assert resets(stream.on(Replayed(1, 5, b"another"), 11.0))


def test_a_silent_replay_endpoint_of_the_same_process_leaves_the_stream_partial() -> None:
    stream = known(replay=True)
    stream.process_started(STARTED, 10.1)
    stream.tick(15.0)
    assert not resets([*stream.tick(40.0), *stream.tick(40.0)])
    assert (stream.state, stream.last) == ("partial", 5)


def test_a_stream_that_is_not_proven_does_not_take_up_a_start_time() -> None:
    stream = known(replay=False, started_at=None)
    stream.process_started(STARTED, 11.0)
    assert stream.started_at is None
    assert stream.process_started(STARTED, 12.0) == []
    assert stream.state == "unverified"


def test_an_answer_to_a_question_from_before_the_connection_says_nothing() -> None:
    stream = known(replay=False)
    assert stream.process_started(STARTED, 11.0, asked=9.0) == []
    assert stream.state == "unverified"


def test_an_answer_to_a_question_from_before_a_restart_is_not_taken_up() -> None:
    stream = known(replay=False)
    stream.on(Frame(2, b"2"), 12.0)
    stream.process_started(STARTED, 12.5, asked=11.0)
    assert stream.started_at is None


def test_nothing_is_concluded_without_a_connection() -> None:
    stream = known(replay=False)
    stream.on(Disconnected(), 11.0)
    assert stream.process_started(LATER, 12.0) == []
    assert (stream.state, stream.last) == ("offline", 5)


def test_start_times_that_go_back_are_of_several_processes_and_prove_nothing() -> None:
    stream = known(replay=False)
    assert stream.process_started(STARTED - 60, 11.0) == []
    assert stream.process_started(STARTED, 12.0) == []
    assert (stream.state, stream.started_at) == ("unverified", None)
