"""Start times of engines' processes, asked over HTTP: engines and indexers on real sockets."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq
from aiohttp import web
from aiohttp.test_utils import TestServer

from events.engine_metrics import start_time
from events.publisher import encode
from events.schema import Event
from indexer import witness as witness_module
from indexer.errors import RegistrationError
from indexer.registration import Registration
from indexer.service import Indexer
from indexer.witness import MAX_ANSWER_BYTES, Witness

PROMPT = list(range(28))
STARTED, LATER = 1_700_000_000.5, 1_700_000_500.25
DEADLINE_S = 20.0


class Metrics:
    """An engine's ``/metrics``: what it says can be changed at any time."""

    def __init__(self) -> None:
        self.body = b""
        self.status = 200
        self.asked = 0
        self.says(STARTED)

    def says(self, at: float) -> None:
        self.body = f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {at}\n".encode()

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(body=self.body, status=self.status)


class Engine:
    """Publishes without a replay endpoint, and knows when somebody listens: nothing is sent again."""

    def __init__(self, address: str = "tcp://127.0.0.1:*", sequence: int = 0) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self.endpoint = self._socket.last_endpoint.decode()
        self._sequence = sequence

    async def subscribed(self) -> None:
        await comes(lambda: self._subscription() == b"\x01", "somebody listens")

    def _subscription(self) -> bytes | None:
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def publish(self, event: Event) -> None:
        payload = encode([event], float(self._sequence), None)
        self._socket.send_multipart([b"", self._sequence.to_bytes(8, "big"), payload])
        self._sequence += 1

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def talker() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def url(metrics: Metrics) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.get("/metrics", metrics.answer)])
    async with TestServer(app) as server:
        yield str(server.make_url("/"))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_S", "ASK_EVERY_S", "RETRY_S"):
        monkeypatch.setattr(witness_module, name, 0.02)


@pytest.fixture
async def witnessed() -> AsyncIterator[Callable[[Indexer], None]]:
    """Starts the witness of an indexer."""
    started: list[Witness] = []

    def start(indexer: Indexer) -> None:
        started.append(indexer.witness)
        indexer.witness.start()

    yield start
    for each in started:
        await each.close()


async def comes(true: Callable[[], Any], what: str) -> None:
    """A deadline, not a delay."""
    until = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < until, f"not within {DEADLINE_S} s: {what}"
        await asyncio.sleep(0.005)


async def follow(indexer: Indexer, publisher: Any, **fields: Any) -> None:
    said = Registration(instance_id="A", endpoint=publisher.endpoint, model_name="m", **fields)
    await asyncio.wrap_future(indexer.ingest.register(said))


def seen(indexer: Indexer) -> tuple[str, int]:
    (one,) = indexer.reader.query("m", PROMPT)
    return one.state, one.gpu


def record(indexer: Indexer) -> Any:
    return indexer.reader.streams()[0].record


async def feed(indexer: Indexer, talker: Engine, engine: Any, url: str) -> None:
    """A live stream without a replay endpoint, whose start time is known."""
    await follow(indexer, talker, url=url)
    await talker.subscribed()
    await comes(lambda: seen(indexer)[0] == "partial", "it is connected")
    talker.publish(engine().stored(PROMPT))
    await comes(lambda: seen(indexer) == ("live", 28), "it is live")
    await comes(lambda: record(indexer).started_at == STARTED, "its start time is known")


async def test_ev12_an_engine_that_restarted_and_says_nothing_is_found_by_its_start_time(
    indexers: Any, talker: Engine, engine: Any, metrics: Metrics, url: str, witnessed: Any
) -> None:
    indexer = indexers()
    witnessed(indexer)
    await feed(indexer, talker, engine, url)
    metrics.says(LATER)
    await comes(lambda: seen(indexer)[1] == 0, "nothing of it is credited")
    await comes(lambda: record(indexer).started_at == LATER, "the new start time is known")
    assert "start time" in record(indexer).reason


