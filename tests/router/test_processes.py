"""Several router processes on one port."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import textwrap
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from router.errors import ListenError
from router.processes import Board, Worker, Workers, _end_with, reserved
from router.settings import RouterSettings
from router.standings import Record
from router.waitlist import Place
from tests.router.command import START_S
from tests.router.forked import all_at_once, forked

ROOT = Path(__file__).resolve().parents[2]
BODY = {"model": "m", "prompt": [1]}


class Process:
    """A ``warmroute router`` and what it has logged so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log = ""
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.log += line.decode()

    def urls(self, said: str) -> list[str]:
        return re.findall(rf"{said} (http\S+)", self.log)

    async def listen(self, workers: int) -> None:
        """Waits until so many have begun to listen; that takes its time on a busy machine."""
        async with asyncio.timeout(START_S):
            while len(self.urls("listening on")) < workers:
                assert self.process.returncode is None, self.log
                await asyncio.sleep(0.005)

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    async def end(self, deadline_s: float = 15.0) -> int:
        if self.process.returncode is None:
            self.process.terminate()
        async with asyncio.timeout(deadline_s):
            code = await self.process.wait()
            await self._reader
        return code


@asynccontextmanager
async def routers(*arguments: str, **environment: str) -> AsyncIterator[Process]:
    async with processes("-m", "warmroute", "router", *arguments, **environment) as process:
        yield process


@asynccontextmanager
async def processes(*arguments: str, **environment: str) -> AsyncIterator[Process]:
    process = Process(
        await asyncio.create_subprocess_exec(
            *(sys.executable, *arguments),
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | environment,
        )
    )
    try:
        yield process
    finally:
        await process.end()


async def all_know(process: Process) -> None:
    """Waits until every worker knows what every replica serves: until then those that have said so are sent
    all requests, and retries.
    """
    async with aiohttp.ClientSession() as client, asyncio.timeout(20):
        for admin in process.urls("debug pages on"):
            while True:
                async with client.get(f"{admin}/debug/replicas") as page:
                    if all(replica["model"] for replica in (await page.json())["replicas"]):
                        break


async def spread(url: str, enough: Callable[[], bool]) -> None:
    """Sends requests, each on a connection of its own, until they have come where they should."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client:
        async with asyncio.timeout(20):
            while not enough():
                async with client.post(f"{url}/v1/completions", json=BODY) as response:
                    assert response.status == 200, response.headers


async def test_tr03_workers_share_a_port_and_each_traces_as_itself(start_engine: Any, kit: Any) -> None:
    instances: set[str] = set()

    async def traces(request: web.Request) -> web.Response:
        for spans in ExportTraceServiceRequest.FromString(await request.read()).resource_spans:
            said = {attribute.key: attribute.value.string_value for attribute in spans.resource.attributes}
            instances.add(said["service.instance.id"])
        return web.Response()

    engine = await start_engine()
    collector = web.Application()
    collector.router.add_post("/v1/traces", traces)
    runner = web.AppRunner(collector)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{runner.addresses[0][1]}",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    arguments = ("--listen", "127.0.0.1:0", "--workers", "2", "--replica", f"e0={engine.url}")
    async with routers(*arguments, **environment) as process:
        await process.listen(2)
        assert len(set(process.urls("listening on"))) == 1
        admins = process.urls("debug pages on")
        assert len(set(admins)) == 2
        await spread(process.urls("listening on")[0], lambda: len(instances) == 2)
        async with aiohttp.ClientSession() as client:
            for admin in admins:
                async with client.get(f"{admin}/debug/decisions") as response:
                    assert (await response.json())["decisions"]
        assert await process.end() == 0
        assert process.log.count("shutting down") == 2
    await runner.cleanup()


@asynccontextmanager
async def held(count: int, url: str) -> AsyncIterator[list[int]]:
    """So many streams at once, each on a connection of its own; gives their statuses."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as client:
        body = {"model": "m", "prompt": [1] * 500, "stream": True}
        answers = await asyncio.gather(
            *(client.post(f"{url}/v1/completions", json=body) for _ in range(count))
        )
        yield [answer.status for answer in answers]
        for answer in answers:
            answer.close()


