"""One connection to an engine: a request goes out, its answer comes in, then the next one may go.

A body goes to whoever takes it in the step that its bytes arrive in: no task is woken and no timer is set
for a piece of a stream.
"""

from __future__ import annotations

import asyncio
from typing import cast

from aiohttp.http import RawResponseMessage
from multidict import CIMultiDictProxy

from router.errors import BrokenAnswerError, DisconnectedError, UpstreamError, UpstreamTimeoutError
from router.framing import Framing, FramingError, framing_of
from router.head import HeadError, HeadLimits, HeadReader, trailers_of
from router.last_words import hear
from router.upstream import NO_TRAILERS, READ_BUFFER_BYTES, Taker, told

JOINED_BYTES, PIECE_BYTES = 16 * 1024, 256 * 1024
"""Bodies up to the first are joined with their head, those up to the second go out beside it in one step,
longer ones in pieces.
"""
_NOTHING = memoryview(b"")


class EngineConnection(asyncio.Protocol):
    """``ask``, then ``pour`` until all is there; then it may be asked again where ``is_usable``. An engine
    that says nothing for ``idle_s`` seconds has failed, unless nobody takes what it says.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, idle_s: float, limits: HeadLimits) -> None:
        self._loop = loop
        self._idle_s = idle_s
        self._limits = limits
        self._transport: asyncio.Transport | None = None
        self._is_secured = False
        self._asked = 0
        self._closes = self._bodiless = False
        self._unsent = _NOTHING
        self._writing_paused = self._reading_paused = False
        self._heard = False
        self._heard_at = 0.0
        self._silence: asyncio.TimerHandle | None = None
        self._reader: HeadReader | None = None
        self._framing: Framing | None = None
        self._head: asyncio.Future[RawResponseMessage] | None = None
        self._taker: Taker | None = None
        self._poured: asyncio.Future[bool] | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._failure: BaseException | None = None
        self.trailers: CIMultiDictProxy[str] = NO_TRAILERS

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent over it: nothing is under way, and it stays open."""
        is_open = self._transport is not None and not self._transport.is_closing()
        return is_open and self._is_over() and not self._closes and not self._unsent and not self._held

    async def ask(self, head: bytes, body: bytes, *, bodiless: bool, closes: bool) -> RawResponseMessage:
        """Sends a request; returns the head of its answer, which may come before all of a long body is gone.
        ``bodiless``: the answer is to HEAD; ``closes``: it is the last one.

        Raises DisconnectedError, UpstreamTimeoutError, and UpstreamError for what is no HTTP.
        """
        self._asked += 1
        self._bodiless, self._closes, self._heard = bodiless, closes, False
        self._reader, self._framing = HeadReader(self._limits), None
        self.trailers = NO_TRAILERS
        self._head = self._loop.create_future()
        if self._transport is None:
            self._fail(self._disconnected("it was closed"))
        else:
            self._send(self._transport, head, body)
            self._heard_at = self._loop.time()
            if self._silence is None:
                self._silence = self._loop.call_later(self._idle_s, self._check_silence)
        try:
            return await self._head
        finally:
            self._head = None

    async def pour(self, taker: Taker) -> bool:
        """Hands the body to ``taker`` as it comes. True: that was all of it. False: there is no room for
        more; another call goes on.

        Raises UpstreamTimeoutError and BrokenAnswerError, behind all that came, and what ``taker`` raises.
        """
        has_room = True
        if self._held:
            piece = b"".join(self._held)
            self._held, self._held_bytes = [], 0
            has_room = taker(piece)
            self._resume_reading()
        if self._failure is not None:
            raise self._taken_failure()
        if self._is_over():
            return True
        if not has_room:
            return False
        self._taker, self._poured = taker, self._loop.create_future()
        try:
            return await self._poured
        finally:
            self._taker = self._poured = None

    def close(self) -> None:
        """Lets it go, whatever is still to come or to be sent."""
        self._stop_watching()
        transport, is_usable = self._transport, self.is_usable
        self._transport, self._unsent = None, _NOTHING
        if transport is not None and is_usable:
            transport.close()
        elif transport is not None:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Is told again when the connection goes on over TLS."""
        self._transport = cast(asyncio.Transport, transport)
        self._is_secured = transport.get_extra_info("sslcontext") is not None

    def connection_lost(self, exc: Exception | None) -> None:
        transport = self._transport
        if transport is not None and not self._is_over() and not self._is_secured:
            hear(transport, exc, self.data_received)
        self._transport, self._unsent = None, _NOTHING
        self._stop_watching()
        why = told(exc) if exc is not None else "it closed the connection"
        if self._framing is None:
            self._fail(self._disconnected(why))
            return
        if exc is None:
            self._framing.close()
        if self._framing.over:
            self._end()
        else:
            self._fail(BrokenAnswerError(f"the replica's answer broke off: {why}"))

    def data_received(self, data: bytes) -> None:
        self._heard = True
        self._heard_at = self._loop.time()
        if self._framing is not None:
            self._read_body(self._framing, data)
        elif self._reader is not None:
            self._read_head(self._reader, data)
        else:
            # Nobody asked it anything.
            self.close()

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._send_piece()

    # What goes out.

    def _send(self, transport: asyncio.Transport, head: bytes, body: bytes) -> None:
        if len(body) <= JOINED_BYTES:
            transport.write(head + body)
        elif len(body) <= PIECE_BYTES:
            # As they are: joined, they would be copied.
            transport.writelines((head, body))
        else:
            transport.write(head)
            self._unsent = memoryview(body)
            self._send_piece()

    def _send_piece(self) -> None:
        """A long body goes out as fast as it is taken, and each piece in a step of its own."""
        if not self._unsent or self._writing_paused or self._transport is None:
            return
        piece, rest = self._unsent[:PIECE_BYTES], self._unsent[PIECE_BYTES:]
        # An empty view of a body would keep all of it, as long as the connection is.
        self._unsent = rest or _NOTHING
        self._heard_at = self._loop.time()
        self._transport.write(piece)
        if not self._writing_paused:
            self._loop.call_soon(self._send_piece)

    # What comes in.

    def _read_head(self, reader: HeadReader, data: bytes) -> None:
        try:
            rest = reader.feed(data)
            message = reader.message
            if message is None:
                return
            self._framing = framing_of(
                message, bodiless=self._bodiless, trailer_bytes=self._limits.header_bytes
            )
        except HeadError as error:
            self._fail(UpstreamError(f"an answer that is no HTTP: {error}"))
            return
        self._closes |= message.should_close or message.upgrade
        if self._head is not None and not self._head.done():
            self._head.set_result(message)
        if self._framing.over:
            self._end()
        if rest:
            self._read_body(self._framing, rest)

    def _read_body(self, framing: Framing, data: bytes) -> None:
        if framing.over:
            # It belongs to no answer.
            self._closes = True
            return
        malformed: FramingError | HeadError | None = None
        try:
            piece = framing.feed(data)
        except FramingError as error:
            piece, malformed = error.before, error
        self._closes |= bool(framing.rest)
        if piece:
            self._hand_over(piece)
        if framing.over and framing.trailers:
            try:
                self.trailers = trailers_of(framing.trailers, self._limits)
            except HeadError as error:
                malformed = error
        if malformed is not None:
            self._fail(BrokenAnswerError(f"the replica's answer broke off: {malformed}"))
        elif framing.over:
            self._end()

    def _hand_over(self, piece: bytes) -> None:
        """To the taker; nobody takes anything between a head and the first pour, and between two of them."""
        if self._taker is None:
            self._held.append(piece)
            self._held_bytes += len(piece)
            if self._held_bytes > READ_BUFFER_BYTES:
                self._pause_reading()
            return
        try:
            has_room = self._taker(piece)
        except Exception as error:
            self._fail(error)
            return
        if not has_room:
            self._taker = None
            self._settle(False)

    def _pause_reading(self) -> None:
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._reading_paused and self._transport is not None and not self._transport.is_closing():
            self._reading_paused = False
            self._heard_at = self._loop.time()
            self._transport.resume_reading()

    # How it ends.

    def _is_over(self) -> bool:
        return self._reader is None or (self._framing is not None and self._framing.over)

    def _end(self) -> None:
        """All of the answer is here."""
        self._settle(True)

    def _settle(self, is_over: bool) -> None:
        if self._poured is not None and not self._poured.done():
            self._poured.set_result(is_over)

    def _fail(self, error: BaseException) -> None:
        """Tells whoever waits, or pours next."""
        self.close()
        waiting: asyncio.Future[RawResponseMessage] | asyncio.Future[bool] | None = self._head or self._poured
        if waiting is None or waiting.done():
            self._failure = error
        else:
            waiting.set_exception(error)

    def _taken_failure(self) -> BaseException:
        """It is let go before it is raised: the two would know each other, and outlive the request."""
        assert self._failure is not None
        failure, self._failure = self._failure, None
        return failure

    def _disconnected(self, why: str) -> DisconnectedError:
        return DisconnectedError(why, stale=self._asked > 1 and not self._heard)

    def _check_silence(self) -> None:
        """One timer for many answers: it looks when something was heard last, and goes when it finds that
        nothing is awaited.
        """
        self._silence = None
        if self._is_over():
            return
        since = self._loop.time() if self._reading_paused else self._heard_at
        left_s = since + self._idle_s - self._loop.time()
        if left_s > 0:
            self._silence = self._loop.call_later(left_s, self._check_silence)
        elif self._framing is None:
            self._fail(UpstreamTimeoutError("no answer within the idle timeout"))
        else:
            self._fail(UpstreamTimeoutError("the replica was silent for longer than the idle timeout"))

    def _stop_watching(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
