"""Reads a request's body, whole: it is routed by what it says, and may have to be sent twice."""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion10, HttpVersion11, web

from router.errors import RefusedError


def check_framing(request: web.Request) -> None:
    """Raises RefusedError for a body in a transfer coding that we would have to undo (501), and for versions
    that are none of HTTP/1 (505).
    """
    coding = request.headers.get("Transfer-Encoding")
    if coding is not None and coding.strip().lower() != "chunked":
        raise RefusedError(
            501, "Not Implemented", "Only the transfer coding chunked is understood", reason="transfer coding"
        )
    if request.version not in (HttpVersion10, HttpVersion11):
        raise RefusedError(505, "HTTP Version Not Supported", "Only HTTP/1.0 and HTTP/1.1 are served")


async def read_body(request: web.Request, limit_bytes: int, idle_s: float) -> bytes:
    """The body. Raises RefusedError: 413 over the limit, 408 when nothing of it comes for ``idle_s``, 400
    when it breaks off or is malformed.
    """
    check_framing(request)
    if request.content_length is not None and request.content_length > limit_bytes:
        raise _too_large(limit_bytes)
    body = bytearray()
    try:
        while piece := await _next_piece(request, idle_s):
            body += piece
            if len(body) > limit_bytes:
                raise _too_large(limit_bytes)
    except TimeoutError as error:
        raise RefusedError(
            408, "Request Timeout", f"Nothing of the request body came for {idle_s:g} s", reason="slow body"
        ) from error
    except web.RequestPayloadError as error:
        raise RefusedError(
            400, "Bad Request", "The request body cannot be read", reason="bad body"
        ) from error
    return bytes(body)


async def _next_piece(request: web.Request, idle_s: float) -> bytes:
    # Not at_eof(): what was malformed is at its end too, and only reading says so.
    if request.content.is_eof():
        return await request.content.readany()
    async with asyncio.timeout(idle_s):
        return await request.content.readany()


def _too_large(limit_bytes: int) -> RefusedError:
    return RefusedError(
        413,
        "Request Entity Too Large",
        f"The request body is larger than {limit_bytes} bytes (--request-limit-bytes)",
        reason="request too large",
    )
