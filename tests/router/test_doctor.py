"""EV-32, OP-04: why no events come, said by `warmroute doctor`: simulated engines, and such as are ill."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner

from events.curve import Curve, read_curve, write_pair
from events.publisher import Publisher
from indexer.layout import boot_clock
from indexer.writer import MapWriter
from router.doctor import Finding, _connect, examine
from router.replicas import parse_replicas
from simulator.engine import Engine
from simulator.settings import EngineSettings
from warmroute import main

QUICK: dict[str, Any] = {"listen": "127.0.0.1:0", "prefill_rate": 1e6, "decode_rate": 1e4}
ROOT = Path(__file__).parents[2]
ANYWHERE = "tcp://127.0.0.1:*"


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def look(
    session: aiohttp.ClientSession,
    *lines: str,
    indexer: str | None = None,
    wait_s: float = 0.3,
    curve: Curve | None = None,
) -> dict[tuple[str, str], Finding]:
    found = examine(parse_replicas(lines), indexer, session, wait_s=wait_s, curve=curve)
    return {(finding.of, finding.check): finding async for finding in found}


def bad(findings: dict[tuple[str, str], Finding]) -> set[str]:
    return {check for (_, check), finding in findings.items() if finding.level == "bad"}


class Ill:
    """An engine's HTTP API that says what a test wants of its events."""

    def __init__(self, sources: Any = None, caching: str = "True") -> None:
        self.sources = sources
        self.caching = caching
        self.requests = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/kv_event_sources", self._sources)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def _sources(self, _: web.Request) -> web.Response:
        return web.json_response(self.sources) if self.sources is not None else web.Response(status=404)

    async def _metrics(self, _: web.Request) -> web.Response:
        self.requests += 3
        return web.Response(
            text=f'vllm:cache_config_info{{block_size="16",enable_prefix_caching="{self.caching}"}} 1.0\n'
            f'vllm:request_success_total{{finished_reason="stop"}} {self.requests}\n'
        )


async def test_ev32_all_is_well_with_an_engine_that_publishes_and_replays(
    session: aiohttp.ClientSession,
) -> None:
    async with Engine(EngineSettings(**QUICK, events=ANYWHERE, replay=ANYWHERE, ranks=2)) as engine:
        for _ in range(2):
            body = {"model": "model", "prompt": list(range(64)), "max_tokens": 1}
            async with session.post(engine.url + "/v1/completions", json=body) as answer:
                assert answer.status == 200
        findings = await look(session, f"e0={engine.url}")
    assert bad(findings) == set(), findings
    assert findings["e0", "rank 1 replay"].found == "answers with 1 batches"
    assert findings["e0", "rank 0 block size"].found == "16 tokens"
    assert findings["e0", "prefix caching"].found == "on"


