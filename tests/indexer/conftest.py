"""What the indexer's tests share: engines in miniature, a map fed by hand, and a check of all its tables."""

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from events.inbox import Inbox, StreamId
from events.publisher import Publisher, encode
from events.schema import BlockRemoved, BlockStored, Event, canonical_hash, token_array
from events.signals import Connected, Frame, Signal
from events.source import Source
from events.stream import AskReplay
from indexer.check import check
from indexer.ingest import Ingest
from indexer.layout import StreamRecord, Tables
from indexer.reader import MapReader
from indexer.registration import Registration
from indexer.service import Indexer
from indexer.settings import IndexerSettings
from indexer.writer import MapWriter

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0
MAP_SIZE = 256 << 20


def wait_until(true: Callable[[], Any], what: str = "") -> Any:
    """The first true answer. A deadline, not a delay: it fails after ``DEADLINE_S``."""
    until = time.monotonic() + DEADLINE_S
    while not (answer := true()):
        assert time.monotonic() < until, f"not within {DEADLINE_S} s: {what or true}"
        time.sleep(0.005)
    return answer


class Prompt(msgspec.Struct, frozen=True):
    """What an engine hashes: tokens, the adapter, and the extra keys of blocks by number."""

    tokens: tuple[int, ...]
    lora_name: str | None = None
    extras: tuple[tuple[int, tuple[Any, ...]], ...] = ()


def as_prompt(prompt: Prompt | Sequence[int]) -> Prompt:
    return prompt if isinstance(prompt, Prompt) else Prompt(tuple(prompt))


