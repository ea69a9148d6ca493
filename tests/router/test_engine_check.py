"""EV-32, OP-04: why no events come of an engine: simulated engines, and such as are ill."""

import socket
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from events.curve import Curve, read_curve, write_pair
from events.publisher import Publisher
from router.engine_check import EngineCheck
from router.finding import Finding
from router.replicas import parse_replica
from simulator.engine import Engine
from simulator.settings import EngineSettings

QUICK: dict[str, Any] = {"listen": "127.0.0.1:0", "prefill_rate": 1e6, "decode_rate": 1e4}
ANYWHERE = "tcp://127.0.0.1:*"


async def look(
    session: aiohttp.ClientSession, line: str, *, wait_s: float = 0.3, curve: Curve | None = None
) -> dict[str, Finding]:
    """What is found of one replica, by check."""
    check = EngineCheck(parse_replica(line), session, wait_s, curve, time.monotonic)
    return {finding.check: finding for finding in await check.findings()}


def bad(findings: dict[str, Finding]) -> set[str]:
    return {check for check, finding in findings.items() if finding.level == "bad"}


def sources(endpoint: str, **more: str) -> dict[str, Any]:
    """What an engine with one rank answers at /kv_event_sources."""
    return {"0": {"endpoint": endpoint, "enable_kv_cache_events": True, **more}}


def completing(caching: str = "True") -> Callable[[], bytes]:
    """The metrics of an engine that completes three requests between two looks at them."""
    requests = count(3, 3)

    def metrics() -> bytes:
        return (
            f'vllm:cache_config_info{{block_size="16",enable_prefix_caching="{caching}"}} 1.0\n'
            f'vllm:request_success_total{{finished_reason="stop"}} {next(requests)}\n'
        ).encode()

    return metrics


async def complete(session: aiohttp.ClientSession, engine: Engine) -> None:
    body = {"model": "model", "prompt": list(range(64)), "max_tokens": 1}
    async with session.post(engine.url + "/v1/completions", json=body) as answer:
        assert answer.status == 200


async def test_ev32_all_is_well_with_an_engine_that_publishes_and_replays(
    session: aiohttp.ClientSession,
) -> None:
    async with Engine(EngineSettings(**QUICK, events=ANYWHERE, replay=ANYWHERE, ranks=2)) as engine:
        for _ in range(2):
            await complete(session, engine)
        findings = await look(session, f"e0={engine.url}")
    assert bad(findings) == set(), findings
    assert findings["rank 1 replay"].found == "answers with 1 batches"
    assert findings["rank 0 block size"].found == "16 tokens"
    assert findings["prefix caching"].found == "on"


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
        await complete(session, engine)
        findings = await look(session, f"e0={engine.url}", curve=curve)
    events = findings["rank 0 events"]
    assert found in events.found
    assert events.fix.startswith(fix)
    assert bad(findings) == ({"rank 0 events"} if fix else set())


async def test_ev32_nobody_at_the_url_is_all_that_is_said(session: aiohttp.ClientSession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    findings = await look(session, f"e0=http://127.0.0.1:{port}")
    assert list(findings) == ["http"]
    assert findings["http"].level == "bad"


async def test_ev32_a_publisher_that_connects_instead_of_binding_is_told_to_bind(
    session: aiohttp.ClientSession, start_engine: Any
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    connects = await start_engine(event_sources=sources("tcp://0.0.0.0:5557"))
    closed = await start_engine(event_sources=sources(f"tcp://127.0.0.1:{port}"))
    assert "tcp://*:5557" in (await look(session, f"e0={connects.url}"))["event source"].fix
    of_port = (await look(session, f"e0={closed.url}"))["rank 0 port"]
    assert "tcp://*:PORT" in of_port.fix
    assert of_port.found.endswith("Connection refused")


@pytest.mark.parametrize("told", [None, {}])
async def test_op04_an_engine_without_events_is_told_the_flags(
    session: aiohttp.ClientSession, start_engine: Any, told: Any
) -> None:
    engine = await start_engine(event_sources=told)
    findings = await look(session, f"e0={engine.url}")
    assert bad(findings) == {"event source"}
    assert "enable_kv_cache_events" in findings["event source"].fix


async def test_op04_requests_that_complete_without_an_event_and_caching_that_is_off_are_told(
    session: aiohttp.ClientSession, start_engine: Any
) -> None:
    engine, silent = await start_engine(metrics=completing(caching="False")), Publisher(ANYWHERE)
    try:
        findings = await look(session, f"e0={engine.url},events={silent.endpoint}", wait_s=0.1)
    finally:
        silent.close()
    assert bad(findings) == {"prefix caching", "rank 0 events"}
    assert findings["rank 0 events"].found == "none in 0.1 s, while 3 requests completed"
    assert findings["rank 0 replay"].level == "warning"


async def test_ev32_a_block_size_that_is_not_the_engines_and_a_port_of_something_else_are_told(
    session: aiohttp.ClientSession, start_engine: Any
) -> None:
    engine, other = await start_engine(metrics=completing()), Publisher(ANYWHERE, ANYWHERE)
    other.publish_payload(b"hello")
    try:
        at = f"events={other.endpoint},replay={other.replay_endpoint}"
        findings = await look(session, f"e0={engine.url},{at},block-size=32")
    finally:
        other.close()
    assert bad(findings) == {"rank 0 payloads", "rank 0 block size"}


async def test_ev32_ports_that_are_not_those_that_the_engine_tells_are_told(
    session: aiohttp.ClientSession, start_engine: Any
) -> None:
    engine = await start_engine(event_sources=sources("tcp://*:5557", replay_endpoint="tcp://*:5558"))
    line = f"e0={engine.url},events=tcp://127.0.0.1:1,replay=tcp://127.0.0.1:5558"
    findings = await look(session, line)
    crossed = findings["rank 0 events port"]
    assert (crossed.level, crossed.found) == (
        "warning",
        "events=tcp://127.0.0.1:1 is configured, and the engine says port 5557",
    )
    assert "rank 0 replay port" not in findings


async def test_a_server_without_tls_is_told_to_be_asked_without(
    session: aiohttp.ClientSession, start_engine: Any
) -> None:
    engine = await start_engine()
    found = (await look(session, f"e0={engine.url.replace('http:', 'https:')}"))["http"]
    assert "TLS: " in found.found
    assert found.fix.startswith("write http://")


async def test_op04_a_model_that_the_engine_does_not_serve_is_told(
    session: aiohttp.ClientSession, start_engine: Any
) -> None:
    engine = await start_engine()
    wrong = (await look(session, f"e0={engine.url},model=other"))["models"]
    right = (await look(session, f"e0={engine.url},model=m"))["models"]
    assert (wrong.level, wrong.found) == ("bad", "serves m; other is configured")
    assert (right.level, right.found) == ("ok", "serves m")