@pytest.mark.parametrize(
    ("case", "found", "fix"),
    [
        ("the key", "in its replay", ""),
        ("no key", "it wants a CURVE key, and none is given for it", "give --curve-key FILE"),
        ("another one's key", "it has another CURVE key", "compare --curve-server e0=FILE"),
    ],
)
async def test_op10_ev32_an_engine_with_keys_is_heard_by_its_key_and_a_wrong_one_is_said(
    session: aiohttp.ClientSession, tmp_path: Path, case: str, found: str, fix: str
) -> None:
    (public, held), (wrong, ours) = (write_pair(tmp_path / name) for name in ("engine", "ours"))
    servers = {"the key": (f"e0={public}",), "no key": (), "another one's key": (f"e0={wrong}",)}[case]
    curve = read_curve(str(ours), servers, ()) if servers else None
    settings = EngineSettings(**QUICK, events=ANYWHERE, replay=ANYWHERE, curve_key=str(held))
    async with Engine(settings) as engine:
        body = {"model": "model", "prompt": list(range(64)), "max_tokens": 1}
        async with session.post(engine.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200
        findings = await look(session, f"e0={engine.url}", curve=curve)
    events = findings["e0", "rank 0 events"]
    assert found in events.found
    assert events.fix.startswith(fix)
    assert bad(findings) == ({"rank 0 events"} if fix else set())


async def test_ev32_nobody_at_the_url_is_all_that_is_said(session: aiohttp.ClientSession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    findings = await look(session, f"e0=http://127.0.0.1:{port}")
    assert list(findings) == [("e0", "http")]
    assert findings["e0", "http"].level == "bad"


async def test_ev32_a_publisher_that_connects_instead_of_binding_is_told_to_bind(
    session: aiohttp.ClientSession,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    connects = {"0": {"endpoint": "tcp://0.0.0.0:5557", "enable_kv_cache_events": True}}
    closed = {"0": {"endpoint": f"tcp://127.0.0.1:{port}", "enable_kv_cache_events": True}}
    async with TestServer(Ill(connects).app()) as one, TestServer(Ill(closed).app()) as two:
        findings = await look(session, f"a={one.make_url('')}", f"b={two.make_url('')}")
    assert "tcp://*:5557" in findings["a", "event source"].fix
    assert "tcp://*:PORT" in findings["b", "rank 0 port"].fix
    assert findings["b", "rank 0 port"].found.endswith("Connection refused")


@pytest.mark.parametrize("sources", [None, {}])
async def test_op04_an_engine_without_events_is_told_the_flags(
    session: aiohttp.ClientSession, sources: Any
) -> None:
    async with TestServer(Ill(sources).app()) as server:
        findings = await look(session, f"e0={server.make_url('')}")
    assert bad(findings) == {"event source"}
    assert "enable_kv_cache_events" in findings["e0", "event source"].fix


async def test_op04_requests_that_complete_without_an_event_and_caching_that_is_off_are_told(
    session: aiohttp.ClientSession,
) -> None:
    silent = Publisher(ANYWHERE)
    try:
        async with TestServer(Ill(caching="False").app()) as server:
            line = f"e0={server.make_url('')},events={silent.endpoint}"
            findings = await look(session, line, wait_s=0.1)
    finally:
        silent.close()
    assert bad(findings) == {"prefix caching", "rank 0 events"}
    assert findings["e0", "rank 0 events"].found == "none in 0.1 s, while 3 requests completed"
    assert findings["e0", "rank 0 replay"].level == "warning"


async def test_ev32_a_block_size_that_is_not_the_engines_and_a_port_of_something_else_are_told(
    session: aiohttp.ClientSession,
) -> None:
    other = Publisher(ANYWHERE, ANYWHERE)
    other.publish_payload(b"hello")
    try:
        async with TestServer(Ill().app()) as server:
            at = f"events={other.endpoint},replay={other.replay_endpoint}"
            findings = await look(session, f"e0={server.make_url('')},{at},block-size=32")
    finally:
        other.close()
    assert bad(findings) == {"rank 0 payloads", "rank 0 block size"}


async def test_ev31_ev32_what_the_indexer_says_is_told_and_what_it_does_not_follow(
    session: aiohttp.ClientSession,
) -> None:
    stream = {"instance": "e1", "rank": 0, "state": "offline", "reason": "lost", "blocks": 3}
    told = {"replicas": [stream | {"skipped": {"sparse": 2}}], "unmatched_topics": {"kv@x@m": 7}}

    async def replicas(_: web.Request) -> web.Response:
        return web.json_response(told)

    app = web.Application()
    app.router.add_get("/debug/replicas", replicas)
    async with TestServer(app) as server, TestServer(Ill({}).app()) as engine:
        url = str(server.make_url(""))
        findings = await look(session, f"e0={engine.make_url('')}", indexer=url)
        wrong = await look(session, indexer=str(engine.make_url("")))
    assert findings["e0", "indexer"].level == "bad"
    assert findings["e1", "rank 0 in the indexer"].found == "offline: lost; 3 blocks; left out: 2 sparse"
    assert findings["indexer", "topics"].found == "7 messages of no registered topic: kv@x@m"
    assert bad(wrong) == {"http"}


async def test_ev32_replicas_with_one_address_and_events_of_another_engine_are_told(
    session: aiohttp.ClientSession,
) -> None:
    told = {
        "0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "enable_kv_cache_events": True}
    }
    async with TestServer(Ill(told).app()) as server:
        url = server.make_url("")
        one = f"e0={url},events=tcp://127.0.0.1:1"
        findings = await look(session, one, f"e1={url},events=tcp://127.0.0.1:1,replay=tcp://127.0.0.1:5558")
        bound = await look(
            session, *(f"e{n}=http://127.0.0.1:{n},events=bind:tcp://*:9,topic=t{n}" for n in (1, 2))
        )
    assert findings["e1", "address"].found == "tcp://127.0.0.1:1 is that of e0 too"
    assert ("e0", "address") not in findings
    crossed = findings["e0", "rank 0 events port"]
    assert (crossed.level, crossed.found) == (
        "warning",
        "events=tcp://127.0.0.1:1 is configured, and the engine says port 5557",
    )
    assert ("e1", "rank 0 replay port") not in findings
    assert not any(check == "address" for _, check in bound)


async def test_a_server_without_tls_is_told_to_be_asked_without(session: aiohttp.ClientSession) -> None:
    async with TestServer(Ill().app()) as server:
        url = str(server.make_url("")).replace("http:", "https:")
        found = (await look(session, f"e0={url}"))["e0", "http"]
    assert "TLS: " in found.found
    assert found.fix.startswith("write http://")


async def test_op04_a_model_that_the_engine_does_not_serve_is_told(session: aiohttp.ClientSession) -> None:
    async with TestServer(Ill().app()) as server:
        line = f"e0={server.make_url('')}"
        wrong = (await look(session, f"{line},model=other"))["e0", "models"]
        right = (await look(session, f"{line},model=m"))["e0", "models"]
    assert (wrong.level, wrong.found) == ("bad", "serves m; other is configured")
    assert (right.level, right.found) == ("ok", "serves m")


def test_op04_the_map_of_the_config_file_is_looked_at_and_its_indexer_asked(tmp_path: Path) -> None:
    folder, config = tmp_path / "map", tmp_path / "warmroute.toml"
    config.write_text(f'[router]\nmap = "{folder}"\n')

    def told() -> dict[tuple[str, str], str]:
        done = CliRunner().invoke(main, ["--config", str(config), "doctor", "--wait-s", "0", "--json"])
        findings = json.loads(done.stdout)["findings"]
        return {(each["of"], each["level"]): each["found"] for each in findings}

    assert told()["map", "bad"].startswith(f"no map in {folder} yet")
    with closing(MapWriter(folder)) as writer:
        writer.set_address("http://127.0.0.1:1")
    assert told()["map", "bad"] == f"{folder}: no sign of its indexer since this host started"
    assert told()["indexer", "bad"] == "http://127.0.0.1:1: Connection refused"
    for silent_s, level, found in ((60, "bad", "indexer for 6"), (0, "ok", "kept by http://127.0.0.1:1")):
        beat_at = boot_clock() - silent_s
        with closing(MapWriter(folder, clock=lambda at=beat_at: at)) as writer:
            writer.set_address("http://127.0.0.1:1")
            with writer.group():
                pass
        assert found in told()["map", level]


def test_the_command_ends_with_1_when_something_is_wrong_and_says_what_to_give() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run = CliRunner().invoke
    lost = run(main, ["doctor", "--replica", f"e0=http://127.0.0.1:{port}", "--json"])
    assert (lost.exit_code, json.loads(lost.stdout)["findings"][0]["level"]) == (1, "bad")
    shown = run(main, ["doctor", "--replica", f"e0=http://127.0.0.1:{port}"])
    assert (shown.exit_code, "start it, or correct its URL" in shown.stdout) == (1, True)
    assert run(main, ["doctor"]).exit_code == 2
    assert run(main, ["doctor", "--replica", "nonsense"]).exit_code == 2


def test_op10_the_command_takes_the_indexers_keys_from_flags_and_from_its_table(tmp_path: Path) -> None:
    config = tmp_path / "warmroute.toml"
    config.write_text(f'[indexer]\ncurve_key = "{tmp_path}/of-the-file"\ncurve_server = ["*=x"]\n')
    run, line = CliRunner().invoke, ["doctor", "--replica", "e0=http://127.0.0.1:1"]
    by_file = run(main, ["--config", str(config), *line])
    by_flag = run(main, [*line, "--curve-key", str(tmp_path / "of-the-flag")])
    record = run(main, ["record", "--output", str(tmp_path / "r"), "--curve-server", f"e0={tmp_path}/none"])
    assert (by_file.exit_code, "--curve-server * x: no keys" in by_file.stderr) == (2, True)
    assert (by_flag.exit_code, "--curve-key alone protects nothing" in by_flag.stderr) == (2, True)
    assert (record.exit_code, "--curve-server e0" in record.stderr) == (2, True)


def test_one_resolver_looks_up_all_that_the_command_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, asked_by = socket.getaddrinfo, set()

    def noted(host: str, *more: Any, **named: Any) -> Any:
        if host == "localhost":
            asked_by.add((host, threading.current_thread().name))
        return ask(host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", noted)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    CliRunner().invoke(main, ["doctor", "--replica", f"e0=http://localhost:{port}"])
    assert asyncio.run(_connect(f"tcp://localhost:{port}")) == "Connection refused"
    assert asked_by == {("localhost", "lookup of localhost")}


def test_ev32_what_we_write_of_engines_binds() -> None:
    """vLLM connects where there is no wildcard (``tcp://0.0.0.0:5557`` too), and nobody hears it."""
    endpoints = []
    for name in ("docs/operating.md", "README.md", "compose/compose.yaml", "router/doctor.py"):
        text = (ROOT / name).read_text()
        endpoints += re.findall(r'endpoint":\s*"([^"]+)"', text)
        endpoints += re.findall(r"- --(?:events|replay)=(\S+)", text)
    assert len(endpoints) > 8
    assert [endpoint for endpoint in endpoints if "*" not in endpoint] == []
