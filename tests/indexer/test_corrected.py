"""Corrections in a match, against walking every block; and what is remembered of touched blocks."""

from array import array
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from events.schema import AllBlocksCleared
from indexer.corrected import Corrected, _Slot
from indexer.corrections import Touched
from indexer.keys import keys_behind, root_key
from indexer.match import match

KEYS = [bytes([number]) * 8 for number in range(80)]
SLOTS = 4
blocks = st.sets(st.integers(0, len(KEYS) - 1), max_size=3)


def of(numbers: set[int]) -> frozenset[bytes]:
    return frozenset(KEYS[number] for number in numbers)


@given(
    runs=st.lists(st.integers(0, len(KEYS)), min_size=SLOTS, max_size=SLOTS),
    denied=st.dictionaries(st.integers(0, SLOTS - 1), blocks, max_size=2),
    believed=st.dictionaries(st.integers(0, SLOTS - 1), blocks, max_size=2),
)
def test_a_corrected_match_is_that_of_walking_every_block(
    runs: list[int], denied: dict[int, set[int]], believed: dict[int, set[int]]
) -> None:
    """Slots hold leading runs, as healthy ones do; the jump stays exact for those without corrections."""

    def lookup(key: bytes) -> int:
        return sum(1 << slot for slot, run in enumerate(runs) if key[0] < run)

    believed = {slot: numbers - denied.get(slot, set()) for slot, numbers in believed.items()}
    found = {
        slot: _Slot((1, 1), of(denied.get(slot, set())), of(believed.get(slot, set())))
        for slot in denied.keys() | believed.keys()
    }
    corrected = Corrected(found)
    matched = match(corrected.over(lookup), KEYS, (1 << SLOTS) - 1, corrected.slots)
    for slot, run in enumerate(runs):
        held = set(range(run)) | believed.get(slot, set())
        held -= denied.get(slot, set())
        leading = next((number for number in range(len(KEYS)) if number not in held), len(KEYS))
        assert matched.get(slot, 0) == leading


@given(
    batches=st.lists(st.lists(st.integers(0, 1 << 64), max_size=5), max_size=20),
    asked=st.integers(-1, 20),
)
def test_a_block_that_was_touched_is_never_taken_for_one_that_was_not(
    batches: list[list[int]], asked: int
) -> None:
    touched = Touched()
    last: dict[bytes, int] = {}
    for sequence, values in enumerate(batches):
        keys = [(value & (1 << 64) - 1).to_bytes(8, "big") for value in values]
        touched.note(keys, sequence)
        last.update(dict.fromkeys(keys, sequence))
    for key, sequence in last.items():
        if sequence > asked:
            assert touched.since(key, asked)
        elif len({each[:2] for each in last}) == len(last):
            assert not touched.since(key, asked)


def test_corrections_of_two_models_are_kept_apart_and_not_read_again(rig: Any, engine: Any) -> None:
    """Each family of streams has its own merged corrections."""
    tokens = list(range(28))
    for name in ("m", "n"):
        rig.say(rig.follow(name, name), engine().stored(tokens))
    reads = []
    before = rig.reader._corrections._read
    rig.reader._corrections._read = lambda txn, record, now: (
        reads.append(record.slot) or before(txn, record, now)
    )
    with rig.writer.group() as group:
        for record in rig.writer.streams.values():
            corrections = rig.ingest._followed[record.id].own.corrections(group)
            corrections.deny(group.changes, record, bytes(8), rig.now)
            group.touch(record)
    for _ in range(3):
        assert rig.held(tokens, "m") == {"m": (28, 28, 28)}
        assert rig.held(tokens, "n") == {"n": (28, 28, 28)}
    assert sorted(reads) == [0, 1]


def test_many_corrections_are_read_again_at_most_once_in_a_while_and_of_a_new_generation_at_once(
    rig: Any, engine: Any
) -> None:
    tokens, stream = list(range(28)), rig.follow("A")
    rig.say(stream, engine().stored(tokens))
    reads = []
    before = rig.reader._corrections._read
    rig.reader._corrections._read = lambda txn, record, now: reads.append(now) or before(txn, record, now)

    def deny(*blocks: bytes) -> None:
        with rig.writer.group() as group:
            record = rig.writer.streams[stream]
            corrections = rig.ingest._followed[record.id].own.corrections(group)
            for block in blocks:
                corrections.deny(group.changes, record, block, rig.now)
            group.touch(record)

    keys = keys_behind(root_key("m", None, 4), array("I", tokens), 4)
    deny(keys[6], *(number.to_bytes(8, "big") for number in range(1, 2_001)))
    for lost in (5, 4, 3):
        deny(keys[lost])
        assert rig.held(tokens)["A"][0] == 20, "what was first read rests for 0.1 s"
    assert reads == [rig.now]
    rig.now += 0.2
    assert rig.held(tokens)["A"][0] == 12
    deny(keys[0])
    rig.say(stream, AllBlocksCleared(), engine().stored(tokens))
    deny(keys[6])
    assert rig.held(tokens)["A"][0] == 24, "corrections of another generation are never kept"
    assert len(reads) == 3
