"""Makes the file of a map as small as what it holds. LMDB itself never gives a page back to the disk."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import msgspec

from indexer.errors import MapBusyError, MapError
from indexer.folder import DATA_FILE, LMDB_LOCK_FILE, as_map_error, lock_to_write, open_to_read
from indexer.sharding import whole_map

COPY_PREFIX = "compact-"


class Compacted(msgspec.Struct, frozen=True):
    """Bytes of the map's file, before and after."""

    before: int
    after: int


def compact(path: Path) -> Compacted:
    """As :func:`compact_one`, of every shard of a divided map, one after the other."""
    done = [compact_one(folder) for folder in whole_map(path)]
    return Compacted(sum(each.before for each in done), sum(each.after for each in done))


def compact_one(path: Path) -> Compacted:
    """Rewrites the map in a folder without its free pages, and swaps the new file in, in one step.

    Needs as much room on the disk as the map holds, until it is done. Raises MapBusyError while an indexer or
    a reader has the map open, MapError when it cannot be read or written; the map is then as it was.
    """
    open_to_read(path)[0].close()  # before our lock file would be made in a folder without a map
    lock, _ = lock_to_write(path)
    try:
        with lock:
            _remove_left_over(path)
            with tempfile.TemporaryDirectory(prefix=COPY_PREFIX, dir=path) as folder:
                return _compact(path, Path(folder) / DATA_FILE)
    except OSError as error:
        why = f"{error.strerror}; make room on its disk"
        raise MapError(f"cannot compact the map in {path}: {why}") from error


def _remove_left_over(path: Path) -> None:
    """Copies of compactions that were killed, each as large as the map; whoever made one had our lock."""
    for folder in path.glob(f"{COPY_PREFIX}*"):
        shutil.rmtree(folder)


def _compact(path: Path, copy: Path) -> Compacted:
    env, _ = open_to_read(path)
    try:
        with as_map_error("write", path):
            env.copy(str(copy.parent), compact=True)
    finally:
        env.close()
    copy.chmod((path / DATA_FILE).stat().st_mode)
    with copy.open("rb") as file:
        os.fsync(file.fileno())
    done = Compacted((path / DATA_FILE).stat().st_size, copy.stat().st_size)
    with _nobody_else(path):
        copy.replace(path / DATA_FILE)
        with as_map_error("read", path):
            # The lock file knows the last commit of the old file; opened alone, it takes the new one's.
            lmdb.open(str(path), map_size=0, readonly=True).close()
    return done


@contextmanager
def _nobody_else(path: Path) -> Iterator[None]:
    """LMDB's own lock, alone: whoever has a map open holds a shared one, and who opens it waits.

    It belongs to the process, so that the map can be opened within. A reader that stayed on the old file
    would share the lock file with those on the new one, and each would believe the other's commits.
    """
    with (path / LMDB_LOCK_FILE).open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError as error:
            raise MapBusyError(
                f"the map in {path} is open in a reader, such as a router; stop it to compact the map"
            ) from error
        yield
