"""The one seam to the engines: sends a request, hands back the answer's head and then its bytes as they
come.
"""

from __future__ import annotations

import asyncio
import io
import re
import socket
import ssl
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from events.names import NameResolver
from router.errors import (
    BrokenAnswerError,
    ConnectTimeoutError,
    DisconnectedError,
    UnreachableError,
    UpstreamError,
    UpstreamTimeoutError,
)
from router.headers import CONTENT_LENGTH, TRANSFER_ENCODING
from router.last_words import hear, over_tls

READ_BUFFER_BYTES = 256 * 1024
"""So much of an answer is held while nobody takes it, before the engine has to wait."""
DNS_TTL_S = 10
MOST_INFORMATIONAL = 100
"""Heads in front of an answer that are none yet (102 says again and again that it is being worked on). What
comes after so many is a flood, which would be read for ever.
"""
SWITCHING_PROTOCOLS = 101
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""aiohttp's parser of answers lets them through in a header, and nothing that writes headers does."""
NO_TRAILERS: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict())

_NO_LENGTH = str((1 << 64) - 1)
"""aiohttp takes an answer of this length for one without a body."""
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Asks the other host after so many seconds of silence, every so often, and gives up after so many times."""
AddressInfo = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]]

Taker = Callable[[bytes], bool]
"""Takes a piece of a body; says whether there is room for another one."""


class UpstreamAnswer(Protocol):
    """An answer whose head is known. ``reason`` is what its status line says, if anything; ``trailers`` are
    there when the body is, where the client tells them.
    """

    status: int
    reason: str
    headers: CIMultiDictProxy[str]
    trailers: CIMultiDictProxy[str]

    async def pour(self, taker: Taker) -> bool:
        """Hands the body to ``taker`` as it comes, untouched. True: that was all of it. False: there is no
        room for more; another call goes on.

        Raises UpstreamError when the body ends before it is complete, and what ``taker`` raises.
        """
        ...

    def close(self) -> None:
        """Lets the connection go: kept if the body was read to its end, else closed. May be called twice."""
        ...


def check_head(answer: UpstreamAnswer) -> None:
    """Raises UpstreamError for a head that aiohttp's parser takes and that a client could read in another
    way: a status that is none, a name with a blank behind it (RFC 9112, section 5.1), a transfer coding other
    than chunked, which we would have to undo.
    """
    if answer.status == SWITCHING_PROTOCOLS:
        raise UpstreamError("it switches protocols, which nobody asked for")
    if answer.status < 200:
        raise UpstreamError(f"an answer that is no HTTP: status {answer.status}")
    names = "\n".join(answer.headers)
    if " " in names or "\t" in names:
        raise UpstreamError("an answer that is no HTTP: a blank in the name of a header")
    for coding in answer.headers.getall(TRANSFER_ENCODING, ()):
        if coding.strip().lower() != "chunked":
            raise UpstreamError("an answer in a transfer coding that is not chunked")


def engine_socket(address: AddressInfo) -> socket.socket:
    """The socket of a connection to an engine, whose host is watched."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    watch_host(made)
    return made


def watch_host(connected: socket.socket) -> None:
    """Has a host that went without a word (no power, no network) noticed while nothing is said: an engine may
    be silent for as long as ``--idle-timeout-s``.
    """
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


class Upstream(Protocol):
    """Sends requests to engines."""

    async def send(
        self,
        method: str,
        url: str,
        headers: CIMultiDict[str],
        body: bytes,
        *,
        trailers: CIMultiDict[str] | None = None,
        fresh: bool = False,
    ) -> UpstreamAnswer:
        """The answer's head. ``headers`` may be added to. ``trailers`` go out behind the body, where the
        client can send them. ``fresh``: over a new connection, none that was kept alive.

        Raises UnreachableError, ConnectTimeoutError, DisconnectedError, UpstreamTimeoutError, UpstreamError.
        """
        ...


def upstream_session(
    connect_timeout_s: float,
    idle_timeout_s: float,
    keepalive_s: float,
    header_bytes: int,
    headers: int,
    tls: ssl.SSLContext,
) -> aiohttp.ClientSession:
    """A session for LLM traffic: no limit on connections or on total time, bytes as they are.

    Connections are kept for ``keepalive_s`` seconds without a request; 0 keeps none. ``header_bytes`` is the
    most that a header of an answer may take, ``headers`` how many it may have; ``tls`` is for URLs with
    https.
    """
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    connector = _EngineConnector(
        limit=0,
        keepalive_timeout=keepalive_s or None,
        force_close=not keepalive_s,
        ssl=tls,
        ttl_dns_cache=DNS_TTL_S,
        resolver=NameResolver(),
        socket_factory=engine_socket,
    )
    connector._factory = partial(  # type: ignore[assignment]
        _EngineHandler, loop=asyncio.get_running_loop()
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=idle_timeout_s),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        trace_configs=[trace],
        max_line_size=header_bytes,
        max_field_size=header_bytes,
        max_headers=headers,
        read_bufsize=READ_BUFFER_BYTES,
    )


class _EngineConnector(aiohttp.TCPConnector):
    async def _wrap_create_connection(
        self,
        *args: Any,
        req: aiohttp.ClientRequest,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109
        ssl: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        **more: Any,
    ) -> tuple[asyncio.Transport, ResponseHandler]:
        """aiohttp's own, but over TLS last words are heard, too."""
        transport, protocol = await super()._wrap_create_connection(*args, req=req, timeout=timeout, **more)
        if ssl is not None:
            try:
                async with asyncio.timeout(timeout.sock_connect):
                    transport = await over_tls(transport, protocol, ssl, server_hostname)
            except TimeoutError:
                raise
            except OSError as error:
                raise aiohttp.ClientConnectorError(req.connection_key, error) from error
            protocol.connection_made(transport)
        return transport, protocol