async def test_rq06_a_burst_over_four_workers_spreads_and_keeps_limits_as_over_one(
    start_engine: Any, kit: Any
) -> None:
    gate = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        return await kit.stream(request, [b"data: {}\n\n", b"data: [DONE]\n\n"], gate.wait)

    engines = [await start_engine(answer=answer) for _ in range(4)]
    replicas = [part for n, engine in enumerate(engines) for part in ("--replica", f"e{n}={engine.url}")]
    # Nothing is polled: all that workers know of each other is on their board.
    limits = ("--poll-interval-s", "0", "--max-inflight", "12", "--slow-start-s", "0")
    workers = 4
    async with routers("--listen", "127.0.0.1:0", "--workers", str(workers), *limits, *replicas) as process:
        await process.listen(workers)
        url = process.urls("listening on")[0]
        await spread(url, lambda: all(engine.generated for engine in engines))
        async with held(40, url) as statuses:
            taken = [engine.open for engine in engines]
            assert statuses == [200] * 40
            # Decisions of the same instant cannot see each other: one for each other worker.
            assert max(taken) <= 10 + workers - 1
            async with held(30, url) as more:
                taken = [engine.open for engine in engines]
                assert set(more) == {200, 503}
                # A limit is one all the same.
                assert taken == [12] * 4
                assert Counter(more) == {200: 8, 503: 22}
        # What was held is over for every worker.
        await kit.wait_until(lambda: not any(engine.open for engine in engines), "engines are idle")
        async with held(40, url) as statuses:
            assert statuses == [200] * 40


async def test_ix12_a_burst_with_one_cold_prefix_lands_on_few_replicas_whichever_worker_it_comes_to(
    start_engine: Any, kit: Any
) -> None:
    gate = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        await gate.wait()
        return await kit.stream(request, [b"data: {}\n\n", b"data: [DONE]\n\n"])

    engines = [await start_engine(answer=answer) for _ in range(8)]
    replicas = [part for n, engine in enumerate(engines) for part in ("--replica", f"e{n}={engine.url}")]
    limits = ("--poll-interval-s", "0", "--slow-start-s", "0")
    async with routers("--listen", "127.0.0.1:0", "--workers", "4", *limits, *replicas) as process:
        await process.listen(4)
        url = process.urls("listening on")[0]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client:
            posts = []
            for number in range(20):
                body = {"model": "m", "prompt": [7] * 8192 + [number] * 50, "stream": True}
                posts.append(asyncio.create_task(client.post(f"{url}/v1/completions", json=body)))
                # Decisions of the same instant cannot see each other.
                await kit.wait_until(
                    lambda sent=number: sum(engine.open for engine in engines) > sent, "it was sent"
                )
            taken = [engine.open for engine in engines]
            gate.set()
            for response in await asyncio.gather(*posts):
                assert response.status == 200
                response.close()
    assert sum(count > 0 for count in taken) <= 2, taken


