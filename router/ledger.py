"""Records in shared memory that all worker processes of one router write, one at a time.

Beside the board, where each writes a row of its own: for what has one value for all, such as how far a
replica is trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router.board import CHANGES, Row, Table


class Ledger(Row):
    """One row for all workers, made before they are forked. Who changes a record from what it was does so
    ``alone``. Who only looks needs not: each field is whole.
    """

    def __init__(self, records: int, shape: str, of: str = "names") -> None:
        super().__init__(Table(1, records, shape, of), 0)

    def change(self, how: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
        """Makes each record what ``how`` gives for it."""
        table = self.table
        for at in self._look().values():
            table.fields.pack_into(table.memory, at, *how(table.fields.unpack_from(table.memory, at)))
        table.count(CHANGES, self._number)