class _EngineHandler(ResponseHandler):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._informational = 0

    def is_connected(self) -> bool:
        """aiohttp asks before it uses a connection again. Where it had let it go before it saw a second
        answer behind the first, the next request, of somebody else, would get that.
        """
        return super().is_connected() and not self._buffer

    def feed_data(self, data: Any, size: int = 0) -> None:
        """Takes a head: not an endless flood of those that are no answer yet."""
        code = data[0].code
        is_informational = 100 <= code < 200 and code != SWITCHING_PROTOCOLS
        self._informational = self._informational + 1 if is_informational else 0
        if self._informational <= MOST_INFORMATIONAL:
            if self.exception() is None:
                super().feed_data(data, size)
        elif self.transport is not None:
            self.transport.abort()
            self.set_exception(HttpProcessingError(message="too many informational heads"))

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        """Who writes a body may be told first that its connection was reset. That does not count before the
        last words that came over it, which are heard in the next step, when it is lost.
        """
        transport = self.transport
        if isinstance(exc, OSError) and transport is not None and transport.is_closing():
            self._should_close = True
            return
        super().set_exception(exc, *cause)
        if isinstance(exc, HttpProcessingError):
            # aiohttp tells nobody who waits for more of a body, and takes back the idle timeout.
            self._break_off("malformed")

    def connection_lost(self, exc: BaseException | None) -> None:
        transport, self.transport = self.transport, None
        if transport is not None and transport.get_extra_info("sslcontext") is None:
            hear(transport, exc, self.data_received)
        if exc is not None:
            # aiohttp takes the end of a connection for that of a body without a length, a reset too.
            self._break_off(told(exc))
        super().connection_lost(exc)

    def _break_off(self, why: str) -> None:
        payload = self._payload
        if payload is not None and not payload.is_eof():
            payload.set_exception(aiohttp.ClientPayloadError(why))
            # Who was woken by the end of a chunk would wait again, whatever the exception.
            payload.feed_eof()


async def _note_reuse(
    session: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    noted = context.trace_request_ctx
    if noted is not None:
        noted.reused = True


class AiohttpUpstream:
    """The upstream over aiohttp's client: two sessions, the second one keeps no connection."""

    def __init__(self, session: aiohttp.ClientSession, fresh: aiohttp.ClientSession) -> None:
        self._session = session
        self._fresh = fresh

    async def send(
        self,
        method: str,
        url: str,
        headers: CIMultiDict[str],
        body: bytes,
        *,
        trailers: CIMultiDict[str] | None = None,
        fresh: bool = False,
    ) -> UpstreamAnswer:
        connection = SimpleNamespace(reused=False)
        try:
            answer = await (self._fresh if fresh else self._session).request(
                method,
                URL(url, encoded=True),
                headers=headers,
                # As a file: aiohttp writes it in pieces, where bytes would go out in one long step.
                data=io.BytesIO(body) if body else None,
                allow_redirects=False,
                trace_request_ctx=connection,
            )
        except aiohttp.ConnectionTimeoutError as error:
            raise ConnectTimeoutError("no connection within the connect timeout") from error
        except aiohttp.ClientConnectorError as error:
            raise UnreachableError(told(error)) from error
        except (aiohttp.ServerTimeoutError, TimeoutError) as error:
            raise UpstreamTimeoutError("no answer within the idle timeout") from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError) as error:
            raise DisconnectedError(told(error), stale=connection.reused and not _has_begun(error)) from error
        except aiohttp.ClientError as error:
            raise UpstreamError(f"an answer that is no HTTP: {told(error)}") from error
        try:
            _check_head(answer.headers)
        except UpstreamError:
            answer.close()
            raise
        return _AiohttpAnswer(answer)


def _check_head(headers: CIMultiDictProxy[str]) -> None:
    """Raises UpstreamError for what our own pool refuses, and aiohttp does not."""
    if CONTROL.search("".join(headers.values())):
        raise UpstreamError("an answer that is no HTTP: a control character in a header")
    if headers.get(CONTENT_LENGTH) == _NO_LENGTH:
        raise UpstreamError("an answer that is no HTTP: it is longer than can be")


class _AiohttpAnswer:
    trailers = NO_TRAILERS

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self.status = answer.status
        self.reason = answer.reason or ""
        self.headers = answer.headers

    async def pour(self, taker: Taker) -> bool:
        while piece := await self._next_piece():
            if not taker(piece):
                return False
        return True

    async def _next_piece(self) -> bytes:
        content = self._answer.content
        try:
            piece = await content.readany()
            if not piece and (broken := content.exception()) is not None:
                raise broken
            return piece
        except (aiohttp.ServerTimeoutError, TimeoutError) as error:
            raise UpstreamTimeoutError("the replica was silent for longer than the idle timeout") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise BrokenAnswerError(f"the replica's answer broke off: {told(error)}") from error

    def close(self) -> None:
        # Closing is a no-op for an answer that was read to its end: its connection is back in the pool.
        self._answer.close()


def _has_begun(error: Exception) -> bool:
    """Whether the connection closed in the middle of an answer's head, which aiohttp then hands over."""
    return isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)


def told(error: BaseException) -> str:
    return str(error) or type(error).__name__
