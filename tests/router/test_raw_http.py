"""Bytes on the wire that a proxy must refuse, bound or pass on as they are: over raw sockets."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from aiohttp import web

from router import pool, upstream
from router.body import BodyPace
from router.settings import UPSTREAM_CLIENTS
from router.upstream import MOST_INFORMATIONAL, watch_host
from tests.router.raw_server import raw_server

HEAD = b"POST /v1/x HTTP/1.1\r\nHost: r\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(params=UPSTREAM_CLIENTS)
def upstream_client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Exchanged:
    """What came back on a connection: the statuses in order, all bytes, and whether it was closed."""

    def __init__(self, content: bytes, *, closed: bool) -> None:
        self.content = content
        self.closed = closed
        self.statuses = [int(status) for status in re.findall(rb"HTTP/\d\.\d (\d+)", content)]


async def exchange(router: Any, *pieces: bytes, answers: int = 1) -> Exchanged:
    """Sends the pieces, each after the router has had time for the one before; reads until so many answers
    are there or the connection is closed.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
    content, closed = b"", False
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        async with asyncio.timeout(5):
            while not closed and len(re.findall(rb"HTTP/\d\.\d [2-5]\d\d", content)) < answers:
                data = await reader.read(65536)
                content, closed = content + data, not data
    finally:
        writer.close()
    return Exchanged(content, closed=closed)


SMUGGLING = {
    "both lengths": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/x",
    "both lengths, the other way": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
    "one length twice": b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a list of lengths": b"Content-Length: 2, 2\r\n\r\n{}",
    "a signed length": b"Content-Length: +2\r\n\r\n{}",
    "a negative length": b"Content-Length: -2\r\n\r\n{}",
    "a hexadecimal length": b"Content-Length: 0x2\r\n\r\n{}",
    "a grouped length": b"Content-Length: 0_2\r\n\r\n{}",
    "a folded header": b"X-A: 1\r\n folded\r\nContent-Length: 2\r\n\r\n{}",
    "a folded coding": b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "a bare line feed": b"X-A: 1\nContent-Length: 2\r\n\r\n{}",
    "a bare carriage return": b"X-A: 1\rX-B: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a zero byte": b"X-A: 1\x00\r\nContent-Length: 2\r\n\r\n{}",
    "a blank before the colon": b"Content-Length : 2\r\n\r\n{}",
    "no name": b": x\r\nContent-Length: 2\r\n\r\n{}",
    "no colon": b"XA\r\nContent-Length: 2\r\n\r\n{}",
    "a blank in a name": b"X A: x\r\nContent-Length: 2\r\n\r\n{}",
    "another coding": b"Transfer-Encoding: xchunked\r\nContent-Length: 2\r\n\r\n{}",
    "a coding that is none": b"Transfer-Encoding: identity\r\nContent-Length: 2\r\n\r\n{}",
    "chunked not last": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a vertical tab": b"Transfer-Encoding: \x0bchunked\r\nContent-Length: 2\r\n\r\n{}",
    "a chunk longer than it says": b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}X\r\n0\r\n\r\n",
    "a chunk of 0x2": b"Transfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
    "a chunk without bounds": b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff1\r\n{}\r\n0\r\n\r\n",
    "chunks ended by line feeds": b"Transfer-Encoding: chunked\r\n\r\n2\n{}\n0\n\n",
    "an extension with a line feed": b"Transfer-Encoding: chunked\r\n\r\n2;a\n{}\r\n0\r\n\r\n",
    "a length in the trailers": b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 50\r\n\r\n",
    "a coding in the trailers": b"Transfer-Encoding: chunked\r\n\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a host in the trailers": b"Transfer-Encoding: chunked\r\n\r\n0\r\nHost: evil\r\n\r\n",
    "a folded trailer": b"Transfer-Encoding: chunked\r\n\r\n0\r\nX-A: 1\r\n 2\r\n\r\n",
    "a trailer with a line feed": b"Transfer-Encoding: chunked\r\n\r\n0\r\nX-A: 1\nX-B: 2\r\n\r\n",
    "a trailer that is none": b"Transfer-Encoding: chunked\r\n\r\n0\r\nX-A\r\n\r\n",
    "a blank behind a chunk's size": b"Transfer-Encoding: chunked\r\n\r\n2 \r\n{}\r\n0\r\n\r\n",
    "an extension with a zero byte": b"Transfer-Encoding: chunked\r\n\r\n2;a\x00\r\n{}\r\n0\r\n\r\n",
    "a coding that is empty": b"Transfer-Encoding: \r\n\r\n0\r\n\r\n",
    "a coding with parameters": b"Transfer-Encoding: chunked;q=1\r\n\r\n0\r\n\r\n",
    "two hosts": b"Host: evil\r\nContent-Length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("rest", SMUGGLING.values(), ids=SMUGGLING.keys())
