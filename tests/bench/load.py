"""A made-up fleet for benchmarks: what eight replicas publish, and processes whose cost is measured."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from events.inbox import Inbox, StreamId
from events.publisher import Publisher, encode
from events.schema import BlockStored
from events.source import Source

BLOCK_SIZE = 16
MODEL = "bench"
PACE_BLOCKS_PER_S = 250_000
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Prompt(msgspec.Struct, frozen=True):
    """A prompt that one replica has cached whole."""

    replica: int
    tokens: array[int]


class Fleet(msgspec.Struct):
    """Payloads to publish, in order, by replica; and prompts to ask for."""

    frames: list[tuple[int, bytes, int]]
    prompts: list[Prompt]
    blocks: int


def fleet(blocks: int, replicas: int = 8, seed: int = 1) -> Fleet:
    """About ``blocks`` stored blocks: prompts of 8 to 256 blocks, half of them on a second replica too."""
    chance = random.Random(seed)
    made = Fleet([], [], 0)
    while made.blocks < blocks:
        count = chance.choice((8, 16, 32, 64, 128, 256))
        tokens = array("I", chance.choices(range(128_000), k=count * BLOCK_SIZE))
        first = chance.randrange(replicas)
        for replica in {first, (first + 1) % replicas if chance.random() < 0.5 else first}:
            hashes = [chance.getrandbits(64).to_bytes(8, "big") for _ in range(count)]
            event = BlockStored(hashes, None, tokens, BLOCK_SIZE, group_kind="full_attention")
            made.frames.append((replica, encode([event], 0.0, 0, "map"), count))
            made.blocks += count
        made.prompts.append(Prompt(first, tokens))
    return made


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def indexer(folder: Path, log: Path, *options: str) -> Measured:
    """Our indexer, with the map in ``folder``."""
    port = free_port()
    command = [sys.executable, "-m", "warmroute", "--log-level", "warning", "indexer", "--map", str(folder)]
    return Measured([*command, "--listen", f"127.0.0.1:{port}", *options], port, log)


class NoFeed:
    """Stands in for the subscriber: batches are put into the inbox by hand."""

    def __init__(self) -> None:
        self.inbox = Inbox()

    def add(self, stream: StreamId, source: Source) -> None: ...

    def remove(self, stream: StreamId) -> None: ...

    def ask_replay(self, stream: StreamId, ask: int, start: int) -> None: ...


def own_rss() -> int:
    """Resident memory of this process, bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Measured:
    """A process under measurement, with an HTTP port."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file)
        self.pid = self._process.pid

    @property
    def _pids(self) -> list[int]:
        """The process and its children."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [self.pid, *map(int, children)]

    def cpu_s(self) -> float:
        """User and system time so far, of its children too, seconds."""
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self._pids]
        return sum(int(fields[11]) + int(fields[12]) for fields in stats) / CLOCK_TICKS

    def rss(self) -> int:
        """Resident memory, of its children too, bytes."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self._pids)
        return pages * os.sysconf("SC_PAGE_SIZE")

    def ask(self, path: str, body: Any = None) -> Any:
        """A JSON call."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read()
        return json.loads(text) if text else None

    def await_health(self, deadline_s: float = 20.0, path: str = "/health") -> None:
        def healthy() -> bool:
            try:
                with urllib.request.urlopen(self.url + path, timeout=2):
                    return True
            except (urllib.error.URLError, OSError):
                return False

        wait_until(healthy, deadline_s)

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=60)

    def kill(self) -> None:
        """As ``kill -9``."""
        self._process.kill()
        self._process.wait()


@contextmanager
def publishers(count: int) -> Iterator[list[Publisher]]:
    """Engines' publishers with replay endpoints, which drop nothing."""
    opened = [Publisher("tcp://*:0", "tcp://*:0", hwm=0) for _ in range(count)]
    try:
        yield opened
    finally:
        for publisher in opened:
            publisher.close()


def reachable(endpoint: str | None) -> str:
    """A bound address, as it can be connected to."""
    assert endpoint is not None
    return "tcp://127.0.0.1:" + endpoint.rpartition(":")[2]


def registrations(opened: list[Publisher]) -> list[dict[str, Any]]:
    """Bodies of ``/register`` for publishers, by their number."""
    return [
        {
            "instance_id": number,
            "endpoint": reachable(publisher.endpoint),
            "replay_endpoint": reachable(publisher.replay_endpoint),
            "model_name": MODEL,
            "block_size": BLOCK_SIZE,
        }
        for number, publisher in enumerate(opened)
    ]


def register(indexer: Measured, opened: list[Publisher]) -> None:
    """Has every publisher followed."""
    for body in registrations(opened):
        indexer.ask("/register", body)


def wait_until(condition: Callable[[], bool], deadline_s: float, pause_s: float = 0.02) -> None:
    """Raises TimeoutError when ``condition`` does not come true in time."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {deadline_s} s")
        time.sleep(pause_s)


def publish(made: Fleet, publishers: list[Publisher], pace: float = PACE_BLOCKS_PER_S) -> None:
    """Publishes all frames at ``pace`` blocks per second, so that nobody has to drop any."""
    begun, sent = time.monotonic(), 0
    for replica, payload, count in made.frames:
        publishers[replica].publish_payload(payload)
        sent += count
        ahead = sent / pace - (time.monotonic() - begun)
        if ahead > 0.005:
            time.sleep(ahead)
