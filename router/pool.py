"""Connections to engines, kept alive, without aiohttp's client session around them, which costs 100 to 200
microseconds a request (docs/benchmarks.md).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from functools import lru_cache
from typing import Any

import aiohappyeyeballs
import msgspec
from aiohttp import http_writer
from aiohttp.http import RawResponseMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from events.names import look_up
from router.engine_connection import EngineConnection
from router.errors import ConnectTimeoutError, UnreachableError
from router.head import HeadLimits
from router.headers import CONNECTION, CONTENT_LENGTH, TE, TRAILER, TRANSFER_ENCODING
from router.last_words import over_tls
from router.upstream import DNS_TTL_S, NO_TRAILERS, Taker, UpstreamAnswer, told, watch_host

NEXT_ADDRESS_AFTER_S = 0.25
"""How long the first of several addresses is waited for alone (RFC 8305)."""
BODILESS_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})


class Origin(msgspec.Struct, frozen=True):
    """Where a replica is. ``host_line`` is what it is called in the Host header, between two line ends."""

    host: str
    port: int
    is_tls: bool
    host_line: bytes


@lru_cache(1024)
def _origin(text: str) -> Origin:
    url = URL(text, encoded=True)
    assert url.raw_host is not None
    assert url.port is not None
    host_line = f"\r\nHost: {url.host_port_subcomponent}\r\n".encode()
    return Origin(url.raw_host, url.port, url.scheme == "https", host_line)


def origin_and_target(url: str) -> tuple[Origin, str]:
    """``http://host:8000/v1/x?y`` as where it is and what is asked there."""
    end = url.find("/", url.index("://") + 3)
    return (_origin(url), "/") if end < 0 else (_origin(url[:end]), url[end:])


