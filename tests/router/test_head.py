from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.head import HeadError, HeadLimits, HeadReader, trailers_of

LIMITS = HeadLimits(100, 5)
OK = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nContent-Length: 2\r\n\r\n"


@given(st.integers(0, 130), st.integers(0, 130), st.booleans())
def test_a_head_is_read_however_it_is_cut_and_what_is_behind_it_is_left(
    first: int, second: int, bare: bool
) -> None:
    data = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + OK + b"\r\n\r\n{}"
    if bare:
        data = data.replace(b"\r\n", b"\n")
    body = b"\n\n{}" if bare else b"\r\n\r\n{}"
    low, high = sorted((first, second))
    reader, rest = HeadReader(LIMITS), b""
    for piece in (data[:low], data[low:high], data[high:]):
        rest += reader.feed(piece)
    assert reader.message is not None
    assert (reader.message.code, dict(reader.message.headers)) == (200, {"X-A": "1", "Content-Length": "2"})
    assert rest == body


@pytest.mark.parametrize(
    "head",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"\r\n\r\n" + OK,
        b"HTTP/1.1 200 OK\r\nX: a\rb\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\x01b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 101,
        b"HTTP/1.1 200 OK\r\n" + b"X: 1\r\n" * 6 + b"\r\n",
    ],
)
def test_px10_what_is_no_head_or_over_the_limits_is_refused(head: bytes) -> None:
    with pytest.raises(HeadError):
        HeadReader(LIMITS).feed(head)


def test_trailers_are_fields() -> None:
    assert list(trailers_of(b"X-T: 1\r\nx-t:  2\r\n", LIMITS).items()) == [("X-T", "1"), ("x-t", "2")]
    for lines in (b"no colon\r\n", b"X T: 1\r\n", b"X: a\rb\r\n", b"X: \x7f\r\n", b"X: 1\r\n" * 6):
        with pytest.raises(HeadError):
            trailers_of(lines, LIMITS)
