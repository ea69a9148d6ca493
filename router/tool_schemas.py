"""The tools of requests, which agents send again with every turn: read and written as JSON once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

from cachetools import LRUCache
from xxhash import xxh3_128_digest

MAX_BYTES = 8 << 20
"""Of all tools that are kept: the JSON that they came as, and what it becomes."""
PART_BYTES = 200
"""What an object or a list takes besides its JSON, and the note of it."""
TEXTS = 4
"""The texts of tools that are kept may take so many times what the tools came as."""
DEEPEST, MOST_INDENT_CHARS = 64, 4 << 20
"""Of what is indented: how deep it is nested, and the spaces of it. They grow with both: 10 kB of brackets
became 17 MB in half a second.
"""


def written(value: Any, *, indent: Any = None, **form: Any) -> str:
    """``json.dumps``. Raises ValueError for what would be too long or too deep, indented."""
    if indent is not None:
        check_indented(value, len(indent) if isinstance(indent, str) else indent)
    return json.dumps(value, indent=indent, **form)


def check_indented(value: Any, width: int) -> None:
    """Raises ValueError for what is too large to be indented by ``width`` spaces a level."""
    chars, inside = 0, [(value, 1)] if isinstance(value, dict | list | tuple) else []
    while inside:
        part, depth = inside.pop()
        inner = part.values() if isinstance(part, dict) else part
        chars += max(1, width) * depth * (len(inner) + 1)
        if chars > MOST_INDENT_CHARS or depth > DEEPEST:
            raise ValueError("it is too large to be indented")
        inside += [(each, depth + 1) for each in inner if isinstance(each, dict | list | tuple)]


class ToolSchemas:
    """Tools as a template gets them, which came as ``json_bytes``; ``size_bytes`` is about what they take in
    memory. Not to be changed.
    """

    def __init__(self, schemas: list[dict[str, Any]], json_bytes: int) -> None:
        self.schemas = schemas
        self._parts = frozenset(map(id, _containers(schemas)))
        self._room = TEXTS * json_bytes
        self.size_bytes = (2 + TEXTS) * json_bytes + PART_BYTES * len(self._parts)
        self._texts: dict[tuple[int, str], str] = {}

    def tojson(self, value: Any, **form: Any) -> str:
        """``json.dumps`` of any ``value``; made once, if it is a part of these tools."""
        if id(value) not in self._parts:
            return written(value, **form)
        key = (id(value), repr(form))
        text = self._texts.get(key)
        if text is None:
            text = written(value, **form)
            if len(text) <= self._room and len(self._texts) < len(self._parts):
                self._room -= len(text)
                self._texts[key] = text
        return text


def _containers(value: Any) -> Iterator[Any]:
    # Not by recursion: each would be handed on from level to level.
    found = [value] if isinstance(value, dict | list) else []
    while found:
        part = found.pop()
        yield part
        inner = part.values() if isinstance(part, dict) else part
        found += [each for each in inner if isinstance(each, dict | list)]


class SchemaCache:
    """Tools by a digest of the JSON they came as; the least lately used forgotten first. For any thread."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._lock = threading.Lock()
        self._kept: LRUCache[bytes, ToolSchemas] = LRUCache(max_bytes, lambda tools: tools.size_bytes)

    def get(self, field: bytes | memoryview) -> ToolSchemas | None:
        digest = xxh3_128_digest(field)
        with self._lock:
            return self._kept.get(digest)

    def put(self, field: bytes | memoryview, tools: ToolSchemas) -> None:
        """Keeps them; more than all may have together are not kept."""
        digest = xxh3_128_digest(field)
        with self._lock:
            if tools.size_bytes <= self._kept.maxsize and digest not in self._kept:
                self._kept[digest] = tools
