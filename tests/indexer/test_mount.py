"""Folders on network file systems: a list of mounts as the kernel gives it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from indexer.errors import MapError
from indexer.mount import check_mount, file_system
from indexer.writer import MapWriter

MOUNTS = r"""proc /proc proc rw,relatime 0 0
/dev/sda1 / ext4 rw,relatime 0 0
server:/export /mnt/shared\040data nfs4 rw,vers=4.2 0 0
//server/share /mnt/windows cifs rw 0 0
tmpfs /mnt/shared\040data/fast tmpfs rw 0 0
/dev/sdb1 /data ext4 rw 0 0
host /data 9p rw,trans=virtio 0 0
me@host:/ /home/me/remote fuse.sshfs rw 0 0
lxcfs /var/lib/lxcfs fuse.lxcfs rw 0 0
nonsense
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    path = tmp_path / "mounts"
    path.write_text(MOUNTS)
    return path


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/srv/map", "ext4"),
        ("/mnt/shared data/map", "nfs4"),
        ("/mnt/shared data/fast/map", "tmpfs"),
        ("/mnt/shared database", "ext4"),
        ("/mnt/windows", "cifs"),
        ("/data/map", "9p"),
    ],
)
def test_the_innermost_and_last_mount_says_what_a_folder_is_on(mounts: Path, folder: str, kind: str) -> None:
    assert file_system(Path(folder), mounts) == kind


@pytest.mark.parametrize("folder", ["/mnt/shared data/map", "/mnt/windows/map", "/home/me/remote/map"])
def test_pe10_a_folder_on_a_network_file_system_is_refused_with_what_to_do(mounts: Path, folder: str) -> None:
    with pytest.raises(MapError, match=r"network file system .*give a --map folder on a disk of this host"):
        check_mount(Path(folder), mounts)


def test_pe10_one_that_may_be_another_hosts_is_warned_of(
    mounts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_mount(Path("/data/map"), mounts)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "of type 9p" in caplog.text


def test_where_the_mounts_cannot_be_read_nothing_is_refused(tmp_path: Path) -> None:
    check_mount(Path("/mnt/shared data/map"), tmp_path / "none")


def test_pe10_the_writer_looks_before_it_makes_a_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"server:/export {tmp_path} nfs rw 0 0\n")
    monkeypatch.setattr("indexer.mount.check_mount.__defaults__", (mounts,))
    with pytest.raises(MapError, match="network file system"):
        MapWriter(tmp_path / "map")
    assert not (tmp_path / "map").exists()