class Hasher:
    """Makes events as one engine does, with a hash seed of its own.

    ``announces`` extra keys; engines before 0.17 hash them, and do not say them.
    """

    def __init__(self, seed: int = 0, block_size: int = 4, announces: bool = True) -> None:
        self.seed = seed
        self.block_size = block_size
        self.announces = announces

    def extra_keys(self, prompt: Prompt, number: int) -> list[Any] | None:
        """As announced: the LoRA name first."""
        keys = [prompt.lora_name] if prompt.lora_name else []
        keys += dict(prompt.extras).get(number, ())
        return keys or None

    def hashes(self, prompt: Prompt | Sequence[int]) -> list[bytes]:
        """Chained engine hashes of the whole blocks, canonical."""
        prompt = as_prompt(prompt)
        size, before, hashes = self.block_size, self.seed, []
        for number in range(len(prompt.tokens) // size):
            block = prompt.tokens[number * size : (number + 1) * size]
            content = msgspec.msgpack.encode([before, block, self.extra_keys(prompt, number)])
            before = xxh3_64_intdigest(content, self.seed)
            hashes.append(canonical_hash(before))
        return hashes

    def stored(
        self, prompt: Prompt | Sequence[int], start: int = 0, stop: int | None = None, **fields: Any
    ) -> BlockStored:
        """The blocks ``start`` to ``stop`` of a prompt."""
        prompt = as_prompt(prompt)
        hashes, size = self.hashes(prompt), self.block_size
        stop = len(hashes) if stop is None else stop
        extras = [self.extra_keys(prompt, number) for number in range(start, stop)]
        return BlockStored(
            hashes=hashes[start:stop],
            parent=hashes[start - 1] if start else None,
            tokens=token_array(prompt.tokens[start * size : stop * size]),
            block_size=size,
            lora_name=prompt.lora_name,
            lora_id=1 if prompt.lora_name else None,
            extra_keys=extras if self.announces and any(extras) else None,
            **fields,
        )

    def removed(
        self, prompt: Prompt | Sequence[int], start: int = 0, stop: int | None = None, **fields: Any
    ) -> list[Event]:
        """One event a block, tail first, as engines evict."""
        return [BlockRemoved([each], **fields) for each in reversed(self.hashes(prompt)[start:stop])]


class Tape:
    """Stands in for the subscriber: notes what is asked of it."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.sources: dict[StreamId, Source] = {}
        self.added: Counter[StreamId] = Counter()
        self.removed: Counter[StreamId] = Counter()
        self.asks: list[tuple[StreamId, AskReplay]] = []

    def add(self, stream: StreamId, source: Source) -> None:
        self.sources[stream] = source
        self.added[stream] += 1

    def remove(self, stream: StreamId) -> None:
        self.removed[stream] += 1
        self.sources.pop(stream, None)
        self.inbox.forget(stream)

    def ask_replay(self, stream: StreamId, ask: int, start: int) -> None:
        self.asks.append((stream, AskReplay(ask, start)))


class Rig:
    """A map with its writer and reader, fed by hand on a clock that stands still unless it is moved."""

    def __init__(self, folder: Path, map_size: int = MAP_SIZE) -> None:
        self.now = 100.0
        self.feed = Tape()
        self.writer = MapWriter(folder, map_size=map_size, clock=lambda: self.now)
        self.ingest = Ingest(self.writer, self.feed, clock=lambda: self.now, wall=lambda: self.now)
        self.reader = MapReader(self.writer.env, self.writer.tables, clock=lambda: self.now)
        self.sequences: dict[StreamId, int] = {}
        self._made = 0

    def follow(self, instance: str | int, model: str = "m", **fields: Any) -> StreamId:
        """Registers a stream and connects it; without a replay endpoint unless one is given."""
        registration = Registration(
            instance_id=instance, endpoint="tcp://127.0.0.1:5557", model_name=model, **fields
        )
        self.ingest.follow(registration)
        stream = (registration.instance, registration.dp_rank)
        self.sequences[stream] = 0
        self.ingest.step([(stream, Connected())])
        return stream

    def resume(self) -> None:
        """As a new process does: takes up what the map knows, and connects it all."""
        self.ingest._follow_all()
        self.ingest.step([(stream, Connected()) for stream in self.feed.sources])

    def frame(self, stream: StreamId, *events: Event) -> tuple[StreamId, Signal]:
        """The stream's next batch; no two are the same bytes."""
        number = self.sequences[stream]
        self.sequences[stream] += 1
        self._made += 1
        return stream, Frame(number, encode(events, self._made, None))

    def say(self, stream: StreamId, *events: Event) -> None:
        """The stream's next batch, in a group of its own."""
        self.ingest.step([self.frame(stream, *events)])

    def record(self, stream: StreamId) -> StreamRecord:
        """The stream's committed record."""
        return next(status.record for status in self.reader.streams() if status.record.id == stream)

    def held(self, tokens: Sequence[int], model: str = "m", **query: Any) -> dict[str, tuple[int, int, int]]:
        """Tokens on GPU, in memory too, anywhere, by instance (rank 0)."""
        return {
            one.instance: (one.gpu, one.cpu, one.disk)
            for one in self.reader.query(model, tokens, **query)
            if one.rank == 0
        }

    def collect(self) -> None:
        while self.writer.garbage:
            self.writer.collect()

    def check(self) -> None:
        check_tables(self.writer.env, self.writer.tables)

    def close(self) -> None:
        self.writer.close()

    def abandon(self) -> None:
        """The map as a process that was killed leaves it."""
        self.writer.env.close()
        self.writer._lock.close()


def check_tables(env: lmdb.Environment, tables: Tables) -> None:
    """Every invariant between the tables, from one snapshot."""
    report = check(env, tables)
    assert report.clean, report.violations


class IndexerProcess:
    """``warmroute indexer`` in a process of its own."""

    def __init__(self, folder: Path, log: Path, *options: str) -> None:
        command = [sys.executable, "-m", "warmroute", "indexer", "--map", str(folder)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--listen", "127.0.0.1:0", *options], cwd=ROOT, stdout=output, stderr=output
            )
        self._log = log

    def listening(self) -> "IndexerProcess":
        """Itself, once it has said where it listens."""

        def url() -> str | None:
            assert self.process.poll() is None, self._log.read_text()
            found = re.search(r"listening on (http://\S+)", self._log.read_text())
            return found[1] if found else None

        self.url = wait_until(url, "the indexer listens")
        return self

    def call(self, path: str, body: Any = None) -> Any:
        """The JSON answer, also of an error."""
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(self.url + path, data, timeout=DEADLINE_S) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            return json.loads(error.read())

    def replicas(self) -> dict[str, dict[str, Any]]:
        return {each["instance"]: each for each in self.call("/debug/replicas")["replicas"]}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(DEADLINE_S)


class Script:
    """Python code in a process of its own: a line of JSON goes in, a line of JSON comes out."""

    def __init__(self, code: str, *arguments: object) -> None:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: Any = None) -> Any:
        assert self.process.stdin is not None
        print(json.dumps(line), file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def script() -> Iterator[Callable[..., Script]]:
    """Starts Python code in processes; all are ended at the end."""
    started: list[Script] = []

    def start(code: str, *arguments: object) -> Script:
        started.append(Script(code, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "map")
    yield rig
    rig.close()


@pytest.fixture(scope="session")
def make_rig() -> type[Rig]:
    return Rig


@pytest.fixture(scope="session")
def engine() -> type[Hasher]:
    """Makes events: ``engine(seed, block_size)``."""
    return Hasher


@pytest.fixture(scope="session")
def tables_agree() -> Callable[[lmdb.Environment, Tables], None]:
    return check_tables


@pytest.fixture(scope="session")
def prompt() -> type[Prompt]:
    return Prompt


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    return wait_until


@pytest.fixture
def publishers() -> Iterator[Callable[..., Publisher]]:
    """Makes publishers with a replay endpoint on free ports of loopback; all are closed at the end."""
    made: list[Publisher] = []

    def publisher(
        endpoint: str = "tcp://127.0.0.1:*", replay: str | None = "tcp://127.0.0.1:*", **options: Any
    ) -> Publisher:
        made.append(Publisher(endpoint, replay, **options))
        return made[-1]

    yield publisher
    for each in made:
        each.close()


@pytest.fixture
def indexers(tmp_path: Path) -> Iterator[Callable[..., Indexer]]:
    """Makes running indexers in this process, without their HTTP server; all are closed at the end."""
    made: list[Indexer] = []

    def indexer(folder: Path | None = None, **settings: Any) -> Indexer:
        folder = folder or tmp_path / f"indexer {len(made)}"
        made.append(Indexer(IndexerSettings(map=str(folder), **settings)))
        made[-1].start()
        return made[-1]

    yield indexer
    for each in made:
        if each.ingest._running:
            each.close()


@pytest.fixture
def indexer_process(tmp_path: Path) -> Iterator[Callable[..., IndexerProcess]]:
    """Starts indexer processes; all are ended at the end."""
    started: list[IndexerProcess] = []

    def start(folder: Path, *options: str) -> IndexerProcess:
        log = tmp_path / f"indexer-{len(started)}.log"
        started.append(IndexerProcess(folder, log, *options))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.kill()
