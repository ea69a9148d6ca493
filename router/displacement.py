"""What a placement pushes out of a cache, and how likely that is wanted back.

Hits emit no events, so when a prefix was last used is remembered here, from our own placements: for each
stream a book of marks, least recently used first, as long as the stream's cache. What falls out of it is
displaced. A displaced mark that a later prompt asks for, and that no stream has any more, would have been a
hit: their share of all that was displaced is what a displaced token is worth. It is measured, not set, and it
falls with age by itself: the larger the caches are for their traffic, the older is what they push out, and
the less of it comes back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from router.replicas import StreamId

MOST_MARKS = 2048
"""Marks in the book of one stream. Of a cache that holds more, only each n-th mark, by its hash, is kept."""
HALF_LIFE = 2.0
"""What was displaced counts half after the fleet's books have been displaced so many times over."""


class _Book:
    """The marks of one stream, least recently used first. One mark in ``every`` is kept."""

    def __init__(self, capacity_marks: int) -> None:
        self.of_marks = capacity_marks
        self.every = -(-capacity_marks // MOST_MARKS)
        self.capacity = capacity_marks // self.every
        self.marks: OrderedDict[Hashable, None] = OrderedDict()

    def use(self, marks: Sequence[Hashable]) -> list[Hashable]:
        """Makes them the most recently used, the head last. Returns what has no room any more."""
        kept = marks if self.every == 1 else [mark for mark in marks if hash(mark) % self.every == 0]
        book = self.marks
        for mark in reversed(kept):
            book[mark] = None
            book.move_to_end(mark)
        return [book.popitem(last=False)[0] for _ in range(len(book) - self.capacity)]


class Displacement:
    """The books of all streams. ``mark_tokens`` is how many tokens a mark stands for.

    Without a known capacity there is no book, and nothing is ever displaced.
    """

    def __init__(self, mark_tokens: int) -> None:
        self._mark_tokens = mark_tokens
        self._books: dict[StreamId, _Book] = {}
        self._displaced: OrderedDict[Hashable, int] = OrderedDict()
        self._displaced_marks = 0.0
        self._wanted_marks = 0.0
        self._room = 0
        self._room_marks = 0

    def capacity(self, stream: StreamId, tokens: int | None) -> None:
        """How many tokens fit in the stream's cache, as its engine says; None where it does not."""
        marks = tokens // self._mark_tokens if tokens else 0
        book = self._books.get(stream)
        if marks == (book.of_marks if book is not None else 0):
            return
        if marks:
            self._books[stream] = _Book(marks)
        else:
            del self._books[stream]
        self._measure()

    def rooms(self, streams: Iterable[StreamId]) -> list[int | None]:
        """Tokens that fit in each stream's cache before anything is pushed out; None where nobody knows."""
        books, mark_tokens = self._books, self._mark_tokens
        return [
            None
            if (book := books.get(stream)) is None
            else (book.capacity - len(book.marks)) * book.every * mark_tokens
            for stream in streams
        ]

    @property
    def worth(self) -> float:
        """How much of what is displaced is wanted back, 0 to 1."""
        return min(1.0, self._wanted_marks / self._displaced_marks) if self._displaced_marks else 0.0

    def asked(self, marks: Sequence[Hashable], held: int) -> None:
        """A prompt came; of its marks, the first ``held`` are cached in some stream."""
        for mark in marks[held:]:
            every = self._displaced.pop(mark, 0)
            self._wanted_marks += every

    def placed(self, stream: StreamId, marks: Sequence[Hashable]) -> None:
        """A prompt was sent to ``stream``."""
        book = self._books.get(stream)
        if book is None:
            return
        for mark in book.use(marks):
            self._displaced[mark] = book.every
            self._displaced_marks += book.every
        self._fade()

    def forget(self, stream: StreamId) -> None:
        """The stream has lost its cache; what it had was not displaced by us."""
        book = self._books.get(stream)
        if book is not None:
            book.marks.clear()

    def gone(self, replica: str) -> None:
        """The replica is none of ours any more, or another one."""
        self._books = {stream: book for stream, book in self._books.items() if stream[0] != replica}
        self._measure()

    def _measure(self) -> None:
        """How much all books together have room for: in kept marks, and in all that these stand for."""
        self._room = sum(book.capacity for book in self._books.values())
        self._room_marks = sum(book.capacity * book.every for book in self._books.values())

    def _fade(self) -> None:
        """Forgets what was displaced long ago, and halves the counts when they have grown."""
        while len(self._displaced) > self._room:
            self._displaced.popitem(last=False)
        if self._displaced_marks > HALF_LIFE * self._room_marks:
            self._displaced_marks /= 2
            self._wanted_marks /= 2
