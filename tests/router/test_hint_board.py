"""Hints that the workers of one router tell each other."""

from __future__ import annotations

import os
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.reader import Matched
from router.chooser import Chooser, Subject
from router.hint_board import MOST_MARKS, NOTES, HintBoard, Note, SharedHints
from router.hints import LINGER_S, Hint, Hints
from router.load import Load
from router.policies import POLICIES
from router.replicas import StreamId

A, B = ("a", 0), ("b/c", 1)


def marks(name: str, count: int = 3) -> tuple[bytes, ...]:
    return tuple(f"{name:0>4}{number:04d}".encode() for number in range(count))


def tell(hints: SharedHints, stream: StreamId, said: tuple[bytes, ...]) -> Hint:
    hint = hints.add(stream, said, now=1.0, predicted_s=1.0)
    return hints.tell(hint, stream, said, now=1.0, predicted_s=1.0)


def test_what_one_worker_has_sent_is_soon_cached_for_all() -> None:
    board = HintBoard(3)
    one, two, three = (SharedHints(board, number) for number in range(3))
    tell(one, A, marks("x"))
    tell(two, B, marks("x")[:1])
    for each in (one, two, three):
        assert each.soon(marks("x"), now=1.5) == {A: 3, B: 1}
        assert len(each) == 4
        assert each.soon(marks("x"), now=2.0 + LINGER_S) == {}


def test_ix12_a_hint_dies_in_all_workers_with_its_request() -> None:
    board = HintBoard(2)
    one, two = SharedHints(board, 0), SharedHints(board, 1)
    first, _ = (tell(one, A, marks("x", count)) for count in (3, 1))
    assert two.soon(marks("x"), now=1.0) == {A: 3}
    first.drop()
    first.drop()
    assert one.soon(marks("x"), now=1.0) == two.soon(marks("x"), now=1.0) == {A: 1}
    one.forget(A)
    assert two.soon(marks("x"), now=1.0) == {A: 1}  # each worker hears of a restart by itself


def test_another_process_is_heard() -> None:
    board = HintBoard(2)
    here = SharedHints(board, 0)
    pid = os.fork()
    if pid == 0:
        tell(SharedHints(board, 1), A, marks("x"))
        os._exit(0)
    os.waitpid(pid, 0)
    assert here.soon(marks("x"), now=1.0) == {A: 3}
    # Who takes the place of a worker that died hears what still counts, and goes on counting.
    again = SharedHints(board, 1)
    tell(again, B, marks("y"))
    assert here.soon(marks("y"), now=1.0) == {B: 3}
    tell(here, A, marks("z"))
    assert SharedHints(board, 1).soon(marks("z"), now=1.0) == {A: 3}


def test_who_does_not_listen_for_long_misses_what_was_written_over() -> None:
    board = HintBoard(2)
    one, two = SharedHints(board, 0), SharedHints(board, 1)
    hints = [tell(one, A, marks(f"{n:03d}")) for n in range(NOTES + 50)]
    assert two.soon(marks("049"), now=1.0) == {}
    assert two.soon(marks("050"), now=1.0) == {A: 3}
    for hint in hints:
        hint.drop()
    two.soon((), now=1.0)
    assert two.soon(marks("178"), now=1.0) == one.soon(marks("178"), now=1.0) == {}


def test_a_note_that_is_not_whole_is_left_out() -> None:
    board = HintBoard(1)
    assert board.read(0, 1) is None
    assert board.write(0, Note(1, 1.0, A, b"12345678"))
    assert board.read(0, 1) == Note(1, 1.0, A, b"12345678")
    assert board.read(0, 1 + NOTES) is None
    at = board._place(0, 1)
    board._memory[at + 30 : at + 31] = b"\xff"
    assert board.read(0, 1) is None


def test_of_a_long_prompt_its_beginning_is_told_and_of_a_long_name_nothing() -> None:
    board = HintBoard(2)
    one, two = SharedHints(board, 0), SharedHints(board, 1)
    tell(one, A, marks("x", 1000))
    tell(one, ("n" * 600, 0), marks("y", 1000)).drop()
    assert two.soon(marks("x", 1000), now=1.0) == {A: MOST_MARKS}
    assert two.soon(marks("y", 1000), now=1.0) == {}


def test_what_the_index_tells_everybody_is_told_no_second_time() -> None:
    board = HintBoard(2)
    chooser = Chooser(Load(), random.Random(1), lambda: 1.0, mark_tokens=512, hints=SharedHints(board, 0))
    for held, notes in ((0, 1), (511, 2), (1024, 2)):
        matches = {A: Matched("a", 0, 1, "live", 1.0, held, held, held, 1, None)}
        prompt = Subject(prompt_tokens=1100, matches=matches, marks=marks("x", 2))
        chooser.choose(POLICIES["cache-aware"], prompt, [A])
        assert board.head(0) == notes


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([A, B]), st.lists(st.sampled_from("abcd"), max_size=4, unique=True), st.booleans()
        ),
        max_size=12,
    )
)
def test_marks_that_collide_hurt_nobody(steps: list[tuple[StreamId, list[str], bool]]) -> None:
    """No prompts have such marks: the same behind others."""
    side, sent = Hints(), list[Hint]()
    for stream, some, ends in steps:
        sent.append(side.add(stream, some, now=0.0, predicted_s=1.0))
        side.soon(some, now=0.0)
        if ends:
            sent.pop(0).drop()
    for hint in sent:
        hint.drop()
    side.forget(A)
    assert len(side) == 0
    assert not side.soon(["a", "b"], now=0.0)
