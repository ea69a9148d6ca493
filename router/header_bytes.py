"""Header bytes that are no UTF-8 pass through us as they came (RFC 9110, section 5.5: they are opaque).

aiohttp reads such bytes as surrogate escapes, and its writer leaves those out without a word. It has no
public way to have them written, so the function that both its server and its client make heads with is
replaced.
"""

from __future__ import annotations

from aiohttp import http_writer
from multidict import CIMultiDict

_aiohttps_own = http_writer._serialize_headers


def pass_header_bytes() -> None:
    """From now on aiohttp writes in this process what it has read."""
    http_writer._serialize_headers = _serialize


def _serialize(status_line: str, headers: CIMultiDict[str]) -> bytes:
    head: bytes = _aiohttps_own(status_line, headers)  # refuses control characters
    if status_line.isascii() and "".join(headers.values()).isascii():
        return head
    lines = (status_line, *(f"{name}: {value}" for name, value in headers.items()), "\r\n")
    return "\r\n".join(lines).encode("utf-8", "surrogateescape")
