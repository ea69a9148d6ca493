"""Clients that ask a router for chats as fast as they can, at a pace, or for streams: over bare sockets, so
that they cost little beside what is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator

import msgspec

PATH = "/v1/chat/completions"
MODEL = "mock-model"
WORDS = (
    "the",
    "router",
    "prefix",
    "cache",
    "block",
    "of",
    "tokens",
    "is",
    "hashed",
    "and",
    "matched",
    "with",
)
Body = Callable[[], bytes]


class Answered(msgspec.Struct, frozen=True):
    """One answer: seconds to its first byte behind the head and to its end, and the chunks that the engine
    sent: events of a stream, which may come together.
    """

    first_s: float
    whole_s: float
    chunks: int


class Bodies:
    """Chats of about ``size`` bytes, of ``count`` conversations.

    Each has a long system prompt and a short question that is always new. ``warm``: the same system prompts
    again and again; else each begins in a way that was never seen.
    """

    def __init__(
        self, size: int, *, warm: bool, stream: bool = False, count: int = 16, seed: int = 1
    ) -> None:
        chance = random.Random(seed + size)
        overhead = len(self._made("", "", stream)) + 60
        self.prefixes = [
            f"session {seed}-{number}: " + _words(chance, max(20, size - overhead)) for number in range(count)
        ]
        self._warm = warm
        self._stream = stream
        self._numbers = itertools.count()

    def __call__(self) -> bytes:
        number = next(self._numbers)
        prefix = self.prefixes[number % len(self.prefixes)]
        if not self._warm:
            prefix = f"{number} {prefix}"
        return self._made(prefix, f"what is the {number}th answer?", self._stream)

    @staticmethod
    def messages(prefix: str, question: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": prefix}, {"role": "user", "content": question}]

    @classmethod
    def _made(cls, prefix: str, question: str, stream: bool) -> bytes:
        asked = {
            "model": MODEL,
            "messages": cls.messages(prefix, question),
            "max_tokens": 64,
            "stream": stream,
        }
        return json.dumps(asked, separators=(",", ":")).encode()


def _words(chance: random.Random, size: int) -> str:
    text = " ".join(chance.choices(WORDS, k=size // 4 + 1))
    return text[:size]


class Connection:
    """One connection to ``port``, kept alive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 20))

    def close(self) -> None:
        self._writer.close()

    async def ask(self, body: bytes) -> Answered:
        """Raises RuntimeError for anything but a 200."""
        begun = time.monotonic()
        head = f"POST {PATH} HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
        self._writer.write(
            f"{head}Authorization: Bearer sk-bench\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if not answer.startswith(b"http/1.1 200"):
            raise RuntimeError(f"answered {answer[:40]!r}")
        if b"transfer-encoding: chunked" in answer:
            return await self._chunks(begun)
        length = int(answer.partition(b"content-length:")[2].partition(b"\r\n")[0])
        await self._reader.readexactly(length)
        end = time.monotonic() - begun
        return Answered(end, end, 1)

    async def _chunks(self, begun: float) -> Answered:
        first_s, events, last = 0.0, 0, b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            data = (await self._reader.readexactly(size + 2))[:-2]
            first_s = first_s or time.monotonic() - begun
            events += (last + data).count(b"\n\n")
            last = data[-1:]
        await self._reader.readexactly(2)
        return Answered(first_s, time.monotonic() - begun, events)


async def closed(port: int, body: Body, *, connections: int, seconds: float) -> list[Answered]:
    """As many requests as go, ``connections`` at a time."""
    end = time.monotonic() + seconds

    async def one() -> list[Answered]:
        connection, answers = await Connection.open(port), []
        while time.monotonic() < end:
            answers.append(await connection.ask(body()))
        connection.close()
        return answers

    return [
        answer for answers in await asyncio.gather(*(one() for _ in range(connections))) for answer in answers
    ]


async def paced(port: int, body: Body, *, rate: float, seconds: float) -> list[Answered]:
    """``rate`` requests a second, whether or not those before are answered."""
    idle: list[Connection] = []

    async def one() -> Answered:
        connection = idle.pop() if idle else await Connection.open(port)
        answer = await connection.ask(body())
        idle.append(connection)
        return answer

    begun, tasks = time.monotonic(), []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(begun + number / rate - time.monotonic())
        tasks.append(asyncio.create_task(one()))
    answers = await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()
    return answers


def p50_ms(values: Iterator[float]) -> float:
    return statistics.median(values) * 1e3


def p99_ms(values: Iterator[float]) -> float:
    return statistics.quantiles(values, n=100)[98] * 1e3
