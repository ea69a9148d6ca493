from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.answer import BODY_LIMIT_BYTES, NOTHING, TAIL_BYTES, Answer, AnswerTap

USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}


def sse(*objects: object) -> bytes:
    lines = [b"data: " + json.dumps(value).encode() + b"\n\n" for value in objects]
    return b"".join(lines) + b"data: [DONE]\n\n"


STREAM = sse(
    {"choices": [{"index": 0, "delta": {"role": "assistant"}}]},
    {"choices": [{"index": 0, "delta": {"content": 'say "usage"'}}]},
    {"choices": [{"index": 0, "delta": {"content": " ok"}, "finish_reason": "stop", "token_ids": [5]}]},
    {"choices": [], "usage": USAGE},
)


def read(content: bytes, cuts: list[int], *, is_stream: bool, whole: bool = False) -> Answer:
    tap = AnswerTap(is_stream=is_stream, whole=whole)
    edges = [0, *sorted(cut % (len(content) + 1) for cut in cuts), len(content)]
    for start, end in pairwise(edges):
        tap.feed(content[start:end])
    return tap.answer()


@given(st.lists(st.integers(0, 10_000), max_size=10))
def test_the_usage_of_a_stream_is_found_wherever_chunks_are_cut(cuts: list[int]) -> None:
    assert read(STREAM, cuts, is_stream=True) == Answer(9, 8, 2)


@given(st.lists(st.integers(0, 10_000), max_size=10))
def test_the_end_of_a_stream_is_noted_wherever_chunks_are_cut(cuts: list[int]) -> None:
    tap = AnswerTap(is_stream=True)
    edges = [0, *sorted(cut % len(STREAM) for cut in cuts), len(STREAM)]
    end = STREAM.index(b"[DONE]") + len(b"[DONE]")
    for start, stop in pairwise(edges):
        tap.feed(STREAM[start:stop])
        assert tap.done == (stop >= end)


def test_a_text_that_quotes_the_end_is_not_the_end() -> None:
    tap = AnswerTap(is_stream=True)
    tap.feed(sse({"choices": [{"index": 0, "text": "\ndata: [DONE]\n\n"}]}).removesuffix(b"data: [DONE]\n\n"))
    tap.feed(b": data: [DONE]\n\n")
    assert not tap.done
    tap.feed(b"data:[DONE]\n\n")
    assert tap.done


@given(st.lists(st.integers(0, 10_000), max_size=10))
def test_the_text_is_put_together_for_a_recorder(cuts: list[int]) -> None:
    assert read(STREAM, cuts, is_stream=True, whole=True) == Answer(9, 8, 2, 'say "usage" ok', "stop", (5,))


def test_the_usage_of_a_body_is_found() -> None:
    body = json.dumps(
        {"choices": [{"index": 0, "text": "hi", "finish_reason": "length"}], "usage": USAGE}
    ).encode()
    assert read(body, [3], is_stream=False) == Answer(9, 8, 2)
    assert read(body, [3], is_stream=False, whole=True) == Answer(9, 8, 2, "hi", "length")


def test_a_long_streams_usage_is_found_though_only_its_tail_is_kept() -> None:
    tap = AnswerTap(is_stream=True)
    chunk = sse({"choices": [{"index": 0, "text": "x" * 200}]}).removesuffix(b"data: [DONE]\n\n")
    for _ in range(1000):
        tap.feed(chunk)
        assert tap._size <= 2 * TAIL_BYTES + len(chunk)
    tap.feed(sse({"choices": [], "usage": USAGE}))
    assert tap.answer() == Answer(9, 8, 2)


def test_an_answer_without_usage_or_with_null_details_says_nothing_of_the_cache() -> None:
    assert read(sse({"choices": []}), [], is_stream=True) == NOTHING
    assert read(b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}', [], is_stream=False) == Answer(
        9
    )


def test_what_is_no_json_says_nothing() -> None:
    assert read(b"<html>", [], is_stream=False) == NOTHING
    assert read(b"data: {nonsense}\n\n", [], is_stream=True, whole=True) == NOTHING


def test_a_body_beyond_the_limit_is_not_kept() -> None:
    tap = AnswerTap(is_stream=False)
    for _ in range(10):
        tap.feed(b" " * (BODY_LIMIT_BYTES // 4))
    assert sum(map(len, tap._chunks)) <= BODY_LIMIT_BYTES
    assert tap.answer() == NOTHING
