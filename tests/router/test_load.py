from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.load import Load, StreamLoad

A, B = ("a", 0), ("b", 0)


def test_a_request_counts_as_prefill_until_its_first_byte_and_as_decoding_after() -> None:
    load = Load()
    reservation = load.reserve(A, 100)
    assert load.of(A) == StreamLoad(1, 100, 0)
    reservation.first_byte()
    assert load.of(A) == StreamLoad(1, 0, 1)
    reservation.release()
    assert load.of(A) == StreamLoad()


def test_released_after_release_nothing_counts_again() -> None:
    load = Load()
    reservation = load.reserve(A, 100)
    reservation.release()
    reservation.first_byte()
    reservation.release()
    assert list(load.items()) == []


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["first_byte", "release"])), max_size=40))
def test_rq11_whatever_the_order_of_endings_the_book_is_empty_afterwards(
    steps: list[tuple[int, str]],
) -> None:
    load = Load()
    reservations = [load.reserve(A if number % 2 else B, 10 * number) for number in range(5)]
    for number, step in steps:
        getattr(reservations[number], step)()
        for now in dict(load.items()).values():
            assert min(now.requests, now.prefill_tokens, now.decoding) >= 0
    for reservation in reservations:
        reservation.release()
    assert list(load.items()) == []
