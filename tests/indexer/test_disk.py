"""A disk without room, and one that cannot be written: real disks, and real limits of a process."""

from __future__ import annotations

import contextlib
import resource
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from indexer.bounds import Bounds, Eviction
from indexer.compact import compact
from indexer.errors import DiskFullError, MapError
from indexer.writer import MapWriter
from warmroute import main

PROMPT = list(range(28))
DISK_BYTES = 2 << 20
MOST_TURNS = 500


class Disk:
    """A small disk of its own, in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.map = path / "map"
        self._ballast = path / "ballast"

    def fill(self) -> None:
        """Takes all the room that is left."""
        try:
            with self._ballast.open("ab", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        except OSError:
            assert shutil.disk_usage(self.path).free == 0

    def empty(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    """Mounts disks, where this process may; all are unmounted at the end."""
    made: list[Path] = []

    def mount(options: str = f"size={DISK_BYTES}") -> Disk:
        path = tmp_path / f"disk {len(made)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=10)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no disk can be mounted here: {error}")
        made.append(path)
        return Disk(path)

    yield mount
    for path in made:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=10)


def prompt(number: int, blocks: int) -> list[int]:
    return list(range(number * 1_000_000, number * 1_000_000 + 4 * blocks))


def hear(rig: Any, stream: Any, hasher: Any, numbers: range, blocks: int) -> None:
    for number in numbers:
        rig.feed.inbox.put(*rig.frame(stream, hasher.stored(prompt(number, blocks))))


def work_off(rig: Any, stream: Any) -> None:
    for _ in range(MOST_TURNS):
        rig.ingest.work()
        if not rig.feed.inbox.depth(stream):
            return
    pytest.fail(f"{rig.feed.inbox.depth(stream)} batches still wait")


def get(process: Any, path: str) -> str:
    """The answer, also of an error."""
    try:
        with urllib.request.urlopen(process.url + path, timeout=10) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        return str(error.read().decode())


# full


def test_a_full_disk_holds_what_it_can_and_the_oldest_make_room(
    mounted: Any, make_rig: Any, engine: Any
) -> None:
    """The budget knows nothing of the disk: what the file cannot grow by has to come from within it."""
    disk = mounted(f"size={1 << 20}")
    rig = make_rig(disk.map, map_size=64 << 20)
    bounds = Bounds(16 << 20)
    rig.ingest._house.eviction, rig.ingest._group_bytes = Eviction(bounds), bounds.group_bytes
    a, hasher = rig.follow("A"), engine()
    hear(rig, a, hasher, range(60), 200)
    work_off(rig, a)
    assert rig.ingest.failures > 0
    record = rig.record(a)
    assert (record.sequence, record.counters.batches) == (59, 60)
    assert record.counters.evicted > 0
    assert (record.state == "partial") == (record.counters.skipped.get("no_room", 0) > 0)
    assert rig.held(prompt(59, 200)) == {"A": (800, 800, 800)}
    rig.check()
    rig.close()


def test_a_disk_that_others_filled_costs_nothing_once_there_is_room_again(
    mounted: Any, make_rig: Any, engine: Any
) -> None:
    disk = mounted()
    rig = make_rig(disk.map)
    a, hasher = rig.follow("A"), engine()
    rig.say(a, hasher.stored(PROMPT))
    disk.fill()
    hear(rig, a, hasher, range(1, 4), 500)
    while rig.ingest.work():
        pass
    assert rig.ingest.trouble is not None
    waiting = rig.feed.inbox.depth(a)
    assert waiting > 0
    assert waiting + rig.record(a).counters.batches == 4
    disk.empty()
    work_off(rig, a)
    assert rig.ingest.trouble is None
    assert (rig.record(a).sequence, rig.record(a).counters.batches) == (3, 4)
    assert (rig.record(a).state, rig.record(a).counters.skipped) == ("live", {})
    rig.check()
    rig.close()


def test_a_map_that_cannot_be_begun_on_a_full_disk_says_so(mounted: Any) -> None:
    disk = mounted()
    disk.fill()
    with pytest.raises(MapError, match=r"No space left on device.*make room on its disk"):
        MapWriter(disk.map)
    result = CliRunner().invoke(main, ["indexer", "--map", str(disk.map), "--listen", "127.0.0.1:0"])
    assert result.exit_code == 2
    assert "make room on its disk, or give another --map" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_map_that_is_there_is_not_harmed_by_a_start_on_a_full_disk(
    mounted: Any, make_rig: Any, engine: Any
) -> None:
    disk = mounted()
    rig = make_rig(disk.map)
    rig.say(rig.follow("A"), engine().stored(PROMPT))
    rig.close()
    disk.fill()
    with contextlib.suppress(DiskFullError):  # The pages that are free in its file may do.
        MapWriter(disk.map, clock=lambda: 100.0).close()
    disk.empty()
    rig = make_rig(disk.map)
    assert rig.held(PROMPT) == {"A": (28, 28, 28)}
    rig.check()
    rig.close()


def test_a_map_that_cannot_be_compacted_on_a_full_disk_is_as_it_was(
    mounted: Any, make_rig: Any, engine: Any
) -> None:
    disk = mounted()
    rig = make_rig(disk.map)
    rig.say(rig.follow("A"), engine().stored(prompt(1, 2_000)))
    rig.close()
    disk.fill()
    with pytest.raises(MapError, match="make room on its disk"):
        compact(disk.map)
    disk.empty()
    assert [path.name for path in disk.map.iterdir() if path.name.startswith("compact-")] == []
    rig = make_rig(disk.map)
    assert rig.held(prompt(1, 2_000)) == {"A": (8_000, 8_000, 8_000)}
    rig.check()
    rig.close()


def test_an_indexer_on_a_disk_that_fills_goes_on_answering_says_so_and_catches_up(
    mounted: Any, indexer_process: Any, publishers: Any, engine: Any, until: Any
) -> None:
    disk = mounted(f"size={8 << 20}")
    process, publisher, hasher = indexer_process(disk.map).listening(), publishers(), engine()
    registration = {
        "instance_id": "A",
        "model_name": "m",
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint,
    }
    process.call("/register", registration)
    publisher.publish([hasher.stored(PROMPT)], 1.0)
    query = {"model_name": "m", "token_ids": PROMPT}
    until(lambda: process.call("/query", query)["scores"] == {"A": {"0": 28}})
    disk.fill()
    for number in range(1, 6):
        publisher.publish([hasher.stored(prompt(number, 2_000))], 1.0)
    until(lambda: "warmroute_indexer_write_trouble 1.0" in get(process, "/metrics"), "the alert")
    until(lambda: "stands still" in get(process, "/health"), "the heartbeat to be missed")
    assert '"ready":false' in get(process, "/ready")
    assert "make room on its disk" in get(process, "/ready")
    assert process.call("/query", query)["instances"]["A"]["dp"].keys() == {"0"}  # It goes on answering.
    disk.empty()
    until(lambda: process.replicas()["A"]["sequence"] == 5, "it goes on")
    until(lambda: '"ready":true' in get(process, "/ready"), "it is ready again")
    assert "warmroute_indexer_write_trouble 0.0" in get(process, "/metrics")
    replica = process.replicas()["A"]
    assert replica["state"] == ("partial" if "no_room" in str(replica) else "live")
    assert process.stop() == 0


# read-only


def test_a_map_that_would_be_made_on_a_read_only_disk_is_refused(mounted: Any) -> None:
    disk = mounted("ro")
    result = CliRunner().invoke(main, ["indexer", "--map", str(disk.map), "--listen", "127.0.0.1:0"])
    assert result.exit_code == 2
    assert "Read-only file system" in result.output
    assert "--map" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_an_indexer_that_may_write_nothing_any_more_loses_nothing_and_goes_on(
    indexer_process: Any, publishers: Any, engine: Any, until: Any, tmp_path: Path
) -> None:
    """The limit refuses every write to a file, as a disk does that the kernel made read-only."""
    process, publisher, hasher = indexer_process(tmp_path / "map").listening(), publishers(), engine()
    registration = {
        "instance_id": "A",
        "model_name": "m",
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint,
    }
    process.call("/register", registration)
    publisher.publish([hasher.stored(PROMPT, 0, 2)], 1.0)
    until(lambda: process.replicas()["A"]["sequence"] == 0)
    _, hard = resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (0, hard))
    publisher.publish([hasher.stored(PROMPT, 2)], 1.0)
    until(lambda: "warmroute_indexer_write_trouble 1.0" in get(process, "/metrics"), "the alert")
    until(lambda: "stands still" in get(process, "/health"), "the heartbeat to be missed")
    assert process.replicas()["A"]["sequence"] == 0
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    query = {"model_name": "m", "token_ids": PROMPT}
    until(lambda: process.call("/query", query)["scores"] == {"A": {"0": 28}}, "it goes on")
    assert process.replicas()["A"]["state"] == "live"
    assert process.stop() == 0
