"""The ids of a text, most of them from what its words became before.

The model of a tokenizer sees one word at a time, and texts are made of few different ones: ``tokenizers``
takes ten times as long to split a text into them as Python takes to look them up.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Any
from unicodedata import is_normalized

from router.cuts import Cuts
from router.encoding import encoded
from router.heap import give_back
from router.word_split import SLICE, WordSplit, word_split_of

KEPT_WORDS = 8192
"""How many words are kept, and as many that were before: 200 bytes each."""
LONGEST = 48
"""Characters of a word that is kept."""
CHARS_PER_NEW = 24
"""In a text with a new word for so many characters, it is quicker to have the tokenizer split it."""
LEARNED = 64
"""New words of such a part that are made ids of all the same, so that there are fewer in the next."""
GIVE_BACK_CHARS = 1 << 20
"""Some eight texts of 128 kB, of which each takes several times what it is long for a while."""
BREATH_S = 20e-6
"""What others get of the interpreter after each part of a long text."""
_BECOME = frozenset("K;`")
"""Those of ASCII that NFC makes of other characters."""


class Words:
    """For one tokenizer, used from the loop and from threads: a word may be made ids of twice then, and
    forgotten too soon, which costs time and nothing else.
    """

    def __init__(self, backend: Any, cuts: Cuts, split: WordSplit) -> None:
        self._backend = backend
        self._cuts = cuts
        self._split = split
        self._tokens: dict[str, bytes] = {}
        self._young: dict[str, bytes] = {}
        self._old: dict[str, bytes] = {}
        self._used_chars = 0

    def ids(self, text: str) -> array[int]:
        """The ids of a text, without what the tokenizer adds to it. Raises TypeError for half of a pair of
        surrogates.
        """
        ids = array("I")
        ids.frombytes(b"".join(self._parts(text)))
        if len(text) > SLICE:
            self._give_back(len(text))
        return ids[:]  # without the room that an array has which grew

    def _give_back(self, chars: int) -> None:
        """What a few long texts left behind is given back with one call, on the loop never."""
        self._used_chars += chars
        if self._used_chars > GIVE_BACK_CHARS:
            self._used_chars = 0
            give_back()

    def _parts(self, text: str) -> Iterator[bytes]:
        parted = self._cuts.parted(text)
        if parted is None:
            yield self._encoded([text])[0]
            return
        for number, part in enumerate(parted):
            if number % 2:
                yield self._token(part)
                continue
            for at, (piece, plain) in enumerate(self._split.slices(part)):
                if at:
                    time.sleep(BREATH_S)
                yield self._plain(piece) if plain else self._encoded([piece])[0]

    def _token(self, content: str) -> bytes:
        made = self._tokens.get(content)
        if made is None:
            made = self._tokens[content] = array("I", [self._backend.token_to_id(content)]).tobytes()
        return made

    def _plain(self, text: str) -> bytes:
        words = self._split.words(text)
        young = self._young
        try:
            return b"".join(map(young.__getitem__, words))
        except KeyError:
            unknown = set(words).difference(young)
        old = self._old
        made = {word: old[word] for word in unknown if word in old}
        new = list(unknown.difference(made))
        many = len(new) > max(LEARNED, len(text) // CHARS_PER_NEW)
        learned = new[:LEARNED] if many else new
        made.update(zip(learned, self._encoded(learned), strict=True))
        kept = {word: ids for word, ids in made.items() if len(word) <= LONGEST}
        self._keep(young, kept)
        if many:
            return self._encoded([text])[0]
        if len(kept) == len(made):
            return b"".join(map(young.__getitem__, words))
        return b"".join(made[word] if word in made else young[word] for word in words)

    def _keep(self, young: dict[str, bytes], made: dict[str, bytes]) -> None:
        """What is not asked for while as many others come as are kept is forgotten. Of what somebody may be
        reading nothing is taken away.
        """
        young.update(made)
        if len(young) > KEPT_WORDS:
            self._old, self._young = young, {}

    def _encoded(self, texts: Sequence[str]) -> list[bytes]:
        return [ids.tobytes() for ids in encoded(self._backend, texts)]


def words_of(backend: Any, cuts: Cuts | None) -> Words | None:
    """None for a tokenizer that may split texts in another way than is known here."""
    split = word_split_of(backend)
    if cuts is None or split is None or not _finds_added(backend, split):
        return None
    return Words(backend, cuts, split)


def _finds_added(backend: Any, split: WordSplit) -> bool:
    """Whether an added token that is looked for in normalised text is in the text as well, or else in one of
    its slices.
    """
    if not split.composes:
        return True
    added = [token.content for token in backend.get_added_tokens_decoder().values() if token.normalized]
    return all(
        (content.isascii() and _BECOME.isdisjoint(content))
        or (is_normalized("NFC", content) and not split.can_cut(content))
        for content in added
    )