async def test_ev12_an_engine_that_restarted_and_goes_on_with_the_very_next_sequence_is_found_too(
    indexers: Any, talker: Engine, engine: Any, metrics: Metrics, url: str, witnessed: Any
) -> None:
    """Without a replay endpoint that sequence is taken for proof, until the start time can be read."""
    indexer = indexers()
    witnessed(indexer)
    await feed(indexer, talker, engine, url)
    metrics.status = 503
    talker.close()
    metrics.says(LATER)
    with closing(Engine(talker.endpoint, sequence=1)) as another:
        await another.subscribed()
        another.publish(engine().stored([*PROMPT, 1, 2, 3, 4], 7))
        await comes(lambda: record(indexer).sequence == 1, "it is believed")
        assert seen(indexer) == ("live", 28)
        metrics.status = 200
        await comes(lambda: seen(indexer)[1] == 0, "nothing of it is credited")
        await comes(lambda: record(indexer).started_at == LATER, "the new start time is known")


async def test_ev17_the_block_size_of_an_engine_that_announces_nothing_comes_from_its_metrics(
    indexers: Any, talker: Engine, metrics: Metrics, url: str, witnessed: Any
) -> None:
    metrics.body = b'vllm:cache_config_info{block_size="4",engine="0"} 1.0\n'
    indexer = indexers()
    witnessed(indexer)
    await follow(indexer, talker, url=url)
    await comes(lambda: record(indexer).block_size == 4, "its block size is known")


async def resumed(folder: Path, indexers: Any, talker: Engine, engine: Any, url: str, witnessed: Any) -> Any:
    """Another indexer on a map whose stream was live; the engine says nothing meanwhile."""
    before = indexers(folder)
    witnessed(before)
    await feed(before, talker, engine, url)
    await before.witness.close()
    before.close()
    return indexers(folder)


async def test_ev12_after_an_indexer_restart_the_same_start_time_makes_a_stream_without_replay_partial(
    tmp_path: Path, indexers: Any, talker: Engine, engine: Any, url: str, witnessed: Any
) -> None:
    indexer = await resumed(tmp_path / "map", indexers, talker, engine, url, witnessed)
    assert seen(indexer) == ("unverified", 28)
    assert indexer.reader.streams()[0].weight == 0
    witnessed(indexer)
    await comes(lambda: seen(indexer) == ("partial", 28), "the same process")
    await talker.subscribed()
    talker.publish(engine().stored([*PROMPT, 1, 2, 3, 4], 7))
    await comes(lambda: seen(indexer) == ("live", 28), "the next sequence shows that nothing was missed")


async def test_ev12_after_an_indexer_restart_another_start_time_drops_everything(
    tmp_path: Path,
    indexers: Any,
    talker: Engine,
    engine: Any,
    metrics: Metrics,
    url: str,
    witnessed: Any,
) -> None:
    indexer = await resumed(tmp_path / "map", indexers, talker, engine, url, witnessed)
    metrics.says(LATER)
    witnessed(indexer)
    await comes(lambda: seen(indexer)[1] == 0, "the engine restarted while no indexer ran")


async def test_an_engine_that_cannot_be_asked_is_asked_again(
    indexers: Any, publishers: Any, engine: Any, metrics: Metrics, url: str, witnessed: Any
) -> None:
    indexer, publisher = indexers(), publishers(replay=None)
    metrics.status = 503
    witnessed(indexer)
    await follow(indexer, publisher, url=url)
    await comes(lambda: indexer.witness.failures >= 3, "it is asked and does not answer")
    assert record(indexer).started_at is None
    metrics.status = 200
    await comes(lambda: record(indexer).started_at == STARTED, "it answers")


async def test_an_endless_answer_is_not_read_to_its_end(
    indexers: Any, publishers: Any, metrics: Metrics, url: str, witnessed: Any
) -> None:
    indexer, publisher = indexers(), publishers(replay=None)
    metrics.body += b"#" * (MAX_ANSWER_BYTES + 1)
    witnessed(indexer)
    await follow(indexer, publisher, url=url)
    await comes(lambda: indexer.witness.failures >= 1, "the answer is refused")
    assert record(indexer).started_at is None


async def test_ranks_of_one_replica_share_one_question(
    indexers: Any, publishers: Any, metrics: Metrics, url: str
) -> None:
    indexer = indexers()
    for rank in range(3):
        await follow(indexer, publishers(replay=None), url=url, dp_rank=rank)
    await comes(
        lambda: all(status.record.state == "partial" for status in indexer.reader.streams()), "connected"
    )
    async with aiohttp.ClientSession() as session:
        await indexer.witness.look(session)
    assert metrics.asked == 1
    assert [status.record.started_at for status in indexer.reader.streams()] == [STARTED] * 3


