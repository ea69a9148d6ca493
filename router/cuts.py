"""Where a text may be cut so that the tokens of its pieces are the tokens of the whole.

A fast tokenizer (``tokenizers`` 0.23: ``added_vocabulary.rs``, ``pre_tokenizer.rs``) finds the added tokens
that are not normalised first, leftmost and longest, and handles what is between them piece by piece. So a
text can be cut in front of such a token: the matches on both sides, and the pieces between them, stay what
they were. Each piece but the first begins with the token that it was cut at, so nothing that belongs to the
begin of a prompt (Metaspace's ``first``) happens inside of it. What could look across a cut ends cutting
altogether: an added token that must be a word of its own, a random merge, a part of the tokenizer that is
not known here.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import takewhile
from typing import Any

import msgspec

SHORTEST = 64
"""Characters that are tokenised in about the time that it takes to look up what they became."""
FEW = 32
"""Places that are found one by one in less time than it takes to count them."""
DEEPEST = 64
"""How often texts may part within each other in one regular expression, which Python reads by recursion."""
_PRE_TOKENIZERS = frozenset(
    {
        "BertPreTokenizer",
        "ByteLevel",
        "CharDelimiterSplit",
        "Digits",
        "FixedLength",
        "Metaspace",
        "Punctuation",
        "Split",
        "UnicodeScripts",
        "Whitespace",
        "WhitespaceSplit",
    }
)
"""Those that handle each piece by itself, ``Metaspace`` but for whether it is the prompt's first."""
_NORMALIZERS = frozenset(
    {
        "BertNormalizer",
        "ByteLevel",
        "Lowercase",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Precompiled",
        "Prepend",
        "Replace",
        "Strip",
        "StripAccents",
    }
)


class AddedToken(msgspec.Struct, frozen=True):
    """An added token and how it is looked for."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class Cuts:
    """Cuts texts for one tokenizer."""

    def __init__(self, added: Iterable[AddedToken]) -> None:
        added = [token for token in added if token.content]
        raw = [token for token in added if not token.normalized]
        contents = {token.content for token in raw}
        self.patterns = _patterns(contents)
        self._added = re.compile("|".join(self.patterns))
        self._begin = _common_begin(contents)
        self._begins = [self._begin] if self._begin else sorted({content[0] for content in contents})
        self._cutters = frozenset(
            token.content for token in raw if not (token.lstrip or token.content[0].isspace())
        )
        self._bare = frozenset(token.content for token in raw if not (token.lstrip or token.rstrip))
        normalized = [token for token in added if token.normalized]
        self._parts_texts = not any(
            token.lstrip or token.rstrip or any(map(str.isspace, token.content)) for token in normalized
        )
        among = "|".join(_patterns({token.content for token in normalized}))
        self._normalized = re.compile(among).search if among else None

    def added(self, text: str) -> list[str]:
        """The added tokens in ``text``, one after the other."""
        return self._added.findall(text)

    def places(self, text: str) -> int:
        """At most in how many places of ``text`` an added token may begin: what cutting takes time for."""
        return sum(_count(text, begin) for begin in self._begins)

    def pieces(self, text: str) -> list[str]:
        """``text`` in pieces of ``SHORTEST`` characters or more, each but the first beginning with an added
        token; the last may be shorter.

        Where a text is cut depends on what comes before alone: one that goes on has the same pieces so far.
        """
        return self._cut(text, SHORTEST)

    def all_pieces(self, text: str) -> list[str]:
        """``text``, cut wherever it can be."""
        return self._cut(text, 1)

    def parted(self, text: str) -> list[str] | None:
        """What is between added tokens and these, in turn: text of which the tokenizer knows nothing but what
        stands there, and a token that is that alone. None where there is something else.
        """
        parts, start = [], 0
        match = self._next(text, 0)
        while match:
            if match.group() not in self._bare:
                return None
            at, end = match.span()
            parts += [text[start:at], text[at:end]]
            start = end
            match = self._next(text, end)
        parts.append(text[start:])
        if not self._parts_texts or (self._normalized and any(map(self._normalized, parts[::2]))):
            return None
        return parts

    def _cut(self, text: str, shortest: int) -> list[str]:
        pieces, start = [], 0
        match = self._next(text, 0)
        while match:
            at, end = match.span()
            if at - start >= shortest and match.group() in self._cutters:
                pieces.append(text[start:at])
                start = at
            match = self._next(text, end)
        pieces.append(text[start:])
        return pieces

    def _next(self, text: str, start: int) -> re.Match[str] | None:
        """What all tokens begin with is found ten times as fast as a token is."""
        at = text.find(self._begin, start)
        return None if at < 0 else self._added.search(text, at)


def _count(text: str, begin: str) -> int:
    """How often. Finding a few in a long text is ten times as fast as counting them is."""
    found = at = 0
    while found < FEW and (at := text.find(begin, at) + 1):
        found += 1
    return found + text.count(begin, at) if at else found


def _patterns(texts: Iterable[str], depth: int = 0) -> list[str]:
    """Regular expressions of which one takes the longest of ``texts`` that fits, as the tokenizer does.

    What texts begin with in common stands there once. Else each place where one may begin would be compared
    with all of them, and there are models with 6,000 (Gemma): two seconds for 250 kB of HTML.
    """
    if depth > DEEPEST:
        return [re.escape(text) for text in sorted(texts, key=len, reverse=True)]
    by_first: defaultdict[str, list[str]] = defaultdict(list)
    for text in texts:
        by_first[text[0]].append(text)
    made = []
    for alike in by_first.values():
        begin = _common_begin(alike)
        ends = [text[len(begin) :] for text in alike if text != begin]
        inner = f"(?:{'|'.join(_patterns(ends, depth + 1))})" if ends else ""
        made.append(re.escape(begin) + inner + ("?" if ends and len(ends) < len(alike) else ""))
    return made


def _common_begin(texts: Collection[str]) -> str:
    first, last = min(texts, default=""), max(texts, default="")
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(char for char, _ in pairs)


def cuts_of(backend: Any) -> Cuts | None:
    """How texts may be cut for a ``tokenizers.Tokenizer``; None where that is not known to be exact."""
    added = [
        AddedToken(token.content, token.single_word, token.lstrip, token.rstrip, token.normalized)
        for token in backend.get_added_tokens_decoder().values()
    ]
    usable = any(token.content and not token.normalized for token in added)
    if not usable or any(token.single_word for token in added) or backend.encode_special_tokens:
        return None
    if getattr(backend.model, "dropout", None):
        return None
    known = _all_known(backend.pre_tokenizer, _PRE_TOKENIZERS) and _all_known(
        backend.normalizer, _NORMALIZERS
    )
    return Cuts(added) if known else None


def _all_known(part: Any, known: frozenset[str]) -> bool:
    if part is None:
        return True
    try:
        described = json.loads(part.__getstate__())
    except Exception:  # a part that is written in Python cannot be described
        return False
    return _known(described, known)


def _known(described: Any, known: frozenset[str]) -> bool:
    if not isinstance(described, dict):
        return False
    if described.get("type") == "Sequence":
        inner = described.get("pretokenizers") or described.get("normalizers") or []
        return all(_known(one, known) for one in inner)
    return described.get("type") in known
