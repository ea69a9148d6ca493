"""The writer: one of it, all or nothing, and what is there after it has ended in whatever way."""

import socket
from pathlib import Path
from typing import Any

import lmdb
import pytest
from click.testing import CliRunner, Result

from events.schema import AllBlocksCleared
from indexer import writer as writer_module
from indexer.errors import MapBusyError, MapError, MapFullError, MapSchemaError
from indexer.layout import META_SCHEMA, SCHEMA_VERSION
from indexer.registration import Registration
from indexer.writer import MapWriter
from warmroute import main

open_lmdb = lmdb.open
PROMPT = list(range(28))

WRITER = """
import sys
from pathlib import Path
from indexer.writer import MapWriter
writer = MapWriter(Path(sys.argv[1]), map_size=1 << 24)
print("1", flush=True)
sys.stdin.readline()
writer.close()
print("2", flush=True)
"""
READER_IN_A_QUERY = """
import sys
from pathlib import Path
from indexer.reader import MapReader
with MapReader.open(Path(sys.argv[1]))._begin():
    print("1", flush=True)
    sys.stdin.readline()
"""


def start(folder: Path) -> Result:
    """``warmroute indexer`` on a folder that it refuses."""
    return CliRunner().invoke(main, ["indexer", "--map", str(folder), "--listen", "127.0.0.1:0"])


def refused_in_one_line(result: Result, *words: str) -> None:
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1
    for word in words:
        assert word in result.output


# opening


def test_pe10_a_second_writer_is_refused_and_told_who_has_the_map(tmp_path: Path, script: Any) -> None:
    first = script(WRITER, tmp_path)
    assert first.answer() == 1
    with pytest.raises(MapBusyError, match=rf"another indexer \(process {first.process.pid} on .*--map"):
        MapWriter(tmp_path)
    refused_in_one_line(start(tmp_path), str(first.process.pid), "--map")
    assert first.ask() == 2
    MapWriter(tmp_path).close()


def test_a_killed_writer_keeps_nobody_out(tmp_path: Path, script: Any) -> None:
    first = script(WRITER, tmp_path)
    assert first.answer() == 1
    first.end()
    MapWriter(tmp_path).close()


def test_a_map_of_a_newer_schema_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    env = lmdb.open(str(tmp_path), max_dbs=8)
    meta = env.open_db(b"meta")
    with env.begin(write=True) as txn:
        txn.put(META_SCHEMA, str(SCHEMA_VERSION + 1).encode(), db=meta)
    env.close()
    with pytest.raises(MapSchemaError, match=f"schema {SCHEMA_VERSION + 1}.*--map"):
        MapWriter(tmp_path)
    refused_in_one_line(start(tmp_path), f"schema {SCHEMA_VERSION + 1}", "--map")
    with lmdb.open(str(tmp_path), max_dbs=8) as env, env.begin() as txn:
        assert [bytes(key) for key, _ in txn.cursor()] == [b"meta"]


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        with pytest.raises(MapError, match=f"{folder}.*--map"):
            MapWriter(folder)
        refused_in_one_line(start(folder), str(folder), "--map")


def test_a_file_that_is_no_map_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"no map" * 4096)
    for _ in range(2):  # The second time too: the first attempt left nothing open.
        with pytest.raises(MapError, match=str(tmp_path)):
            MapWriter(tmp_path)
    refused_in_one_line(start(tmp_path), str(tmp_path))


def test_an_address_in_use_is_refused_and_the_map_is_free_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["indexer", "--map", str(tmp_path), "--listen", f"127.0.0.1:{port}"]
        refused_in_one_line(
            CliRunner().invoke(main, arguments), f"127.0.0.1:{port}", "address already in use"
        )
    MapWriter(tmp_path).close()


# what stays


def test_a_map_closed_cleanly_survives_a_boot(tmp_path: Path) -> None:
    writer, registration = MapWriter(tmp_path, boot=b"one"), registered("A")
    with writer.group() as group:
        writer.open_stream(group, registration)
    writer.close()
    writer = MapWriter(tmp_path, boot=b"two")
    assert [record.registration for record in writer.streams.values()] == [registration]
    writer.close()


