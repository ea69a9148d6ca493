"""``warmroute reuse``: how much of recorded prompts was computed before, and what in them keeps it from being
found in a cache.

A prefix cache ends at the first token that differs. What a prompt has in common with an earlier one behind
that place is lost: a date in front of a long system prompt, documents in another order, tools listed by
chance.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from events.recording import Done, Sent, read_recording
from router.common_prefix import common_chars

BLOCK_TOKENS = 16
LEAST_LOST_TOKENS = 64
"""Less than these few blocks are nothing to change a prompt for."""
LEAST_PIECE = 12
"""Characters; what is shorter is alike by chance."""
GUESSED_CHARACTERS = 4
SHOWN = 32
"""Characters of a prompt shown on each side of a break."""
DEEPEST = 100
"""Levels of what stands in each other in a tool or a part."""
WORTH = 0.05
"""A smaller share of the prompt tokens is nothing that one would notice."""

_PIECE = re.compile(r".+?(?:[.!?]\s+|\n+|$)", re.DOTALL)

_WORD_BEGUN = re.compile(r"\w+$")


class Break(msgspec.Struct, frozen=True, kw_only=True):
    """A place where prompts stop being alike, though they are alike again behind it.

    ``before`` is the text in common up to it, ``here`` and ``earlier`` how it goes on in the last such
    request and in the earlier one that it is compared with. Text of prompts: for who may read the recording.
    """

    place: str
    before: str
    here: str
    earlier: str
    requests: int
    lost_tokens: int


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording says, in tokens.

    ``reusable`` would be cached by one cache that forgets nothing, ``lost`` is what prompts repeat behind
    their first difference (an estimate, by characters). ``cached`` is what engines reported, of ``reported``
    prompt tokens. Of ``guessed`` requests the tokens are not known: a guess of four characters each.
    """

    file: str
    requests: int
    guessed: int
    prompt: int
    reusable: int
    lost: int
    reported: int
    cached: int
    breaks: tuple[Break, ...]

    def verdict(self) -> str:
        """What follows from it: what routing can gain, and whether prompts are to be changed."""
        if not self.prompt:
            return "Nothing can be said: the recording holds no prompts."
        could, lost = self.reusable / self.prompt, self.lost / self.prompt
        had = self.cached / self.reported if self.reported else 0.0
        if could < WORTH:
            said = "These prompts begin alike next to nowhere: routing by caches is not worth it for them."
        elif had > could + WORTH:
            said = "Engines had more cached than these prompts say: their caches were warm before."
        elif self.reported and could - had < WORTH:
            said = "Engines have what can be had: better routing gains next to nothing on these prompts."
        else:
            said = "Routing by caches can gain what lies between the first two shares, at most."
        if lost < WORTH:
            return said
        return f"{said} Other prompts can: move what changes at the places above behind what does not."


class _Prompt(NamedTuple):
    """A prompt's text, with the names of its parts and where they begin."""

    text: str
    places: list[str]
    starts: list[int]

    def place(self, offset: int) -> str:
        return self.places[bisect_right(self.starts, offset) - 1] if self.places else "prompt"


def measure(path: Path) -> Reuse:
    """Looks at all prompts of a recording, in their order. Raises RecordingError, OSError."""
    look = _Look()
    for line in read_recording(path):
        if isinstance(line, Sent):
            look.sent(line)
        elif isinstance(line, Done):
            look.done(line)
    breaks = sorted(look.breaks.values(), key=lambda each: -each.lost_tokens)
    return Reuse(
        file=str(path),
        requests=look.requests,
        guessed=look.guessed,
        prompt=look.prompt,
        reusable=look.reusable,
        lost=sum(each.lost_tokens for each in breaks),
        reported=look.reported,
        cached=look.cached,
        breaks=tuple(breaks),
    )


