"""Reading the map: how far it is believed, and from another process beside the writer's."""

import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb
import pytest

from events.schema import AllBlocksCleared, token_array
from indexer.errors import MapError, MapMissingError, MapSchemaError
from indexer.keys import local_hashes
from indexer.layout import META_BOOT, META_SCHEMA, boot_clock
from indexer.reader import MapReader, Trust
from indexer.writer import MapWriter

PROMPT = list(range(28))

READER = """
import json, sys
from pathlib import Path
from indexer.reader import MapReader
reader = MapReader.open(Path(sys.argv[1]))
print("1", flush=True)
for line in sys.stdin:
    tokens = json.loads(line)
    found = reader.query("m", tokens)
    answer = {one.instance: [one.state, round(one.weight, 3), one.gpu] for one in found}
    print(json.dumps([answer, reader.indexer_address()]), flush=True)
"""


# how far the map is believed


@pytest.mark.parametrize(
    ("state", "age", "expected"),
    [
        ("live", 0.0, ("live", 1.0)),
        ("live", 2.0, ("live", 1.0)),
        ("live", 2.000001, ("partial", 0.5)),
        ("live", 16.0, ("partial", 0.25)),
        ("live", 30.0, ("partial", 0.0)),
        ("live", float("inf"), ("partial", 0.0)),
        ("partial", 0.0, ("partial", 0.5)),
        ("partial", 16.0, ("partial", 0.25)),
        ("replaying", 1.0, ("replaying", 0.5)),
        ("replaying", 16.0, ("partial", 0.25)),
        ("unverified", 0.0, ("unverified", 0.0)),
        ("unverified", 16.0, ("unverified", 0.0)),
        ("connecting", 0.0, ("connecting", 0.0)),
        ("offline", 0.0, ("offline", 0.0)),
        ("of the future", 0.0, ("of the future", 0.0)),
    ],
)
def test_trust_falls_with_the_age_of_the_heartbeat(
    state: str, age: float, expected: tuple[str, float]
) -> None:
    judged, weight = Trust(stale_after=30.0).judge(state, age)
    assert (judged, pytest.approx(weight, abs=1e-5)) == expected


def test_trust_ends_where_it_was_told_to() -> None:
    assert Trust(stale_after=4.0).judge("live", 3.0) == ("partial", 0.25)
    assert Trust(stale_after=4.0).judge("live", 4.0) == ("partial", 0.0)
    assert Trust(stale_after=1.0).judge("live", 1.5) == ("live", 1.0)
    assert Trust(stale_after=1.0).judge("live", 2.5) == ("partial", 0.0)


def test_a_map_whose_indexer_is_silent_is_believed_less_and_less(rig: Any, engine: Any) -> None:
    stream = rig.follow("A")
    rig.say(stream, engine().stored(PROMPT))
    seen = []
    for _ in range(4):
        one = rig.reader.query("m", PROMPT)[0]
        seen.append((one.state, round(one.weight, 3), one.gpu))
        rig.now += 14.0
    assert seen == [("live", 1.0, 28), ("partial", 0.286, 28), ("partial", 0.036, 28), ("partial", 0.0, 28)]
    rig.ingest.step([])
    assert rig.reader.query("m", PROMPT)[0].state == "live"


def test_pe10_a_heartbeat_of_another_boot_or_host_is_none(make_rig: Any, engine: Any, tmp_path: Path) -> None:
    """Their clocks say nothing here: the host was up for longer then, and its map was live."""
    rig = make_rig(tmp_path)
    rig.say(rig.follow("A"), engine().stored(PROMPT))
    with rig.writer.env.begin(write=True) as txn:
        txn.put(META_BOOT, b"another", db=rig.writer.tables.meta)
    one = rig.reader.query("m", PROMPT)[0]
    assert (one.state, one.weight, one.gpu) == ("partial", 0.0, 28)
    rig.close()
    MapWriter(tmp_path, clock=lambda: 5.0).close()  # nothing was followed yet, so no heart has beaten
    with closing(MapReader.open(tmp_path)) as reader:
        assert reader.heartbeat_age() == float("inf")


def test_a_heart_beats_also_when_nothing_is_said(rig: Any) -> None:
    for _ in range(20):
        rig.ingest.step([])
        assert rig.reader.heartbeat_age() <= 0.5
        rig.now += 0.3


