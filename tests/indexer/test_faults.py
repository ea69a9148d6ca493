"""What one engine, one client or one file does wrong costs nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from events.publisher import encode
from events.schema import AllBlocksCleared
from events.signals import Connected, Frame
from indexer.blocks import StreamBlocks
from indexer.errors import MapError, MapFullError, MapSchemaError, RegistrationError
from indexer.folder import DAMAGED_FILE, DATA_FILE
from indexer.layout import MAX_SLOTS
from indexer.rank import RELEARN_AFTER
from indexer.reader import MapReader
from indexer.registration import Registration
from indexer.writer import MapWriter

PROMPT = list(range(28))
BOUND = "bind:tcp://127.0.0.1:5557"
DEADLINE_S = 10.0


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "not in time"
        threading.Event().wait(0.01)


# batches


def test_ev04_a_batch_that_cannot_be_applied_is_left_out_and_the_rest_goes_on(
    rig: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StreamBlocks.store

    def fails_on_group_7(self: StreamBlocks, event: Any, *rest: Any) -> None:
        if event.group == 7:
            raise TypeError("made to fail")
        store(self, event, *rest)

    monkeypatch.setattr(StreamBlocks, "store", fails_on_group_7)
    monkeypatch.setattr("indexer.followed.POISON_AFTER", 1)
    a, b = rig.follow("A"), rig.follow("B")
    rig.say(b, engine().stored(PROMPT))
    rig.ingest.start()
    try:
        for stream in (a, b):
            rig.feed.inbox.put(stream, Connected())
        rig.feed.inbox.put(*rig.frame(a, engine().stored(PROMPT, group=7)))
        wait_until(lambda: rig.record(a).counters.skipped.get("poison") == 1)
    finally:
        rig.ingest.stop()
    assert rig.ingest.failures == 1
    assert rig.feed.added[b] == 2  # Followed, and at the start: nobody else has to begin anew.
    assert rig.record(a).state == "partial"
    assert rig.record(b).blocks == 7


def test_more_clears_in_one_batch_than_there_are_slots_are_one_clear(rig: Any, engine: Any) -> None:
    a, b = rig.follow("A"), rig.follow("B")
    rig.say(b, engine().stored(PROMPT))
    rig.say(a, engine().stored(PROMPT), *[AllBlocksCleared()] * (MAX_SLOTS + 10))
    assert rig.record(a).counters.cleared == MAX_SLOTS + 10
    assert rig.held(PROMPT) == {"A": (0, 0, 0), "B": (28, 28, 28)}


def test_clears_faster_than_one_collection_a_step_never_use_up_the_slots(rig: Any, engine: Any) -> None:
    a, hasher = rig.follow("A"), engine()
    for _ in range(20):
        rig.say(a, *[event for _ in range(150) for event in (hasher.stored(PROMPT[:4]), AllBlocksCleared())])
    assert rig.record(a).counters.cleared == 3_000
    assert rig.ingest.failures == 0


def test_as_many_streams_as_there_can_be_leave_slots_to_begin_anew(
    rig: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.writer.MAX_SLOTS", 8)
    monkeypatch.setattr("indexer.writer.MOST_STREAMS", 7, raising=False)
    streams = [rig.follow(f"A{number}") for number in range(7)]
    with pytest.raises(MapFullError, match="7 streams, as many as it can"):
        rig.follow("one more")
    for stream in streams:
        rig.say(stream, engine().stored(PROMPT))
    for stream in streams:
        rig.feed.inbox.put(stream, Frame(0, encode([engine().stored(PROMPT[:8])], 2.0, None)))  # all restart
    for _ in range(20):
        rig.ingest.work()
    assert set(rig.held(PROMPT).values()) == {(8, 8, 8)}
    assert {rig.record(stream).counters.evicted for stream in streams} == {0}
    rig.ingest.forget("A0", "m")
    rig.follow("B")


def test_a_batch_that_needs_more_slots_than_there_are_costs_only_itself(rig: Any, engine: Any) -> None:
    a, b = rig.follow("A"), rig.follow("B")
    rig.say(b, engine().stored(PROMPT))
    rig.say(a, engine().stored(PROMPT))
    clears = [event for _ in range(MAX_SLOTS) for event in (engine().stored(PROMPT[:4]), AllBlocksCleared())]
    rig.feed.inbox.put(*rig.frame(a, *clears))
    rig.feed.inbox.put(*rig.frame(b, engine().stored([*PROMPT, *PROMPT])))
    for _ in range(20):
        rig.ingest.work()
    assert rig.record(a).counters.skipped == {"no_room": 1}
    assert rig.record(a).state == "partial"
    assert rig.held([*PROMPT, *PROMPT])["B"] == (56, 56, 56)
    assert rig.record(a).counters.evicted + rig.record(b).counters.evicted == 0


def test_a_block_size_learned_from_a_stray_event_is_learned_again(rig: Any, engine: Any) -> None:
    a = rig.follow("A")
    rig.say(a, engine(block_size=1).stored(PROMPT[:1]))
    for number in range(RELEARN_AFTER + 1):
        rig.say(a, engine(number).stored([*range(number, number + 28)]))
    assert rig.record(a).block_size == 4
    assert rig.held([*range(RELEARN_AFTER, RELEARN_AFTER + 28)]) == {"A": (28, 28, 28)}


# registrations


def test_ev31_two_replicas_that_could_not_be_told_apart_are_refused(rig: Any) -> None:
    rig.ingest.follow(Registration(instance_id="A", endpoint=BOUND, model_name="m", topic="kv"))
    rig.ingest.follow(Registration(instance_id="B", endpoint=BOUND, model_name="m", topic="kv-events"))
    with pytest.raises(RegistrationError, match=r"A rank 0 has the topic 'kv'"):
        rig.ingest.follow(Registration(instance_id="C", endpoint=BOUND, model_name="m", topic="kv"))
    assert {status.record.id[0] for status in rig.reader.streams()} == {"A", "B"}


def test_a_registration_that_cannot_be_written_disturbs_no_stream(
    rig: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))

    def refuses(*_: Any) -> None:
        raise OverflowError("made to fail")

    monkeypatch.setattr(rig.writer, "open_stream", refuses)
    refused = rig.ingest.register(Registration(instance_id="B", endpoint=BOUND, model_name="m"))
    rig.ingest._carry_out_commands()
    assert "made to fail" in str(refused.exception())
    assert rig.held(PROMPT) == {"A": (28, 28, 28)}
    assert (rig.feed.added[a], rig.feed.removed[a], rig.record(a).state) == (1, 0, "live")


@pytest.mark.parametrize("endpoint", ["bind:ipc://{file}", "ipc://{file}", "inproc://wake", "tcp://*:5557"])
def test_addresses_that_would_do_harm_are_refused(endpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "precious"
    file.write_text("data")
    with pytest.raises(RegistrationError):
        Registration(instance_id="A", endpoint=endpoint.format(file=file), model_name="m").checked()
    assert file.read_text() == "data"


# files


def damage(path: Path, how: str) -> None:
    data = (path / DATA_FILE).read_bytes()
    spoilt = {"cut off": data[: len(data) // 2], "garbage": b"no map" * 4096, "empty pages": bytes(len(data))}
    (path / DATA_FILE).write_bytes(spoilt[how])


@pytest.mark.parametrize("how", ["cut off", "garbage", "empty pages"])
def test_a_damaged_map_of_ours_is_put_aside_and_begun_anew(
    how: str, make_rig: Any, engine: Any, tmp_path: Path
) -> None:
    rig = make_rig(tmp_path)
    for number in range(20):
        rig.say(rig.follow(f"A{number}"), engine(number).stored(list(range(4_000))))
    rig.close()
    damage(tmp_path, how)
    again = make_rig(tmp_path)
    assert again.reader.streams() == []
    assert (tmp_path / DAMAGED_FILE).exists()


def test_a_reader_is_not_killed_by_a_map_that_is_cut_off(make_rig: Any, engine: Any, tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    rig.say(rig.follow("A"), engine().stored(list(range(40_000))))
    rig.close()
    damage(tmp_path, "cut off")
    with pytest.raises(MapError, match="cut off"):
        MapReader.open(tmp_path)


def test_an_lmdb_file_of_another_program_is_left_alone(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path)) as theirs, theirs.begin(write=True) as txn:
        txn.put(b"key", b"value")
    with pytest.raises(MapSchemaError, match="no map of warmroute"):
        MapWriter(tmp_path)
    with lmdb.open(str(tmp_path)) as theirs, theirs.begin() as txn:
        assert txn.get(b"key") == b"value"


@pytest.mark.parametrize("schema", [b"2-beta", b""])
def test_a_schema_that_is_no_number_is_refused_too(schema: bytes, make_rig: Any, tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    with rig.writer.env.begin(write=True) as txn:
        txn.put(b"schema", schema, db=rig.writer.tables.meta)
    rig.close()
    with pytest.raises(MapSchemaError, match="another --map"):
        MapWriter(tmp_path)


def test_a_reader_notices_that_its_map_was_put_aside(make_rig: Any, tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    rig.follow("A")
    now = rig.now
    rig.close()
    reader = MapReader.open(tmp_path)
    reader._clock = lambda: now
    (tmp_path / DATA_FILE).replace(tmp_path / DAMAGED_FILE)
    assert reader.query("m", PROMPT)
    now += 3.0
    with pytest.raises(MapError, match="replaced"):
        reader.query("m", PROMPT)
    reader.close()