async def test_px10_a_request_that_two_servers_could_read_in_two_ways_is_refused(
    start_engine: Any, start_router: Any, rest: bytes
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    got = await exchange(router, HEAD + rest, answers=2)
    assert got.statuses == [400]
    assert got.closed
    assert engine.generated == 0


async def test_px10_chunks_of_http_1_0_are_no_body(start_engine: Any, start_router: Any) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    got = await exchange(router, CHUNKED.replace(b"1.1", b"1.0") + b"2\r\n{}\r\n0\r\n\r\n", answers=2)
    assert (got.statuses, got.closed, engine.generated) == ([400], True, 0)


async def test_px10_a_coding_that_we_would_have_to_undo_is_refused(
    start_engine: Any, start_router: Any
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    got = await exchange(router, HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n")
    assert got.statuses == [501]
    for line in (b"GET /v1/x HTTP/2.0", b"GET /v1/x"):
        assert (await exchange(router, line + b"\r\nHost: r\r\n\r\n")).statuses in ([505], [400])
    assert engine.generated == 0


async def test_px10_a_request_needs_a_host(start_engine: Any, start_router: Any) -> None:
    router = await start_router(await start_engine())
    assert (await exchange(router, b"GET /v1/x HTTP/1.1\r\n\r\n")).statuses == [400]
    for host, status in (
        *((good, 500) for good in (b"", b"r", b"r:80", b"[::1]:80", b"10.0.0.1", b"my_svc.ns.svc", b"%41")),
        *(
            (bad, 400)
            for bad in (b"a b", b"a/b", b"a@b", b'"a"', b"a\tb", b"\xff", b"\xc3\xa9", b"a\\b", b"a?")
        ),
    ):
        got = await exchange(router, b"GET /v1/x HTTP/1.1\r\nHost: %b\r\n\r\n" % host)
        assert (host, got.statuses) == (host, [status])


@pytest.mark.parametrize("pieces", [(CHUNKED, b"2\r\n{}\r\nZZ\r\n"), (CHUNKED + b"2\r\n{}\r\n", b"ZZ\r\n")])
async def test_px10_a_body_that_turns_malformed_later_ends_the_connection(
    start_engine: Any, start_router: Any, pieces: tuple[bytes, ...]
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    got = await exchange(router, *pieces, answers=2)
    assert (got.statuses, got.closed, engine.generated) == ([400], True, 0)
    assert b"cannot be read" in got.content
    assert router.idle()
    # Right behind the rest, too, however many steps of the loop later.
    for steps in range(8):
        with socket.create_connection(("127.0.0.1", int(router.url.rpartition(":")[2]))) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.sleep(0.02)
            client.sendall(pieces[0])
            for _ in range(steps):
                await asyncio.sleep(0)
            client.sendall(pieces[1])
            reader, writer = await asyncio.open_connection(sock=client.dup())
            async with asyncio.timeout(5):
                assert b" 400 " in await reader.read()
            writer.close()


def taking_raw(taken: list[bytes]) -> AbstractAsyncContextManager[str]:
    """An engine that keeps each POST as it came over the wire."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"POST"):
                    length = re.search(rb"\r\nContent-Length: (\d+)", head)
                    if length:
                        body = await reader.readexactly(int(length[1]))
                    else:
                        body = await reader.readuntil(b"\r\n\r\n")
                    taken.append(head + body)
                writer.write(OK + b'Content-Length: 21\r\n\r\n{"data":[{"id":"m"}]}')
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    return raw_server(serve)


FORBIDDEN = (
    *("Authorization", "X-Api-Key", "Cookie", "Via", "X-Forwarded-For", "X-data-parallel-rank", "TE"),
    *("X-Request-Id", "Expect", "Content-Type", "Content-Encoding", "Connection", "traceparent", "X-A"),
    *("X-Warmroute-Replica", "Trailer"),
)


async def test_px10_trailers_of_a_request_pass_but_for_those_that_would_change_it(
    start_router: Any, upstream_client: str
) -> None:
    evil = b"".join(b"%b: evil\r\n" % name.encode() for name in FORBIDDEN)
    chunks = b'2;a="b"\r\n{}\r\n0\r\nX-T: 1\r\nx-t: \xff\r\n' + evil + b"\r\n"
    request = HEAD + b"X-A: 1\r\nTransfer-Encoding: chunked\r\nTrailer: X-T, X-A\r\n\r\n" + chunks
    taken: list[bytes] = []
    async with taking_raw(taken) as url:
        router = await start_router(f"e0={url}")
        for pieces in [request], [request[:-30], request[-30:]], [request[:90], request[90:]]:
            taken.clear()
            rest = HEAD + b"Content-Length: 2\r\n\r\n[]"
            got = await exchange(router, *pieces[:-1], pieces[-1] + rest, answers=2)
            assert got.statuses == [200, 200]
            head, _, body = taken[0].partition(b"\r\n\r\n")
            assert b"evil" not in taken[0]
            if upstream_client == "pool":
                assert body == b"2\r\n{}\r\n0\r\nX-T: 1\r\nx-t: \xff\r\n\r\n"
                assert b"\r\nTrailer: X-T" in head
                assert b"Content-Length" not in head
            else:
                assert body == b"{}"
                assert b"Trailer" not in head
            assert taken[1].endswith(b"\r\n\r\n[]")


async def test_px10_chunk_extensions_and_trailers_that_may_not_pass_stay_behind(
    start_engine: Any, start_router: Any
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    body = b'2;a="b"\r\n{}\r\n0\r\nCookie: 1\r\n\r\n'
    got = await exchange(router, HEAD + b"Transfer-Encoding: chunked\r\nTrailer: Cookie\r\n\r\n" + body)
    assert (got.statuses, engine.bodies) == ([200], [b"{}"])
    assert "Trailer" not in engine.requests[-1].headers
    assert engine.requests[-1].headers["Content-Length"] == "2"


def answering_raw(answer: bytes, *, closes: bool = False) -> AbstractAsyncContextManager[str]:
    """A server whose answer to any POST is these bytes, and that then leaves, or does not."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                models = b'{"data":[{"id":"m"}]}'
                told = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(models), models)
                writer.write(answer if head.startswith(b"POST") else told)
                if closes and head.startswith(b"POST"):
                    await asyncio.sleep(0.05)
                    writer.close()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    return raw_server(serve)


TRAILED = (
    b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\nTrailer: X-T, X-U\r\n\r\n"
    b"2\r\n{}\r\n0\r\nX-T: 1\r\nx-t: \xff\r\nContent-Type: evil\r\nX-Warmroute-Replica: evil\r\n\r\n"
)


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
async def test_px10_trailers_of_an_answer_pass_but_for_those_that_would_change_it(
    start_router: Any, upstream_client: str, kind: bytes
) -> None:
    async with answering_raw(TRAILED % kind) as url:
        router = await start_router(f"e0={url}")
        got = await exchange(router, HEAD + b"Content-Length: 0\r\n\r\n" + HEAD + b"\r\n", answers=2)
        head, body = got.content.split(b"\r\n\r\n", 1)
        assert b"\r\nTrailer: X-T, X-U\r\n" in head + b"\r\n"
        behind = b"X-T: 1\r\nx-t: \xff\r\n" if upstream_client == "pool" else b""
        assert body.startswith(b"2\r\n{}\r\n0\r\n" + behind + b"\r\nHTTP/1.1 200 OK\r\n")
        # Where there are no chunks there is no place for them.
        got = await exchange(router, HEAD.replace(b"1.1", b"1.0") + b"Content-Length: 0\r\n\r\n", answers=9)
        assert got.content.endswith(b"\r\n\r\n{}")


async def test_px10_an_engine_is_told_who_takes_trailers(start_engine: Any, start_router: Any) -> None:
    engine = await start_engine()
    for keepalive_s in (4.0, 0.0):
        router = await start_router(engine, upstream_keepalive_s=keepalive_s)
        for te, told in ((b"gzip, Trailers", "trailers"), (b"gzip", None)):
            await exchange(router, HEAD + b"Connection: TE\r\nTE: %b\r\nContent-Length: 2\r\n\r\n{}" % te)
            got = engine.requests[-1].headers
            assert got.get("TE") == told
            assert ("TE" in got.get("Connection", "")) == (told is not None)


async def test_px07_a_client_of_http_1_0_is_told_of_an_answer_that_broke_off(start_router: Any) -> None:
    """It knows the end of a body by the end of its connection alone."""
    begun = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
    async with answering_raw(begun, closes=True) as url:
        router = await start_router(f"e0={url}")
        with pytest.raises(ConnectionResetError):
            await exchange(router, HEAD.replace(b"1.1", b"1.0") + b"Content-Length: 0\r\n\r\n", answers=9)
        assert router.idle()


async def test_px10_an_upgrade_is_refused_or_ignored_and_never_made(
    start_engine: Any, start_router: Any
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    ask = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nContent-Length: 2\r\n\r\n{}"
    for protocol in (b"websocket", b"h2c, WebSocket"):
        got = await exchange(router, HEAD + ask % protocol)
        assert (got.statuses, engine.generated) == ([501], 0)
        assert b"WebSocket is not relayed" in got.content
    # Something that is only offered is served as it is. The connection ends: what came behind would be lost.
    got = await exchange(router, HEAD + ask % b"h2c" + HEAD + b"Content-Length: 2\r\n\r\n{}", answers=2)
    assert (got.statuses, got.closed, engine.bodies) == ([200], True, [b"{}"])
    assert b"Connection: close" in got.content
    assert "Upgrade" not in engine.requests[-1].headers
    assert "HTTP2-Settings" not in engine.requests[-1].headers


async def test_px10_a_replica_that_switches_protocols_unasked_is_no_answer(start_router: Any) -> None:
    switched = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nhello"
    async with answering_raw(switched) as url:
        router = await start_router(f"e0={url}")
        got = await exchange(router, HEAD + b"Content-Length: 0\r\n\r\n")
        assert got.statuses == [502]
        assert b"hello" not in got.content
        assert router.idle()


@pytest.mark.parametrize("head", [b"HTTP/1.1 100\r\n\r\n", b"HTTP/1.1 102 Processing\r\nX-A: 1\r\n\r\n"])
async def test_px10_an_endless_flood_of_heads_that_are_no_answer_is_none(
    start_router: Any, head: bytes
) -> None:
    said = OK + b"Content-Length: 2\r\n\r\n{}"
    for times, status in ((MOST_INFORMATIONAL, 200), (MOST_INFORMATIONAL + 1, 502), (100_000, 502)):
        async with answering_raw(head * times + said) as url:
            router = await start_router(f"e0={url}")
            ask = b"POST /v1/embeddings HTTP/1.1\r\nHost: r\r\nContent-Length: 0\r\n\r\n"
            got = await exchange(router, ask)
            assert got.statuses == [status]
            failed = await router.metric("retries_total", replica="e0", reason="nonsense")
            assert failed == (status == 502)
            assert router.idle()


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKS = b"5\r\nhello\r\n0\r\n\r\n"
TWO_WAYS = {
    "a blank before the colon": OK + b"Content-Length : 5\r\n\r\nhello",
    "a control character": OK + b"X-A: a\x01b\r\nContent-Length: 5\r\n\r\nhello",
    "a coding beside chunked": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS,
    "a coding and no chunks": OK + b"Transfer-Encoding: gzip\r\n\r\nhello",
    "a coding that is none": OK + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS,
    "a status of 0": b"HTTP/1.1 000 OK\r\nContent-Length: 5\r\n\r\nhello",
    "a status of 99": b"HTTP/1.1 099 OK\r\nContent-Length: 5\r\n\r\nhello",
}


@pytest.mark.parametrize("answer", TWO_WAYS.values(), ids=TWO_WAYS.keys())
async def test_px10_an_answer_that_a_client_could_read_in_another_way_is_a_502(
    start_router: Any, answer: bytes
) -> None:
    async with answering_raw(answer, closes=True) as url:
        router = await start_router(f"e0={url}")
        got = await exchange(router, HEAD + b"Content-Length: 0\r\n\r\n")
        assert got.statuses == [502]
        assert b"hello" not in got.content
        assert router.idle()


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="the system has another name for it")
async def test_px07_an_engines_host_that_goes_without_a_word_is_noticed_in_half_a_minute(
    start_engine: Any, start_router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []

    def kept(connected: socket.socket) -> None:
        watch_host(connected)
        made.append(connected)

    for module in (pool, upstream):
        monkeypatch.setattr(module, "watch_host", kept)
    engine = await start_engine()
    router = await start_router(engine)
    made.clear()
    async with router.client.post(f"{router.url}/v1/x", json={}) as response:
        assert response.status == 200
        (connection,) = made
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, every, times = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + every * times <= 30


@pytest.mark.parametrize("length", [b"Content-Length: 18446744073709551615\r\n", b""])
async def test_px07_an_answer_whose_connection_is_reset_is_never_taken_for_whole(
    start_router: Any, length: bytes
) -> None:
    """Neither one that can have no end, nor one whose end is that of its connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
                writer.write(OK + b'Content-Length: 21\r\n\r\n{"data":[{"id":"m"}]}')
            writer.write(OK + length + b"\r\nhello")
            await asyncio.sleep(0.1)
            connected = writer.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with raw_server(serve) as url:
        router = await start_router(f"e0={url}")
        ask = HEAD + b"Connection: close\r\nContent-Length: 0\r\n\r\n"
        got = await exchange(router, ask, answers=9)
        assert got.statuses in ([200], [502])
        assert not got.content.endswith(b"\r\n0\r\n\r\n")
        assert await router.metric("broken_answers_total", replica="e0") == (got.statuses == [200])
        assert router.idle()


async def test_px07_an_answer_whose_chunks_turn_malformed_breaks_off_behind_what_was_whole(
    start_router: Any, upstream_client: str
) -> None:
    """Also where the engine says no more, and keeps its connection."""
    head = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
                writer.write(OK + b'Content-Length: 21\r\n\r\n{"data":[{"id":"m"}]}')
            writer.write(head + b"9\r\ndata: x\n\n\r\n")
            await asyncio.sleep(0.05)
            for piece in rest.pop():
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            await reader.read()
        finally:
            writer.close()

    chunk, done = b"9\r\ndata: y\n\n\r\n", b"E\r\ndata: [DONE]\n\n\r\n"
    whole = [[chunk + done + b"0\r\n: 1\r\n\r\n"]]
    broken = [[chunk + b"ZZ\r\n"], [chunk[:-2], b"\r", b"\n", b"\n"], [chunk, b"Z"]]
    rest = [*broken, *whole]
    for is_whole in (True, False, False, False):
        async with raw_server(serve) as url:
            router = await start_router(f"e0={url}")
            got = await exchange(router, HEAD + b"Connection: close\r\nContent-Length: 0\r\n\r\n", answers=9)
            assert b"data: x\n\n" in got.content
            if upstream_client == "pool":
                assert b"data: y\n\n" in got.content
                assert (b"[DONE]" in got.content, b"broke off" in got.content) == (is_whole, not is_whole)
            assert got.content.endswith(b"\r\n0\r\n\r\n")
            assert router.idle()


async def test_px05_a_client_that_closes_its_side_behind_a_request_counts_as_gone(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError("nobody stopped it")

    engine = await start_engine(answer=answer)
    router = await start_router(engine)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
    writer.write(HEAD + b"Content-Length: 2\r\n\r\n{}")
    await kit.wait_until(lambda: engine.open == 1, "the engine is at work")
    writer.write_eof()
    async with asyncio.timeout(1):
        assert await reader.read() == b""
        await kit.wait_until(lambda: engine.cancelled == 1, "the engine is let go")
    writer.close()
    await kit.wait_until(router.idle, "nothing is in flight")


async def test_px10_an_answer_behind_an_answer_is_nobodys(start_router: Any) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"POST"):
                    writer.write(OK + b"Content-Length: 5\r\n\r\n")
                    await asyncio.sleep(0.02)
                    writer.write(b"hello" + OK + b"Content-Length: 4\r\n\r\nevil")
                else:
                    writer.write(OK + b'Content-Length: 21\r\n\r\n{"data":[{"id":"m"}]}')
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with raw_server(serve) as url:
        router = await start_router(f"e0={url}")
        got = await exchange(router, (HEAD + b"Content-Length: 0\r\n\r\n") * 3, answers=3)
        assert (got.content.count(b"hello"), got.content.count(b"evil")) == (3, 0)


async def test_px10_answers_have_the_same_limits_of_headers(start_router: Any) -> None:
    many = b"".join(b"X-%d: 1\r\n" % number for number in range(200))
    async with answering_raw(b"HTTP/1.1 200 OK\r\n" + many + b"Content-Length: 0\r\n\r\n") as url:
        replica = f"e0={url}"
        for settings, status in ({}, 200), ({"header_limit_count": 100}, 502):
            router = await start_router(replica, **settings)
            got = await exchange(router, HEAD + b"Content-Length: 0\r\n\r\n")
            assert got.statuses == [status]
            assert got.content.count(b"\r\nX-1") > 100 or status == 502


async def test_px10_a_client_that_waits_for_it_is_told_to_go_on(start_engine: Any, start_router: Any) -> None:
    engine = await start_engine()
    router = await start_router(engine, request_limit_bytes=1000)
    head = HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    got = await exchange(router, head % 2, b"{}")
    assert (got.statuses, engine.bodies) == ([100, 200], [b"{}"])
    # A body that is too large anyway is not asked for.
    got = await exchange(router, head % 1001)
    assert got.statuses == [413]
    # Whether it comes, or the next request does, nobody can know.
    assert b"\r\nConnection: close\r\n" in got.content
    assert engine.generated == 1


async def test_px10_nobody_is_asked_for_a_body_that_nobody_reads(
    start_engine: Any, start_router: Any
) -> None:
    router = await start_router(await start_engine(), api_key=("a=" + "0" * 64,))
    for head in (HEAD, b"POST /nobody HTTP/1.1\r\nHost: r\r\n", b"PUT /ready HTTP/1.1\r\nHost: r\r\n"):
        got = await exchange(router, head + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert got.statuses in ([401], [404], [405])
        assert b"\r\nConnection: close\r\n" in got.content


async def test_px10_pipelined_requests_are_answered_in_order(start_engine: Any, start_router: Any) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    got = await exchange(router, (HEAD + b"Content-Length: 2\r\n\r\n{}") * 3, answers=3)
    assert (got.statuses, engine.generated) == ([200] * 3, 3)


@pytest.mark.parametrize(
    "garbage",
    [
        b"garbage\r\n\r\n",
        b"\x00",
        b"GET /v1/x HTTP/1.1\r\nA b: c\r\n\r\n",
        CHUNKED + b"ZZ\r\n",
        CHUNKED + b"2\r\n{}\r\n0\r\nX\r\n\r\n",
    ],
)
async def test_px10_what_is_no_http_behind_requests_is_refused_behind_their_answers(
    start_engine: Any, start_router: Any, garbage: bytes
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    request = HEAD + b"Content-Length: 2\r\n\r\n{}"
    for ahead in (request, request * 3, CHUNKED + b"2\r\n{}\r\n0\r\n\r\n"):
        engine.bodies.clear()
        got = await exchange(router, ahead + garbage + request, answers=9)
        times = len(engine.bodies)
        assert (got.statuses, got.closed) == ([200] * times + [400], True)
        assert times == ahead.count(b"POST")
        assert router.idle()


async def test_px10_nothing_is_answered_behind_a_request_that_is_the_last(
    start_engine: Any, start_router: Any
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    rest = b"Content-Length: 2\r\n\r\n{}"
    for last in (
        HEAD + b"Connection: close\r\n" + rest,
        HEAD.replace(b"1.1", b"1.0") + rest,
        HEAD + b"Connection: upgrade\r\nUpgrade: h2c\r\n" + rest,
        CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b"2\r\n{}\r\n0\r\n\r\n",
    ):
        got = await exchange(router, last + HEAD + rest, answers=9)
        assert (got.statuses, got.closed) == ([200], True)
    assert engine.bodies == [b"{}"] * 4


async def test_px10_a_client_that_still_sends_gets_to_read_that_its_body_is_none(
    start_engine: Any, start_router: Any
) -> None:
    router = await start_router(await start_engine())
    for begun in (b"d;", b"0\r\nX: "):
        got = await exchange(router, CHUNKED + begun + b"x" * 1_000_000, *[b"x" * 1_000_000] * 3, answers=9)
        assert (got.statuses, got.closed) == ([400], True)


async def test_px10_empty_lines_in_front_of_a_request_are_passed_over_however_many(
    start_engine: Any, start_router: Any
) -> None:
    router = await start_router(await start_engine())
    got = await exchange(router, b"\r\n" * 8_000_000 + HEAD + b"Content-Length: 2\r\n\r\n{}")
    assert got.statuses == [200]


async def test_px10_a_tunnel_that_is_not_made_ends_its_connection(
    start_engine: Any, start_router: Any
) -> None:
    router = await start_router(await start_engine())
    got = await exchange(router, b"CONNECT evil:80 HTTP/1.1\r\nHost: evil:80\r\n\r\nhello", answers=9)
    assert (got.statuses, got.closed) == ([404], True)


async def test_px10_more_requests_than_are_read_ahead_are_answered_in_order(
    start_engine: Any, start_router: Any
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    bodies = [b'{"n":%3d}' % number for number in range(100)]
    chunked = CHUNKED + b"9\r\n%b\r\n0\r\n\r\n"
    sized = HEAD + b"Content-Length: 9\r\n\r\n%b"
    requests = [(chunked if number % 3 else sized) % body for number, body in enumerate(bodies)]
    got = await exchange(router, b"".join(requests), answers=100)
    assert (got.statuses, engine.bodies) == ([200] * 100, bodies)


async def test_header_limits_are_settings(start_engine: Any, start_router: Any) -> None:
    engine = await start_engine()
    router = await start_router(engine, header_limit_bytes=2000, header_limit_count=10)
    get = b"GET /v1/%s HTTP/1.1\r\nHost: r\r\n%s\r\n"
    long = b"x" * 1900
    assert (await exchange(router, get % (b"x", b"X: %s\r\n" % long))).statuses == [500]
    assert (await exchange(router, get % (long, b""))).statuses == [500]
    assert engine.generated == 2
    assert (await exchange(router, get % (b"x", b"X: %s%s\r\n" % (long, long)))).statuses == [431]
    assert (await exchange(router, get % (long + long, b""))).statuses == [414]
    assert (await exchange(router, get % (b"x", b"X: 1\r\n" * 10))).statuses == [400]
    assert engine.generated == 2


async def test_px02_a_head_that_does_not_come_whole_in_time_is_not_waited_for(
    start_engine: Any, start_router: Any
) -> None:
    router = await start_router(await start_engine(), head_timeout_s=0.2)
    for pieces in ((b"POST /v1/x HT",), (b"",), (HEAD + b"Content-Length: 2\r\n\r\n{}", b"POST /v1/x HT")):
        got = await exchange(router, *pieces, answers=2)
        assert got.closed
        assert got.statuses in ([], [200])


async def test_px02_a_head_that_began_with_the_request_before_it_is_not_waited_for_either(
    start_engine: Any, start_router: Any
) -> None:
    router = await start_router(await start_engine(), head_timeout_s=0.2)
    request = HEAD + b"Content-Length: 2\r\n\r\n{}"
    for begun in (b"P", b"\r\nPOST /v1/x HTTP/1.1\r\nHost: r\r"):
        got = await exchange(router, request + begun, answers=2)
        assert (got.statuses, got.closed) == ([200], True)

    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(0.5)
        return web.Response(body=b"{}")

    # While an answer is under way a head may wait for its rest, as the next request may.
    router = await start_router(await start_engine(answer=answer), head_timeout_s=0.2)
    got = await exchange(router, request + HEAD, *[b""] * 15, b"Content-Length: 2\r\n\r\n{}", answers=2)
    assert got.statuses == [200, 200]


async def test_px02_an_empty_line_behind_a_request_begins_no_other(
    start_engine: Any, start_router: Any
) -> None:
    router = await start_router(await start_engine(), head_timeout_s=0.05)
    request = HEAD + b"Content-Length: 2\r\n\r\n{}"
    got = await exchange(router, request, b"\r\n", b"", b"", b"", b"", b"", request, answers=2)
    assert got.statuses == [200, 200]


async def test_px02_a_body_that_falls_silent_is_a_408(start_engine: Any, start_router: Any) -> None:
    engine = await start_engine()
    router = await start_router(engine, body_idle_timeout_s=0.2)
    got = await exchange(router, HEAD + b"Content-Length: 50\r\n\r\n{")
    assert got.statuses == [408]
    assert engine.generated == 0
    assert router.idle()


async def test_px02_a_body_that_trickles_on_for_ever_is_a_408(start_engine: Any, start_router: Any) -> None:
    """Never silent for long, and never whole: the pace on the whole counts, unless that is turned off."""
    head, pieces = HEAD + b"Content-Length: 30\r\n\r\n", [b"x"] * 30
    engine = await start_engine()
    router = await start_router(engine, body_idle_timeout_s=0.2)
    got = await exchange(router, head, *pieces)
    assert got.statuses == [408]
    assert b"slower than 1000 bytes/s (--body-least-bytes-s)" in got.content
    assert engine.generated == 0
    assert router.idle()
    patient = await start_router(engine, body_idle_timeout_s=0.2, body_least_bytes_s=0)
    got = await exchange(patient, head, *pieces)
    assert (got.statuses, engine.bodies[-1]) == ([500], b"x" * 30)


def test_px02_a_body_that_keeps_its_pace_is_waited_for_however_long_it_is() -> None:
    pace = BodyPace(idle_s=30.0, least_bytes_s=1000)
    assert pace.patience_s(3_600.0, 3_600_000) == 30.0
    assert pace.patience_s(3_600.0, 3_590_000) == 20.0
    assert pace.patience_s(3_600.0, 3_500_000) < 0


async def test_px16_a_line_of_megabytes_passes(start_engine: Any, start_router: Any, kit: Any) -> None:
    line = b"data: " + b"x" * 5_000_000 + b"\n\n"

    async def answer(request: web.Request) -> web.StreamResponse:
        return await kit.stream(request, [line, b"data: [DONE]\n\n"])

    router = await start_router(await start_engine(answer=answer))
    async with router.client.post(
        f"{router.url}/v1/completions", json={"prompt": [1], "stream": True}
    ) as response:
        assert await response.read() == line + b"data: [DONE]\n\n"


@pytest.mark.parametrize(("status", "headers"), [(204, {}), (304, {"ETag": '"a"'})])
async def test_an_answer_without_a_body_keeps_its_status_and_headers(
    start_engine: Any, start_router: Any, status: int, headers: dict[str, str]
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, headers=headers)

    router = await start_router(await start_engine(answer=answer))
    got = await exchange(router, (b"GET /v1/x HTTP/1.1\r\nHost: r\r\n\r\n") * 2, answers=2)
    assert got.statuses == [status] * 2
    assert all(f"{name}: {value}".lower().encode() in got.content.lower() for name, value in headers.items())


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"200 Fine by me", b"200 Fine by me"),
        (b"429 Zu viel, sch\xc3\xb6n", b"429 Zu viel, sch\xc3\xb6n"),
        (b"200 ", b"200 "),
        (b"429 a\x07b", b"429 Too Many Requests"),
    ],
)
async def test_px06_the_words_of_a_status_arrive_as_the_engine_said_them(
    start_router: Any, said: bytes, told: bytes
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while b"POST" not in (head := await reader.readuntil(b"\r\n\r\n")):
            models = b'{"data":[{"id":"m"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(models), models))
        await reader.readexactly(int(re.findall(rb"Content-Length: (\d+)", head)[0]))
        writer.write(b"HTTP/1.1 " + said + b"\r\nContent-Length: 2\r\n\r\n{}")
        await reader.read()
        writer.close()

    async with raw_server(answer) as url:
        router = await start_router(f"e0={url}")
        got = await exchange(router, HEAD + b"Content-Length: 2\r\n\r\n{}")
    assert got.content.partition(b"\r\n")[0] == b"HTTP/1.1 " + told


async def test_a_redirect_is_the_clients_to_follow(start_engine: Any, start_router: Any) -> None:
    """Only configured replicas are ever dialled."""
    elsewhere = await start_engine()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": f"{elsewhere.url}/v1/x"})

    router = await start_router(await start_engine(answer=answer))
    for path in ("/v1/completions", "/v1/x"):
        async with router.client.post(
            router.url + path, json={"prompt": [1]}, allow_redirects=False
        ) as response:
            assert (response.status, response.headers["Location"]) == (307, f"{elsewhere.url}/v1/x")
    got = await exchange(router, b"GET http://127.0.0.1:%d/v1/x HTTP/1.1\r\nHost: r\r\n\r\n" % elsewhere.port)
    assert got.statuses == [307]
    assert elsewhere.generated == 0
