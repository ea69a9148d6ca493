"""The folder of a map: who may write it, whether it can be read at all, and how it is opened.

Three files: LMDB's ``data.mdb`` and ``lock.mdb``, and ``writer.lock``, which the one writer holds.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import lmdb

from indexer.errors import (
    DiskFullError,
    MapBusyError,
    MapError,
    MapFullError,
    MapMissingError,
    MapSchemaError,
)
from indexer.layout import MAX_READERS, META_SCHEMA, SCHEMA_VERSION, Tables
from indexer.mount import check_mount

log = logging.getLogger(__name__)

DATA_FILE = "data.mdb"
LOCK_FILE = "writer.lock"
LMDB_LOCK_FILE = "lock.mdb"
LMDB_LOCK_BYTES = MAX_READERS * 64 + 128  # as LMDB 0.9 makes it: a cache line for each reader, two for itself
DAMAGED_FILE = "data.mdb.damaged"
DAMAGE = (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, lmdb.VersionMismatchError)
ANOTHER_FOLDER = "delete the folder, or give another --map"

OPEN_ATTEMPTS = 5
OPEN_PAUSE_S = 0.02
PID_CLASH = (
    "another container with the same process id uses it: share one pid namespace, as compose.yaml does"
)

ROOM = "make room on its disk, or give another --map"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FIXES = {
    "use": ANOTHER_FOLDER,
    "read": "its files must be readable and writable for this user, as LMDB locks them",
    "write": f"its disk may be full or read-only: {ROOM}",
}


class DamagedError(MapError):
    """A file that LMDB cannot use."""


def lock_to_write(path: Path) -> tuple[TextIO, bool]:
    """Our own lock, and whether the map was ours before: LMDB lets several processes write in turn.

    Raises MapBusyError when another indexer holds it, MapError when the folder cannot be used, as one on a
    network file system.
    """
    check_mount(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / LOCK_FILE).open("a+")
    except OSError as error:
        raise MapError(
            f"cannot use the map folder {path}: {error.strerror}; give a --map folder that can be written"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise MapBusyError(
            f"the map in {path} is written by another indexer (process {owner}); "
            "stop that one, or give another --map folder"
        ) from error
    lock.seek(0)
    return lock, bool(lock.read())


def sign(lock: TextIO) -> None:
    """Notes who has the lock, and that the map is ours."""
    lock.seek(0)
    lock.truncate()
    lock.write(f"{os.getpid()} on {os.uname().nodename}")
    lock.flush()


def open_to_write(path: Path, map_size: int, *, ours: bool) -> tuple[lmdb.Environment, Tables]:
    """The map for its writer, made if it is not there; ``map_size`` in bytes.

    A damaged map of ours is put aside and begun anew: it only repeats what engines hold. Raises
    MapSchemaError for one of another version, DamagedError for a file that never was ours.
    """
    try:
        return _open_whole(path, map_size)
    except DamagedError as error:
        if not ours:
            raise
        log.warning("%s; it is kept as %s, and a new map is begun", error, DAMAGED_FILE)
        (path / DATA_FILE).replace(path / DAMAGED_FILE)
        return _open_whole(path, map_size)


def _reserve_lock(path: Path) -> None:
    """LMDB writes its lock file through memory: a page of it that a full disk has no room for is a SIGBUS.

    Only before LMDB opens it: whoever closes the file gives up the locks that its process has on it.
    """
    file = os.open(path / LMDB_LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.posix_fallocate(file, 0, os.fstat(file).st_size or LMDB_LOCK_BYTES)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # a file system that cannot
            raise
    finally:
        os.close(file)


def _open_whole(path: Path, map_size: int) -> tuple[lmdb.Environment, Tables]:
    """No ``writemap``: a full disk would be a SIGBUS. No sync: the map is a cache of what engines hold."""
    with as_map_error("use", path):
        _reserve_lock(path)
        env = lmdb.open(
            str(path),
            map_size=map_size,
            max_dbs=16,
            max_readers=MAX_READERS,
            sync=False,
            metasync=False,
            writemap=False,
        )
        try:
            _check_whole(env, path)
            check_schema(env, path)
            return env, Tables(env, create=True)
        except BaseException:
            env.close()
            raise


def open_to_read(path: Path) -> tuple[lmdb.Environment, Tables]:
    """The map for a reader in another process than the indexer's. Raises MapError."""
    if not (path / DATA_FILE).exists():
        raise MapMissingError(f"no map in {path} yet; start `warmroute indexer --map {path}`")
    with as_map_error("read", path):
        try:
            env = _open_shared(path)
        except FileNotFoundError as error:
            raise MapMissingError(f"the map in {path} was taken away while it was opened") from error
    try:
        with as_map_error("read", path):
            _check_whole(env, path)
            check_schema(env, path)
            try:
                return env, Tables(env, create=False)
            except (lmdb.ReadonlyError, lmdb.NotFoundError) as error:
                raise MapMissingError(f"the map in {path} has no tables yet: {error}") from error
    except BaseException:
        env.close()
        raise