def test_a_map_that_nobody_fed_yet_has_no_heartbeat(rig: Any) -> None:
    assert rig.reader.heartbeat_age() == float("inf")
    assert rig.reader.streams() == []
    assert rig.reader.query("m", PROMPT) == []


# what a query tells


def test_a_query_tells_state_generation_and_sequence_of_every_stream_of_the_model(
    rig: Any, engine: Any
) -> None:
    a, other = rig.follow("A"), rig.follow("B", dp_rank=1)
    rig.follow("C", "another model")
    rig.say(a, engine().stored(PROMPT))
    rig.say(a, AllBlocksCleared(), engine().stored(PROMPT, 0, 1))
    first, second = sorted(rig.reader.query("m", PROMPT), key=lambda one: one.instance)
    assert (first.instance, first.rank, first.block_size, first.gpu, first.sequence) == ("A", 0, 4, 4, 1)
    assert first.generation == rig.record(a).generation > second.generation == rig.record(other).generation
    assert (second.instance, second.rank, second.block_size, second.sequence) == ("B", 1, 0, None)
    assert (first.state, second.state) == ("live", "partial")


def test_a_token_outside_u32_is_refused(rig: Any) -> None:
    rig.follow("A")
    for token in (-1, 2**32):
        with pytest.raises(ValueError, match="token id"):
            rig.reader.query("m", [token])


def test_local_hashes_ask_the_same_as_their_tokens(rig: Any, engine: Any, prompt: Any) -> None:
    a, b = rig.follow("A"), rig.follow("B", additional_salt="tenant")
    rig.say(a, engine().stored(PROMPT, 0, 5), engine().stored(prompt(tuple(PROMPT), "adapter"), 0, 3))
    rig.say(b, engine().stored(PROMPT))
    hashes = local_hashes(token_array(PROMPT), 4)
    for adapter in (None, "adapter"):
        by_tokens = rig.reader.query("m", PROMPT, lora_name=adapter)
        assert rig.reader.query_local("m", hashes, lora_name=adapter) == by_tokens
    assert [one.gpu for one in rig.reader.query_local("m", hashes)] == [20, 28]


def test_a_block_knows_its_holders_by_key_and_by_engine_hash(rig: Any, engine: Any) -> None:
    a, b = rig.follow("A"), rig.follow("B")
    rig.say(a, engine(1).stored(PROMPT), engine(1).stored(PROMPT, 0, 1, medium="CPU"))
    rig.say(b, engine(2).stored(PROMPT, 0, 1, medium="STORAGE"))
    name = rig.reader.name("A", 0, 0, engine(1).hashes(PROMPT)[0])
    assert name.copies == (1, 1, 0)
    holders = [(record.id, tiers) for record, tiers in rig.reader.holders(name.key)]
    assert holders == [(("A", 0), ["gpu", "cpu"]), (("B", 0), ["disk"])]
    assert rig.reader.name("A", 0, 0, engine(2).hashes(PROMPT)[0]) is None
    assert rig.reader.name("A", 0, 1, engine(1).hashes(PROMPT)[0]) is None
    assert rig.reader.name("Z", 0, 0, engine(1).hashes(PROMPT)[0]) is None
    assert rig.reader.holders(b"\0" * 8) == []


def test_one_reader_sees_every_commit_as_it_comes(rig: Any, engine: Any) -> None:
    """It keeps decoded records between commits, and must notice each."""
    stream = rig.follow("A")
    for number in range(7):
        rig.say(stream, engine().stored(PROMPT, number, number + 1))
        assert rig.held(PROMPT)["A"][0] == 4 * number + 4
        assert rig.reader.streams()[0].record.blocks == number + 1
    rig.ingest.forget("A", "m")
    assert rig.reader.streams() == []
    rig.follow("B")
    assert [status.record.id for status in rig.reader.streams()] == [("B", 0)]


def test_used_bytes_grow_with_what_is_held(rig: Any, engine: Any) -> None:
    stream = rig.follow("A")
    before = rig.reader.used_bytes()
    rig.say(stream, engine().stored(range(40_000)))
    assert rig.reader.used_bytes() > before + 10_000 * 30


# in another process