async def test_a_replica_that_fails_is_found_out_once_by_four_workers_and_not_by_each(
    start_engine: Any, kit: Any
) -> None:
    asked = 0

    async def fail(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(status=500)

    bad, good = await start_engine(answer=fail), await start_engine()
    replicas = ("--replica", f"bad={bad.url}", "--replica", f"good={good.url}")
    rules = ("--policy", "random", "--eject-after", "5", "--eject-s", "600", "--eject-max-s", "600")
    async with routers("--listen", "127.0.0.1:0", "--workers", "4", *rules, *replicas) as process:
        await process.listen(4)
        await all_know(process)
        await spread(process.urls("listening on")[0], lambda: good.generated == 80)
        assert asked == 5
        assert process.log.count("replica bad is kept from requests") == 1
        async with aiohttp.ClientSession() as client:
            for admin in process.urls("debug pages on"):
                async with client.get(f"{admin}/debug/replicas") as response:
                    page = await response.json()
                assert [replica["standing"] for replica in page["replicas"]] == ["ejected", "in"]


async def test_rq17_requests_wait_in_four_workers_as_in_one(start_engine: Any, kit: Any) -> None:
    gate, begun = asyncio.Semaphore(0), list[str]()

    async def answer(request: web.Request) -> web.Response:
        begun.append((await request.json())["prompt"])
        await gate.acquire()
        return web.json_response({})

    engine = await start_engine(answer=answer)
    arguments = ("--listen", "127.0.0.1:0", "--workers", "4", "--replica", f"e0={engine.url}")
    limits = ("--max-inflight", "1", "--queue-limit", "7", "--poll-interval-s", "0")
    async with routers(*arguments, *limits) as process:
        await process.listen(4)
        url, admin = process.urls("listening on")[0], process.urls("debug pages on")[0]
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as client:

            async def ask(name: str, priority: int) -> int:
                body = {"model": "m", "prompt": name, "priority": priority}
                async with client.post(f"{url}/v1/completions", json=body) as response:
                    return response.status

            async def waiting() -> int:
                async with client.get(f"{admin}/metrics") as response:
                    queued = re.findall(r"^warmroute_router_queued{.*} (\S+)", await response.text(), re.M)
                return int(sum(map(float, queued)))

            asked = {"running": asyncio.create_task(ask("running", 0))}
            await kit.wait_until(lambda: begun == ["running"], "the replica is full")
            for number, priority in enumerate((0, 5, 0, 5, 0, 0, 0)):
                name = f"{priority}-{number}"
                asked[name] = asyncio.create_task(ask(name, priority))
                while await waiting() <= number:
                    pass
            assert await ask("no better", 5) == 503
            asked["better"] = asyncio.create_task(ask("better", -1))
            assert await asked.pop("5-3") == 503  # The last of all, whichever worker it was in.
            assert await waiting() == 7
            for number in range(8):
                assert len(begun) == number + 1
                gate.release()
                if number < 7:
                    await kit.wait_until(lambda n=number: len(begun) == n + 2, "the next one is sent")
            assert await asyncio.gather(*asked.values()) == [200] * 8
            assert begun == ["running", "better", "0-0", "0-2", "0-4", "0-5", "0-6", "5-1"]


async def test_any_workers_pages_show_all_of_them(start_engine: Any, kit: Any) -> None:
    engine = await start_engine()
    rule = '{"name": "texts", "policy": "least-loaded", "path": "/v1/completions"}'
    arguments = ("--listen", "127.0.0.1:0", "--workers", "2", "--replica", f"e0={engine.url}", "--rule", rule)
    async with routers(*arguments) as process, aiohttp.ClientSession() as client:
        await process.listen(2)
        admins = process.urls("debug pages on")

        async def page(path: str, admin: str = admins[0]) -> Any:
            async with client.get(admin + path) as response:
                assert response.status == 200, path
                return await (response.text() if path.startswith("/metrics") else response.json())

        sent = 0

        async def seen() -> set[int]:
            return {decision["worker"] for decision in (await page("/debug/decisions"))["decisions"]}

        async with asyncio.timeout(20):
            while await seen() != {0, 1}:
                await spread(process.urls("listening on")[0], lambda before=sent: engine.generated > before)
                sent = engine.generated
        async with client.post(process.urls("listening on")[0] + "/v1/embeddings", json=BODY) as response:
            assert response.status == 200
        sent += 1
        for admin in admins:
            newest = (await page("/debug/decisions", admin))["decisions"]
            assert len(newest) == sent
            assert [one["at"] for one in newest] == sorted((one["at"] for one in newest), reverse=True)
            assert len((await page("/debug/decisions?limit=1", admin))["decisions"]) == 1
            rules = await page("/debug/rules", admin)
            assert (rules["rules"][0]["requests"], rules["default_requests"]) == (sent - 1, 1)
            metrics = await page("/metrics", admin)
            counts = re.findall(r'^warmroute_router_requests_total{.*worker="(\d)".*} (\S+)', metrics, re.M)
            assert {worker for worker, _ in counts} == {"0", "1"}
            assert sum(float(count) for _, count in counts) == sent
            assert 'warmroute_router_worker_up{worker="0"} 1.0' in metrics
            assert 'warmroute_router_worker_up{worker="1"} 1.0' in metrics
            assert metrics.count("# TYPE warmroute_router_requests_total counter") == 1
        both = [(await page(f"/debug/decisions?worker={number}"))["decisions"] for number in range(2)]
        assert [{one["worker"] for one in ones} for ones in both] == [{0}, {1}]
        assert "worker=" not in await page("/metrics?worker=1")
        assert (await page("/debug/replicas?worker=1"))["worker"] == 1
        async with client.get(admins[0] + "/metrics?worker=7") as response:
            error = (await response.json())["error"]
            assert (response.status, error["message"]) == (404, "there is no worker '7'; they are 0 to 1")


async def test_pages_on_the_port_that_workers_share_show_all_of_them_whoever_is_asked(
    start_engine: Any, kit: Any
) -> None:
    engine = await start_engine()
    arguments = ("--listen", "127.0.0.1:0", "--admin-listen", "same", "--workers", "2")
    async with routers(*arguments, "--replica", f"e0={engine.url}") as process:
        await process.listen(2)
        assert not process.urls("debug pages on")
        url, asked = process.urls("listening on")[0], set[int]()
        async with asyncio.timeout(20):
            while asked != {0, 1}:
                # On a new connection each time: the kernel chooses the worker.
                async with aiohttp.ClientSession() as client, client.get(url + "/debug/replicas") as page:
                    asked.add((await page.json())["worker"])
                async with aiohttp.ClientSession() as client, client.get(url + "/metrics") as page:
                    metrics = await page.text()
                assert 'warmroute_router_worker_up{worker="0"} 1.0' in metrics
                assert 'warmroute_router_worker_up{worker="1"} 1.0' in metrics


async def test_px17_workers_finish_open_streams_at_sigterm(start_engine: Any, kit: Any) -> None:
    gate = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        return await kit.stream(request, [b"data: {}\n\n", b"data: [DONE]\n\n"], gate.wait)

    engine = await start_engine(answer=answer)
    arguments = ("--listen", "127.0.0.1:0", "--workers", "2", "--replica", f"e0={engine.url}")
    async with routers(*arguments) as process, aiohttp.ClientSession() as client:
        await process.listen(2)
        url = process.urls("listening on")[0]
        async with client.post(f"{url}/v1/completions", json={**BODY, "stream": True}) as response:
            await response.content.readexactly(10)
            process.process.send_signal(signal.SIGTERM)
            await kit.wait_until(lambda: process.log.count("shutting down") == 2, "both go down")
            gate.set()
            assert (await response.read()).endswith(b"[DONE]\n\n")
        assert await process.end() == 0


async def test_a_worker_that_cannot_start_ends_them_all(tmp_path: Path) -> None:
    arguments = ("--listen", "127.0.0.1:0", "--workers", "2", "--tls-cert", str(tmp_path / "gone.pem"))
    async with routers(*arguments) as process:
        async with asyncio.timeout(START_S):
            assert await process.process.wait() == 2
    assert "gone.pem" in process.log
    assert "could not start" in process.log
    assert re.search(r"WARNING worker [01] router.assembly: no replica is configured", process.log)
    assert "Traceback" not in process.log


CRASHING = """
    import logging, os, sys, time
    from pathlib import Path
    from router import processes
    from router.settings import RouterSettings

    logging.basicConfig(level="INFO")
    processes.STARTED_S = 0.0

    def serve(worker):
        (Path(sys.argv[1]) / str(os.getpid())).write_text(str(worker.number))
        time.sleep(60)

    sys.exit(processes.Workers(RouterSettings(listen="127.0.0.1:0", workers=2), serve).run())
"""


async def test_a_worker_that_dies_is_started_again(tmp_path: Path, kit: Any) -> None:
    def alive() -> dict[int, str]:
        found = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
        return {pid: number for pid, number in found.items() if number and Path(f"/proc/{pid}").exists()}

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(CRASHING), str(tmp_path), cwd=ROOT
    )
    await kit.wait_until(lambda: sorted(alive().values()) == ["0", "1"], "both run")
    victim = next(pid for pid, number in alive().items() if number == "1")
    os.kill(victim, signal.SIGKILL)
    await kit.wait_until(lambda: victim not in alive() and len(alive()) == 2, "another one took its place")
    assert sorted(alive().values()) == ["0", "1"]
    process.terminate()
    async with asyncio.timeout(10):
        assert await process.wait() == 0
    await kit.wait_until(lambda: not alive(), "all are gone")