def registered(name: str) -> Registration:
    return Registration(instance_id=name, endpoint="tcp://127.0.0.1:5557", model_name="m", aliases=("alias",))


def test_a_map_of_another_boot_that_was_not_closed_is_emptied_in_place(
    make_rig: Any, engine: Any, tmp_path: Path
) -> None:
    rig = make_rig(tmp_path)
    rig.say(rig.follow("A"), engine().stored(PROMPT), engine(2).stored(PROMPT[4:], 1))
    rig.say(rig.follow("B"), engine().stored(PROMPT))
    rig.ingest.forget("B", "m")
    registration = rig.record(("A", 0)).registration
    file = (tmp_path / "data.mdb").stat().st_ino
    rig.abandon()
    writer = MapWriter(tmp_path, boot=b"another boot")
    assert [each.registration for each in writer.streams.values()] == [registration]
    assert [(each.sequence, each.blocks, each.state) for each in writer.streams.values()] == [
        (None, 0, "connecting")
    ]
    with writer.env.begin() as txn:
        for table in (*writer.tables.by_slot, writer.tables.blocks):
            assert txn.stat(table)["entries"] == 0
    assert (tmp_path / "data.mdb").stat().st_ino == file
    writer.close()


def test_a_map_of_this_boot_survives_a_kill(make_rig: Any, engine: Any, tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    stream = rig.follow("A", aliases=("alias",), block_size=4)
    rig.say(stream, engine().stored(PROMPT))
    before = rig.record(stream)
    rig.abandon()
    rig = make_rig(tmp_path)
    assert rig.record(stream) == before
    assert rig.held(PROMPT, "alias") == {"A": (28, 28, 28)}
    rig.check()
    rig.close()


def test_a_map_that_was_closed_once_is_not_clean_while_it_is_open(tmp_path: Path) -> None:
    MapWriter(tmp_path, boot=b"one").close()
    writer = MapWriter(tmp_path, boot=b"one")
    with writer.group() as group:
        writer.open_stream(group, registered("A"))
    writer.env.close()
    writer._lock.close()
    used = writer_slots(tmp_path, b"two")
    assert used == {("A", 0): (None, 0)}


def writer_slots(folder: Path, boot: bytes) -> dict[tuple[str, int], tuple[int | None, int]]:
    """Sequence and blocks of the streams that a writer begins with."""
    writer = MapWriter(folder, boot=boot)
    found = {record.id: (record.sequence, record.blocks) for record in writer.streams.values()}
    writer.close()
    return found


def test_the_last_address_is_forgotten_until_the_indexer_listens_again(make_rig: Any, tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    rig.writer.set_address("http://127.0.0.1:9400")
    assert rig.reader.indexer_address() == "http://127.0.0.1:9400"
    rig.close()
    rig = make_rig(tmp_path)
    assert rig.reader.indexer_address() is None
    rig.close()


def test_generations_are_never_used_twice(make_rig: Any, engine: Any, tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        rig = make_rig(tmp_path)
        stream = rig.follow("A", additional_salt=str(len(seen)))
        seen.append(rig.record(stream).generation)
        rig.say(stream, engine().stored(list(range(8))), AllBlocksCleared())
        seen.append(rig.record(stream).generation)
        rig.close()
    assert seen == sorted(set(seen))


# all or nothing


class Unreadable:
    """An environment of which nothing can be read or written now."""

    def __init__(self, env: lmdb.Environment) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        if name in ("begin", "sync", "reader_check"):
            raise lmdb.PanicError("made to fail")
        return getattr(self._env, name)


def test_a_map_that_cannot_even_be_read_after_a_failure_is_read_before_the_next_group(
    rig: Any, engine: Any
) -> None:
    a, env = rig.follow("A"), rig.writer.env
    rig.say(a, engine().stored(PROMPT))
    try:
        with pytest.raises(MapError, match="cannot write"), rig.writer.group() as group:  # noqa: PT012
            record = rig.writer.streams[a]
            record.sequence = 99
            group.touch(record)
            rig.writer.env = Unreadable(env)
            raise lmdb.DiskError("made to fail")
        for action in (rig.writer.group().__enter__, rig.writer.used_bytes, rig.writer.forget_dead_readers):
            with pytest.raises(MapError, match="made to fail"):
                action()
    finally:
        rig.writer.env = env
    rig.say(a, engine().stored(PROMPT))
    assert rig.writer.streams[a] == rig.record(a)
    assert rig.record(a).sequence == 1
    rig.check()


def test_pe02_a_full_map_applies_nothing_of_the_group_and_answers_as_before(
    make_rig: Any, engine: Any, tmp_path: Path, tables_agree: Any
) -> None:
    def prompt(number: int) -> range:
        return range(number * 10_000, number * 10_000 + 4_000)

    rig = make_rig(tmp_path, map_size=1 << 20)
    stream, hasher = rig.follow("A"), engine()
    number = 0
    with pytest.raises(MapFullError, match=f"{tmp_path}.*--map-size"):  # noqa: PT012
        while True:
            before = rig.record(stream)
            rig.say(stream, hasher.stored(prompt(number)))
            number += 1
    assert number > 0
    assert rig.record(stream) == rig.writer.streams[stream] == before
    for kept in range(number):
        assert rig.held(prompt(kept))["A"][0] == 4_000
    assert rig.held(prompt(number))["A"][0] == 0
    tables_agree(rig.writer.env, rig.writer.tables)
    rig.close()
    rig = make_rig(tmp_path, map_size=1 << 26)
    rig.sequences[stream] = before.sequence + 1
    rig.resume()
    rig.say(stream, hasher.stored(prompt(number)))
    assert rig.held(prompt(number))["A"][0] == 4_000
    rig.check()
    rig.close()


def test_an_error_in_a_group_undoes_all_of_it(rig: Any, engine: Any) -> None:
    a, b = rig.follow("A"), rig.follow("B")
    rig.say(a, engine().stored(PROMPT, 0, 2))
    before = [rig.record(a), rig.record(b)]
    with pytest.raises(ZeroDivisionError), rig.writer.group() as group:  # noqa: PT012
        group.blocks(rig.writer.streams[a]).store(engine().stored(PROMPT))
        rig.writer.close_stream(group, rig.writer.streams[b])
        rig.writer.open_stream(group, registered("C"))
        _ = 1 / 0
    assert [rig.record(a), rig.record(b)] == before
    assert rig.writer.streams.keys() == {a, b}
    assert not rig.writer.garbage
    assert rig.held(PROMPT) == {"A": (8, 8, 8), "B": (0, 0, 0)}
    rig.check()


def test_blocks_and_the_sequence_that_they_came_with_are_one_commit(rig: Any, engine: Any) -> None:
    stream = rig.follow("A")
    for number in range(7):
        rig.say(stream, engine().stored(PROMPT, number, number + 1))
        matched = rig.reader.query("m", PROMPT)[0]
        assert (matched.sequence, matched.gpu) == (number, 4 * number + 4)


# slots


def test_a_clear_is_one_small_write_however_much_there_was(rig: Any, engine: Any) -> None:
    stream = rig.follow("A")
    rig.say(stream, engine().stored(range(40_000)))
    names, blocks = rig.writer.tables.names, rig.writer.tables.blocks
    with rig.writer.group() as group:
        rig.writer.renew(group, rig.writer.streams[stream])
    with rig.writer.env.begin() as txn:
        assert txn.stat(names)["entries"] == txn.stat(blocks)["entries"] == 10_000
    assert rig.held(range(40_000)) == {"A": (0, 0, 0)}
    rig.writer.collect(step=100)
    with rig.writer.env.begin() as txn:
        assert txn.stat(names)["entries"] == txn.stat(blocks)["entries"] == 9_900
    rig.check()


@pytest.mark.parametrize("step", [1, 2, 7, 14, 1000])
def test_a_slot_is_used_again_only_when_nothing_of_it_is_left(rig: Any, engine: Any, step: int) -> None:
    a, b = rig.follow("A"), rig.follow("B")
    rig.say(a, engine().stored(PROMPT), engine(2).stored(PROMPT, 3))
    rig.say(b, engine().stored(PROMPT))
    old = rig.record(a).slot
    with rig.writer.group() as group:
        rig.writer.close_stream(group, rig.writer.streams[a])
    steps, probes = 0, []
    while rig.writer.garbage:
        with rig.writer.group() as group:
            probe = rig.writer.open_stream(group, registered(f"probe {steps}"))
        probes.append(probe.slot)
        rig.check()
        assert rig.held(PROMPT)["B"] == (28, 28, 28)
        assert "A" not in rig.held(PROMPT)
        rig.writer.collect(step)
        steps += 1
    assert steps >= 15 // step
    assert old not in probes
    with rig.writer.group() as group:
        assert rig.writer.open_stream(group, registered("last")).slot == old
    assert rig.held(PROMPT)["last"] == (0, 0, 0)
    rig.check()


def test_collecting_goes_on_after_a_kill(make_rig: Any, engine: Any, tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    stream = rig.follow("A")
    rig.say(stream, engine().stored(PROMPT))
    with rig.writer.group() as group:
        rig.writer.close_stream(group, rig.writer.streams[stream])
    rig.writer.collect(step=3)
    rig.abandon()
    rig = make_rig(tmp_path)
    assert rig.writer.garbage
    rig.collect()
    with rig.writer.env.begin() as txn:
        for table in (*rig.writer.tables.by_slot, rig.writer.tables.blocks, rig.writer.tables.streams):
            assert txn.stat(table)["entries"] == 0
    rig.close()


def test_a_map_without_a_free_slot_says_so(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_SLOTS", 2)
    rig.follow("A")
    rig.follow("B")
    with pytest.raises(MapFullError, match="all 2 slots"):
        rig.follow("C")
    assert {record.registration.instance for record in rig.writer.streams.values()} == {"A", "B"}


def test_the_highest_slot_can_be_written(rig: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.writer, "_free_slot", lambda: writer_module.MAX_SLOTS - 1)
    rig.say(rig.follow("A"), engine().stored(PROMPT))
    assert rig.held(PROMPT) == {"A": (28, 28, 28)}
    rig.check()


# others


class Syncs:
    """Notes how often each map is forced to the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr("indexer.folder.lmdb.open", self._open)

    def _open(self, *arguments: Any, **options: Any) -> Any:
        return Syncing(open_lmdb(*arguments, **options), self)


class Syncing:
    """An environment that counts."""

    def __init__(self, env: lmdb.Environment, syncs: Syncs) -> None:
        self._env = env
        self._syncs = syncs

    def sync(self, force: bool = False) -> None:
        self._syncs.count += 1
        self._env.sync(force)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


def test_a_restart_in_the_same_boot_waits_for_no_disk(
    make_rig: Any, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a running writer: what it changed may take the disk many seconds, and nothing is promised."""
    syncs = Syncs(monkeypatch)
    rig = make_rig(tmp_path)
    assert syncs.count == 1, "that the map is in use is on the disk before anything else is"
    rig.say(rig.follow("A"), engine().stored(PROMPT))
    rig.now += 1_000.0
    rig.ingest.step([])
    rig.abandon()
    rig = make_rig(tmp_path)
    assert rig.held(PROMPT) == {"A": (28, 28, 28)}
    assert syncs.count == 1
    rig.close()
    assert syncs.count == 3
    make_rig(tmp_path).abandon()
    assert syncs.count == 4, "it was closed cleanly, and is in use again"


def test_readers_that_died_in_a_query_are_forgotten(rig: Any, script: Any) -> None:
    rig.follow("A")
    reader = script(READER_IN_A_QUERY, rig.writer.path)
    assert reader.answer() == 1
    assert str(reader.process.pid) in rig.writer.env.readers()
    reader.end()
    rig.writer.forget_dead_readers()
    assert str(reader.process.pid) not in rig.writer.env.readers()
