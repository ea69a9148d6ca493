from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.engine_connection import EngineConnection
from router.errors import BrokenAnswerError
from router.head import HeadLimits

HEADS = {
    "sized": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n",
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    "until close": b"HTTP/1.1 200 OK\r\n\r\n",
}


class Taker:
    """Takes a body; has room for more where ``room`` says so, and at the end always."""

    def __init__(self, room: list[bool]) -> None:
        self._room = iter(room)
        self.taken = b""
        self.is_full = False

    def __call__(self, piece: bytes) -> bool:
        assert piece
        assert not self.is_full
        self.taken += piece
        self.is_full = not next(self._room, True)
        return not self.is_full


@asynccontextmanager
async def asked() -> AsyncIterator[tuple[EngineConnection, asyncio.Task[object]]]:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    with theirs:
        _, connection = await loop.create_connection(
            lambda: EngineConnection(loop, 5.0, HeadLimits(65536, 256)), sock=ours
        )
        asking = asyncio.create_task(connection.ask(b"", b"", bodiless=False, closes=False))
        await asyncio.sleep(0)
        yield connection, asking
        connection.close()
        await asyncio.sleep(0)


def framed(kind: str, chunks: list[bytes]) -> bytes:
    if kind != "chunked":
        return b"".join(chunks)
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


def pieces(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in pairwise(ends)]


@given(
    st.sampled_from(sorted(HEADS)),
    st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=5),
    st.lists(st.integers(0, 150), max_size=8),
    st.lists(st.booleans(), max_size=12),
    st.lists(st.integers(0, 3), max_size=12),
    st.booleans(),
)
def test_px07_however_an_answer_comes_and_is_taken_it_is_whole_and_in_order_or_is_said_to_be_broken(
    kind: str, chunks: list[bytes], places: list[int], room: list[bool], steps: list[int], breaks: bool
) -> None:
    body, head = b"".join(chunks), HEADS[kind]
    data = (head % len(body) if kind == "sized" else head) + framed(kind, chunks)
    come = pieces(data, places)
    if breaks:
        come, lost = come[:-1], come[-1]
    taker = Taker(room)

    async def run() -> bool:
        async with asyncio.timeout(5), asked() as (connection, asking):
            for piece, turns in zip(come, [*steps, *[0] * len(come)], strict=False):
                connection.data_received(piece)
                # So many steps of the loop, in which the taker may come to its turn.
                for _ in range(turns):
                    await asyncio.sleep(0)
                if turns > 1 and asking.done() and not pouring:
                    pouring.append(asyncio.create_task(pour(connection)))
                    await asyncio.sleep(0)
            if breaks or kind == "until close":
                connection.connection_lost(ConnectionResetError("reset") if breaks else None)
            if not asking.done():
                await asyncio.wait([asking])
            if asking.exception() is not None:
                return False
            try:
                await (pouring[0] if pouring else pour(connection))
            except BrokenAnswerError:
                return False
            return True

    async def pour(connection: EngineConnection) -> None:
        while not await connection.pour(taker):
            assert taker.is_full
            taker.is_full = False

    pouring: list[asyncio.Task[None]] = []
    assert asyncio.run(run()) is not breaks
    if not breaks:
        assert taker.taken == body
    elif kind != "chunked":
        assert taker.taken == data[: len(data) - len(lost)].partition(b"\r\n\r\n")[2]
    else:
        assert body.startswith(taker.taken)


async def test_a_connection_that_is_kept_keeps_no_long_body() -> None:
    body = bytes(3_000_000)
    references = sys.getrefcount(body)
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with theirs:
        _, connection = await loop.create_connection(
            lambda: EngineConnection(loop, 5.0, HeadLimits(65536, 256)), sock=ours
        )
        asking = asyncio.create_task(connection.ask(b"", body, bodiless=False, closes=False))
        theirs.setblocking(False)
        left = len(body)
        while left:
            left -= len(await loop.sock_recv(theirs, left))
        theirs.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await asking
        assert connection.is_usable
        del asking
        assert sys.getrefcount(body) == references
        connection.close()
        await asyncio.sleep(0)
