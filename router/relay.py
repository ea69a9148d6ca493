"""Hands a replica's answer to the client: byte for byte, as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from router.answer import AnswerTap
from router.errors import BrokenAnswerError, RefusedError, UpstreamError, UpstreamTimeoutError
from router.headers import to_client
from router.refusal import terminal_event
from router.upstream import UpstreamAnswer
from router.usage import UnaskedUsage

NO_WAIT_BYTES = 32 * 1024
"""So much goes out without a wait when nothing waits already: a timer for each token would cost more."""


class ClientGoneError(Exception):
    """The client closed its connection."""


class _Response(web.StreamResponse):
    """The head of a replica's answer, as the client gets it: ``at_once``, or with its first bytes."""

    def __init__(
        self, answer: UpstreamAnswer, ours: Mapping[str, str], *, keeps_length: bool, at_once: bool
    ) -> None:
        headers = to_client(answer.headers, ours)
        if not keeps_length:
            headers.popall("Content-Length", None)
        super().__init__(status=answer.status, headers=headers)
        self._is_typed = "Content-Type" in answer.headers
        # aiohttp's own switch, off in its web.Response: else each head would be a write of its own.
        self._send_headers_immediately = at_once

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        if not self._is_typed:
            # aiohttp gives a type to an answer that came without one.
            self._headers.popall("Content-Type", None)


class RelayedAnswer:
    """One answer of ``replica`` on its way.

    ``complete`` tells whether the client has all of it, be it only that a stream has said ``[DONE]``;
    ``failure`` is what broke it off. ``without_usage``: a stream's usage chunk is ours alone.
    """

    def __init__(
        self,
        answer: UpstreamAnswer,
        replica: str,
        *,
        whole: bool,
        on_first_byte: Callable[[], None],
        without_usage: bool = False,
    ) -> None:
        self._answer = answer
        self._replica = replica
        self._on_first_byte = on_first_byte
        self._begun = False
        self._last_bytes = b""
        content_type = answer.headers.get("Content-Type", "")
        self.is_stream = content_type.lower().startswith("text/event-stream")
        self.tap = AnswerTap(is_stream=self.is_stream, whole=whole)
        readable = self.is_stream and "Content-Encoding" not in answer.headers
        self._unasked = UnaskedUsage() if without_usage and readable else None
        # What has a length, or is compressed, is no place for an event of ours.
        self._takes_events = readable and (
            self._unasked is not None or "Content-Length" not in answer.headers
        )
        self._client_idle_s = 0.0
        self.complete = False
        self.failure: UpstreamError | None = None

    async def relay(
        self, request: web.Request, ours: Mapping[str, str], *, client_idle_s: float
    ) -> web.StreamResponse:
        """Writes the answer with ``ours`` among its headers.

        The head of a stream goes out at once. Any other head waits for the first bytes, so that an answer
        that breaks off before them can still be told as an error: RefusedError (502 or 504). Raises
        ClientGoneError, also for a client that takes nothing for ``client_idle_s``: it would keep its place
        at the replica for ever.
        """
        self._client_idle_s = client_idle_s
        response = _Response(self._answer, ours, keeps_length=self._unasked is None, at_once=self.is_stream)
        try:
            if self.is_stream:
                await response.prepare(request)
            try:
                await self._pass_chunks(request, response)
            except UpstreamError as error:
                if not self.complete:
                    self.failure = error
                elif not self._takes_events and request.transport is not None:
                    # Said [DONE], but not by its own length: nothing else tells the client that it is over.
                    request.transport.abort()
            if self._unasked is not None:
                await self._write(request, response, self._unasked.end())
            if self.failure is not None:
                await self._break_off(request, response, self.failure)
            if not response.prepared:
                await response.prepare(request)
            await self._patiently(request, response.write_eof(), 0)
        except (ConnectionError, TimeoutError) as error:
            if request.transport is not None:
                request.transport.abort()
            if self.failure is not None:
                return response
            raise ClientGoneError from error
        return response

    async def _pass_chunks(self, request: web.Request, response: web.StreamResponse) -> None:
        async for chunk in self._answer.chunks():
            if not self._begun:
                self._begun = True
                self._on_first_byte()
            self.tap.feed(chunk)
            if not response.prepared:
                await response.prepare(request)
            await self._write(request, response, self._unasked.feed(chunk) if self._unasked else chunk)
            self.complete = self.tap.done
        self.complete = True

    async def _write(self, request: web.Request, response: web.StreamResponse, chunk: bytes) -> None:
        if not chunk:
            return
        self._last_bytes = chunk
        await self._patiently(request, response.write(chunk), len(chunk))

    async def _patiently(self, request: web.Request, writing: Awaitable[None], size: int) -> None:
        """Awaits a write of ``size`` bytes, no longer than the client may be idle."""
        transport = request.transport
        if transport is not None and not transport.get_write_buffer_size() and size < NO_WAIT_BYTES:
            await writing
            return
        async with asyncio.timeout(self._client_idle_s):
            await writing

    async def _break_off(
        self, request: web.Request, response: web.StreamResponse, error: UpstreamError
    ) -> None:
        """Says that the answer is not whole: as an error, as a last event, or by cutting the connection."""
        if not response.prepared:
            raise refused(error, self._replica) from error
        if self._takes_events and self._answer.status == 200:
            await response.write(terminal_event(told(error, self._replica), self._last_bytes[-2:]))
        elif request.transport is not None:
            request.transport.abort()


def told(error: UpstreamError, replica: str) -> str:
    """What a client is told: the replica's name and what it did, nothing of addresses and libraries."""
    if isinstance(error, UpstreamTimeoutError):
        return f"replica {replica} was silent for too long"
    if isinstance(error, BrokenAnswerError):
        return f"the answer of replica {replica} broke off"
    return f"the answer of replica {replica} failed"


def refused(error: UpstreamError, replica: str) -> RefusedError:
    """The error answer for a replica that failed after it may have begun to work."""
    if isinstance(error, UpstreamTimeoutError):
        return RefusedError(504, "GatewayTimeoutError", told(error, replica))
    return RefusedError(502, "BadGatewayError", told(error, replica))
