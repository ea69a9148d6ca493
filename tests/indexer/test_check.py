"""The check finds each way in which tables can disagree, and says where."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest
from click.testing import CliRunner, Result

from events.schema import AllBlocksCleared, display_hash
from indexer.check import check, check_folder
from indexer.errors import MapMissingError
from indexer.folder import DATA_FILE
from indexer.layout import (
    Name,
    Tables,
    age_key,
    decode_record,
    encode_holders,
    encode_record,
    encode_shared,
    slot_key,
)
from indexer.violations import MAX_TOLD
from warmroute import main

PROMPT = list(range(28))
LATER = list(range(100, 128))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["indexer", *map(str, arguments)])


class Spoiler:
    """Changes single rows behind the writer's back."""

    def __init__(self, rig: Any, engine: Any) -> None:
        self.rig, self.hasher = rig, engine()
        self.stream = rig.follow("A")
        rig.say(self.stream, self.hasher.stored(PROMPT))  # slot 0, seven blocks
        rig.say(self.stream, self.hasher.stored(LATER, 2))  # five blocks wait
        self.tables: Tables = rig.writer.tables
        self.hashes = self.hasher.hashes(PROMPT)

    def key(self, number: int) -> bytes:
        return slot_key(0) + b"\0" + self.hashes[number]

    def put(self, table: Any, key: bytes, value: bytes) -> None:
        with self.rig.writer.env.begin(write=True) as txn:
            txn.put(key, value, db=table)

    def delete(self, table: Any, key: bytes, value: bytes = b"") -> None:
        with self.rig.writer.env.begin(write=True) as txn:
            assert txn.delete(key, value, db=table)

    def name(self, number: int) -> Name:
        with self.rig.writer.env.begin() as txn:
            return Name.decode(bytes(txn.get(self.key(number), db=self.tables.names)))

    def change_name(self, number: int, **fields: Any) -> None:
        name = self.name(number)
        for field, value in fields.items():
            setattr(name, field, value)
        self.put(self.tables.names, self.key(number), name.encode())

    def change_record(self, **fields: Any) -> None:
        with self.rig.writer.env.begin() as txn:
            record = decode_record(bytes(txn.get(slot_key(0), db=self.tables.streams)))
        for field, value in fields.items():
            setattr(record, field, value)
        self.put(self.tables.streams, slot_key(0), encode_record(record))

    def first(self, table: Any) -> tuple[bytes, bytes]:
        with self.rig.writer.env.begin() as txn, txn.cursor(table) as cursor:
            assert cursor.first()
            return bytes(cursor.key()), bytes(cursor.value())


@pytest.fixture
def spoiler(rig: Any, engine: Any) -> Spoiler:
    return Spoiler(rig, engine)


