"""Hands a replica's answer to the client: byte for byte, as it comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web

from router.answer import AnswerTap
from router.delivery import Delivery
from router.errors import BrokenAnswerError, RefusedError, UpstreamError, UpstreamTimeoutError
from router.headers import trailers_to_client
from router.lines import WholeLines
from router.refusal import terminal_event
from router.upstream import UpstreamAnswer
from router.usage import UnaskedUsage


class ClientGoneError(Exception):
    """The client closed its connection."""


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
        self._first = self._last = b""
        content_type = answer.headers.get("Content-Type", "")
        self.is_stream = content_type.lower().startswith("text/event-stream")
        self.tap = AnswerTap(is_stream=self.is_stream, whole=whole)
        readable = self.is_stream and answer.headers.get("Content-Encoding", "identity").lower() == "identity"
        self._keeps_length = not (without_usage and readable)
        # What has a length, or is compressed, is no place for an event of ours.
        self._takes_events = readable and not (self._keeps_length and "Content-Length" in answer.headers)
        self._sieve: UnaskedUsage | WholeLines | None = None
        if not self._keeps_length:
            self._sieve = UnaskedUsage()
        elif self._takes_events:
            self._sieve = WholeLines()
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
        delivery = Delivery(self._answer, ours, keeps_length=self._keeps_length, at_once=self.is_stream)
        try:
            try:
                await self._pass(request, delivery, client_idle_s)
            except UpstreamError as error:
                if not self.complete:
                    self.failure = error
                elif not self._takes_events:
                    # Said [DONE], but not by its own length: nothing else tells the client that it is over.
                    delivery.cut()
            if self._sieve is not None and (held := self._sieve.end(is_whole=self.failure is None)):
                self._last = held
                delivery.send(held)
            if self.failure is not None:
                self._break_off(delivery, self.failure)
            await delivery.end(trailers_to_client(self._answer.trailers), client_idle_s)
        except (ConnectionError, TimeoutError) as error:
            if request.transport is not None:
                request.transport.abort()
            if self.failure is not None:
                return delivery
            raise ClientGoneError from error
        return delivery

    async def _pass(self, request: web.Request, delivery: Delivery, client_idle_s: float) -> None:
        """The head and the body, in as many turns as the client needs to take them."""

        def take(piece: bytes) -> bool:
            return self._take(piece, delivery)

        is_over = False
        if not self.is_stream:
            is_over = await self._answer.pour(self._take_first)
        await delivery.prepare(request)
        if self._first:
            take(self._first)
        while not is_over:
            await delivery.room(client_idle_s)
            is_over = await self._answer.pour(take)
        self.complete = True

    def _take_first(self, piece: bytes) -> bool:
        """There is no room for more before the head is made."""
        self._first = piece
        return False

    def _take(self, piece: bytes, delivery: Delivery) -> bool:
        if not self._begun:
            self._begun = True
            self._on_first_byte()
        self.tap.feed(piece)
        passed = piece if self._sieve is None else self._sieve.feed(piece)
        has_room = True
        if passed:
            self._last = passed
            has_room = delivery.send(passed)
        self.complete = self.tap.done
        return has_room

    def _break_off(self, delivery: Delivery, error: UpstreamError) -> None:
        """Says that the answer is not whole: as an error, as a last event, or by cutting the connection."""
        if not delivery.prepared:
            raise refused(error, self._replica) from error
        if self._takes_events and self._answer.status == 200:
            delivery.send(terminal_event(told(error, self._replica), self._last[-2:]))
        else:
            delivery.cut()


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
