from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import census
from router.census import MOST_NUMBERS, MOST_VALUES, holds_too_much

VALUES = st.recursive(
    st.none()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.sampled_from('a"\\[]{},é\n'), max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=30,
)


def count(value: Any) -> int:
    """How many texts, lists and objects there are; a number is as many as it has points and exponents."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(count, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    if isinstance(value, float):
        return sum(map(json.dumps(value).count, ".e"))
    return isinstance(value, str)


@given(VALUES, st.integers(1, 9), st.booleans())
def test_texts_lists_and_objects_are_counted_wherever_slices_end(
    value: Any, slice_bytes: int, is_ascii: bool
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(census, "SLICE_BYTES", slice_bytes)
        patch.setattr(census, "MOST_VALUES", count(value))
        assert not holds_too_much(text)
        patch.setattr(census, "MOST_VALUES", count(value) - 1)
        assert holds_too_much(text)


@pytest.mark.parametrize(
    ("text", "too_much"),
    [
        (b"[" + b"[]," * (MOST_VALUES - 2) + b"[]]", False),
        (b"[" + b"[]," * MOST_VALUES + b"[]]", True),
        (b"[" + b'"a",' * MOST_VALUES + b'"a"]', True),
        (b"[" + b"1," * MOST_NUMBERS + b"1]", False),
        (b"[" + b"1," * MOST_NUMBERS + b"1,1]", True),
        (b"[" + b"0.5," * MOST_VALUES + b"1]", True),
        (b"[" + b"1e308," * MOST_VALUES + b"1]", True),
        (b"[" + b"1E308," * (MOST_VALUES - 1) + b"1]", False),
        (b'{"prompt":"' + b'[{,\\"\\\\' * 1_000_000 + b'"}', False),
        (b"\\" * 3_000_001 + b"]" * 3_000_000, False),
    ],
)
def test_what_takes_long_to_read_is_told_from_what_is_only_long(text: bytes, too_much: bool) -> None:
    assert holds_too_much(text) == too_much


TOO_MANY = b",".join([b'{"type":"text","text":"a"}'] * 100_000)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":[%b]}],"model":"m"}' % TOO_MANY),
        ("/v1/completions", b'{"prompt":"a","n":[%b],"model":"m"}' % TOO_MANY),
        ("/v1/responses", b'{"input":[%b],"model":"m"}' % TOO_MANY),
    ],
)
async def test_px13_a_body_of_very_many_values_goes_by_load_to_a_replica_of_its_model(
    start_engine: Any, start_router: Any, path: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    for name in ("read_body", "read_other"):
        monkeypatch.setattr(f"router.plan.{name}", lambda text, *_: read.append(len(text)))
    engine = await start_engine()
    other = await start_engine(model="o", cards=[{"id": "o", "object": "model", "max_model_len": 4096}])
    router = await start_router(engine, other, admin_listen="same")
    for _ in range(3):
        headers = {"Content-Type": "application/json"}
        async with router.client.post(router.url + path, data=body, headers=headers) as response:
            assert response.status == 200
    assert (engine.generated, other.generated, read) == (3, 0, [])
    assert engine.bodies[-1] == body
