"""How many values a text of JSON holds, before anybody reads it.

What reads JSON reads it in one go, and holds the interpreter's lock meanwhile, in whatever thread: 8 MB of
empty lists for a second. Counting goes on in slices, between which others have their turn.
"""

from __future__ import annotations

LONG_BYTES = 256 * 1024
"""What is not longer is read at once: that is 25 ms at the very most."""
MOST_VALUES = 50_000
"""Texts, lists and objects, names of fields among the texts: 15 ms. And numbers with a fraction or an
exponent: 25 ms. A chat of 3,000 messages with a hundred tools comes to less.
"""
MOST_NUMBERS = 1 << 20
"""What is none of them: 15 ms. Ids of a prompt are such."""
_COUNTED = (b"[", b"{", b".", b"e", b"E")
SLICE_BYTES = 256 * 1024


def holds_too_much(text: bytes) -> bool:
    """Whether to read ``text`` would take too long. Not for the event loop: it takes 4 ms a megabyte."""
    quotes = others = numbers = at = 0
    while at < len(text):
        piece = text[at : at + SLICE_BYTES]
        # Not between a backslash and what it escapes.
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = text[at : at + SLICE_BYTES + 1]
        at += len(piece)
        bare = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        inside = quotes % 2
        quotes += bare.count(b'"')
        if quotes // 2 > MOST_VALUES:
            return True
        marks = b"".join(bare.split(b'"')[inside::2])
        others += sum(map(marks.count, _COUNTED))
        numbers += marks.count(b",")
        if quotes // 2 + others > MOST_VALUES or numbers > MOST_NUMBERS:
            return True
    return False
