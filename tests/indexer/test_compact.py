"""Compaction gives free pages back to the disk, and changes nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lmdb
import pytest
from click.testing import CliRunner, Result

from indexer.check import check_folder
from indexer.compact import compact
from indexer.errors import MapBusyError, MapMissingError
from indexer.folder import DATA_FILE
from indexer.writer import MapWriter
from warmroute import main

PROMPT = list(range(28))
LONG = list(range(100, 40_100))

WRITER = """
import sys
from pathlib import Path
from indexer.writer import MapWriter
writer = MapWriter(Path(sys.argv[1]))
print('"open"', flush=True)
sys.stdin.readline()
"""
READER = """
import sys
from pathlib import Path
from indexer.reader import MapReader
reader = MapReader.open(Path(sys.argv[1]))
print('"open"', flush=True)
for _ in sys.stdin:
    print(sum(len(reader.query("m", list(range(28)))) for _ in range(3)), flush=True)
"""


DIES = """
import os, sys
from pathlib import Path
from indexer import compact
compact.os.fsync = lambda _: (print('"copied"', flush=True), sys.stdin.readline())
compact.compact(Path(sys.argv[1]))
"""


def run(folder: Path) -> Result:
    return CliRunner().invoke(main, ["indexer", "compact", str(folder)])


@pytest.fixture
def churned(make_rig: Any, engine: Any, tmp_path: Path) -> Path:
    """A closed map that held much more than it does."""
    rig = make_rig(tmp_path / "map")
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT), engine().stored(LONG))
    rig.say(a, *engine().removed(LONG))
    rig.close()
    return tmp_path / "map"


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_compacted_map_is_smaller_and_holds_the_same(churned: Path, make_rig: Any, engine: Any) -> None:
    there, size = files(churned), (churned / DATA_FILE).stat().st_size
    done = run(churned)
    assert done.exit_code == 0, done.output
    after = (churned / DATA_FILE).stat().st_size
    assert f"{size:,} bytes before, {after:,} after" in done.output
    assert after < size / 4
    assert files(churned) == there
    assert check_folder(churned).clean
    rig = make_rig(churned)
    rig.resume()
    rig.sequences["A", 0] = 2
    assert rig.held(PROMPT) == {"A": (28, 28, 28)}
    rig.say(("A", 0), engine().stored(LONG))
    rig.check()
    rig.close()


def test_a_map_that_an_indexer_writes_is_left_alone(churned: Path, script: Any) -> None:
    size = (churned / DATA_FILE).stat().st_size
    assert script(WRITER, churned).answer() == "open"
    done = run(churned)
    assert done.exit_code == 2
    assert "written by another indexer" in done.output
    assert (churned / DATA_FILE).stat().st_size == size


def test_a_map_that_a_router_reads_is_left_alone(churned: Path, script: Any) -> None:
    before, there = (churned / DATA_FILE).read_bytes(), files(churned)
    reader = script(READER, churned)
    assert reader.answer() == "open"
    with pytest.raises(MapBusyError, match="open in a reader, such as a router; stop it"):
        compact(churned)
    assert (churned / DATA_FILE).read_bytes() == before
    assert files(churned) == there
    assert reader.ask() == 3
    reader.end()
    assert compact(churned).after < len(before)


def test_a_reader_that_waits_to_open_the_map_meanwhile_sees_what_is_in_it(
    churned: Path, script: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[Any] = []
    replace = Path.replace

    def while_somebody_opens(self: Path, target: Path) -> Path:
        waiting.append(script(READER, churned))
        blocked = re.compile(rf"-> POSIX .* {waiting[0].process.pid} ")
        until(lambda: blocked.search(Path("/proc/locks").read_text()), "the reader waits for LMDB's lock")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", while_somebody_opens)
    compact(churned)
    assert waiting[0].answer() == "open"
    assert waiting[0].ask() == 3


def test_the_lock_file_forgets_the_last_commit_of_the_old_file(churned: Path) -> None:
    """By its number, a second reader would look at the wrong one of the new file's two meta pages."""
    with lmdb.open(str(churned), map_size=256 << 20, sync=False, max_dbs=1) as env:
        meta = env.open_db(b"meta")
        for number in range(1_000):
            with env.begin(write=True) as txn:
                txn.put(b"made", str(number).encode(), db=meta)
        last = env.info()["last_txnid"].to_bytes(8, "little")
    assert last in (churned / "lock.mdb").read_bytes()[:256]
    compact(churned)
    assert last not in (churned / "lock.mdb").read_bytes()[:256]


def test_a_folder_without_a_map_is_left_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(MapMissingError):
        compact(tmp_path)
    assert files(tmp_path) == set()
    assert run(tmp_path / "nowhere").exit_code == 2
    assert not (tmp_path / "nowhere").exists()


def test_a_copy_that_fails_leaves_the_map_as_it_was(churned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, there = (churned / DATA_FILE).read_bytes(), files(churned)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("indexer.compact.os.fsync", full)
    done = run(churned)
    assert done.exit_code == 2
    assert "No space left on device; make room" in done.output
    assert (churned / DATA_FILE).read_bytes() == before
    assert files(churned) == there
    MapWriter(churned).close()


def test_what_a_killed_compaction_left_behind_goes_with_the_next(churned: Path, script: Any) -> None:
    before = files(churned)
    dies = script(DIES, churned)
    assert dies.answer() == "copied"
    dies.end()
    assert any(name.startswith("compact-") for name in files(churned) - before)
    assert check_folder(churned).clean
    assert run(churned).exit_code == 0
    assert files(churned) == before
    assert check_folder(churned).clean
