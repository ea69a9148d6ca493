"""The HTTP server: aiohttp's, but what it would answer by itself is answered as everything else is.

That is malformed HTTP, paths and methods that nobody serves, and handlers that fail. None of it is logged
with bytes of a request: they hold prompts and keys.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.web_protocol import _ErrInfo

from events.logs import Throttled
from router.errors import RefusedError
from router.headers import REQUEST_ID, request_id_of
from router.pages import Pages
from router.refusal import refusal

log = logging.getLogger(__name__)

_MESSAGES = {
    400: "The request is no valid HTTP",
    414: "The request target is longer than --header-limit-bytes",
    431: "A request header is longer than --header-limit-bytes",
    404: "Not Found: this router serves /v1/..., /health and /ready here, /metrics and /debug/... on "
    "--admin-listen",
}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one connection may take: ``header_bytes`` of a header and of the request's target, ``headers``
    lines, ``head_s`` seconds for a head to come whole, ``keepalive_s`` seconds without a request.
    """

    header_bytes: int = 64 * 1024
    headers: int = 256
    head_s: float = 30.0
    keepalive_s: float = 3630.0


class Server(web.Server):
    """Serves ``pages``. ``policy`` is named in answers of its own. While ``parting`` says so, clients are
    asked to take their next request to another router.
    """

    def __init__(
        self, pages: Pages, policy: str, limits: Limits, *, parting: Callable[[], bool] = bool
    ) -> None:
        super().__init__(
            pages.answer,  # type: ignore[arg-type]
            request_factory=self._request,
            handler_cancellation=True,
        )
        self.pages = pages
        self.policy = policy
        self.limits = limits
        self.parting = parting
        self.throttled = Throttled(log)

    def __call__(self) -> web.RequestHandler:
        return _Connection(self)

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        connection: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.Request:
        request = _Request(
            message, payload, connection, writer, task, self._loop, client_max_size=self.pages.limit_bytes
        )
        request.parting = self.parting
        return request


class _Request(web.Request):
    ATTRS = web.Request.ATTRS | {"parting"}
    parting: Callable[[], bool] = bool

    @property
    def keep_alive(self) -> bool:
        """Whether the connection stays. Not after a request for an upgrade that is not heeded: aiohttp loses
        what was sent right behind it.
        """
        return not (self._message.should_close or self.parting() or "Upgrade" in self._message.headers)

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        """Of an application, there is none."""


class _Connection(web.RequestHandler):
    def __init__(self, server: Server) -> None:
        limits = server.limits
        super().__init__(
            server,
            loop=server._loop,
            access_log=None,  # type: ignore[arg-type]
            auto_decompress=False,
            # One more than for headers: the error says which of the two it is about by the limit alone.
            max_line_size=limits.header_bytes + 1,
            max_field_size=limits.header_bytes,
            max_headers=limits.headers,
            keepalive_timeout=limits.keepalive_s,
        )
        self._policy = server.policy
        self._throttled = server.throttled
        self._head_s = limits.head_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._body: StreamReader | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._head_timer = self._loop.call_later(self._head_s, self._head_is_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """aiohttp's own, but a head has to be whole in time, and a body that turns malformed ends the wait
        for it.
        """
        super().data_received(data)
        if self._messages:
            self._stop_head_timer()
            if isinstance(self._messages[-1][0], _ErrInfo):
                self._fail_body()
            else:
                self._body = self._messages[-1][1]
        elif self._waiter is not None and self._head_timer is None:
            self._head_timer = self._loop.call_later(self._head_s, self._head_is_late)

    def resume_reading(self, resume_parser: bool = True) -> None:
        """aiohttp's own, which its reader of a body calls for each piece, also where nothing was paused."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        self.force_close()

    def _fail_body(self) -> None:
        """aiohttp would queue the error as the next request, and leave the reader of this body waiting."""
        # Not the current request's: between two steps of the loop a request is neither queued nor current.
        if self._body is not None and not self._body.is_eof():
            self._messages.pop()
            self.close()
            self._body.set_exception(web.RequestPayloadError("malformed"))
            self._body.feed_eof()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to malformed HTTP (400), and to what a handler raised (500)."""
        self.log_exception("a request failed", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun and cannot become another one")
        if isinstance(exc, LineTooLong):
            status = 431 if exc.args[1] == self.max_field_size else 414
        response = self._refusal(request, status)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends the answer; one that aiohttp made for a path, method or expectation, in our shape."""
        if isinstance(resp, web.HTTPException):
            allowed = resp.headers.get("Allow")
            resp = self._refusal(request, resp.status)
            if allowed is not None:
                resp.headers["Allow"] = allowed
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Says what kind of thing went wrong, at most once a minute for each."""
        kind = type(kw.get("exc_info")).__name__
        self._throttled.warning(kind, "%s: %s", args[0] if args else "a request failed", kind)

    def _refusal(self, request: web.BaseRequest, status: int) -> web.Response:
        phrase = HTTPStatus(status).phrase
        error = RefusedError(status, phrase, _MESSAGES.get(status, phrase), reason=phrase.lower())
        return refusal(error, self._policy, {REQUEST_ID: request_id_of(request.headers)})
