"""The forms in which values stand in the map."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.layout import (
    CPU,
    DISK,
    GPU,
    MAX_COPIES,
    MAX_SLOTS,
    Name,
    StreamRecord,
    Waiting,
    decode_holders,
    decode_record,
    decode_waiting,
    encode_holders,
    encode_record,
    encode_waiting,
    tier_of,
)
from indexer.registration import Registration

bitmaps = st.integers(0, 2**40) | st.sampled_from([0, 1, 255, 256, 1 << (MAX_SLOTS - 1)])


@settings(deadline=None)
@given(st.tuples(bitmaps, bitmaps, bitmaps).filter(any))
def test_holders_come_back_as_they_were_written(holders: tuple[int, int, int]) -> None:
    assert decode_holders(encode_holders(holders)) == holders


def test_a_block_on_one_gpu_of_eight_takes_two_bytes() -> None:
    assert len(encode_holders((1 << 7, 0, 0))) == 2


@settings(deadline=None)
@given(
    st.binary(min_size=8, max_size=8),
    st.binary(max_size=65),
    st.lists(st.integers(0, MAX_COPIES), min_size=3, max_size=3),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**24 - 1),
)
def test_names_come_back_as_they_were_written(
    key: bytes, parent: bytes, copies: list[int], children: int, ghosts: int
) -> None:
    name = Name(key, parent)
    name.copies, name.children, name.ghosts, name.again = tuple(copies), children, ghosts, copies[0]
    again = Name.decode(name.encode())
    for field in Name.__slots__:
        assert getattr(again, field) == getattr(name, field)
    assert again.held == any(copies)


def test_waiting_blocks_and_records_come_back_as_they_were_written() -> None:
    waiting = Waiting(b"parent", b"local", b"extra", [1, 0, 2])
    assert decode_waiting(encode_waiting(waiting)) == waiting
    registration = Registration(
        instance_id=7, endpoint="tcp://h:1", model_name="m", aliases=("a",), dp_rank=2
    )
    record = StreamRecord(
        slot=3,
        generation=4,
        registration=registration,
        sequence=2**63,
        digest=b"\xff" * 8,
        group_kinds={1: None},
    )
    record.counters.skip("sparse", 2)
    again = decode_record(encode_record(record))
    assert again == record
    assert again.id == ("7", 2)


@pytest.mark.parametrize(
    ("medium", "tier"), [("GPU", GPU), ("CPU", CPU), ("DISK", DISK), ("STORAGE", DISK), ("ELSEWHERE", DISK)]
)
def test_what_is_neither_gpu_nor_cpu_is_the_slowest_tier(medium: str, tier: int) -> None:
    assert tier_of(medium) == tier
