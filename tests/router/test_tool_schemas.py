from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from router import tool_schemas
from router.tool_schemas import DEEPEST, MOST_INDENT_CHARS, TEXTS, SchemaCache, ToolSchemas, written


def tools(name: str = "f") -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"ä": {"type": "string", "enum": ["<b>", None, 1.5]}}}
    return [{"type": "function", "function": {"name": name, "parameters": parameters}}]


@pytest.mark.parametrize("form", [{"indent": None}, {"indent": 4}, {"separators": [",", ":"]}])
def test_a_part_of_the_tools_is_written_once(form: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Json:
        @staticmethod
        def dumps(value: Any, **form: Any) -> str:
            made.append(value)
            return json.dumps(value, **form)

    monkeypatch.setattr(tool_schemas, "json", Json)
    schemas = ToolSchemas(tools(), 10_000)
    function = schemas.schemas[0]["function"]
    parts = [schemas.schemas, schemas.schemas[0], function, function["parameters"]]
    for _ in range(3):
        for part in parts:
            assert schemas.tojson(part, **form) == json.dumps(part, **form)
    assert len(made) == len(parts)
    others = [tools(), tools()[0], "text", 5, None, {"ä": 1}]
    for other in others * 2:
        assert schemas.tojson(other, **form) == json.dumps(other, **form)
    assert len(made) == len(parts) + 2 * len(others), "what only looks like one of them is none"


def test_as_many_texts_are_kept_as_the_tools_have_parts() -> None:
    schemas = ToolSchemas(tools(), 10_000)
    for indent in range(1000):
        assert schemas.tojson(schemas.schemas, indent=indent) == json.dumps(schemas.schemas, indent=indent)
    assert len(schemas._texts) <= len(schemas._parts) < 10


def test_the_least_lately_used_tools_are_forgotten_and_their_bytes_are_bounded() -> None:
    made = {name: ToolSchemas(tools(name), 100) for name in "abc"}
    room = int(2.5 * made["a"].size_bytes)
    cache = SchemaCache(room)
    cache.put(b"a", made["a"])
    cache.put(b"b", made["b"])
    assert cache.get(memoryview(b"a")) is made["a"]
    cache.put(b"c", made["c"])
    assert [cache.get(name.encode()) for name in "abc"] == [made["a"], None, made["c"]]
    cache.put(b"large", ToolSchemas(tools(), room))
    assert cache.get(b"large") is None
    assert cache.get(b"a") is made["a"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"a": [[]] * 1000},
        {"a": [{}] * 1000},
        {"x" * 5000: {}},
        {f"p{n}": {"type": "string"} for n in range(300)},
    ],
)
def test_what_tools_take_in_memory_is_not_more_than_is_counted(parameters: dict[str, Any]) -> None:
    text = json.dumps([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        made = ToolSchemas(json.loads(text), len(text))
        made.tojson(made.schemas)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken < 1.5 * made.size_bytes


def test_px13_what_would_be_long_indented_is_refused_before_it_is_made() -> None:
    deep: list[Any] = []
    for _ in range(DEEPEST):
        deep = [deep]
    wide = [0] * (MOST_INDENT_CHARS // 4)
    for value in (deep, {"a": [deep]}, wide):
        for made in (written, ToolSchemas([{"function": value}], 1000).tojson):
            with pytest.raises(ValueError, match="indented"):
                made(value, indent=4)
            assert made(value) == json.dumps(value)
    assert written(deep[0][0], indent=1) == json.dumps(deep[0][0], indent=1)
    assert written("text", indent="\t") == '"text"'


def test_the_texts_that_are_kept_are_bounded_by_what_the_tools_came_as() -> None:
    schemas = ToolSchemas(tools(), 100)
    for indent in range(5):
        assert schemas.tojson(schemas.schemas, indent=indent) == json.dumps(schemas.schemas, indent=indent)
    assert sum(map(len, schemas._texts.values())) <= TEXTS * 100