async def test_an_engine_is_asked_again_at_once_when_its_stream_reconnects(
    indexers: Any, publishers: Any, metrics: Metrics, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(witness_module, "ASK_EVERY_S", 1000.0)
    indexer, publisher = indexers(), publishers(replay=None)
    await follow(indexer, publisher, url=url)
    machine = indexer.ingest.machine(("A", 0))
    await comes(lambda: machine.connected_at is not None, "connected")
    first = machine.connected_at
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            await indexer.witness.look(session)
        assert metrics.asked == 1
        publisher.close()
        await comes(lambda: machine.connected_at is None, "the connection is lost")
        publishers(publisher.endpoint.replace("127.0.0.1", "*"), replay=None)
        await comes(lambda: machine.connected_at not in (None, first), "connected again")
        await indexer.witness.look(session)
    assert metrics.asked == 2


async def test_a_stream_without_a_url_is_not_asked(indexers: Any, publishers: Any, metrics: Metrics) -> None:
    indexer = indexers()
    await follow(indexer, publishers(replay=None))
    await comes(lambda: seen(indexer)[0] == "partial", "connected")
    async with aiohttp.ClientSession() as session:
        await indexer.witness.look(session)
    assert (metrics.asked, record(indexer).started_at) == (0, None)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        (b"process_start_time_seconds 1.7e+09\n", 1.7e9),
        (b'a 1\nprocess_start_time_seconds{pid="7"} 1700000000.25\nb 2\n', 1_700_000_000.25),
        (b"process_start_time_seconds 5\nprocess_start_time_seconds 5\n", 5.0),
        (b"process_start_time_seconds 5\nprocess_start_time_seconds 6\n", None),
        (b"# HELP process_start_time_seconds 7\n", None),
        (b"my_process_start_time_seconds 7\n", None),
        (b"process_start_time_seconds NaN\n", None),
        (b"process_start_time_seconds +Inf\n", None),
        (b"process_start_time_seconds 0\n", None),
        (b"process_start_time_seconds soon\n", None),
        (b"\xff\xfe", None),
        (b"", None),
    ],
)
def test_a_start_time_is_read_only_where_it_is_one(text: bytes, at: float | None) -> None:
    assert start_time(text) == at


def test_a_url_of_another_kind_is_refused() -> None:
    with pytest.raises(RegistrationError, match="write http://HOST:PORT"):
        Registration(instance_id="A", endpoint="tcp://h:1", model_name="m", url="h:8000").checked()


def test_another_url_changes_only_where_the_engine_is_asked(rig: Any, engine: Any) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    said = {"instance_id": "A", "endpoint": "tcp://127.0.0.1:5557", "model_name": "m"}
    rig.ingest.follow(Registration(**said, url="http://h:8000"))
    assert rig.held(PROMPT) == {"A": (28, 28, 28)}
    assert rig.record(a).registration.url == "http://h:8000"


SLOW_NAMES = """
import asyncio, os, signal, socket, sys, threading, time
sys.path.insert(0, sys.argv[1])
look_up, asked = socket.getaddrinfo, threading.Event()

def slow(host, *arguments, **options):
    if host != "replica":
        return look_up(host, *arguments, **options)
    asked.set()
    time.sleep(600)

socket.getaddrinfo = slow
from indexer.registration import Registration
from indexer.service import Indexer, serve
from indexer.settings import IndexerSettings
start = Indexer.start

def started(self):
    start(self)
    self.ingest.register(
        Registration(
            instance_id="A", endpoint="tcp://127.0.0.1:1", model_name="m", url="http://replica:8000"
        )
    )
    end = lambda: (asked.wait(20), os.kill(os.getpid(), signal.SIGTERM))
    threading.Thread(target=end, daemon=True).start()

Indexer.start = started
asyncio.run(serve(IndexerSettings(map=sys.argv[2], listen="127.0.0.1:0")))
print(asked.is_set())
"""


def test_an_indexer_ends_while_the_name_of_a_replica_is_still_looked_up(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", SLOW_NAMES, str(root), str(tmp_path / "map")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr
