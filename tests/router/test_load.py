from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.load import LEARN_FROM_TOKENS, UNKNOWN_PREFILL_S, Load, StreamLoad

A, B = ("a", 0), ("b", 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_request_counts_as_prefill_until_its_first_byte_and_as_decoding_after() -> None:
    load = Load()
    reservation = load.reserve(A, 100)
    assert load.of(A) == StreamLoad(1, 100, 0)
    reservation.first_byte(0.1)
    assert load.of(A) == StreamLoad(1, 0, 1)
    reservation.release()
    assert load.of(A) == StreamLoad()


def test_released_after_release_nothing_counts_again() -> None:
    load = Load()
    reservation = load.reserve(A, 100)
    reservation.release()
    reservation.first_byte(0.1)
    reservation.release()
    assert list(load.items()) == []


def test_an_answer_in_one_piece_leaves_the_queue_after_a_second_while_no_speed_is_known() -> None:
    clock = Clock()
    load = Load(clock)
    whole, stream = load.reserve(A, 5000, streams=False), load.reserve(A, 300)
    clock.now = UNKNOWN_PREFILL_S - 0.01
    assert load.of(A) == StreamLoad(2, 5300, 0)
    clock.now = UNKNOWN_PREFILL_S
    assert dict(load.items()) == {A: StreamLoad(2, 300, 1)}
    whole.release()
    stream.release()
    assert list(load.items()) == []


def test_an_answer_in_one_piece_leaves_the_queue_when_the_speed_seen_on_streams_says() -> None:
    clock = Clock()
    load = Load(clock)
    stream = load.reserve(A, 4000)
    assert stream.queued_tokens == 4000
    stream.first_byte(2.0)
    assert load.prefill_s("a", 1000) == 0.5
    assert load.prefill_s("b", 1000) == UNKNOWN_PREFILL_S
    load.reserve(A, 6000, streams=False)
    # What is queued in front of it has to be computed first.
    load.reserve(A, 2000, streams=False)
    for now, queued in ((2.99, 8000), (3.0, 2000), (3.99, 2000), (4.0, 0)):
        clock.now = now
        assert load.of(A).prefill_tokens == queued


def test_the_speed_follows_what_is_seen_and_ignores_what_says_little() -> None:
    load = Load(Clock())
    load.reserve(A, 1000).first_byte(1.0)
    load.reserve(A, 2000).first_byte(1.0)
    assert load.prefill_s("a", 1200) == 1.0
    load.reserve(A, LEARN_FROM_TOKENS - 1).first_byte(100.0)
    load.reserve(A, 1000).first_byte(0.0)
    assert load.prefill_s("a", 1200) == 1.0


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["first_byte", "prefilled", "release", "tick"])),
        max_size=40,
    )
)
def test_rq11_whatever_the_order_of_endings_the_book_is_empty_afterwards(
    steps: list[tuple[int, str]],
) -> None:
    clock = Clock()
    load = Load(clock)
    reservations = [
        load.reserve(A if number % 2 else B, 10 * number, streams=number > 2) for number in range(5)
    ]
    for number, step in steps:
        if step == "tick":
            clock.now += 0.3
        elif step == "first_byte":
            reservations[number].first_byte(0.1)
        else:
            getattr(reservations[number], step)()
        for now in dict(load.items()).values():
            assert min(now.requests, now.prefill_tokens, now.decoding) >= 0
    for reservation in reservations:
        reservation.release()
    assert list(load.items()) == []
