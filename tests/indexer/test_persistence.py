"""The map among processes and threads: many that open it, one that is killed, another that comes too."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest
from aiohttp.test_utils import TestClient, TestServer

from indexer.changes import Changes
from indexer.check import check_folder
from indexer.errors import MapError
from indexer.folder import DATA_FILE, OPEN_ATTEMPTS
from indexer.reader import MapReader
from indexer.registration import Registration
from indexer.writer import MapWriter

ROOT = Path(__file__).parents[2]
PROMPT = list(range(28))
LONG = list(range(100, 20_100))

# many processes

OPENS = """
import json, sys
from pathlib import Path
from indexer.check import check_folder
from indexer.reader import MapReader
path = Path(sys.argv[1])
print("1", flush=True)
sys.stdin.readline()
held = set()
for number in range(100):
    reader = MapReader.open(path)
    held.add(sum(one.gpu for one in reader.query("m", list(range(28)))))
    reader.close()
    if number % 25 == 0:
        assert check_folder(path).clean
print(json.dumps(sorted(held)), flush=True)
"""


@pytest.mark.parametrize("running", [True, False], ids=["beside its indexer", "closed"])
def test_pe04_20_processes_open_and_close_a_map_in_a_loop(
    running: bool, make_rig: Any, engine: Any, tmp_path: Path, script: Any
) -> None:
    rig = make_rig(tmp_path)
    stream = rig.follow("A")
    rig.say(stream, engine().stored(PROMPT))
    if not running:
        rig.close()
    started = [script(OPENS, tmp_path) for _ in range(20)]
    assert [each.answer() for each in started] == [1] * 20
    for each in started:
        each.process.stdin.write("go\n")
        each.process.stdin.flush()
    if running:
        for number in range(50):
            rig.say(stream, engine().stored([number, *LONG[:400]]))
    assert [each.answer() for each in started] == [[28]] * 20
    if running:
        rig.check()
        rig.close()
    assert check_folder(tmp_path).clean


@pytest.mark.parametrize("times", [1, OPEN_ATTEMPTS - 1])
def test_pe04_einval_while_another_process_opens_is_retried_briefly(
    times: int, make_rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_rig(tmp_path).close()
    opened = refusing(monkeypatch, times)
    MapReader.open(tmp_path).close()
    assert len(opened) == times + 1


def test_pe04_einval_that_stays_is_an_error(
    make_rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_rig(tmp_path).close()
    opened = refusing(monkeypatch, 1_000)
    with pytest.raises(MapError, match="cannot read the map"):
        MapReader.open(tmp_path)
    assert len(opened) == OPEN_ATTEMPTS


def refusing(monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """Lets LMDB refuse to open, as it does while another process sets up the lock file."""
    opened: list[str] = []
    open_lmdb = lmdb.open

    def refuses(path: str, **options: Any) -> lmdb.Environment:
        opened.append(path)
        if len(opened) <= times:
            raise lmdb.InvalidParameterError("Invalid argument")
        return open_lmdb(path, **options)

    monkeypatch.setattr(lmdb, "open", refuses)
    monkeypatch.setattr("indexer.folder.OPEN_PAUSE_S", 0.0)
    return opened


def test_pe04_a_map_is_not_opened_twice_in_one_process(make_rig: Any, tmp_path: Path) -> None:
    make_rig(tmp_path).close()
    reader = MapReader.open(tmp_path)
    with pytest.raises(MapError, match="already open in this process"):
        MapReader.open(tmp_path)
    assert reader.streams() == []
    reader.close()
    MapReader.open(tmp_path).close()


# a larger map, a smaller map


def test_pe03_a_restart_with_a_smaller_map_size_does_not_shrink_the_file(
    make_rig: Any, engine: Any, tmp_path: Path
) -> None:
    rig, longer = make_rig(tmp_path), list(range(80_000))
    rig.say(rig.follow("A"), engine().stored(longer))
    rig.close()
    size = (tmp_path / DATA_FILE).stat().st_size
    assert size > 1 << 20
    rig = make_rig(tmp_path, map_size=1 << 20)
    rig.resume()
    assert (tmp_path / DATA_FILE).stat().st_size == size
    assert rig.held(longer) == {"A": (80_000, 80_000, 80_000)}
    rig.check()
    rig.close()


# threads


class Noting:
    """An environment that notes which threads write, and lets no thread read within a read."""

    def __init__(self, env: lmdb.Environment) -> None:
        self._env = env
        self.writers: set[str] = set()

    def begin(self, *arguments: Any, **options: Any) -> lmdb.Transaction:
        if options.get("write"):
            self.writers.add(threading.current_thread().name)
        return self._env.begin(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


async def test_pe07_all_writes_are_on_one_thread_also_under_load(
    indexers: Any, publishers: Any, engine: Any
) -> None:
    indexer, publisher = indexers(), publishers()
    noting = indexer.writer.env = Noting(indexer.writer.env)
    async with TestClient(TestServer(indexer.application())) as client:

        async def register(name: str) -> None:
            body = {
                "instance_id": name,
                "endpoint": publisher.endpoint,
                "replay_endpoint": publisher.replay_endpoint,
                "model_name": "m",
            }
            async with client.post("/register", json=body) as response:
                assert response.status == 201

        async def ask(path: str, body: Any) -> None:
            async with client.request("POST" if body else "GET", path, json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()

        await asyncio.gather(*(register(name) for name in "ABCD"))
        for number in range(20):
            publisher.publish([engine().stored([number, *LONG[:4_000]])], 1.0)
            query = {"model_name": "m", "token_ids": [number, *LONG]}  # on a thread of the pool
            paths = [("/query", query), ("/debug/dump", None), ("/debug/replicas", None), ("/metrics", None)]
            await asyncio.gather(*(ask(path, body) for path, body in paths))
        async with client.post("/unregister", json={"instance_id": "D", "model_name": "m"}) as response:
            assert response.status == 200
    assert noting.writers == {"ingest"}


async def test_pe07_the_loop_is_not_held_while_a_commit_takes_its_time(
    indexers: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held by an event here, not by its size: as long as it lasts, everything else is answered."""
    indexer = indexers()
    registration = Registration(instance_id="A", endpoint="tcp://127.0.0.1:1", model_name="m")
    indexer.ingest.register(registration).result(10)
    flush, commits, goes_on = Changes.flush, threading.Event(), threading.Event()

    def slow(self: Changes) -> None:
        commits.set()
        assert goes_on.wait(20)
        flush(self)

    monkeypatch.setattr(Changes, "flush", slow)
    later = Registration(instance_id="B", endpoint="tcp://127.0.0.1:1", model_name="m")
    async with TestClient(TestServer(indexer.application())) as client:
        try:
            done = asyncio.wrap_future(indexer.ingest.register(later))
            await asyncio.wait_for(asyncio.to_thread(commits.wait), 10)
            for path, body in (
                ("/query", {"model_name": "m", "token_ids": PROMPT}),
                ("/query", {"model_name": "m", "token_ids": LONG}),
                ("/workers", None),
                ("/debug/replicas", None),
                ("/debug/dump", None),
                ("/health", None),
            ):
                async with client.request("POST" if body else "GET", path, json=body) as response:
                    assert response.status == 200, path
                    assert b'"B"' not in await response.read()
            assert not done.done()
        finally:
            goes_on.set()
        await asyncio.wait_for(done, 10)
        async with client.get("/workers") as response:
            assert {each["instance_id"] for each in await response.json()} == {"A", "B"}


