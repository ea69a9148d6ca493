"""The HTTP server: aiohttp's, but what it would answer by itself is answered as everything else is.

That is malformed HTTP, paths and methods that nobody serves, and handlers that fail. None of it is logged
with bytes of a request: they hold prompts and keys.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from aiohttp import web

from events.logs import Throttled
from router.errors import RefusedError
from router.headers import REQUEST_ID, request_id_of
from router.refusal import refusal

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 * 1024
_MESSAGES = {
    400: "The request is no valid HTTP",
    404: "Not Found: this router serves /v1/..., /health, /ready, /metrics and /debug/...",
}


class Runner(web.AppRunner):
    """Runs ``app``. ``policy`` is named in answers, ``grace_s`` is what open ones get when it ends."""

    def __init__(self, app: web.Application, policy: str, *, grace_s: float) -> None:
        super().__init__(app, shutdown_timeout=grace_s)
        self._policy = policy

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(self._policy, made)


class _Server(web.Server):
    """Makes our connections for the handler of the server that aiohttp ``made`` of an application."""

    def __init__(self, policy: str, made: web.Server) -> None:
        super().__init__(
            made.request_handler, request_factory=made.request_factory, handler_cancellation=True
        )
        self.policy = policy
        self.throttled = Throttled(log)

    def __call__(self) -> web.RequestHandler:
        return _Connection(self)


class _Connection(web.RequestHandler):
    def __init__(self, server: _Server) -> None:
        super().__init__(
            server,
            loop=server._loop,
            access_log=None,  # type: ignore[arg-type]
            auto_decompress=False,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
        )
        self._policy = server.policy
        self._throttled = server.throttled

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
