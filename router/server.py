"""The HTTP server: aiohttp's, but what it would answer by itself is answered as everything else is.

That is malformed HTTP, paths and methods that nobody serves, and handlers that fail. None of it is logged
with bytes of a request: they hold prompts and keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import EMPTY_PAYLOAD, web, web_protocol
from aiohttp.http_exceptions import LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.http_writer import StreamWriter

from events.logs import Throttled
from router.errors import RefusedError
from router.headers import EXPECT, REQUEST_ID, request_id_of
from router.incoming import READ_AHEAD_BYTES, REQUESTS_AHEAD, Received, RequestLimits, RequestReader
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

LOOK_S = 0.5
"""How often is looked whether a client that is not read is still there."""
_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
FIRST_REQUEST_S = 1.0
"""How long a connection that has brought no request yet when the router goes down may still bring one:
whoever made it did so before there was anything to be seen of that.
"""
LAST_BYTES_S = 1.0
"""How long a client that sent no HTTP may go on sending, and read why it is refused."""


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
        super().__init__(pages.answer, handler_cancellation=True)  # type: ignore[arg-type]
        self.pages = pages
        self.policy = policy
        self.limits = limits
        self.parting = parting
        self.throttled = Throttled(log)

    def __call__(self) -> web.RequestHandler:
        return _Connection(self)


class _Request(web.Request):
    @property
    def keep_alive(self) -> bool:
        """Whether the connection stays. Not after a request for an upgrade that is not heeded: what was sent
        right behind it may be of the other protocol. Nor where the client, answered already, may still send
        the body that it holds back, or may send its next request instead.
        """
        message, connection = self._message, self._protocol
        assert isinstance(connection, _Connection)
        if message.should_close or message.upgrade or connection.is_closing():
            return False
        return EXPECT not in message.headers or self.content.is_eof()

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
            read_bufsize=READ_AHEAD_BYTES,
        )
        self._parser = self._reader = RequestReader(  # type: ignore[assignment]
            self,
            server._loop,
            RequestLimits(limits.header_bytes, limits.header_bytes + 1, limits.headers),
        )
        self._max_msg_queue_size = REQUESTS_AHEAD
        self._msg_queue_resume_size = REQUESTS_AHEAD // 2
        self._server = server
        self.parting = server.parting
        self._head_s = limits.head_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        self._first_request = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._head_timer = self._loop.call_later(self._head_s, self._head_is_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_head_timer()
        if self._look_timer is not None:
            self._look_timer.cancel()
        self._first_request.cancel()
        super().connection_lost(exc)
        self._reader.close()

    def data_received(self, data: bytes) -> None:
        """Takes requests, and what is still to come of the last one's body: also while the connection is to
        close behind it, or a body under way when the router goes down would never be whole.
        """
        is_closing = self._close or self._force_close
        if self.transport is None or (is_closing and not self._reader.in_body):
            return
        received = self._reader.feed_data(data)
        if received and not is_closing:
            self._stop_head_timer()
            if not self._first_request.done():
                self._first_request.set_result(None)
            self._messages.extend(received)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
            if len(self._messages) >= self._max_msg_queue_size and not self._buffer_paused:
                self._pause_reading_for_buffer()
        elif self._waiter is not None:
            self._time_head()

    def close(self) -> None:
        if self._first_request.done() or not self.parting():
            super().close()

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  aiohttp's own
        if not self._first_request.done():
            await asyncio.wait([self._first_request], timeout=FIRST_REQUEST_S)
            self._first_request.cancel()
            self.close()
        await super().shutdown(timeout)

    def is_closing(self) -> bool:
        """Whether this is the connection's last request."""
        return self._close or self._is_broken() or self.parting()

    def _is_broken(self) -> bool:
        """Whether this is a request whose body turned malformed: none is read behind that."""
        return self._reader.is_broken and not self._messages

    def _time_head(self) -> None:
        """A head that has begun while no answer is under way has to be whole in time."""
        if self._reader.in_head and self._head_timer is None:
            self._head_timer = self._loop.call_later(self._head_s, self._head_is_late)

    def _pause_transport_reading(self) -> None:
        super()._pause_transport_reading()
        if self._look_timer is None:
            self._look_timer = self._loop.call_later(LOOK_S, self._look_whether_gone)

    def _look_whether_gone(self) -> None:
        """While nothing is read, nothing tells that the client is gone: one that has sent more behind a
        request than is read ahead would keep its place at the engine to the end.
        """
        self._look_timer = None
        if self.transport is None or not (self._reading_paused or self._buffer_paused):
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _GONE)
        if poll.poll(0):
            self.transport.abort()
        else:
            self._look_timer = self._loop.call_later(LOOK_S, self._look_whether_gone)

    def resume_reading(self, resume_parser: bool = True) -> None:
        """aiohttp's own, which its reader of a body calls for each piece, also where nothing was paused."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    async def start(self) -> None:
        """Answers one request after the other, until the connection ends.

        aiohttp's own makes a task for each, and the answer that a replica gave would go through its steps for
        an answer twice: 8 % of what a request costs (docs/benchmarks.md).
        """
        try:
            while not self._force_close:
                message, body = await self._next()
                if isinstance(message, web_protocol._ErrInfo):
                    await self._refuse(message)
                    break
                if not await self._serve(message, body) or self._close or self._is_broken():
                    if self._reader.is_broken:
                        await self._hear_out()
                    break
                self._await_another()
        except ConnectionError:
            self.force_close()
        except asyncio.CancelledError:
            self.force_close()
            raise
        except Exception as error:
            self.log_exception("a connection failed", exc_info=error)
            self.force_close()
        self._task_handler = None
        if self.transport is not None:
            self.transport.close()

    async def _next(self) -> Received:
        """The next request, or what was wrong with it."""
        if not self._messages:
            self._waiter = self._loop.create_future()
            self._time_head()
            try:
                await self._waiter
            finally:
                self._waiter = None
        received = self._messages.popleft()
        self._reader.message_consumed()
        if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
            self._resume_reading_if_drained()
        return received

    async def _serve(self, message: RawRequestMessage, body: Any) -> bool:
        """Answers one request; returns whether another one may come."""
        request = self._request(message, body)
        answer: Any = self._server.pages.answer
        try:
            response, is_broken = await self._handle_request(request, None, answer)
        except asyncio.CancelledError:
            # The task keeps the error, the error its frames, and they the request: a circle, with the prompt
            # in it, that would outlive the client who left by millions of requests.
            request._task = None  # type: ignore[assignment]
            raise
        if not body.is_eof() and not self._force_close:
            await self._drop(body)
        return bool(response.keep_alive) and not is_broken

    async def _refuse(self, error: web_protocol._ErrInfo) -> None:
        """Answers what is no HTTP. Nothing that comes behind it is read."""
        request = self._request(web_protocol.ERROR, EMPTY_PAYLOAD)
        await self.finish_response(request, self.handle_error(request, error.status, error.exc), None)
        self.close()
        await self._hear_out()

    async def _hear_out(self) -> None:
        """An answer would not come to a client that still sends when its connection closes."""
        if self.transport is not None and self.transport.can_write_eof():
            # Of a client that has reset its connection, which will be told in the next step.
            with contextlib.suppress(OSError):
                self.transport.write_eof()
        # It ends sooner, with the connection.
        await asyncio.sleep(LAST_BYTES_S)

    def _request(self, message: RawRequestMessage, body: Any) -> web.Request:
        loop, task = self._loop, self._task_handler
        assert task is not None
        limit_bytes = self._server.pages.limit_bytes
        return _Request(
            message, body, self, StreamWriter(self, loop), task, loop, client_max_size=limit_bytes
        )

    async def _drop(self, body: Any) -> None:
        """Reads what the handler has not read, for a while."""
        try:
            async with asyncio.timeout(self._lingering_time):
                while not body.is_eof():
                    await body.readany()
        except (TimeoutError, web.RequestPayloadError):
            self.close()

    def _await_another(self) -> None:
        """Sees to it that the connection does not wait for ever."""
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(
                self._next_keepalive_close_time, self._process_keepalive
            )

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        self.force_close()

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
        """Sends the answer, where that is still to be done; one that aiohttp made for a path, method or
        expectation, in our shape.
        """
        if resp._eof_sent and not self._upgraded:
            return resp, False
        if isinstance(resp, web.HTTPException):
            allowed = resp.headers.get("Allow")
            resp = self._refusal(request, resp.status)
            if allowed is not None:
                resp.headers["Allow"] = allowed
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Says what kind of thing went wrong, at most once a minute for each."""
        kind = type(kw.get("exc_info")).__name__
        self._server.throttled.warning(kind, "%s: %s", args[0] if args else "a request failed", kind)

    def _refusal(self, request: web.BaseRequest, status: int) -> web.Response:
        phrase = HTTPStatus(status).phrase
        error = RefusedError(status, phrase, _MESSAGES.get(status, phrase), reason=phrase.lower())
        return refusal(error, self._server.policy, {REQUEST_ID: request_id_of(request.headers)})