class PooledUpstream:
    """The upstream over connections of our own. They are kept for ``keepalive_s`` seconds without a request;
    0 keeps none. ``header_bytes`` is the most that a header of an answer may take, ``headers`` how many it
    may have; ``tls`` is for https.
    """

    def __init__(
        self,
        connect_timeout_s: float,
        idle_timeout_s: float,
        keepalive_s: float,
        header_bytes: int,
        headers: int,
        tls: ssl.SSLContext,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._keepalive_s = keepalive_s
        self._limits = HeadLimits(header_bytes, headers)
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._names = _Names()
        self._idle: dict[Origin, list[tuple[EngineConnection, float]]] = {}
        self._sweep_timer: asyncio.TimerHandle | None = None

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
        origin, target = origin_and_target(url)
        closes = fresh or not self._keepalive_s
        if trailers:
            headers[TRANSFER_ENCODING], headers[TRAILER] = "chunked", ", ".join(dict.fromkeys(trailers))
            body = _chunked(body, trailers)
        elif body or method not in BODILESS_METHODS:
            headers[CONTENT_LENGTH] = str(len(body))
        head = _head(f"{method} {target} HTTP/1.1", origin, headers, closes=closes)
        kept = None if fresh else self._take(origin)
        connection = kept if kept is not None else await self._connect(origin)
        try:
            message = await connection.ask(head, body, bodiless=method == "HEAD", closes=closes)
        except BaseException:
            connection.close()
            raise
        return _PooledAnswer(self, origin, connection, message)

    def close(self) -> None:
        """Closes the connections that nobody uses."""
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for connections in self._idle.values():
            for connection, _ in connections:
                connection.close()
        self._idle.clear()

    def keep(self, origin: Origin, connection: EngineConnection) -> None:
        """Takes back a connection whose answer was read to its end."""
        if not connection.is_usable:
            connection.close()
            return
        self._idle.setdefault(origin, []).append((connection, self._loop.time()))
        if self._sweep_timer is None:
            self._sweep_timer = self._loop.call_later(self._keepalive_s, self._sweep)

    def _take(self, origin: Origin) -> EngineConnection | None:
        """The connection that was used last, of those that can be used."""
        idle = self._idle.get(origin)
        while idle:
            connection, since = idle.pop()
            if self._is_usable(connection, since):
                return connection
            connection.close()
        return None

    def _is_usable(self, connection: EngineConnection, since: float) -> bool:
        return self._loop.time() - since < self._keepalive_s and connection.is_usable

    def _sweep(self) -> None:
        self._sweep_timer = None
        for origin, connections in tuple(self._idle.items()):
            left = []
            for connection, since in connections:
                if self._is_usable(connection, since):
                    left.append((connection, since))
                else:
                    connection.close()
            if left:
                self._idle[origin] = left
            else:
                del self._idle[origin]
        if self._idle:
            self._sweep_timer = self._loop.call_later(self._keepalive_s, self._sweep)

    async def _connect(self, origin: Origin) -> EngineConnection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await self._dial(origin)
        except TimeoutError as error:
            raise ConnectTimeoutError("no connection within the connect timeout") from error
        except OSError as error:
            raise UnreachableError(told(error)) from error

    async def _dial(self, origin: Origin) -> EngineConnection:
        addresses = await self._names.addresses(origin.host, origin.port)
        host, port, *scoped = addresses[0][4]
        if len(addresses) == 1 and not any(scoped):
            # In one step: to have a socket connected and then taken over costs three times as much.
            return await self._connection(origin, host=host, port=port)
        dialled = await aiohappyeyeballs.start_connection(
            addresses, happy_eyeballs_delay=NEXT_ADDRESS_AFTER_S, interleave=1, loop=self._loop
        )
        try:
            return await self._connection(origin, sock=dialled)
        except BaseException:
            dialled.close()
            raise

    async def _connection(self, origin: Origin, **where: Any) -> EngineConnection:
        transport, connection = await self._loop.create_connection(
            lambda: EngineConnection(self._loop, self._idle_timeout_s, self._limits), **where
        )
        watch_host(transport.get_extra_info("socket"))
        if origin.is_tls:
            connection.connection_made(await over_tls(transport, connection, self._tls, origin.host))
        return connection


class _PooledAnswer:
    def __init__(
        self, pool: PooledUpstream, origin: Origin, connection: EngineConnection, message: RawResponseMessage
    ) -> None:
        self._pool = pool
        self._origin = origin
        self._connection: EngineConnection | None = connection
        self.status: int = message.code
        self.reason: str = message.reason
        self.headers: CIMultiDictProxy[str] = message.headers
        self.trailers = NO_TRAILERS

    async def pour(self, taker: Taker) -> bool:
        connection = self._connection
        if connection is None:
            return True
        is_over = await connection.pour(taker)
        if is_over:
            self.trailers = connection.trailers
            self._connection = None
            self._pool.keep(self._origin, connection)
        return is_over

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _chunked(body: bytes, trailers: CIMultiDict[str]) -> bytes:
    """A body with trailers, which have their place behind chunks alone (RFC 9112, section 7.1)."""
    end: bytes = http_writer._serialize_headers("0", trailers)
    return b"%x\r\n%b\r\n%b" % (len(body), body, end) if body else end


def _head(line: str, origin: Origin, headers: CIMultiDict[str], *, closes: bool) -> bytes:
    """Raises ValueError for headers with control characters."""
    if closes:
        headers[CONNECTION] = "close, TE" if TE in headers else "close"
    head: bytes = http_writer._serialize_headers(line, headers)
    # The first header (RFC 9110, section 7.2), without another copy of them all.
    return head.replace(b"\r\n", origin.host_line, 1)


class _Names:
    """The addresses of hosts, asked for again after ``DNS_TTL_S``, by one at a time."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, int], tuple[float, asyncio.Task[list[Any]]]] = {}

    async def addresses(self, host: str, port: int) -> list[Any]:
        """As ``getaddrinfo`` gives them. Raises OSError."""
        try:
            # Of a numeric address; anything else would hold the loop.
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            return await asyncio.shield(self._ask(host, port))

    def _ask(self, host: str, port: int) -> asyncio.Task[list[Any]]:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for key, (until, task) in tuple(self._asked.items()):
            if until <= now or _failed(task):
                del self._asked[key]
        if (host, port) not in self._asked:
            task = loop.create_task(look_up(host, port))
            self._asked[host, port] = now + DNS_TTL_S, task
        return self._asked[host, port][1]


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
