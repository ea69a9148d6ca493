"""Reads a request's body, whole: it is routed by what it says, and may have to be sent twice."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import HttpVersion10, HttpVersion11, web
from multidict import CIMultiDictProxy

from router.errors import RefusedError
from router.headers import EXPECT, TRANSFER_ENCODING, UPGRADE
from router.incoming import BodyAtHand, ComingBody
from router.upstream import NO_TRAILERS


class BodyPace(msgspec.Struct, frozen=True):
    """How slow a body may be: silent for ``idle_s`` seconds at most, and after the first ``idle_s`` of
    them no slower on the whole than ``least_bytes_s``; 0: however slow.
    """

    idle_s: float = 30.0
    least_bytes_s: int = 0

    def patience_s(self, passed_s: float, received: int) -> float:
        """How long to wait for more, when ``received`` bytes came in ``passed_s`` seconds."""
        if not self.least_bytes_s:
            return self.idle_s
        return min(self.idle_s, self.idle_s + received / self.least_bytes_s - passed_s)


def check_framing(request: web.Request) -> None:
    """Raises RefusedError for a body in a transfer coding that we would have to undo, for WebSocket (501),
    and for versions that are none of HTTP/1 (505).
    """
    coding = request.headers.get(TRANSFER_ENCODING)
    if coding is not None and coding.strip().lower() != "chunked":
        raise RefusedError(
            501, "Not Implemented", "Only the transfer coding chunked is understood", reason="transfer coding"
        )
    offered = request.headers.get(UPGRADE)
    if offered is not None and any(each.strip().lower() == "websocket" for each in offered.split(",")):
        # Other upgrades (h2c) are offers, which may be ignored (RFC 9110, section 7.8).
        raise RefusedError(501, "Not Implemented", "WebSocket is not relayed", reason="upgrade")
    if request.version not in (HttpVersion10, HttpVersion11):
        raise RefusedError(505, "HTTP Version Not Supported", "Only HTTP/1.0 and HTTP/1.1 are served")


async def read_body(request: web.Request, limit_bytes: int, pace: BodyPace) -> bytes:
    """The body. Raises RefusedError: 413 over the limit, 408 when it comes slower than ``pace``, 400 when it
    breaks off or is malformed.
    """
    check_framing(request)
    if (request.content_length or 0) > limit_bytes:
        raise _too_large(limit_bytes)
    if request.content.is_eof():
        return _body_at_hand(request, limit_bytes)
    if EXPECT in request.headers and request.version == HttpVersion11:
        await _ask_for_it(request)
    loop = asyncio.get_running_loop()
    pieces: list[bytes] = []
    received, began = 0, loop.time()
    patience_s = pace.idle_s
    try:
        while piece := await _next_piece(request, patience_s):
            pieces.append(piece)
            received += len(piece)
            patience_s = pace.patience_s(loop.time() - began, received)
            if received > limit_bytes:
                raise _too_large(limit_bytes)
    except TimeoutError as error:
        raise _too_slow(pace, patience_s) from error
    except web.RequestPayloadError as error:
        raise _unreadable() from error
    return b"".join(pieces)


def trailers_of(request: web.Request) -> CIMultiDictProxy[str]:
    """The fields that came behind the body, when that has been read."""
    body: Any = request.content
    return body.trailers if isinstance(body, (BodyAtHand, ComingBody)) else NO_TRAILERS


async def _ask_for_it(request: web.Request) -> None:
    """The client waits for that (RFC 9110, section 10.1.1), and only one who is let in gets it."""
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # What was written is no part of the answer.
    request.writer.output_size = 0


def _body_at_hand(request: web.Request, limit_bytes: int) -> bytes:
    """The body of a request that has come whole, or has broken off."""
    try:
        # Not at_eof(): what was malformed is at its end too, and only reading says so.
        body = request.content.read_nowait()
    except web.RequestPayloadError as error:
        raise _unreadable() from error
    if len(body) > limit_bytes:
        raise _too_large(limit_bytes)
    return body


async def _next_piece(request: web.Request, patience_s: float) -> bytes:
    if request.content.is_eof():
        return await request.content.readany()
    async with asyncio.timeout(patience_s):
        return await request.content.readany()


def _unreadable() -> RefusedError:
    return RefusedError(400, "Bad Request", "The request body cannot be read", reason="bad body")


def _too_large(limit_bytes: int) -> RefusedError:
    return RefusedError(
        413,
        "Request Entity Too Large",
        f"The request body is larger than {limit_bytes} bytes (--request-limit-bytes)",
        reason="request too large",
    )


def _too_slow(pace: BodyPace, patience_s: float) -> RefusedError:
    message = f"Nothing of the request body came for {pace.idle_s:g} s"
    if patience_s < pace.idle_s:
        message = f"The request body came slower than {pace.least_bytes_s} bytes/s (--body-least-bytes-s)"
    return RefusedError(408, "Request Timeout", message, reason="slow body")