def _open_shared(path: Path) -> lmdb.Environment:
    """LMDB answers EINVAL while another process sets up, or takes down, the lock file: that passes.

    A map that was compacted, or put aside, while we waited for its lock is opened again: by its new file.
    """
    file, left = path / DATA_FILE, OPEN_ATTEMPTS
    while True:
        inode = file.stat().st_ino
        try:
            env = lmdb.open(
                str(path),
                map_size=0,  # the map's own: LMDB's default would have to be changed between queries
                readonly=True,
                create=False,
                max_dbs=16,
                max_readers=MAX_READERS,
                lock=True,
            )
        except lmdb.InvalidParameterError:
            left -= 1
            if not left:
                raise
            time.sleep(OPEN_PAUSE_S)
            continue
        if file.stat().st_ino == inode:
            return env
        env.close()


@contextmanager
def as_map_error(action: str, path: Path) -> Iterator[None]:
    """What LMDB raises, as a MapError that says what to do. ``action`` is one of FIXES."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise MapFullError(f"the map in {path} is full; give a larger --map-size") from error
    except DAMAGE as error:
        what = f"the map in {path} is damaged or no LMDB file ({error})"
        raise DamagedError(f"{what}; {ANOTHER_FOLDER}") from error
    except lmdb.LockError as error:
        raise MapError(f"cannot {action} the map in {path}: {error}; {PID_CLASH}") from error
    except lmdb.DiskError as error:
        raise DiskFullError(
            f"cannot {action} the map in {path}: its disk is full ({error}); {ROOM}"
        ) from error
    except lmdb.Error as error:
        raise MapError(f"cannot {action} the map in {path}: {error}; {FIXES[action]}") from error
    except OSError as error:
        if error.errno in FULL:
            raise DiskFullError(f"cannot {action} the map in {path}: {error.strerror}; {ROOM}") from error
        raise MapError(f"cannot {action} the map in {path}: {error.strerror}; {FIXES[action]}") from error


def _check_whole(env: lmdb.Environment, path: Path) -> None:
    """A file shorter than it says would be a SIGBUS at the first look at what is missing."""
    told = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    size = (path / DATA_FILE).stat().st_size
    if size < told:
        raise DamagedError(f"the map in {path} is cut off: {size:,} bytes of {told:,}; {ANOTHER_FOLDER}")


def check_schema(env: lmdb.Environment, path: Path) -> None:
    """Raises MapSchemaError for a map of another schema than this program's; before its tables are opened."""
    try:
        meta = env.open_db(b"meta", create=False)
    except (lmdb.ReadonlyError, lmdb.NotFoundError):
        if env.stat()["entries"]:
            raise MapSchemaError(
                f"the LMDB file in {path} is no map of warmroute; give another --map folder"
            ) from None
        return
    with env.begin() as txn:
        found = txn.get(META_SCHEMA, db=meta)
    if found is not None and bytes(found) != str(SCHEMA_VERSION).encode():
        theirs = bytes(found)[:20].decode("utf-8", "replace")
        raise MapSchemaError(
            f"the map in {path} has schema {theirs}, this warmroute writes schema {SCHEMA_VERSION}; "
            "use the version that wrote it, or give another --map folder"
        )