class _Look:
    """What is known of the requests so far. ``_last_with``: the last prompt with a block, or a piece of text,
    by their hashes.
    """

    def __init__(self) -> None:
        self.requests = self.guessed = self.prompt = self.reusable = self.reported = self.cached = 0
        self.breaks: dict[tuple[str, str], Break] = {}
        self._last_with: dict[int, _Prompt] = {}

    def done(self, line: Done) -> None:
        if line.cached_tokens is not None and line.prompt_tokens:
            self.reported += line.prompt_tokens
            self.cached += line.cached_tokens

    def sent(self, line: Sent) -> None:
        prompt = _prompt_of(line.body)
        tokens: Sequence[int | str] = line.prompt or _guess(prompt.text)
        self.requests += 1
        self.guessed += not line.prompt
        family = str((line.body.get("model"), line.body.get("cache_salt")))
        blocks = list(_blocks(family, tokens))
        known = 0
        while known < len(blocks) and blocks[known] in self._last_with:
            known += 1
        self.prompt += len(tokens)
        self.reusable += known * BLOCK_TOKENS
        if prompt.text:
            nearest = self._last_with[blocks[known - 1]] if known else None
            self._compare(family, prompt, nearest, len(tokens) / len(prompt.text))
            self._last_with |= {hash((family, piece)): prompt for _, piece in _pieces(prompt.text)}
        self._last_with |= dict.fromkeys(blocks, prompt)

    def _compare(self, family: str, prompt: _Prompt, nearest: _Prompt | None, tokens_by_char: float) -> None:
        """Notes what the prompt repeats of the earlier one that it has most in common with, behind the place
        where it parts from that and from ``nearest``, which begins most like it.
        """
        pieces = [
            (at, piece, self._last_with.get(hash((family, piece)))) for at, piece in _pieces(prompt.text)
        ]
        in_common: Counter[int] = Counter()
        for _, piece, other in pieces:
            if other is not None:
                in_common[id(other)] += len(piece)
        if not in_common:
            return
        most = max(in_common, key=lambda number: in_common[number])
        alike = next(other for _, _, other in pieces if id(other) == most)
        assert alike is not None
        end, earlier = max(
            (
                (common_chars(prompt.text, other.text), other)
                for other in (alike, nearest)
                if other is not None
            ),
            key=lambda found: found[0],
        )
        lost = sum(len(piece) for at, piece, _ in pieces if at > end and piece in alike.text)
        if lost * tokens_by_char >= LEAST_LOST_TOKENS:
            self._note(prompt, earlier, end, round(lost * tokens_by_char))

    def _note(self, prompt: _Prompt, earlier: _Prompt, end: int, lost_tokens: int) -> None:
        place, before = prompt.place(end), prompt.text[max(0, end - SHOWN) : end]
        key = place, re.sub(r"\d", "0", _WORD_BEGUN.sub("", before))
        so_far = self.breaks.get(key)
        self.breaks[key] = Break(
            place=place,
            before=before,
            here=prompt.text[end : end + SHOWN],
            earlier=earlier.text[end : end + SHOWN],
            requests=1 + (so_far.requests if so_far else 0),
            lost_tokens=lost_tokens + (so_far.lost_tokens if so_far else 0),
        )


def _guess(text: str) -> list[str]:
    return [text[at : at + GUESSED_CHARACTERS] for at in range(0, len(text), GUESSED_CHARACTERS)]


def _blocks(family: str, tokens: Sequence[int | str]) -> Iterator[int]:
    """A key for each block that a cache could give back: of all up to it, and never of the last token."""
    key = hash(family)
    for end in range(BLOCK_TOKENS, len(tokens), BLOCK_TOKENS):
        key = hash((key, *tokens[end - BLOCK_TOKENS : end]))
        yield key


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    """Sentences and lines, with where they begin; those too short to say anything are left out."""
    for found in _PIECE.finditer(text):
        if len(found[0]) >= LEAST_PIECE:
            yield found.start(), found[0]


def _prompt_of(body: dict[str, Any]) -> _Prompt:
    """The text of a request, in the order in which templates write it: tools, then messages."""
    parts = [("tools", _written(body["tools"]))] if body.get("tools") else []
    prompt, messages = body.get("prompt"), body.get("messages")
    if isinstance(prompt, str):
        parts.append(("prompt", prompt))
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            place = f"messages[{number}] ({message.get('role')})"
            parts.append((place, _text_of(message.get("content"))))
            if message.get("tool_calls"):
                parts.append((place, _written(message["tool_calls"])))
    parts = [(place, text) for place, text in parts if text]
    starts, end = [], 0
    for _, text in parts:
        starts.append(end)
        end += len(text) + 1
    return _Prompt("".join(text + "\n" for _, text in parts), [place for place, _ in parts], starts)


def _written(value: Any) -> str:
    """In lines, so that equal parts are found; nothing of what is nested too deeply: each line of it would
    begin with as many blanks.
    """
    return json.dumps(value, indent=1) if _is_shallow(value, DEEPEST) else ""


def _is_shallow(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_shallow(each, levels - 1) for each in inner)


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""
