"""What kind of disk a folder is on: LMDB's file is shared through memory, as no network file system can.

``/proc/mounts``: ``device folder type options ...``, with blanks in names as ``\\040`` (proc(5), fstab(5)).
LMDB says of itself (lmdb.h, caveats): "Do not use LMDB databases on remote filesystems, even between
processes on the same host."
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from indexer.errors import MapError

log = logging.getLogger(__name__)

MOUNTS = Path("/proc/mounts")
REMOTE = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs"}
    | {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs"}
)
DOUBTFUL = re.compile(r"9p|virtiofs|fuse(\..*)?")
"""May be another host's folder, or one of this host for a virtual machine or container."""


def check_mount(path: Path, mounts: Path = MOUNTS) -> None:
    """Refuses a folder on a network file system, and warns of one that may be. Raises MapError.

    Where ``mounts`` cannot be read nothing is known, and nothing is refused.
    """
    kind = file_system(path, mounts)
    if kind in REMOTE:
        raise MapError(
            f"the map folder {path} is on a network file system ({kind}): LMDB cannot keep it whole there; "
            "give a --map folder on a disk of this host, or in its memory"
        )
    if kind is not None and DOUBTFUL.fullmatch(kind):
        log.warning(
            "the map folder %s is on a file system of type %s; if that is another host's, LMDB cannot keep "
            "it whole there: give a --map folder on a disk of this host, or in its memory",
            path,
            kind,
        )


def file_system(path: Path, mounts: Path = MOUNTS) -> str | None:
    """The type of the file system that ``path`` is on; None if that is not known."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    whole = path.resolve()
    found: tuple[int, str | None] = (-1, None)
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        folder = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[1]))
        depth = len(folder.parts)
        if depth >= found[0] and whole.is_relative_to(folder):  # a later mount covers an earlier one
            found = depth, fields[2]
    return found[1]
