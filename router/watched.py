"""A file that may be written anew at any time, also while we look."""

from __future__ import annotations

from pathlib import Path

Signature = tuple[int, int, int] | None


class WatchedFile:
    """Tells when a file has become another one: by its time, size and place on the disk.

    Links are followed: Kubernetes replaces a mounted file by pointing a link elsewhere.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._taken = self._pending = self._look()

    def changed(self) -> bool:
        """Whether it is another one than before, and was so at the last call already: it is not being written
        just now. True once for each change.
        """
        last, self._pending = self._pending, self._look()
        if self._pending in (None, self._taken) or self._pending != last:
            return False
        self._taken = self._pending
        return True

    def _look(self) -> Signature:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
