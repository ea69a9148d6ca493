"""A byte-level tokenizer and a chat template that only ever extends what it rendered before.

Ids 0 to 255 are UTF-8 bytes, the two above mark where a message begins and ends. Rendering a conversation
with its generation prompt, then what the engine generated, then the next turn gives ids that begin with the
earlier ones: a next turn extends the cached prefix, as with ChatML templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

from simulator.errors import RequestError

MESSAGE_START = 256
MESSAGE_END = 257

_NEWLINE = 10
_CONSONANTS = b"bcdfghjklmnprstvwz"
_VOWELS = b"aeiou"
_WORD = 7


def encode(text: str) -> list[int]:
    """Token ids of plain text. No text ever becomes one of the two message marks."""
    return list(text.encode("utf-8", "replace"))


def decode(tokens: Sequence[int]) -> str:
    """The text of token ids; ids that are no byte show as the replacement character."""
    return b"".join(bytes((token,)) if token < 256 else b"\xef\xbf\xbd" for token in tokens).decode(
        "utf-8", "replace"
    )


def render(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[int]:
    """Token ids of a conversation. Raises RequestError for what cannot be rendered."""
    tokens: list[int] = []
    if tools:
        tokens += _message("tools", msgspec.json.encode(tools, order="sorted").decode())
    for message in messages:
        tokens += _message(*_role_and_text(message))
    if continue_final_message and messages:
        del tokens[-2:]  # The final message stays open: neither its end mark nor the newline.
    elif add_generation_prompt:
        tokens += [MESSAGE_START, *b"assistant\n"]
    return tokens


def _message(role: str, text: str) -> list[int]:
    return [MESSAGE_START, *encode(role), _NEWLINE, *encode(text), MESSAGE_END, _NEWLINE]


def _role_and_text(message: dict[str, Any]) -> tuple[str, str]:
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError(f"a message without a role: {sorted(message)}", param="messages")
    text = _text(message.get("content"))
    if calls := message.get("tool_calls"):
        text += msgspec.json.encode(calls, order="sorted").decode()
    return role, text


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "\n".join(texts)
    raise RequestError(
        "content is neither text nor a list of text parts; this model takes no media", param="messages"
    )


class Babble:
    """Text for one prompt: made-up words, the same for the same prompt and position."""

    def __init__(self, prompt: bytes, choice: int = 0) -> None:
        self._seed = xxhash.xxh3_64_intdigest(prompt, choice)

    def token(self, position: int) -> int:
        """The id generated at ``position`` (0 is the first): a printable ASCII byte, its own token."""
        place = position % _WORD
        if place == _WORD - 1:
            return 32
        letters = _VOWELS if place % 2 else _CONSONANTS
        return letters[xxhash.xxh3_64_intdigest(position.to_bytes(4, "little"), self._seed) % len(letters)]
