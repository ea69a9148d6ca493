from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser
from hypothesis import example, given
from hypothesis import strategies as st

from router.incoming import REQUESTS_AHEAD, RequestLimits, RequestReader

LIMITS = RequestLimits(4096, 4097, 100)


class Calm(BaseProtocol):
    """Of a connection whose bodies are shorter than what is read ahead."""

    def resume_reading(self, resume_parser: bool = True) -> None:
        pass


def cut(data: bytes, places: list[int]) -> Iterator[bytes]:
    """``data`` in pieces that end at ``places``, as far as it is that long."""
    ends = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return (data[start:end] for start, end in pairwise(ends) if start < end)


def read(data: bytes, places: list[int]) -> list[tuple[str, bytes | None] | None]:
    """The requests in ``data`` by target and body (None for one that is none, or not whole); None for bytes
    that are no request.
    """
    loop = asyncio.new_event_loop()
    try:
        reader = RequestReader(Calm(loop), loop, LIMITS)
        received = [each for piece in cut(data, places) for each in reader.feed_data(piece)]
        return [shown(message, body) for message, body in received]
    finally:
        loop.close()


def shown(message: Any, body: Any) -> tuple[str, bytes | None] | None:
    if not hasattr(message, "path"):
        return None
    if not body.is_eof():
        return message.path, None
    try:
        return message.path, body.read_nowait()
    except web.RequestPayloadError:
        return message.path, None


def as_aiohttp_reads(data: bytes) -> list[tuple[str, bytes | None] | None]:
    """The same by aiohttp's own parser, byte by byte: an error takes along what is before it."""
    loop = asyncio.new_event_loop()
    try:
        parser = HttpRequestParser(
            Calm(loop),
            loop,
            2**20,
            auto_decompress=False,
            max_line_size=4097,
            max_field_size=4096,
            max_headers=100,
            payload_exception=web.RequestPayloadError,
        )
        received = []
        for byte in data:
            try:
                messages, _, _ = parser.feed_data(bytes([byte]))
            except HttpProcessingError:
                if not received or received[-1][1].is_eof():
                    return [*(shown(*each) for each in received), None]
                break
            received += messages
        return [shown(*each) for each in received]
    finally:
        loop.close()


HEAD = b"POST /%d HTTP/1.1\r\nHost: r\r\n"
CHUNK = st.tuples(st.sampled_from([b"%x", b"%X", b"0%x", b'%x;a="b"']), st.binary(min_size=1, max_size=9))


def sized(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(chunks: list[tuple[bytes, bytes]], trailers: bytes) -> bytes:
    lines = [size % len(data) + b"\r\n" + data + b"\r\n" for size, data in chunks]
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join([*lines, b"0\r\n", trailers, b"\r\n"])


REQUESTS = st.one_of(
    st.just(HEAD + b"\r\n"),
    st.builds(sized, st.binary(max_size=20).map(lambda body: body.replace(b"%", b"."))),
    st.builds(
        chunked,
        st.lists(CHUNK.map(lambda chunk: (chunk[0], chunk[1].replace(b"%", b"."))), max_size=3),
        st.sampled_from([b"", b"X-T: 1\r\n", b"X-T: 1\r\nX-U: 2\r\n"]),
    ),
)
PLACES = st.lists(st.integers(0, 999), max_size=8)


@given(st.lists(REQUESTS, max_size=4), st.sampled_from([b"", b"\r\n", b"\n", b"\r\n\r\n"]), PLACES)
def test_px10_requests_are_read_as_aiohttps_parser_does_however_they_are_cut(
    requests: list[bytes], between: bytes, places: list[int]
) -> None:
    data = b"".join(between + request.replace(b"%d", b"%d" % at, 1) for at, request in enumerate(requests))
    got = read(data, places)
    assert [each and each[0] for each in got] == [f"/{at}" for at in range(len(requests))]
    assert got == as_aiohttp_reads(data)


LINES = (
    *(
        b"Content-Length: 2",
        b"Transfer-Encoding: chunked",
        b"Connection: close",
        b"X: 1",
        b"",
        b"2",
        b"{}",
        b"2;a",
    ),
    *(
        b" X: 1",
        b"Host: r",
        b"Content-Length: 0",
        b"X : 1",
        b"POST /0 HTTP/1.1",
        b"GET / HTTP/1.1",
        b"2;a",
        b"0",
    ),
)
ENDS = st.sampled_from([b"\r\n"] * 9 + [b"\n", b"\r", b"\r\n\r\n"])


@given(st.lists(st.tuples(st.sampled_from(LINES), ENDS).map(b"".join), max_size=9).map(b"".join), PLACES)
@example(b"Content-Length: 2\r\n\r\n{}GET / HTTP/1.1\n\n", [])
@example(b"\r\nZ\r\n\r\n", [])
def test_px10_what_is_read_as_a_request_aiohttps_parser_reads_in_the_same_way(
    lines: bytes, places: list[int]
) -> None:
    data = HEAD.replace(b"%d", b"0") + lines
    theirs = as_aiohttp_reads(data)
    for ours in read(data, places), read(data, []):
        for at, request in enumerate(ours):
            # It refuses later than ours, and some that ours refuses: never the other way round.
            assert request is None or request[1] is None or request == theirs[at]
        assert len(ours) <= len(theirs) or ours[-1] is None


@given(
    st.sampled_from([b"\n", b"\r\n"]),
    st.sampled_from([b"", b"{}", b"GET / HTTP/1.1\r\nHost: r\r\n\r\n"]),
    PLACES,
)
def test_px10_what_names_no_version_is_no_request_however_it_is_cut(
    end: bytes, rest: bytes, places: list[int]
) -> None:
    assert read(b"GET /" + end + b"\r\n" + rest + b"\r\n\r\n", places) == [None]


def test_px10_no_more_requests_are_read_ahead_than_may_be() -> None:
    loop = asyncio.new_event_loop()
    reader = RequestReader(Calm(loop), loop, LIMITS)
    request = sized(b"{}").replace(b"%d", b"0", 1)
    assert len(reader.feed_data(request * 50)) == REQUESTS_AHEAD
    assert reader.feed_data(b"") == []
    reader.message_consumed()
    assert len(reader.feed_data(b"")) == 1
    for _ in range(REQUESTS_AHEAD):
        reader.message_consumed()
    assert len(reader.feed_data(request)) == 50 - REQUESTS_AHEAD
    loop.close()


def test_a_connection_that_is_over_keeps_nothing_of_what_came() -> None:
    loop = asyncio.new_event_loop()
    reader = RequestReader(Calm(loop), loop, LIMITS)
    request = sized(b"SECRET").replace(b"%d", b"0", 1)
    reader.feed_data(request * 50)
    reader.close()
    assert "SECRET" not in repr(vars(reader))
    assert reader.feed_data(request) == []
    coming = RequestReader(Calm(loop), loop, LIMITS)
    ((_, body),) = coming.feed_data(request[:-1])
    assert coming.in_body
    coming.close()
    assert body not in vars(coming).values()
    loop.close()