SPOILT: dict[str, tuple[Callable[[Spoiler], None], str, str]] = {
    "a name without its block": (
        lambda it: it.delete(it.tables.blocks, it.name(3).key),
        "blocks",
        "is not there, though A rank 0",
    ),
    "a holder in another tier": (
        lambda it: it.put(it.tables.blocks, it.name(3).key, encode_holders((0, 1, 0))),
        "blocks",
        "is a holder (cpu) that has no name",
    ),
    "a block of nobody's": (
        lambda it: it.put(it.tables.blocks, b"stranger", encode_holders((1, 0, 0))),
        "blocks",
        "is a holder (gpu) that has no name",
    ),
    "a block with no holder": (
        lambda it: it.put(it.tables.blocks, b"stranger", b"\1\0"),
        "blocks",
        "nobody holds it",
    ),
    "a holder that is no stream": (
        lambda it: it.put(it.tables.blocks, it.name(3).key, encode_holders((1 | 1 << 77, 0, 0))),
        "blocks",
        "its holder slot 77 is no stream",
    ),
    "a bitmap of the wrong width": (
        lambda it: it.put(it.tables.blocks, it.name(3).key, b"\2\1"),
        "blocks",
        "cannot be read: 0201",
    ),
    "a block key of the wrong width": (
        lambda it: it.put(it.tables.blocks, b"short", encode_holders((1, 0, 0))),
        "blocks",
        "the key has 5 bytes",
    ),
    "a name without its parent's": (
        lambda it: it.change_name(3, parent=b"elsewhen"),
        "names",
        f"its parent {display_hash(b'elsewhen')} has no name",
    ),
    "children miscounted": (lambda it: it.change_name(3, children=9), "names", "counts 9 held children"),
    "ghosts miscounted": (lambda it: it.change_name(3, ghosts=9), "names", "counts 9 ghosts"),
    "a ghost that leads nowhere": (
        lambda it: it.change_name(6, copies=[0, 0, 0]),
        "names",
        "a ghost on which nothing hangs",
    ),
    "a name that cannot be read": (
        lambda it: it.put(it.tables.names, it.key(3), b"short"),
        "names",
        "cannot be read",
    ),
    "a names key of the wrong width": (
        lambda it: it.put(it.tables.names, slot_key(0) + b"\0abc", it.name(3).encode()),
        "names",
        "the key has 6 bytes",
    ),
    "an age that is missing": (
        lambda it: it.delete(it.tables.ages, age_key(it.name(3).age)),
        "names",
        "leads elsewhere",
    ),
    "an age of another's": (
        lambda it: it.put(it.tables.ages, age_key(1 << 40), it.key(3)),
        "ages",
        "is not the age of A rank 0",
    ),
    "an age of nobody's": (
        lambda it: it.put(it.tables.ages, age_key(1 << 40), slot_key(9) + it.key(3)[2:]),
        "ages",
        "no stream's",
    ),
    "a block that waits and is known": (
        lambda it: it.put(it.tables.waiting, it.key(3), it.first(it.tables.waiting)[1]),
        "waiting",
        "both waits and is known",
    ),
    "a waiting block without its link": (
        lambda it: it.delete(it.tables.children, *it.first(it.tables.children)),
        "waiting",
        "nothing leads to it",
    ),
    "a link that dangles": (
        lambda it: it.put(it.tables.children, it.key(3), it.key(4)),
        "children",
        "does not wait for it",
    ),
    "a waiting block without copies": (
        lambda it: it.put(
            it.tables.waiting,
            it.first(it.tables.waiting)[0],
            msgspec.msgpack.encode([*msgspec.msgpack.decode(it.first(it.tables.waiting)[1])[:3], [0, 0, 0]]),
        ),
        "waiting",
        "without copies",
    ),
    "blocks miscounted": (lambda it: it.change_record(blocks=8), "streams", "counts 8 blocks, there are 7"),
    "orphans miscounted": (lambda it: it.change_record(orphans=1), "streams", "counts 1 orphans"),
    "waiting miscounted": (lambda it: it.change_record(waiting=0), "streams", "counts 0 waiting"),
    "denials miscounted": (lambda it: it.change_record(denied=1), "streams", "counts 1 denied"),
    "beliefs miscounted": (lambda it: it.change_record(believed=1), "streams", "counts 1 believed"),
    "a lower tier unknown": (
        lambda it: it.change_name(3, copies=[1, 1, 0]),
        "streams",
        "does not know of its blocks in lower tiers",
    ),
    "a record in another's place": (
        lambda it: it.put(it.tables.streams, slot_key(5), it.first(it.tables.streams)[1]),
        "streams",
        "holds the record of slot 0",
    ),
    "a record that cannot be read": (
        lambda it: it.put(it.tables.streams, slot_key(5), b"\xc1"),
        "streams",
        "cannot be read",
    ),
    "a generation used again": (
        lambda it: it.change_record(generation=99),
        "streams",
        "generation 99 is used twice, or will be",
    ),
    "entries of a slot without a stream": (
        lambda it: it.put(it.tables.names, slot_key(9) + it.key(3)[2:], it.name(3).encode()),
        "names",
        "a slot that no stream has",
    ),
    "a name more than there is": (
        lambda it: it.put(it.tables.shared, slot_key(0) + it.name(3).key, encode_shared(1, 0, 0)),
        "shared",
        "names more than one, there are (0, 0, 0)",
    ),
    "copies in doubt": (
        lambda it: it.change_name(3, again=1),
        "names",
        "doubts 1 of 1 copies on the GPU",
    ),
    "another schema": (lambda it: it.put(it.tables.meta, b"schema", b"7"), "meta", "not 2"),
}


def test_a_map_as_it_should_be_is_clean(spoiler: Spoiler) -> None:
    spoiler.rig.say(spoiler.stream, *spoiler.hasher.removed(PROMPT, 4), spoiler.hasher.stored(PROMPT, 3, 4))
    report = check(spoiler.rig.writer.env, spoiler.tables)
    assert report.clean
    assert report.violations == []
    assert report.streams == 1
    assert report.entries["names"] == report.entries["blocks"] == report.entries["ages"] == 4
    assert report.entries["waiting"] == report.entries["children"] == 5


@pytest.mark.parametrize("how", SPOILT)
def test_each_violation_is_found_and_named(how: str, spoiler: Spoiler) -> None:
    spoil, table, problem = SPOILT[how]
    spoil(spoiler)
    report = check(spoiler.rig.writer.env, spoiler.tables)
    assert not report.clean
    told = [violation.problem for violation in report.violations if violation.table == table]
    assert any(problem in each for each in told), report.violations


def test_a_violation_names_stream_group_and_engine_hash(spoiler: Spoiler) -> None:
    spoiler.change_name(3, children=9)
    (violation,) = check(spoiler.rig.writer.env, spoiler.tables).violations
    assert violation.key == f"A rank 0 (slot 0) group 0 block {display_hash(spoiler.hashes[3])}"