async def test_op02_a_worker_that_is_started_again_has_the_settings_that_the_others_have_taken_over(
    start_engine: Any, tmp_path: Path, kit: Any
) -> None:
    engine, path = await start_engine(), tmp_path / "w.toml"
    path.write_text(f'[router]\nreplica = ["a={engine.url}"]\n')
    # However short a worker has lived, it is started again.
    program = "from router import processes; processes.STARTED_S = 0.0; import warmroute; warmroute.main()"
    arguments = ("--config", str(path), "router", "--listen", "127.0.0.1:0", "--workers", "2")
    async with processes("-c", program, *arguments) as process, aiohttp.ClientSession() as client:
        await process.listen(2)
        path.write_text(f'[router]\nreplica = ["b={engine.url}"]\n')
        process.process.send_signal(signal.SIGHUP)
        await kit.wait_until(lambda: process.log.count("replica a is gone") == 2, "both took it over")
        os.kill(process.children()[0], signal.SIGKILL)
        await process.listen(3)
        async with client.get(process.urls("debug pages on")[-1] + "/debug/replicas") as page:
            assert [replica["name"] for replica in (await page.json())["replicas"]] == ["b"]


FAILING = """
    import os, sys, time
    from pathlib import Path
    from router import processes
    from router.settings import RouterSettings

    processes.STARTED_S = 0.5
    folder = Path(sys.argv[1])

    def serve(worker):
        lives = len(list(folder.glob(f"{worker.number}-*")))
        if lives == 0:
            time.sleep(processes.STARTED_S)  # It has started.
        (folder / f"{worker.number}-{lives}").write_text(str(os.getpid()))
        if lives == 1:
            sys.exit(2)
        time.sleep(60)

    sys.exit(processes.Workers(RouterSettings(listen="127.0.0.1:0", workers=2), serve).run())
"""


