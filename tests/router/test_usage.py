"""Usage is asked for behind the client's back, and nothing of that is seen in the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt import read_body
from router.usage import MOST_HELD_BYTES, UnaskedUsage, asking_for_usage


def asked(text: str) -> Any:
    body = asking_for_usage(text.encode(), read_body(text.encode()))
    return None if body is None else json.loads(body)


def test_a_stream_is_asked_for_usage_and_the_rest_of_the_body_stays() -> None:
    text = '{"model": "m", "prompt": "}\\u00e9", "stream": true, "x": {"stream": 1}}  \n'
    body = asking_for_usage(text.encode(), read_body(text.encode()))
    assert body is not None
    assert body.startswith(text.rstrip()[:-1].encode())
    assert json.loads(body) == json.loads(text) | {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("given_options", "sent"),
    [
        ("null", {"include_usage": True}),
        ("{}", {"include_usage": True}),
        ('{"include_usage": false, "a": [1]}', {"include_usage": True, "a": [1]}),
        ('{"continuous_usage_stats": true}', {"include_usage": True, "continuous_usage_stats": False}),
    ],
)
def test_what_else_the_client_wants_of_its_stream_stays(given_options: str, sent: Any) -> None:
    found = asked(f'{{"stream_options": {given_options}, "prompt": "x", "stream": true}}')
    assert found["stream_options"] == sent


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": "x"}',
        '{"prompt": "x", "stream": false}',
        '{"prompt": "x", "stream": 1}',
        '{"prompt": "x", "stream": true, "stream_options": {"include_usage": true}}',
        '{"prompt": "x", "stream": true, "stream_options": {"include_usage": 1}}',
        '{"prompt": "x", "stream": true, "stream_options": [1]}',
    ],
)
def test_who_asks_or_wants_no_stream_or_asks_nonsense_is_left_alone(text: str) -> None:
    assert asked(text) is None


# As vLLM 0.32 writes a chat's stream: without usage, and with it.
ROLE = b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TEXT = (
    b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a \\"usage\\": \\n\\n"},'
    b'"finish_reason":null}]}\n\n'
)
FINISH = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}]%s}\n\n'
MARK = b',"system_fingerprint":"vllm-0.32.0-tp1-ab"'
USAGE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":9}%s}\n\n'
DONE = b"data: [DONE]\n\n"


def through(stream: bytes, sizes: list[int]) -> bytes:
    unasked, given_out, start = UnaskedUsage(), b"", 0
    for size in sizes:
        given_out += unasked.feed(stream[start : start + size])
        start += size
    return given_out + unasked.feed(stream[start:]) + unasked.end()


@given(st.lists(st.integers(0, 90), max_size=20), st.booleans())
def test_the_client_gets_the_bytes_that_it_would_have_got_without_however_they_come(
    sizes: list[int], marked: bool
) -> None:
    mark = MARK if marked else b""
    with_usage = ROLE + TEXT * 3 + FINISH % b"" + USAGE % mark + DONE
    assert through(with_usage, sizes) == ROLE + TEXT * 3 + FINISH % mark + DONE


@given(st.lists(st.integers(0, 90), max_size=20))
def test_a_stream_without_a_usage_chunk_stays_as_it_is(sizes: list[int]) -> None:
    crlf = (ROLE + TEXT).replace(b"\n\n", b"\r\n\r\n")
    stats = b'data: {"id":"c","choices":[{"index":0}],"usage":{"prompt_tokens":1}}\n\n'
    for stream in (
        ROLE + TEXT + FINISH % MARK + DONE,
        ROLE + TEXT + FINISH % b"",
        ROLE + stats + b'data: {"choices":[],"usage":null}\n\n' + DONE,
        crlf + b": comment\r\n\r\n" + b'data: {"error": "usage"}\n\ndata: {"usage" nonsense',
    ):
        assert through(stream, sizes) == stream


@given(st.lists(st.integers(0, 90), max_size=20))
def test_an_engine_that_gives_usage_to_all_is_not_asked_behind_anybodys_back(sizes: list[int]) -> None:
    """``--enable-force-include-usage``: each chunk has usage, and one more comes at the end."""
    each = b',"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
    chunks = [event.replace(b"}\n\n", each) for event in (ROLE, TEXT, FINISH % b"")]
    forced = b"".join(chunks) + USAGE % MARK + DONE
    assert through(forced, sizes) == forced


def test_events_pass_as_soon_as_they_are_whole() -> None:
    unasked = UnaskedUsage()
    assert unasked.feed(ROLE + TEXT[:10]) == ROLE
    assert unasked.feed(TEXT[10:]) == TEXT


def test_an_endless_event_is_not_held_for_ever() -> None:
    unasked, endless = UnaskedUsage(), b"data: " + b"x" * MOST_HELD_BYTES
    assert unasked.feed(FINISH % b"" + endless) == FINISH % b"" + endless[:-3]
    assert unasked.feed(b"y" * 100) == b"xxx" + b"y" * 97
    assert unasked.end() == b"yyy"


@given(
    st.lists(st.sampled_from([1, 2, 3, 60, 4000, 200_000]), max_size=12), st.sampled_from([b"\n", b"\r\n"])
)
def test_behind_a_long_event_the_usage_chunk_is_still_found(sizes: list[int], line: bytes) -> None:
    """As with the token ids of a long prompt, which stand in the first event."""
    long = b'data: {"prompt_token_ids":[' + b"1," * MOST_HELD_BYTES + b"1]}\n\n"
    parts = [part.replace(b"\n", line) for part in (long, TEXT, FINISH % b"", USAGE % b"", DONE)]
    assert through(b"".join(parts), sizes) == b"".join(parts[:3] + parts[4:])
