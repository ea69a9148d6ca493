from __future__ import annotations

import json
import math

import pytest
from msgspec import Raw

from router.errors import RefusedError
from router.prompt import UnreadableBodyError, model_of, plain, read_body, read_other


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nonsense", b"[]", b'"text"', b"null", b"\xff\xfe", b"[" * 100_000]
)
def test_what_is_no_json_object_is_refused_with_400(body: bytes) -> None:
    with pytest.raises(RefusedError) as caught:
        read_body(body)
    assert caught.value.status == 400


def test_px13_numbers_with_exponents_are_read_in_no_more_time_than_python_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """msgspec's own way, which takes forty times as long for some, refuses those that are no double."""
    monkeypatch.delattr(json, "loads")
    assert plain(Raw(b"[1e308, 1e999, 0.5, 1]")) == [1e308, math.inf, 0.5, 1]
    assert read_body(b'{"stream": [1e999]}').stream == [math.inf]
    assert read_other(b'{"priority": 1e999}', "application/json").priority == math.inf


def test_a_model_that_is_no_text_is_refused_with_its_name() -> None:
    with pytest.raises(RefusedError) as caught:
        read_body(b'{"model": 5}')
    assert (caught.value.status, caught.value.param) == (400, "body.model")


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"model":"b","temperature":NaN}', "b"),
        (b'\xef\xbb\xbf{"model":"b"}', "b"),
        ('{"model":"b"}'.encode("utf-16"), "b"),
        (b'{"model":"b","prompt":"\\ud800"}', "b"),
        (b'{"model":"\\ud800","x":NaN}', "?"),
        (b'{"x":NaN}', None),
    ],
)
def test_json_that_only_python_reads_is_left_to_an_engine_of_its_model(body: bytes, model: str) -> None:
    with pytest.raises(UnreadableBodyError) as caught:
        read_body(body)
    assert caught.value.model == model
    assert model_of(body, "application/json") == model


def test_a_missing_model_is_the_engines_default() -> None:
    assert read_body(b'{"prompt": "x"}').model is None


@pytest.mark.parametrize(
    ("body", "reads"),
    [
        (b'{"prompt":"x"}', True),
        (b'{"prompt":"x","prompt_logprobs":1}', False),
        (b'{"prompt":"x","prompt_logprobs":0}', False),
        (b'{"prompt":"x","echo":true,"logprobs":1}', False),
        (b'{"prompt":"x","echo":true}', True),
    ],
)
def test_prompt_log_probabilities_keep_the_engine_from_its_cache(body: bytes, reads: bool) -> None:
    assert read_body(body).reads_cache is reads


def test_the_model_of_other_paths_is_read_from_what_is_json() -> None:
    assert model_of(b'{"model":"e"}', "application/json") == "e"
    assert model_of(b'{"model":"e"}', "Application/JSON; charset=utf-8") == "e"
    assert model_of(b'{"model":"e"}', "multipart/form-data") is None
    assert model_of(b"nonsense", "application/json") is None


@pytest.mark.parametrize("more", [b"", b"Content-Type: text/plain\r\n"])
def test_the_model_of_an_audio_form_is_read(more: bytes) -> None:
    file = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n\x00\xff\r\n'
    part = b'--b\r\nContent-Disposition: form-data; name="model"\r\n' + more + b"\r\nwhisper\r\n--b--\r\n"
    assert model_of(file + part, "multipart/form-data; boundary=b") == "whisper"
    assert model_of(file, "multipart/form-data; boundary=b") is None


def test_px13_a_form_is_not_looked_through_again_for_each_line_that_could_be_its_model() -> None:
    """In the square of their number: a day, for as many as a body may hold."""
    line = b'Content-Disposition: form-data; name="model"\r\n'
    for end in (b"", b"x\r\n", b"\r\nwhisper\r\n"):
        assert model_of(b"\r\n" + line * 1_000_000 + end, "multipart/form-data; boundary=b") is None
