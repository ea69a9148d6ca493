from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.assembly import router_app
from router.errors import ListenError, RouterError, SettingsError
from router.listening import listening
from router.service import serve
from router.settings import RouterSettings
from tests.router.command import started
from tests.router.forked import all_at_once

ROOT = Path(__file__).resolve().parents[2]
ROUTER = ("router", "--listen", "127.0.0.1:0")


async def start(settings: RouterSettings) -> None:
    async with router_app(settings) as router, listening(router):
        pass


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"policy": "cache-awere"}, "cache-awere"),
        ({"replica": ("a=http://h:1", "a=http://h:2")}, "a is given twice"),
        ({"replica": ("nonsense",)}, "nonsense"),
        ({"listen": "8080"}, "8080"),
        ({"listen": "127.0.0.1:99999"}, "99999"),
        ({"indexer": "127.0.0.1:9400"}, "127.0.0.1:9400"),
        ({"map": __file__}, "is a file"),
        ({"max_inflight": 0}, "--max-inflight 0"),
    ],
)
async def test_bad_settings_keep_it_from_starting_and_the_message_names_them(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        await start(RouterSettings(**settings))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"policy": "cache-awere"}, "--policy 'cache-awere'"),
        ({"replica": ("a=http://h:1", "a=http://h:2")}, "--replica a "),
        ({"replica": ("nonsense",)}, "--replica 'nonsense'"),
        ({"replica": ("a=http://h:1,events=ipc:///run/kv,ranks=2",)}, "--replica a"),
        ({"listen": "8080"}, "--listen '8080'"),
        ({"listen": "127.0.0.1:99999"}, "--listen"),
        ({"indexer": "127.0.0.1:9400"}, "--indexer"),
        ({"indexer": "http://"}, "--indexer"),
        ({"indexer": "http://h:99999"}, "--indexer"),
        ({"max_inflight": 0}, "--max-inflight 0"),
        ({"connect_timeout_s": float("nan")}, "--connect-timeout-s nan"),
        ({"idle_timeout_s": float("inf")}, "--idle-timeout-s inf"),
        ({"grace_s": float("inf")}, "--grace-s inf"),
        ({"tls_client_ca": "ca.pem"}, "--tls-client-ca does nothing without --tls-cert"),
        ({"tls_key": "key.pem"}, "--tls-key does nothing without --tls-cert"),
        ({"upstream_key": "key.pem"}, "--upstream-key does nothing without --upstream-cert"),
        (
            {"admin_listen": "127.0.0.1:65535", "workers": 2},
            "--admin-listen: the pages of 2 workers would be at port",
        ),
        ({"queue_limit": 5}, "--queue-limit does nothing without --max-inflight"),
        ({"replica": ("a=http://h:8000/v1/",)}, "--replica a: 'http://h:8000/v1/': paths begin with /v1"),
    ],
)
def test_what_cannot_be_run_with_is_known_from_the_settings_alone(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(SettingsError, match=re.escape(says)):
        RouterSettings(**settings).check()


def test_settings_that_can_be_run_with_pass_the_check() -> None:
    RouterSettings().check()
    RouterSettings(
        listen="[::1]:0", indexer="http://h:9400/", replica=("a=http://h:1,ranks=2",), max_inflight=1
    ).check()


async def test_a_port_in_use_is_told_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ListenError) as caught:
            await start(RouterSettings(listen=address, admin_listen="same"))
    assert str(caught.value) == f"cannot listen on {address}: address already in use; choose another --listen"
    assert isinstance(caught.value, RouterError)