async def test_a_worker_that_cannot_start_again_is_tried_again_while_another_serves(
    tmp_path: Path, kit: Any
) -> None:
    def lived() -> set[str]:
        return {path.name for path in tmp_path.iterdir() if path.read_text()}

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(FAILING), str(tmp_path), cwd=ROOT
    )
    await kit.wait_until(lambda: lived() == {"0-0", "1-0"}, "both run")
    os.kill(int((tmp_path / "1-0").read_text()), signal.SIGKILL)
    await kit.wait_until(lambda: lived() == {"0-0", "1-0", "1-1", "1-2"}, "it runs again")
    process.terminate()
    async with asyncio.timeout(10):
        assert await process.wait() == 0


def test_a_parent_that_is_given_the_orphans_of_a_container_goes_on() -> None:
    def watch(_: int) -> None:
        workers = Workers(RouterSettings(workers=1), lambda worker: None)
        with forked(2, lambda _: None) as (orphan, own):
            # Both have ended; the older one is told of first.
            for pid in (orphan, own):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            workers._running = {own: (Worker(0, 0, workers._board), 0.0)}
            workers._stopping = True
            assert workers._watch() == 0
            os._exit(0)

    all_at_once(1, watch)


def test_op02_a_worker_that_is_not_up_yet_is_not_ended_by_a_reload() -> None:
    workers = Workers(RouterSettings(workers=1), lambda worker: signal.pause())
    workers._start(Worker(0, 0, workers._board))
    (pid,) = workers._running
    os.kill(pid, signal.SIGHUP)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_a_worker_whose_parent_was_killed_before_it_could_ask_to_be_told_ends() -> None:
    def begin(_: int) -> None:
        _end_with(os.getppid())
        with pytest.raises(SystemExit):
            _end_with(os.getpid())

    all_at_once(1, begin)


