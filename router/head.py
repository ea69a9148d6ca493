"""The head of an answer, and trailers, read by aiohttp's parser: bytes of a body never come to it."""

from __future__ import annotations

import re

import msgspec
from aiohttp.http import HttpResponseParser, RawResponseMessage
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDictProxy

from router.upstream import CONTROL, MOST_INFORMATIONAL, SWITCHING_PROTOCOLS

_BLANK_LINE = re.compile(rb"\n\r?\n")
"""What ends a head: the parser takes lines without a carriage return, too."""


class HeadError(Exception):
    """Bytes that are no head of an answer, or one over the limits."""


class HeadLimits(msgspec.Struct, frozen=True):
    """The most bytes that a header, or all trailers, may take; how many headers there may be."""

    header_bytes: int
    headers: int


class HeadReader:
    """Reads heads until one that is not informational (RFC 9110, section 15.2). ``message`` is that one."""

    def __init__(self, limits: HeadLimits) -> None:
        self._limits = limits
        self._parser = _parser(limits)
        self._last = b""
        self._informational = 0
        self.message: RawResponseMessage | None = None

    def feed(self, data: bytes) -> bytes:
        """What of ``data`` came behind ``message``; nothing while there is none. Raises HeadError."""
        while data and self.message is None:
            seen = self._last + data
            blank = _BLANK_LINE.search(seen)
            end = len(data) if blank is None else blank.end() - len(self._last)
            found = _parsed(self._parser, data[:end])
            self._last, data = seen[-2:], data[end:]
            if blank is None:
                return b""
            if found is None:
                raise HeadError("an empty head")
            if 100 <= found.code < 200 and found.code != SWITCHING_PROTOCOLS:
                self._informational += 1
                if self._informational > MOST_INFORMATIONAL:
                    raise HeadError(f"more than {MOST_INFORMATIONAL} informational heads")
                self._parser, self._last = _parser(self._limits), b""
            else:
                self.message = found
        return data


def trailers_of(lines: bytes, limits: HeadLimits) -> CIMultiDictProxy[str]:
    """The fields of the lines behind a last chunk. Raises HeadError for what are none."""
    message = _parsed(_parser(limits), b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n")
    if message is None:
        raise HeadError("trailers that do not end")
    return message.headers


def _parser(limits: HeadLimits) -> HttpResponseParser:
    # Without a body it makes no stream, and needs neither protocol nor loop.
    return HttpResponseParser(
        None,
        None,
        2**16,
        response_with_body=False,
        read_until_eof=True,
        auto_decompress=False,
        max_line_size=limits.header_bytes,
        max_field_size=limits.header_bytes,
        max_headers=limits.headers,
    )


def _parsed(parser: HttpResponseParser, data: bytes) -> RawResponseMessage | None:
    try:
        messages, _, _ = parser.feed_data(data)
    except HttpProcessingError as error:
        raise HeadError(str(error) or type(error).__name__) from error
    message = messages[0][0] if messages else None
    if message is not None and CONTROL.search("".join(message.headers.values())):
        raise HeadError("a control character in a header")
    return message