async def test_op03_a_router_alone_starts_and_answers_503_with_retry_after(start_router: Any) -> None:
    router = await start_router()
    for path in ("/v1/completions", "/v1/embeddings"):
        async with router.client.post(router.url + path, json={"model": "m", "prompt": "x"}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
            assert response.headers["x-warmroute-reason"] == "no replica"
            assert (await response.json())["error"]["type"] == "ServiceUnavailableError"
    async with router.client.get(f"{router.url}/ready") as response:
        assert response.status == 503
    async with router.client.get(f"{router.url}/health") as response:
        assert response.status == 200


async def test_op03_without_index_tokenizer_and_collector_it_serves_by_load_and_says_why(
    start_engine: Any, start_router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    engine = await start_engine(tokenize=None)
    router = await start_router(engine)
    response = await router.complete("hello")
    assert response.status == 200
    assert response.headers["x-warmroute-reason"].startswith("fallback: ")
    decision = (await router.get("/debug/decisions"))["decisions"][0]
    assert decision["mode"] == "fallback"
    assert await router.metric("fallback_total", reason=decision["fallback"]) == 1
    assert (await router.get("/debug/replicas"))["indexer"] is None
    async with router.client.get(f"{router.url}/ready") as ready:
        assert ready.status == 200


async def test_op03_a_router_that_has_no_index_to_go_by_says_so_at_its_start(
    start_router: Any, tmp_path: Path, caplog: Any
) -> None:
    for settings, warned in (
        ({}, True),
        ({"policy": "session"}, False),
        ({"map": str(tmp_path)}, False),
        ({"indexer": "http://127.0.0.1:9"}, False),
    ):
        caplog.clear()
        await start_router(**settings)
        assert ("no index to go by" in caplog.text) == warned, settings


async def test_px14_503_only_when_no_replica_is_healthy(
    start_engine: Any, start_router: Any, until: Any
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    engine.health_status = 500
    await until(lambda: not router.parts.fleet.usable(), "it is down")
    response = await router.complete("x")
    assert (response.status, response.headers["x-warmroute-reason"]) == (503, "no healthy replica")
    # /debug is not on the port that the client knows.
    assert "--admin-listen" in (await response.json())["error"]["message"]
    engine.health_status = 200
    await until(lambda: bool(router.parts.fleet.usable()), "it is up")
    assert (await router.complete("x")).status == 200


@pytest.mark.parametrize("body", [b"{", b"[]", b"nonsense", b'{"model": 7}'])
async def test_bad_json_is_400_in_openais_shape_and_reaches_no_engine(
    start_engine: Any, start_router: Any, body: bytes
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    for path in ("/v1/completions", "/v1/chat/completions"):
        async with router.client.post(router.url + path, data=body) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["type"]) == (400, 400, "Bad Request")
            assert response.headers["x-warmroute-policy"] == "cache-aware"
            assert "x-warmroute-replica" not in response.headers
            assert response.headers["X-Request-Id"]
    assert engine.generated == 0


async def test_an_unknown_model_is_404_as_vllm_says_it(start_engine: Any, start_router: Any) -> None:
    router = await start_router(await start_engine())
    response = await router.complete("x", model="other")
    assert response.status == 404
    assert response.headers["x-warmroute-reason"] == "unknown model"
    async with router.client.post(f"{router.url}/v1/completions", json={"model": "other"}) as again:
        error = (await again.json())["error"]
    assert error == {
        "message": "The model `other` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


async def test_a_missing_model_is_the_engines_own(start_engine: Any, start_router: Any) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    async with router.client.post(f"{router.url}/v1/completions", json={"prompt": "x"}) as response:
        assert response.status == 200
    assert json.loads(engine.bodies[-1]) == {"prompt": "x"}


async def test_two_models_go_to_their_own_replicas(start_engine: Any, start_router: Any) -> None:
    first, second = await start_engine(), await start_engine(cards=[{"id": "other"}])
    router = await start_router(first, second)
    for model, replica in (("m", "e0"), ("other", "e1")) * 5:
        assert (await router.complete("x", model=model)).headers["x-warmroute-replica"] == replica


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"other","prompt":"x","temperature":NaN}',
        b'\xef\xbb\xbf{"model":"other","prompt":"x"}',
    ],
)
async def test_json_that_only_python_reads_goes_to_a_replica_of_its_model(
    start_engine: Any, start_router: Any, body: bytes
) -> None:
    first, second = await start_engine(), await start_engine(cards=[{"id": "other"}])
    router = await start_router(first, second)
    for path in ("completions", "responses") * 8:
        headers = {"Content-Type": "application/json"}
        async with router.client.post(f"{router.url}/v1/{path}", data=body, headers=headers) as response:
            assert response.headers["x-warmroute-replica"] == "e1"
    assert first.generated == 0
    assert set(second.bodies) == {body}


async def test_a_request_without_a_model_is_for_the_first_replicas_model_whatever_else_is_served(
    start_engine: Any, start_router: Any, until: Any, kit: Any
) -> None:
    engines = [await start_engine(cards=[{"id": name}]) for name in ("a", "b", "a")]
    lookup = kit.lookup(kit.matched("e1", 96), kit.matched("e2", 32))
    router = await start_router(*engines, lookup=lookup)
    for path, body in (("completions", {"prompt": [1] * 100}), ("embeddings", {"input": "x"})) * 8:
        async with router.client.post(f"{router.url}/v1/{path}", json=body) as response:
            assert response.headers["x-warmroute-replica"] in ("e0", "e2")
    assert {asked[0] for asked in lookup.asked} == {"a"}
    assert {json.dumps(json.loads(body).get("model")) for e in engines for body in e.bodies} == {"null"}
    for engine in (engines[0], engines[2]):
        engine.health_status = 500
    await until(lambda: len(router.parts.fleet.usable()) == 1, "only the other model is up")
    async with router.client.post(f"{router.url}/v1/completions", json={"prompt": "x"}) as response:
        assert response.status == 503


async def test_px14_a_model_whose_only_replica_is_down_is_named(
    start_engine: Any, start_router: Any, until: Any
) -> None:
    first, second = await start_engine(), await start_engine(cards=[{"id": "other"}])
    router = await start_router(first, second)
    await second.stop()
    await until(lambda: len(router.parts.fleet.usable()) == 1, "it is down")
    for path in ("completions", "embeddings"):
        body = {"model": "other", "prompt": "x"}
        async with router.client.post(f"{router.url}/v1/{path}", json=body) as response:
            assert response.status == 503
            assert response.headers["x-warmroute-reason"] == "no healthy replica of model other"
            assert "model other" in (await response.json())["error"]["message"]
            assert "Retry-After" in response.headers


@pytest.mark.parametrize("up", [True, False])
async def test_px10_the_list_of_models_echoes_the_request_id(
    start_engine: Any, start_router: Any, until: Any, up: bool
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    if not up:
        await engine.stop()
        await until(lambda: not router.parts.fleet.usable(), "it is down")
    async with router.client.get(f"{router.url}/v1/models", headers={"X-Request-Id": "mine"}) as response:
        assert response.status == (200 if up else 503)
        assert response.headers["X-Request-Id"] == "mine"


async def test_px15_models_are_listed_while_a_replica_is_down(
    start_engine: Any, start_router: Any, until: Any
) -> None:
    first, second = await start_engine(), await start_engine(cards=[{"id": "other", "max_model_len": 9}])
    third = await start_engine()
    router = await start_router(first, second, third)
    await third.stop()
    await until(lambda: len(router.parts.fleet.usable()) == 2, "one is down")
    data = (await router.get("/v1/models"))["data"]
    assert [(card["id"], card.get("max_model_len")) for card in data] == [("m", 4096), ("other", 9)]


async def test_rq17_full_replicas_are_passed_by_and_when_all_are_full_it_says_so_at_once(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    gate = asyncio.Event()
    engines = [await start_engine(answer=kit.gated(gate)) for _ in range(2)]
    router = await start_router(*engines, max_inflight=2)
    tasks = [asyncio.create_task(router.complete("x")) for _ in range(4)]
    await kit.wait_until(lambda: [engine.open for engine in engines] == [2, 2], "both are full")
    response = await router.complete("x")
    assert (response.status, response.headers["x-warmroute-reason"]) == (503, "saturated")
    assert "Retry-After" in response.headers
    gate.set()
    await asyncio.gather(*tasks)
    assert (await router.complete("x")).status == 200


async def test_debug_shows_replicas_and_decisions_with_every_cost_term(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    router = await start_router(
        await start_engine(), await start_engine(), lookup=kit.lookup(kit.matched("e0", 32)), decisions_kept=2
    )
    for _ in range(3):
        response = await router.complete(list(range(40)))
    shown = (await router.get("/debug/decisions"))["decisions"]
    assert len(shown) == 2
    assert shown[0]["request_id"] == response.headers["X-Request-Id"]
    best = shown[0]["ranked"][0]
    assert best["terms"] == {
        "overhead": 0.01,
        "queued": 0.0,
        "in_flight": 0.0,
        "uncached": pytest.approx(0.0008),
        "behind": 0.0,
        "displaced": 0.0,
        "shared": 0.0,
        "late": 0.0,
    }
    assert best["cost"] == pytest.approx(0.0108)
    assert len((await router.get("/debug/decisions?limit=1"))["decisions"]) == 1
    assert (await router.get("/debug/decisions?limit=" + "9" * 5000))["decisions"]
    replica = (await router.get("/debug/replicas"))["replicas"][0]
    assert (replica["name"], replica["health"], replica["model"]) == ("e0", "up", "m")


async def test_metrics_are_in_prometheus_format(start_engine: Any, start_router: Any) -> None:
    router = await start_router(await start_engine())
    await router.complete("x", stream=True)
    async with router.client.get(f"{router.url}/metrics") as response:
        text = await response.text()
    assert 'warmroute_router_requests_total{policy="cache-aware",replica="e0",status="200"} 1.0' in text
    assert 'warmroute_router_inflight_requests{rank="0",replica="e0"} 0.0' in text
    assert 'warmroute_router_ttft_seconds_count{policy="cache-aware",replica="e0"} 1.0' in text


async def test_px13_health_answers_while_long_prompts_are_tokenised(
    start_engine: Any, start_router: Any
) -> None:
    router = await start_router(await start_engine())
    slowest = 0.0

    async def probe() -> None:
        nonlocal slowest
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            async with router.client.get(f"{router.url}/health"):
                slowest = max(slowest, loop.time() - begun)
            await asyncio.sleep(0.01)

    probing = asyncio.create_task(probe())
    await asyncio.gather(*(router.complete(f"{number} " + "word " * 20_000) for number in range(16)))
    probing.cancel()
    # The engine of the test shares this loop, so the bound is wide; it only must not be held for seconds.
    assert slowest < 2


NAMES_THAT_HANG = """
import asyncio, os, socket, sys, threading
import router.discovery
from router.service import serve
from router.service import serve
from router.settings import RouterSettings
own = socket.getaddrinfo
def getaddrinfo(host, *arguments, **fields):
    if host == "hangs.test":
        os.write(1, b"asked\\n")  # in one piece, from any thread
        threading.Event().wait()
    return own(host, *arguments, **fields)
socket.getaddrinfo = getaddrinfo
router.discovery.LOOKUP_TIMEOUT_S = 0.5
settings = RouterSettings(
    listen="127.0.0.1:0", shutdown_delay_s=0, replica=("a=http://hangs.test:1",),
    dns=("pool=http://hangs.test:1",) if sys.argv[1] == "dns" else (),
)
asyncio.run(serve(settings))
"""


@pytest.mark.parametrize("where", ["replica", "dns"])
async def test_a_name_that_is_never_found_holds_up_neither_the_start_nor_the_end(where: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NAMES_THAT_HANG, where, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            assert await process.stdout.readline() == b"asked\n"
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):  # the lookup never ends
            assert await process.wait() in (0, -signal.SIGTERM)
    finally:
        if process.returncode is None:
            process.kill()


async def test_px17_at_sigterm_open_streams_finish_idle_connections_close_and_it_exits(
    start_engine: Any, kit: Any
) -> None:
    gate = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        return await kit.stream(request, [b"data: {}\n\n", b"data: [DONE]\n\n"], gate.wait)

    engine = await start_engine(answer=answer)
    process, url = await started(
        *ROUTER, "--replica", f"e0={engine.url}", "--grace-s", "20", "--shutdown-delay-s", "0.5"
    )
    port = int(url.rpartition(":")[2])
    async with aiohttp.ClientSession() as client:
        async with asyncio.timeout(10):
            while (await client.get(f"{url}/ready")).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        idle, idle_writer = await asyncio.open_connection("127.0.0.1", port)
        idle_writer.write(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n")
        assert b" 200 " in await idle.readuntil(b"\r\n")
        async with client.post(f"{url}/v1/completions", json={"prompt": [1], "stream": True}) as response:
            await response.content.readexactly(10)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                while True:
                    async with client.get(f"{url}/ready") as ready:
                        if ready.status == 503:
                            break
            refused = False
            async with asyncio.timeout(10):
                while not refused:
                    try:
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                        writer.close()
                        await asyncio.sleep(0.01)
                    except OSError:
                        refused = True
            async with asyncio.timeout(10):
                await idle.read()  # to its end: it is closed, while the stream goes on
            idle_writer.close()
            gate.set()
            assert (await response.content.read()).endswith(b"[DONE]\n\n")
        async with asyncio.timeout(5):
            assert await process.wait() == 0


async def test_px17_a_stream_that_does_not_end_is_cut_after_the_grace(start_engine: Any, kit: Any) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        async def wait() -> None:
            await asyncio.Event().wait()

        return await kit.stream(request, [b"data: {}\n\n"], wait)

    engine = await start_engine(answer=answer)
    process, url = await started(*ROUTER, "--replica", f"e0={engine.url}", "--grace-s", "0.3")
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v1/completions", json={"prompt": [1], "stream": True}) as response,
    ):
        await response.content.readexactly(10)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(5):
            assert await process.wait() == 0
    await kit.wait_until(lambda: engine.open == 0, "the engine is let go")


def test_op02_a_reload_that_is_asked_for_while_it_starts_is_done_once_it_is_up() -> None:
    read = 0

    def reread() -> RouterSettings:
        nonlocal read
        read += 1
        os.kill(os.getpid(), signal.SIGHUP if read == 1 else signal.SIGTERM)
        return settings

    async def run() -> None:
        async with asyncio.timeout(20):
            await serve(settings, reread=reread)

    def begin(_: int) -> None:
        asyncio.run(run())
        assert read == 2

    settings = RouterSettings(listen="127.0.0.1:0")
    all_at_once(1, begin)