def test_what_a_retired_slot_left_in_the_bitmaps_is_found_before_it_is_used_again(
    spoiler: Spoiler,
) -> None:
    spoiler.rig.say(spoiler.stream, AllBlocksCleared())
    while spoiler.rig.writer.garbage:
        assert check(spoiler.rig.writer.env, spoiler.tables).clean
        spoiler.rig.writer.collect(5)
    slot = spoiler.rig.record(spoiler.stream).slot
    spoiler.rig.writer.collect = lambda *_: None
    spoiler.rig.say(spoiler.stream, spoiler.hasher.stored(PROMPT), AllBlocksCleared())
    assert check(spoiler.rig.writer.env, spoiler.tables).clean
    spoiler.put(spoiler.tables.blocks, b"leftover", encode_holders((1 << slot, 0, 0)))
    (violation,) = check(spoiler.rig.writer.env, spoiler.tables).violations
    assert f"A rank 0 (slot {slot}, retired) is a holder" in violation.problem


def test_violations_are_counted_and_the_first_of_them_told(spoiler: Spoiler) -> None:
    with spoiler.rig.writer.env.begin(write=True) as txn:
        for number in range(3 * MAX_TOLD):
            txn.put(number.to_bytes(8, "big"), b"\1\0", db=spoiler.tables.blocks)
    report = check(spoiler.rig.writer.env, spoiler.tables)
    assert report.found == 3 * MAX_TOLD
    assert len(report.violations) == MAX_TOLD


# the command


@pytest.mark.parametrize("command", ["check", "compact", "dump"])
def test_the_commands_for_a_map_stand_beside_the_indexers_own_flags(command: str) -> None:
    assert "DIR" in run(command, "--help").output
    told = run("--help").output
    assert command in told
    assert "--map-size" in told


def test_a_clean_map_exits_with_0_closed_and_beside_its_indexer(
    make_rig: Any, engine: Any, tmp_path: Path, script: Any
) -> None:
    rig = make_rig(tmp_path)
    rig.say(rig.follow("A"), engine().stored(PROMPT))
    rig.close()
    done = run("check", tmp_path)
    assert done.exit_code == 0, done.output
    assert "no violations; 1 current streams" in done.output
    writer = script(BESIDE, tmp_path)
    assert writer.answer() == "open"
    done = run("check", tmp_path, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["entries"]["names"] == 7


BESIDE = """
import sys
from pathlib import Path
from indexer.writer import MapWriter
writer = MapWriter(Path(sys.argv[1]))
print('"open"', flush=True)
sys.stdin.readline()
"""


def test_a_spoilt_map_exits_with_1_and_says_what_is_wrong(make_rig: Any, engine: Any, tmp_path: Path) -> None:
    spoiler = Spoiler(make_rig(tmp_path), engine)
    spoiler.change_record(blocks=8)
    spoiler.rig.close()
    done = run("check", tmp_path)
    assert done.exit_code == 1
    assert "streams: A rank 0 (slot 0): counts 8 blocks, there are 7" in done.output
    told = json.loads(run("check", tmp_path, "--json").stdout)
    assert (told["clean"], told["found"]) == (False, 1)
    assert told["violations"][0]["table"] == "streams"


@pytest.mark.parametrize("spoil", ["missing", "no map", "cut off"])
def test_a_map_that_cannot_be_read_exits_with_2(
    spoil: str, make_rig: Any, engine: Any, tmp_path: Path
) -> None:
    if spoil == "no map":
        (tmp_path / DATA_FILE).write_bytes(b"no map" * 4096)
    elif spoil == "cut off":
        rig = make_rig(tmp_path)
        rig.say(rig.follow("A"), engine().stored(list(range(4_000))))
        rig.close()
        (tmp_path / DATA_FILE).write_bytes((tmp_path / DATA_FILE).read_bytes()[: 3 * 4096])
    done = run("check", tmp_path)
    assert done.exit_code == 2
    assert str(tmp_path) in done.output


@pytest.mark.parametrize("command", ["check", "compact", "dump"])
def test_a_folder_with_brackets_in_its_name_is_a_folder(command: str, make_rig: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a[" / "b]c"
    make_rig(folder).close()
    assert run(command, folder).exit_code == 0


def test_a_check_leaves_a_folder_without_a_map_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(MapMissingError):
        check_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_commits_that_come_while_the_check_looks_are_said(rig: Any, engine: Any) -> None:
    stream = rig.follow("A")
    rig.say(stream, engine().stored(PROMPT))

    class Meanwhile:
        """The environment, in which a batch is committed as soon as there is a snapshot."""

        def begin(self) -> lmdb.Transaction:
            txn = rig.writer.env.begin()
            rig.say(stream, engine().stored(LATER))
            return txn

        def info(self) -> Any:
            return rig.writer.env.info()

    report = check(Meanwhile(), rig.writer.tables)  # type: ignore[arg-type]
    assert report.clean
    assert report.commits_behind == 1
    assert report.entries["names"] == 7
