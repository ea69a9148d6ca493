"""The hints of all workers of one router: each tells the others, on a board in shared memory, what it has
just sent where.

Each worker has a ring of its last notes, which it alone writes, and reads those of the others when it looks
for hints itself. A note that is read while it is written over fails its checksum and is left out, as are the
notes of a worker that is more than a ring ahead: no request depends on a hint.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Hashable, Sequence
from typing import cast

import msgspec
from xxhash import xxh3_64_intdigest

from router.hints import LINGER_S, Hint, Hints
from router.replicas import StreamId

NOTES = 128
"""Notes in a ring."""
NOTE_BYTES = 1024
MOST_MARKS = 64
"""Marks in a note: of longer prompts, the first ones."""
MARK_BYTES = 8
REMEMBERED = 8 * NOTES
"""Hints of one other worker that it can still take back."""
_HEAD = struct.Struct("@Q")
_FRAME = struct.Struct("@QQ")
"""Checksum and length of what follows."""


class Note(msgspec.Struct, frozen=True, array_like=True):
    """What a worker tells: that it has sent a prompt with these ``marks``, 8 bytes each, to a stream, whose
    first token is predicted in ``predicted_s`` seconds; or that the prompt of the note ``takes_back`` will
    not be computed after all. ``number`` counts a worker's notes from 1; ``told_at`` is in seconds.
    """

    number: int
    told_at: float
    stream: StreamId = ("", 0)
    marks: bytes = b""
    predicted_s: float = 0.0
    takes_back: int | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Note).decode


class HintBoard:
    """Made before the workers are forked, with a ring for each of ``workers``."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._rings_at = workers * _HEAD.size
        # Pages that nobody writes to take no memory.
        self._memory = mmap.mmap(-1, self._rings_at + workers * NOTES * NOTE_BYTES)

    def heads(self) -> bytes:
        """Other bytes each time that a worker has written."""
        return self._memory[: self._rings_at]

    def head(self, worker: int) -> int:
        """The number of a worker's last note, 0 before the first."""
        number: int = _HEAD.unpack_from(self._memory, worker * _HEAD.size)[0]
        return number

    def write(self, worker: int, note: Note) -> bool:
        """Writes a worker's next note; whether it had room for it."""
        said = _encode(note)
        if len(said) > NOTE_BYTES - _FRAME.size:
            return False
        at, framed = self._place(worker, note.number), _FRAME.pack(xxh3_64_intdigest(said), len(said)) + said
        self._memory[at : at + len(framed)] = framed
        _HEAD.pack_into(self._memory, worker * _HEAD.size, note.number)
        return True

    def read(self, worker: int, number: int) -> Note | None:
        """A note; None where it is not whole, or was written over."""
        at = self._place(worker, number)
        framed = self._memory[at : at + NOTE_BYTES]
        checksum, length = _FRAME.unpack_from(framed)
        said = framed[_FRAME.size : _FRAME.size + length]
        if xxh3_64_intdigest(said) != checksum:
            return None
        note = _decode(said)
        return note if note.number == number else None

    def _place(self, worker: int, number: int) -> int:
        return self._rings_at + (worker * NOTES + number % NOTES) * NOTE_BYTES


class SharedHints(Hints):
    """The hints of one worker, and those of the others as far as they are told. Marks are of 8 bytes; times
    are seconds of a clock that all workers have in common.
    """

    def __init__(self, board: HintBoard, worker: int) -> None:
        super().__init__()
        self._board = board
        self._worker = worker
        self._others = {
            other: _Heard(max(0, board.head(other) - NOTES))
            for other in range(board.workers)
            if other != worker
        }
        self._heads = b""

    def tell(
        self, hint: Hint, stream: StreamId, marks: Sequence[Hashable], now: float, predicted_s: float
    ) -> Hint:
        joined = b"".join(cast(Sequence[bytes], marks[:MOST_MARKS]))
        number = self._next()
        if not self._board.write(self._worker, Note(number, now, stream, joined, predicted_s)):
            return hint
        return _Told(hint, self, number)

    def soon(self, marks: Sequence[Hashable], now: float) -> dict[StreamId, int]:
        self._hear(now)
        return super().soon(marks, now)

    def take_back(self, number: int) -> None:
        """Tells the others that the prompt of this worker's note will not be computed."""
        self._board.write(self._worker, Note(self._next(), 0.0, takes_back=number))

    def _next(self) -> int:
        return self._board.head(self._worker) + 1

    def _hear(self, now: float) -> None:
        heads = self._board.heads()
        if heads == self._heads:
            return
        self._heads = heads
        for other, heard in self._others.items():
            last = self._board.head(other)
            for number in range(max(heard.last, last - NOTES) + 1, last + 1):
                note = self._board.read(other, number)
                if note is not None:
                    self._take(heard, note, now)
            heard.last = last

    def _take(self, heard: _Heard, note: Note, now: float) -> None:
        if note.takes_back is not None:
            hint = heard.hints.pop(note.takes_back, None)
            if hint is not None:
                hint.drop()
            return
        left_s = note.told_at + note.predicted_s - now
        if left_s + LINGER_S <= 0:
            return
        each = range(0, len(note.marks), MARK_BYTES)
        marks = tuple(note.marks[at : at + MARK_BYTES] for at in each)
        heard.hints[note.number] = self.add(note.stream, marks, now, left_s)
        if len(heard.hints) > REMEMBERED:
            del heard.hints[next(iter(heard.hints))]


class _Heard:
    """What was heard of another worker: the number of its ``last`` note, and its hints by number."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.hints: dict[int, Hint] = {}


class _Told(Hint):
    """A hint that the others were told of."""

    __slots__ = ("_hint", "_number", "_shared")

    def __init__(self, hint: Hint, shared: SharedHints, number: int) -> None:
        self._hint = hint
        self._shared = shared
        self._number = number

    def drop(self) -> None:
        self._hint.drop()
        self._shared.take_back(self._number)
