"""How a tokenizer splits a text into the words that its model sees one by one, as Python can do it.

A byte-level tokenizer takes one or more regular expressions to a text, one after the other, and its model
makes tokens of each word by itself (``tokenizers`` 0.23: ``pre_tokenizer.rs``). Expressions that are made of
alternatives known here are known to split alike in Python, and to have no match with a blank or a comma
behind a letter or a digit: between these, a text can be cut and its parts be split by themselves.

That holds for characters whose class is the same to whatever knows Unicode, and that normalisation leaves as
they are: the plain ones, ASCII first of all.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

SLICE = 8192
"""Characters that are split at once, in half a millisecond."""
SMALL_SLICE = 256
"""Characters that are given to the tokenizer for one that is not plain."""
LONGEST_SLICE = 4 * SLICE
"""What cannot be cut, and is longer, is the tokenizer's: Python holds the interpreter while it splits."""

_PLAIN_RANGES = (
    (0xA0, 0x24F),  # Latin
    (0x386, 0x3CE),  # Greek
    (0x400, 0x45F),  # Cyrillic
    (0x5D0, 0x5EA),  # Hebrew
    (0x2010, 0x2027),  # punctuation
    (0x2030, 0x205E),
    (0x20A0, 0x20AF),  # currencies
    (0x2190, 0x22FF),  # arrows, mathematics
    (0x2500, 0x25FF),  # boxes
)
_NOT_PLAIN = frozenset("\u017f")
"""In the long s a comparison without case sees an s."""
_BLANKS = "\t\n\v\f\r \u00a0"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_LEAD, _ENDING = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ALL_LETTERS = frozenset(
    {
        r" ?\p{L}+",
        rf"{_LEAD}\p{{L}}+",
        rf"{_LEAD}+\p{{L}}+",
        rf"{_LEAD}[\p{{L}}\p{{M}}]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    }
)
"""Alternatives that begin to match wherever there is a letter."""
_CAPITALS = _ALL_LETTERS | {
    rf"{_LEAD}[{_UPPER}]+[{_LOWER}]*",
    rf"{_LEAD}[{_UPPER}]+[{_LOWER}]*{_ENDING}?",
}
"""Those that do where it is a capital."""
_LETTERS = _ALL_LETTERS | {
    rf"{_LEAD}[{_UPPER}]*[{_LOWER}]+",
    rf"{_LEAD}[{_UPPER}]*[{_LOWER}]+{_ENDING}?",
}
"""Those that do where it is small or Chinese."""
_NUMBERS = frozenset({r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r" ?\p{N}+"})
"""Those that do wherever there is a digit."""
_OTHER = {
    "'s",
    "'t",
    "'re",
    "'ve",
    "'m",
    "'ll",
    "'d",
    _ENDING,
    "'(?i:[sdmt]|ll|ve|re)",
    "(?i:[sdmt]|ll|ve|re)",
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r" ?[\p{P}\p{S}]+",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[\r\n]",
    r"\s*[\r\n]+",
    r"\s*[\r\n]",
    r"\s+(?!\S)",
    r"\s+",
}
_ALTERNATIVES = _CAPITALS | _LETTERS | _NUMBERS | _OTHER
"""Of GPT-2, Llama 3, Qwen 2 and 3.5, DeepSeek 3, GPT-4, GPT-4o, Mistral's Tekken and others. In no match a
blank or a mark, but for an apostrophe, comes behind a letter or a digit, and none has a digit behind a
letter. None looks back. One looks ahead, behind blanks.
"""
_MARKS = "\\0-&(-/:-@\\[-`{-\x7f\u3001\u3002\uff0c"
"""All of ASCII but letters, digits and the apostrophe; and what ends a Chinese word."""

Split = Callable[[str], list[str]]


class Step(msgspec.Struct, frozen=True):
    """An expression that a text is split by. What is between its matches is a part as well, or left out."""

    pattern: str
    keeps_between: bool = True


def _safe(steps: Sequence[Step]) -> str:
    """Where a text may be cut: what is behind the last character is always a match's end."""
    known = frozenset(chain.from_iterable(_alternatives(step.pattern) for step in steps))
    letters = f"{_SMALL}\u4e00-\u9fa5" + ("" if _CAPITALS.isdisjoint(known) else _CLASSES["Lu"])
    numbers = "" if _NUMBERS.isdisjoint(known) else f"|[0-9](?=[{_MARKS}])"
    return f"[{letters}](?=[0-9{_MARKS}]){numbers}"


class WordSplit:
    """Splits plain text in steps, of which each is given what the one before it made. ``composes``: the
    tokenizer brings texts into NFC before.
    """

    def __init__(self, steps: Sequence[Step], *, composes: bool) -> None:
        self.composes = composes
        self._ascii = [*_compiled(steps, _ASCII_CLASSES)]
        self._plain = [*_compiled(steps, _CLASSES)]
        self._safe = re.compile(_safe(steps)).search

    def words(self, text: str) -> list[str]:
        """The words of a text that is plain."""
        *before, last = self._ascii if text.isascii() else self._plain
        parts = [text]
        for split in before:
            parts = list(filter(None, chain.from_iterable(map(split, parts))))
        return last(parts[0]) if len(parts) == 1 else list(chain.from_iterable(map(last, parts)))

    def can_cut(self, text: str) -> bool:
        """Whether a slice may end within ``text``, wherever that stands."""
        return self._safe(text) is not None

    def slices(self, text: str) -> Iterator[tuple[str, bool]]:
        """A text in parts whose words are those of the whole, and whether each is plain and short enough."""
        for part in self._cut(text, SLICE):
            if len(part) > LONGEST_SLICE:
                yield part, False
            elif part.isascii():
                yield part, True
            else:
                yield from _joined(self._cut(part, SMALL_SLICE))

    def _cut(self, text: str, size: int) -> Iterator[str]:
        """Parts of about ``size`` characters, cut behind letters and digits, in front of blanks and marks."""
        start = 0
        while len(text) - start > size and (end := self._end(text, start + size)):
            yield text[start:end]
            start = end
        if start < len(text):
            yield text[start:]

    def _end(self, text: str, at: int) -> int:
        """The first place behind ``at`` to cut at, 0 if there is none; others get the interpreter between."""
        while at < len(text):
            if found := self._safe(text, at, at + SLICE + 1):
                return found.end()
            at += SLICE
        return 0


def _joined(parts: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Parts, those of one kind that follow each other in one."""
    joined, kind = "", True
    for part in parts:
        plain = not _not_plain(part)
        if joined and plain != kind:
            yield joined, kind
            joined = ""
        joined, kind = joined + part, plain
    if joined:
        yield joined, kind


def word_split_of(backend: Any) -> WordSplit | None:
    """How a ``tokenizers.Tokenizer`` splits what is between its added tokens; None where that is not known
    to be the same here.
    """
    try:
        normalizer = None if backend.normalizer is None else json.loads(backend.normalizer.__getstate__())
        described = json.loads(backend.pre_tokenizer.__getstate__())
    except Exception:  # there is none, or a part that is written in Python
        return None
    normalizers = [] if normalizer is None else _parts(normalizer, "normalizers")
    if any(part.get("type") != "NFC" for part in normalizers):
        return None
    steps: list[Step] = []
    for part in _parts(described, "pretokenizers"):
        step = _step(part)
        if step is None:
            return None
        steps += [step] if step.pattern else []
    known = [_alternatives(step.pattern) for step in steps]
    if not all(map(_ALTERNATIVES.issuperset, known)) or all(map(_LETTERS.isdisjoint, known)):
        return None
    return WordSplit(steps, composes=bool(normalizers))


def _parts(described: dict[str, Any], inner: str) -> list[dict[str, Any]]:
    if described.get("type") != "Sequence":
        return [described]
    return list(chain.from_iterable(_parts(part, inner) for part in described[inner]))


def _step(part: dict[str, Any]) -> Step | None:
    """What a part of a pre-tokenizer splits by; "" if by nothing, None if that is not known."""
    kind = part.get("type")
    if kind == "ByteLevel" and not part["add_prefix_space"]:
        return Step(_GPT2 if part["use_regex"] else "")
    if kind == "Digits" and part["individual_digits"]:
        return Step(r"\p{N}")
    between = _BETWEEN.get((str(part.get("behavior")), bool(part.get("invert"))))
    if kind != "Split" or between is None or not (pattern := part["pattern"].get("Regex")):
        return None
    return Step(pattern.replace("\r", r"\r").replace("\n", r"\n"), between)


_BETWEEN = {("Isolated", False): True, ("Isolated", True): True, ("Removed", True): False}
"""Whether what is between two matches is kept, by a part's ``behavior`` and ``invert``."""


def _alternatives(pattern: str) -> list[str]:
    """Those at the top; a bar in brackets is none."""
    made, depth, in_class, escaped = [""], 0, False, False
    for char in pattern:
        if char == "|" and not (depth or in_class or escaped):
            made.append("")
            continue
        made[-1] += char
        if escaped or char == "\\":
            escaped = not escaped
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        else:
            depth += {"(": 1, ")": -1}.get(char, 0)
    return made


def _compiled(steps: Sequence[Step], classes: Mapping[str, str]) -> Iterator[Split]:
    """One expression for both is quicker where there is little between matches, as in the last step."""
    for number, step in enumerate(steps):
        pattern = _translated(step.pattern, classes)
        if not step.keeps_between:
            yield re.compile(pattern).findall
        elif number + 1 < len(steps):
            yield re.compile(f"({pattern})").split
        else:
            yield re.compile(rf"{pattern}|(?:(?!{pattern})[\s\S])+").findall


def _translated(pattern: str, classes: Mapping[str, str]) -> str:
    """For ``re``, which has no ``\\p``, and other blanks."""
    made, at, in_class = "", 0, False
    while at < len(pattern):
        if found := _ESCAPE.match(pattern, at):
            inner = classes[found[1] or "blank"]
            made += inner if in_class else f"[{'^' if found[0] == _NO_BLANK else ''}{inner}]"
            at = found.end()
            continue
        step = 2 if pattern[at] == "\\" else 1
        if step == 1:
            in_class = pattern[at] == "[" or (in_class and pattern[at] != "]")
        made += pattern[at : at + step]
        at += step
    return made


_ESCAPE, _NO_BLANK = re.compile(r"\\p\{(\w+)\}|\\[sS]"), r"\S"


def _plain_chars() -> Iterator[str]:
    yield from map(chr, range(0x80))
    for first, last in _PLAIN_RANGES:
        for char in map(chr, range(first, last + 1)):
            category = unicodedata.category(char)
            stable = category == unicodedata.ucd_3_2_0.category(char) and category[0] in "LNPSZ"
            if stable and char not in _NOT_PLAIN and unicodedata.is_normalized("NFC", char):
                yield char


def _class(chars: Sequence[str]) -> str:
    """What stands for ``chars``, in their order, between brackets."""
    made, first = "", 0
    for number, char in enumerate(chars):
        if number + 1 == len(chars) or ord(chars[number + 1]) != ord(char) + 1:
            made += re.escape(chars[first]) + ("" if first == number else f"-{re.escape(char)}")
            first = number + 1
    return made


def _classes(chars: Sequence[str]) -> dict[str, str]:
    by_category: defaultdict[str, list[str]] = defaultdict(list)
    for char in chars:
        category = unicodedata.category(char)
        by_category[category[0]].append(char)
        by_category[category].append(char)
        if char in _BLANKS:
            by_category["blank"].append(char)
    return {name: _class(by_category[name]) or _NO_CHAR for name in _CATEGORIES}


_CATEGORIES = ("blank", "L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "N", "P", "S")
_NO_CHAR = r"\uffff"
"""For a class without characters: this one is never in plain text."""
PLAIN = tuple(sorted(_plain_chars()))
_CLASSES = _classes(PLAIN)
_SMALL = _CLASSES["Ll"] + _CLASSES["Lo"]
_ASCII_CLASSES = _classes([char for char in PLAIN if char.isascii()])
_not_plain = re.compile(f"[^{_class(PLAIN)}]").search