def test_a_map_that_is_not_there_yet_is_missing_and_then_found(
    make_rig: Any, tmp_path: Path, script: Any
) -> None:
    folder = tmp_path / "map"
    with pytest.raises(MapMissingError, match=f"{folder}.*warmroute indexer --map {folder}"):
        MapReader.open(folder)
    assert not folder.exists()
    rig = make_rig(folder)
    reader = script(READER, folder)
    assert reader.answer() == 1
    assert reader.ask(PROMPT) == [{}, None]
    rig.close()


def test_a_map_without_tables_is_missing(tmp_path: Path) -> None:
    lmdb.open(str(tmp_path), max_dbs=8).close()
    with pytest.raises(MapMissingError, match=str(tmp_path)):
        MapReader.open(tmp_path)


def test_a_map_of_another_schema_is_not_read(make_rig: Any, tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    with rig.writer.env.begin(write=True) as txn:
        txn.put(META_SCHEMA, b"99", db=rig.writer.tables.meta)
    rig.close()
    with pytest.raises(MapSchemaError, match="schema 99"):
        MapReader.open(tmp_path)


def test_a_file_that_is_no_map_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"no map" * 4096)
    with pytest.raises(MapError, match=str(tmp_path)):
        MapReader.open(tmp_path)


def test_a_reader_beside_the_writer_sees_every_commit(
    make_rig: Any, engine: Any, tmp_path: Path, script: Any
) -> None:
    rig = make_rig(tmp_path)
    rig.now = boot_clock()
    stream = rig.follow("A")
    reader = script(READER, tmp_path)
    assert reader.answer() == 1
    rig.writer.set_address("http://127.0.0.1:9400")
    for number in range(7):
        rig.now = boot_clock()
        rig.say(stream, engine().stored(PROMPT, number, number + 1))
        assert reader.ask(PROMPT) == [{"A": ["live", 1.0, 4 * number + 4]}, "http://127.0.0.1:9400"]
    rig.now = boot_clock()
    rig.say(stream, AllBlocksCleared())
    rig.collect()
    assert reader.ask(PROMPT)[0] == {"A": ["live", 1.0, 0]}
    rig.close()


def test_a_reader_in_another_process_notices_that_the_writer_is_silent(
    make_rig: Any, engine: Any, tmp_path: Path, script: Any
) -> None:
    rig = make_rig(tmp_path)
    rig.now = boot_clock() - 16.0
    rig.say(rig.follow("A"), engine().stored(PROMPT))
    reader = script(READER, tmp_path)
    assert reader.answer() == 1
    state, weight, gpu = reader.ask(PROMPT)[0]["A"]
    assert (state, gpu) == ("partial", 28)
    assert 0.0 < weight <= 0.25
    rig.close()


def test_pe03_a_reader_rides_through_a_restart_with_a_larger_map(
    make_rig: Any, engine: Any, tmp_path: Path, script: Any
) -> None:
    rig = make_rig(tmp_path, map_size=1 << 20)
    rig.now = boot_clock()
    stream, hasher, later = rig.follow("A"), engine(), PROMPT[::-1]
    rig.say(stream, hasher.stored(PROMPT))
    reader = script(READER, tmp_path)
    assert reader.answer() == 1
    assert reader.ask(PROMPT)[0] == {"A": ["live", 1.0, 28]}
    rig.abandon()
    rig = make_rig(tmp_path, map_size=1 << 26)
    rig.now = boot_clock()
    rig.ingest._follow_all()
    state, weight, _ = reader.ask(PROMPT)[0]["A"]
    assert (state, weight) == ("unverified", 0.0)
    with rig.writer.env.begin(write=True) as txn:  # More than the old map had room for.
        txn.put(b"filler", bytes(32 << 20), db=rig.writer.tables.meta)
    rig.resume()
    rig.sequences[stream] = 1
    rig.say(stream, hasher.stored(later))
    assert reader.ask(later)[0] == {"A": ["live", 1.0, 28]}
    rig.close()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts need root")
def test_a_reader_refuses_a_map_that_it_cannot_lock(make_rig: Any, tmp_path: Path) -> None:
    """On a read-only mount LMDB goes on without locks, and pages are reused under the reader."""
    rig = make_rig(tmp_path)
    script = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 77; exec "$2" -c "$3" "$1"'
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), sys.executable, READER],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    rig.close()
    if result.returncode == 77:
        pytest.skip(f"no mounts here: {result.stderr}")
    assert "MapError" in result.stderr
    assert "mount the folder so that it can be written" in result.stderr
