"""Which engines hash alike."""

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.layout import StreamRecord
from indexer.registration import Registration
from indexer.seeds import MAX_SAMPLES, sample, seeds

PROMPT = list(range(28))


def record(name: str, samples: dict[bytes, bytes]) -> StreamRecord:
    registration = Registration(instance_id=name, endpoint="tcp://a:1", model_name="m")
    return StreamRecord(slot=0, generation=1, registration=registration, samples=samples)


def told(rig: Any) -> dict[str, int]:
    return {stream[0]: way for stream, way in seeds(each.record for each in rig.reader.streams()).items()}


def test_ev30_engines_that_hash_the_same_tokens_differently_are_told_apart(rig: Any, engine: Any) -> None:
    for name, seed in (("A", 1), ("B", 2), ("C", 1), ("alone", 1)):
        prompt = [9, *PROMPT] if name == "alone" else PROMPT
        rig.say(rig.follow(name), engine(seed).stored(prompt))
    assert told(rig) == {"A": 0, "B": 1, "C": 0}
    assert rig.held(PROMPT)["B"] == (28, 28, 28)


def test_ev30_engines_that_hash_alike_are_one(rig: Any, engine: Any) -> None:
    for name in ("A", "B"):
        rig.say(rig.follow(name), engine(5).stored(PROMPT), engine(5).stored(PROMPT[4:]))
    assert told(rig) == {"A": 0, "B": 0}


@settings(max_examples=100, deadline=None)
@given(
    contents=st.sets(st.binary(min_size=8, max_size=8), min_size=1, max_size=30),
    order=st.integers(0, 99),
)
def test_streams_with_the_same_prompts_keep_the_same_few(contents: set[bytes], order: int) -> None:
    one, other = record("A", {}), record("B", {})
    for stream, chance in ((one, random.Random(order)), (other, random.Random(order + 1))):
        for block in chance.sample(sorted(contents), len(contents)):
            sample(stream, block, block)
    assert one.samples == other.samples
    assert sorted(one.samples) == sorted(contents)[:MAX_SAMPLES]


@settings(max_examples=200, deadline=None)
@given(
    ways=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    held=st.lists(st.sets(st.integers(0, 4), max_size=4), min_size=6, max_size=6),
)
def test_streams_have_one_number_if_what_they_share_says_so(ways: list[int], held: list[set[int]]) -> None:
    streams = [
        record(str(number), {b"%8d" % block: b"%d %d" % (block, way) for block in held[number]})
        for number, way in enumerate(ways)
    ]
    found = seeds(streams)
    for one, way, blocks in zip(streams, ways, held, strict=False):
        for other, other_way, other_blocks in zip(streams, ways, held, strict=False):
            if one is not other and blocks & other_blocks:
                assert (found[one.id] == found[other.id]) == (way == other_way)
