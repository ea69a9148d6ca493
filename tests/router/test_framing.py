from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpResponseParser
from aiohttp.http_exceptions import HttpProcessingError
from hypothesis import example, given
from hypothesis import strategies as st

from router.framing import (
    SIZE_LINE_BYTES,
    Chunked,
    Framing,
    FramingError,
    Sized,
    StrictlyChunked,
    UntilClose,
    framing_of,
)
from router.head import HeadLimits, HeadReader

LIMITS = HeadLimits(4096, 100)


def cut(data: bytes, places: list[int]) -> Iterator[bytes]:
    """``data`` in pieces that end at ``places``, as far as it is that long."""
    ends = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return (data[start:end] for start, end in pairwise(ends) if start < end)


def read(framing: Framing, pieces: Iterator[bytes] | list[bytes]) -> bytes:
    return b"".join(framing.feed(piece) for piece in pieces)


def of(head: bytes, *, bodiless: bool = False) -> Framing:
    reader = HeadReader(LIMITS)
    reader.feed(head + b"\r\n\r\n")
    assert reader.message is not None
    return framing_of(reader.message, bodiless=bodiless, trailer_bytes=4096)


def as_aiohttp_reads(body: bytes) -> bytes | None:
    """The bytes of a chunked body by aiohttp's own parser; None for one that is none, or not whole."""
    loop = asyncio.new_event_loop()
    try:
        parser = HttpResponseParser(
            BaseProtocol(loop), loop, 2**20, auto_decompress=False, read_until_eof=True
        )
        ((_, payload),), _, _ = parser.feed_data(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            parser.feed_data(body)
        except HttpProcessingError:
            return None
        read: bytes = b"".join(payload._buffer)
        return read if payload.is_eof() and payload.exception() is None else None
    finally:
        loop.close()


SIZES = st.sampled_from([b"%x", b"%X", b"00%x", b"%x;a=b", b"%x "])
CHUNKS = st.lists(st.tuples(SIZES, st.binary(min_size=1, max_size=40)), max_size=5)


@given(CHUNKS, st.sampled_from([b"", b"X-T: 1\r\n", b"X-T: 1\r\nX-U: 2\r\n"]), st.lists(st.integers(0, 400)))
def test_px10_chunks_are_read_as_aiohttps_parser_does_however_they_are_cut(
    chunks: list[tuple[bytes, bytes]], trailers: bytes, places: list[int]
) -> None:
    lines = [size % len(data) + b"\r\n" + data + b"\r\n" for size, data in chunks]
    body = b"".join([*lines, b"0\r\n", trailers, b"\r\n"])
    framing = Chunked(4096)
    assert read(framing, cut(body, places)) == b"".join(data for _, data in chunks) == as_aiohttp_reads(body)
    assert (framing.over, framing.rest, framing.trailers) == (True, b"", trailers)


@given(st.text("0123aAfx+-; \r\n{}", max_size=12), st.lists(st.integers(0, 12), max_size=3))
@example("2\r\n{}X\r\n0\r\n\r\n", [])
def test_px10_what_is_read_as_chunks_aiohttps_parser_reads_in_the_same_way(
    text: str, places: list[int]
) -> None:
    body = text.encode() + b"0\r\n\r\n"
    framing = Chunked(4096)
    try:
        got = read(framing, cut(body, places))
    except FramingError:
        return
    if framing.over and not framing.rest and not framing.trailers:
        # What stands in extensions is dropped; it minds their grammar.
        assert as_aiohttp_reads(body) in ([got, None] if b";" in body else [got])


@given(st.text("0123aAfx+-; \r\n{}", max_size=12), st.lists(st.integers(0, 12), max_size=3))
@example("2\r\n{}\r\n2\r\n{}X\r\n", [12])
def test_px07_what_came_in_front_of_malformed_chunks_is_told_however_they_are_cut(
    text: str, places: list[int]
) -> None:
    assert read_on(cut(text.encode(), places)) == read_on([text.encode()])


def read_on(pieces: Iterator[bytes] | list[bytes]) -> tuple[bytes, bool]:
    """What there is of a body in chunks, and whether that is where it breaks off."""
    framing, got = Chunked(4096), b""
    for piece in pieces:
        try:
            if not framing.over:
                got += framing.feed(piece)
        except FramingError as error:
            return got + error.before, True
    return got, False


@pytest.mark.parametrize(
    "body",
    [
        b"0x2\r\n{}\r\n",
        b"+2\r\n{}\r\n",
        b"-2\r\n{}\r\n",
        b"1_0\r\n",
        b"\r\n",
        b"ZZ\r\n",
        b"2\r\n{}X\r\n",
        b"2\r\n{}XX",
        b"f" * 16 + b"\r\n",
        b"2;a\n{}\r\n",
        b"2;" + b"x" * (SIZE_LINE_BYTES - 1),
        b"2;" + b"x" * (SIZE_LINE_BYTES - 1) + b"\r\n{}\r\n",
        b"0\r\n" + b"X-T: 1\r\n" * 1100,
    ],
)
def test_px10_chunks_that_are_none_are_refused_however_they_are_cut(body: bytes) -> None:
    for pieces in [body], [bytes([byte]) for byte in body]:
        for made in Chunked, StrictlyChunked:
            with pytest.raises(FramingError):
                read(made(8000), pieces)


def test_px10_an_extension_of_a_chunk_may_be_so_long_however_it_is_cut() -> None:
    body = b"2;" + b"x" * (SIZE_LINE_BYTES - 2) + b"\r\n{}\r\n0\r\n\r\n"
    for pieces in [body], [bytes([byte]) for byte in body]:
        assert read(StrictlyChunked(8000), pieces) == b"{}"


def test_px10_what_comes_behind_an_answer_is_no_part_of_it() -> None:
    for framing, body in (Sized(2), b"{}HTTP"), (Chunked(99), b"2\r\n{}\r\n0\r\n\r\nHTTP"):
        assert framing.feed(body) == b"{}"
        assert (framing.over, framing.rest) == (True, b"HTTP")


def test_only_a_body_without_a_length_is_whole_when_its_connection_ends() -> None:
    for framing, is_whole in (Sized(3), False), (Chunked(99), False), (UntilClose(), True):
        framing.feed(b"2\r")
        framing.close()
        assert framing.over == is_whole


@pytest.mark.parametrize(
    ("head", "bodiless", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5", False, Sized),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", False, Chunked),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, Chunked", False, Chunked),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, gzip", False, UntilClose),
        (b"HTTP/1.1 200 OK", False, UntilClose),
        (b"HTTP/1.0 200 OK", False, UntilClose),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5", True, Sized),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5", False, Sized),
        (b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked", False, Sized),
    ],
)
def test_a_body_ends_where_its_head_says(head: bytes, bodiless: bool, kind: type[Framing]) -> None:
    framing = of(head, bodiless=bodiless)
    assert type(framing) is kind
    assert framing.over == (bodiless or b" 304 " in head or b" 204 " in head)
