"""What answers taught about a stream: blocks its engine does not have, and blocks it has without a word.

A **denied** block is not credited, though it was stored and no removal came: the engine said that it does
not have it. A **believed** block is credited, though no event named it: the engine said that it was cached.
Both end when the block is stored again and with the generation, and by themselves after a while, because no
event has to come.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from indexer.changes import Changes
from indexer.layout import StreamRecord, slot_key

DENIAL_S = 600.0
BELIEF_S = 300.0
MAX_CORRECTIONS = 10_000
EXPIRE_EVERY_S = 1.0
TOUCH_BUCKETS = 1 << 16


class Touched:
    """When blocks were last stored or removed, by the sequence of the batch: half a megabyte, whatever comes.

    A block shares its bucket with others, so it may seem touched when one of them was, never the reverse.
    ``floor`` is the last sequence of which nothing is known.
    """

    def __init__(self, floor: int = -1) -> None:
        self.floor = floor
        self._last = array("Q", bytes(8 * TOUCH_BUCKETS))

    def note(self, blocks: list[bytes], sequence: int) -> None:
        """Batch ``sequence`` stored or removed ``blocks``."""
        after = sequence + 1  # 0 is never
        last = self._last
        for bucket in memoryview(b"".join(blocks)).cast("H")[::4].tolist():
            last[bucket] = after

    def since(self, block: bytes, sequence: int) -> bool:
        """Whether the block may have been touched after batch ``sequence``."""
        return self._last[memoryview(block).cast("H")[0]] > sequence + 1


class Corrections:
    """The corrections of one generation of a stream; what changes is written with its record.

    ``denied`` and ``believed``: block key -> until when, seconds on the map's clock; the oldest come first.
    """

    def __init__(self, generation: int, floor: int = -1) -> None:
        self.generation = generation
        self.touched = Touched(floor)
        self.denied: dict[bytes, float] = {}
        self.believed: dict[bytes, float] = {}
        self._expire_at = 0.0

    def load(self, changes: Changes, record: StreamRecord) -> None:
        """Takes up what the map has."""
        if record.denied or record.believed:
            self.denied, self.believed = changes.corrections(slot_key(record.slot))

    def deny(self, changes: Changes, record: StreamRecord, block: bytes, now: float) -> None:
        """From ``now`` on the engine does not have the block."""
        self._set(self.denied, changes.deny, record, block, now + DENIAL_S)

    def believe(self, changes: Changes, record: StreamRecord, block: bytes, now: float) -> None:
        """From ``now`` on the engine has the block."""
        self._set(self.believed, changes.believe, record, block, now + BELIEF_S)

    def end(self, changes: Changes, record: StreamRecord, blocks: Iterable[bytes]) -> int:
        """Ends whatever was said of ``blocks``; gives of how many something was."""
        if not (self.denied or self.believed):
            return 0
        denied = [block for block in blocks if block in self.denied]
        believed = [block for block in blocks if block in self.believed]
        self._drop(self.denied, changes.deny, record, denied)
        self._drop(self.believed, changes.believe, record, believed)
        return len(denied) + len(believed)

    def expire(self, changes: Changes, record: StreamRecord, now: float) -> bool:
        """Ends what is due by ``now``; looks once a second. Gives whether anything was."""
        if now < self._expire_at:
            return False
        self._expire_at = now + EXPIRE_EVERY_S
        before = record.corrected
        for kept, write in ((self.denied, changes.deny), (self.believed, changes.believe)):
            self._drop(kept, write, record, [block for block, until in kept.items() if until <= now])
        return record.corrected != before

    def _set(
        self,
        kept: dict[bytes, float],
        write: Callable[[bytes, float | None], None],
        record: StreamRecord,
        block: bytes,
        until: float,
    ) -> None:
        kept.pop(block, None)
        if len(kept) >= MAX_CORRECTIONS:
            self._drop(kept, write, record, [next(iter(kept))])
        kept[block] = until
        write(slot_key(record.slot) + block, until)
        self._note(record)

    def _drop(
        self,
        kept: dict[bytes, float],
        write: Callable[[bytes, float | None], None],
        record: StreamRecord,
        blocks: list[bytes],
    ) -> None:
        for block in blocks:
            del kept[block]
            write(slot_key(record.slot) + block, None)
        if blocks:
            self._note(record)

    def _note(self, record: StreamRecord) -> None:
        record.denied, record.believed = len(self.denied), len(self.believed)
        record.corrected += 1