# kills

KILLS = """
import json, os, random, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from events.schema import BlockRemoved, BlockStored, token_array
from indexer.changes import Changes
from indexer.check import check
from indexer.layout import boot_clock
from indexer.reader import MapReader
from indexer.registration import Registration
from indexer.writer import MapWriter

KEPT, SIZE, MAP = 3, 80, 64 << 20
path, chance = Path(sys.argv[1]), random.Random(int(sys.argv[3]))

def prompt(number):
    return list(range(number * 1000, number * 1000 + 4 * SIZE))

def hashes(number):
    return [(number << 16 | block).to_bytes(8, "big") for block in range(SIZE)]

def batch(number):
    '''Stores the prompt of this number, and removes the one of three batches ago.'''
    stored = BlockStored(hashes(number), None, token_array(prompt(number)), 4, group_kind="full_attention")
    gone = hashes(number - KEPT)[::-1] if number >= KEPT else []
    return stored, BlockRemoved(gone)

def write(pipe):
    '''Applies batches without end; a byte through the pipe at each step, also in the middle of a batch.'''
    writer = MapWriter(path, map_size=MAP)
    put = Changes._write
    def told(self, *arguments):
        os.write(pipe, b".")
        put(self, *arguments)
        os.write(pipe, b".")
    Changes._write = told
    while True:
        with writer.group() as group:
            record = writer.streams.get(("A", 0))
            if record is None:
                registration = Registration(instance_id="A", endpoint="tcp://127.0.0.1:1", model_name="m")
                record = writer.open_stream(group, registration)
            number = 0 if record.sequence is None else record.sequence + 1
            for event in batch(number):
                blocks = group.blocks(record)
                blocks.store(event) if isinstance(event, BlockStored) else blocks.remove(event)
                os.write(pipe, b".")
            record.sequence, record.state = number, "live"
            group.touch(record)
        os.write(pipe, b".")

def look():
    '''What the map says now: violations, the watermark, and which prompts are there whole.'''
    writer = MapWriter(path, map_size=MAP)
    report = check(writer.env, writer.tables)
    reader = MapReader(writer.env, writer.tables)
    records = [status.record for status in reader.streams()]
    last = records[0].sequence if records else None
    held = {}
    for number in range((last or 0) + 3):
        gpu = sum(one.gpu for one in reader.query("m", prompt(number)))
        if gpu:
            held[number] = gpu
    writer.env.close()
    writer._lock.close()
    return {"violations": report.found, "last": last, "held": held}

for _ in range(50):
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(ours)
        write(theirs)
    os.close(theirs)
    for _ in range(chance.randrange(1, 60)):
        os.read(ours, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ours)
    print(json.dumps(look()), flush=True)
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_pe09_a_writer_killed_50_times_in_mid_batch_leaves_a_whole_map_with_the_right_watermark(
    seed: int, tmp_path: Path, script: Any
) -> None:
    kills = script(KILLS, tmp_path, ROOT, seed)
    before = -1
    for _ in range(50):
        found = kills.answer()
        assert found["violations"] == 0
        last = -1 if found["last"] is None else found["last"]
        assert last >= before, "what was committed is gone"
        assert found["held"] == {str(number): 320 for number in range(max(0, last - 2), last + 1)}
        before = last
    assert before > 50


# signals


@pytest.mark.parametrize("shards", ["1", "2"])
def test_a_hangup_does_not_end_an_indexer_and_a_sigterm_ends_it_cleanly(
    indexer_process: Callable[..., Any], tmp_path: Path, shards: str
) -> None:
    indexer = indexer_process(tmp_path / "map", "--shards", shards).listening()
    indexer.process.send_signal(signal.SIGHUP)
    indexer.call("/workers")  # Whatever it says, it is there.
    assert indexer.stop() == 0
    assert "SIGHUP changes nothing" in indexer._log.read_text()


# another indexer


def test_pe10_a_second_indexer_on_the_folder_ends_with_a_message_and_the_first_goes_on(
    indexer_process: Callable[..., Any], tmp_path: Path
) -> None:
    first = indexer_process(tmp_path / "map").listening()
    command = [sys.executable, "-m", "warmroute", "indexer", "--map", str(tmp_path / "map")]
    second = subprocess.run(
        [*command, "--listen", "127.0.0.1:0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 2
    assert f"written by another indexer (process {first.process.pid} on" in second.stderr
    assert "Traceback" not in second.stderr
    assert first.call("/health") == {"status": "ok"}
    assert first.stop() == 0


def lock_error(*_: Any, **__: Any) -> Any:
    raise lmdb.LockError("mdb_txn_begin: Resource temporarily unavailable")


class Clashing:
    """An environment whose lock table knows our process id as another container's."""

    def __init__(self, env: lmdb.Environment) -> None:
        self._env = env

    begin = staticmethod(lock_error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


def test_pe10_a_reader_recognises_a_clash_of_process_ids(make_rig: Any, tmp_path: Path) -> None:
    make_rig(tmp_path).close()
    reader = MapReader.open(tmp_path)
    env = reader._env
    reader._env = Clashing(env)  # type: ignore[assignment]
    with pytest.raises(MapError, match="same process id uses it: share one pid namespace"):
        reader.query("m", PROMPT)
    env.close()


def test_pe10_a_writer_recognises_a_clash_of_process_ids(rig: Any) -> None:
    env = rig.writer.env
    rig.writer.env = Clashing(env)
    try:
        with pytest.raises(MapError, match="share one pid namespace"):
            rig.writer.set_address("http://127.0.0.1:9400")
    finally:
        rig.writer.env = env


@pytest.mark.parametrize("opens", [MapWriter, MapReader.open, check_folder])
def test_pe10_whoever_opens_the_map_recognises_a_clash_of_process_ids(
    opens: Callable[[Path], Any], make_rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_rig(tmp_path).close()
    with monkeypatch.context() as patched:
        patched.setattr(lmdb, "open", lock_error)
        with pytest.raises(MapError, match="share one pid namespace"):
            opens(tmp_path)
    MapWriter(tmp_path).close()