TELLING = """
    import os, sys, time
    from pathlib import Path
    from router import processes
    from router.stream_load import Share, StreamLoad
    from router.settings import RouterSettings
    from router.shares import BoardShares

    processes.STARTED_S = 0.0
    folder = Path(sys.argv[1])

    def serve(worker):
        told = BoardShares(worker.loads())
        if worker.number == 1:
            if not (folder / "teller").exists():
                told.tell(("a", 0), Share(StreamLoad(1, 100), 1, 100))
                (folder / "teller").write_text(str(os.getpid()))
            time.sleep(60)
        while True:
            (folder / "new").write_text(str(told.of(("a", 0)).load.requests))
            (folder / "new").rename(folder / "seen")
            time.sleep(0.005)

    sys.exit(processes.Workers(RouterSettings(listen="127.0.0.1:0", workers=2), serve).run())
"""


async def test_rq11_what_a_worker_had_in_flight_goes_with_it(tmp_path: Path, kit: Any) -> None:
    teller, seen = tmp_path / "teller", tmp_path / "seen"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(TELLING), str(tmp_path), cwd=ROOT
    )
    try:
        await kit.wait_until(lambda: seen.exists() and seen.read_text() == "1", "it is seen")
        await kit.wait_until(lambda: teller.exists() and bool(teller.read_text()), "it says who it is")
        os.kill(int(teller.read_text()), signal.SIGKILL)
        await kit.wait_until(lambda: seen.read_text() == "0", "it is gone")
    finally:
        process.terminate()
    async with asyncio.timeout(10):
        assert await process.wait() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells children of their parent's death")
def test_what_one_worker_has_learned_all_know_and_it_stays_when_the_worker_is_gone() -> None:
    board, stream = Board(2, 1), ("a", 0)
    one, two = (Worker(number, 0, board) for number in range(2))
    one.speeds().observe(stream, 5000, 5.0)
    one.standings().put("a", Record(failures=2, ejected=True, trying=one.standings().worker))
    one.retries().put(b"", 3, 1)
    one.seats(lambda: {stream}).take(b"session", stream)
    one.queue().tell("m", 2, (Place(0, 1.0, 0, 1), Place(0, 2.0, 0, 2)))
    assert two.retries().others(b"") == [(3, 1)]
    assert (two.queue().waiting(), two.queue().last()) == (2, Place(0, 2.0, 0, 2))
    board.clear(0)
    assert two.speeds().each([stream])[0].s_per_token == pytest.approx(1e-3, rel=0.1)
    assert two.seats(lambda: {stream}).of(b"session") == stream
    assert two.standings().get("a") == Record(failures=2, ejected=True)
    assert two.retries().others(b"") == []
    assert (two.queue().waiting(), two.queue().last()) == (0, None)


def test_px17_a_signal_just_when_a_worker_has_ended_reaches_the_others() -> None:
    workers = Workers(RouterSettings(workers=2), lambda worker: None)
    with forked(1, lambda _: signal.pause()) as (alive,):
        gone = os.fork()
        if gone == 0:
            os._exit(0)
        os.waitpid(gone, 0)
        workers._running = {pid: (Worker(0, 0, workers._board), 0.0) for pid in (gone, alive)}
        workers._forward(signal.SIGTERM, None)  # Else this would wait for ever.


async def test_workers_do_not_outlive_a_parent_that_is_killed(tmp_path: Path, kit: Any) -> None:
    def alive() -> list[str]:
        return [path.name for path in tmp_path.iterdir() if Path(f"/proc/{path.name}").exists()]

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(CRASHING), str(tmp_path), cwd=ROOT
    )
    await kit.wait_until(lambda: len(alive()) == 2, "both run")
    process.kill()
    await process.wait()
    await kit.wait_until(lambda: not alive(), "both are gone")


def test_a_port_that_somebody_has_is_not_shared() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ListenError, match="already in use"), reserved(address):
            pass
