"""Who may come in, and what is shown to whom: over real sockets."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import pty
import shutil
import socket
import ssl
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from router.board import Table
from router.credential import credential
from router.doors import SHAPE, Allowance, Doors, KeySpec, parse_key, parse_keys
from router.errors import RefusedError, SettingsError
from router.ledger import Ledger
from router.settings import UPSTREAM_CLIENTS, RouterSettings
from router.tls import client_context, server_context
from tests.router.forked import all_at_once, patient_mutex

BODY = {"model": "m", "prompt": [1]}
KEY = "sk-router-secret"


def line(key: str = KEY, name: str = "team", more: str = "") -> str:
    return f"{name}={hashlib.sha256(key.encode()).hexdigest()}{more}"


@pytest.mark.parametrize(
    "text",
    [
        *("", KEY, f"team={KEY}", "team=abc", line(name="")),
        *(line(more=f",{limit}") for limit in ("rate=x", "rate=0", "rate=inf", "rate=1,rate=2", "speed=1")),
        line(more=",concurrency=0"),
    ],
)
def test_a_key_that_makes_no_sense_is_refused_and_never_quoted(text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_key(text)
    assert KEY not in str(caught.value)


def test_keys_are_given_once() -> None:
    for lines in ([line(), line("other")], [line(), line(name="two")]):
        with pytest.raises(SettingsError, match="twice"):
            parse_keys(lines)
    assert [key.name for key in parse_keys([line(), line("other", "two")])] == ["team", "two"]


def test_a_rate_lets_a_second_of_it_in_at_once_and_then_one_by_one() -> None:
    now = 100.0
    allowance = Allowance(KeySpec("k", b"", rate=2.0), lambda: now)

    def admitted() -> int:
        before = allowance.running

        def enter_all() -> None:
            while True:
                allowance.enter()

        with pytest.raises(RefusedError) as refused:
            enter_all()
        assert (refused.value.status, refused.value.retry_after) == (429, 1)
        return allowance.running - before

    assert admitted() == 2
    now += 0.5
    assert admitted() == 1
    now += 60
    assert admitted() == 2


def may_enter(allowance: Allowance) -> bool:
    try:
        allowance.enter()
    except RefusedError:
        return False
    return True


@settings(deadline=None)
@given(
    st.sampled_from([0.5, 2.5, 4.0]),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["enter", "enter", "leave", "tick"])), max_size=60),
)
def test_a_keys_limits_are_the_same_over_several_workers_as_over_one(
    rate: float, steps: list[tuple[int, str]]
) -> None:
    now = 100.0

    def clock() -> float:
        return now

    spec, table = KeySpec("k", b"", rate=rate, concurrency=3), Table(3, 1, SHAPE)
    workers, one = [Allowance(spec, clock, table.row(n)) for n in range(3)], Allowance(spec, clock)
    for worker, step in steps:
        if step == "tick":
            now += 0.3
        elif step == "enter":
            assert may_enter(workers[worker]) == may_enter(one)
        elif workers[worker].running:
            workers[worker].leave()
            one.leave()


def test_keys_that_are_gone_leave_their_places_to_others_when_nothing_of_them_counts_any_more() -> None:
    now, table = 100.0, Table(2, 2, SHAPE)
    one, two = (Doors((), "p", lambda: now, table.row(number)) for number in range(2))

    def follow(*names: str) -> None:
        for doors in (one, two):
            doors.follow([KeySpec(name, hashlib.sha256(name.encode()).digest(), 1.0, 1) for name in names])

    def key(doors: Doors, name: str) -> Allowance:
        return doors.allowance({"X-Api-Key": name})

    follow("running", "used")
    running = key(one, "running")
    running.enter()
    key(one, "used").enter()
    key(one, "used").leave()
    follow()
    follow("running", "used")
    assert not may_enter(key(two, "running"))
    assert not may_enter(key(two, "used"))
    now += 10.0
    running.leave()
    follow()
    for number in range(5):
        follow(str(number))
        assert may_enter(key(one, str(number)))
        assert not may_enter(key(two, str(number)))
        key(one, str(number)).leave()
        now += 10.0


def test_of_requests_that_come_to_several_workers_at_the_same_instant_a_key_lets_in_as_many_as_to_one() -> (
    None
):
    table, counts = Table(4, 2, SHAPE), Ledger(8, "qq")
    table.mutex, counts.table.mutex = patient_mutex(), patient_mutex()
    at_once = KeySpec("at once", b"", concurrency=3000)
    by_rate = KeySpec("by rate", b"", rate=3000.0)

    def enter(number: int) -> None:
        row = table.row(number)
        allowances = [Allowance(spec, lambda: 1.0, row) for spec in (at_once, by_rate)]
        entered = [sum(may_enter(allowance) for _ in range(3000)) for allowance in allowances]
        with counts.alone():
            counts.put(str(number).encode(), *entered)

    all_at_once(4, enter)
    assert [sum(each) for each in zip(*counts.each(), strict=True)] == [3000, 3000]


async def test_a_request_needs_one_of_the_keys(start_engine: Any, start_router: Any) -> None:
    engine = await start_engine()
    router = await start_router(engine, api_key=(line(), line("other", "two")))
    good = ({"Authorization": f"Bearer {KEY}"}, {"authorization": "bearer other"}, {"X-Api-Key": KEY})
    bad = (
        {},
        {"Authorization": KEY},
        {"Authorization": "Bearer x"},
        {"X-Api-Key": "\xe9"},
        {"X-Api-Key": ""},
    )
    for path in ("/v1/completions", "/v1/anything", "/v1/models"):
        method = "GET" if path == "/v1/models" else "POST"
        for headers in good:
            async with router.client.request(
                method, router.url + path, json=BODY, headers=headers
            ) as response:
                assert response.status == 200
        for headers in bad:
            async with router.client.request(
                method, router.url + path, json=BODY, headers=headers
            ) as response:
                assert response.status == 401
                assert (await response.json())["error"]["type"] == "AuthenticationError"
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert response.headers["X-Request-Id"]
    assert engine.generated == 6
    # The router's keys are nobody else's business.
    assert not any({"Authorization", "X-Api-Key"} & set(request.headers) for request in engine.requests)
    async with router.client.get(f"{router.url}/health") as response:
        assert response.status == 200


async def test_a_key_has_its_own_concurrency(start_engine: Any, start_router: Any, kit: Any) -> None:
    gate = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        await gate.wait()
        return web.json_response({})

    engine = await start_engine(answer=answer)
    router = await start_router(engine, api_key=(line(more=",concurrency=2"), line("other", "two")))

    async def send(key: str) -> tuple[int, str | None]:
        headers = {"Authorization": f"Bearer {key}"}
        async with router.client.post(f"{router.url}/v1/completions", json=BODY, headers=headers) as response:
            return response.status, response.headers.get("Retry-After")

    running = [asyncio.create_task(send(KEY)) for _ in range(2)]
    await kit.wait_until(lambda: engine.open == 2, "both run")
    assert await send(KEY) == (429, "1")
    running.append(asyncio.create_task(send("other")))
    await kit.wait_until(lambda: engine.open == 3, "the other key's runs")
    gate.set()
    assert [status for status, _ in await asyncio.gather(*running)] == [200] * 3
    assert (await send(KEY))[0] == 200


async def test_a_replica_gets_its_own_key_in_place_of_the_clients(
    start_engine: Any,
    start_router: Any,
    kit: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: Any,
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "sk-env-secret")
    (tmp_path / "key").write_text("sk-file-secret\n")
    engines = [await start_engine() for _ in range(3)]
    places = (",key=env:ENGINE_KEY", f",key=file:{tmp_path / 'key'}", "")
    with caplog.at_level(logging.DEBUG):
        router = await start_router(
            *(f"e{n}={engine.url}{places[n]}" for n, engine in enumerate(engines)), policy="round-robin"
        )
        for _ in range(3):
            headers = {"Authorization": "Bearer sk-client", "X-Api-Key": "sk-client"}
            async with router.client.post(
                f"{router.url}/v1/completions", json=BODY, headers=headers
            ) as response:
                assert response.status == 200
    sent = [engine.requests[-1].headers for engine in engines]
    assert [headers["Authorization"] for headers in sent] == [
        "Bearer sk-env-secret",
        "Bearer sk-file-secret",
        "Bearer sk-client",
    ]
    assert ["X-Api-Key" in headers for headers in sent] == [False, False, True]
    assert [engine.models_headers["Authorization"] for engine in engines[:2]] == [
        "Bearer sk-env-secret",
        "Bearer sk-file-secret",
    ]
    shown = str(await router.get("/debug/replicas")) + str(await router.get("/debug/decisions"))
    shown += router.parts.metrics.render().decode() + caplog.text
    assert "secret" not in shown
    assert "sk-client" not in shown


def test_a_key_that_is_not_where_it_should_be_is_told_without_it(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"sk-secret\x01")
    (tmp_path / "empty").write_text("\n")
    references = ("env:MISSING", f"file:{tmp_path}/gone", f"file:{tmp_path}/bad", f"file:{tmp_path}/empty")
    for reference in references:
        with pytest.raises(SettingsError, match="--replica e0") as caught:
            credential("--replica e0", reference, {})
        assert "sk-secret" not in str(caught.value)
    with pytest.raises(SettingsError, match=r"the variable MISSING, .*, is not set"):
        credential("x", "env:MISSING", {})
    with pytest.raises(SettingsError, match="gone: No such file"):
        credential("x", references[1], {})
    assert credential("x", "env:K", {"K": " k\n"}) == "k"
    for bad in ("e0=http://h:1,key=sk-secret", "e0=http://h:1,key=env:A,key=sk-secret"):
        with pytest.raises(SettingsError) as caught:
            RouterSettings(replica=(bad,)).check()
        assert "sk-secret" not in str(caught.value)


async def test_a_replica_whose_key_is_missing_changes_nothing(start_engine: Any, start_router: Any) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    from router.replicas import parse_replicas  # noqa: PLC0415

    with pytest.raises(SettingsError):
        router.parts.fleet.update(parse_replicas([f"new={engine.url}", f"bad={engine.url},key=env:MISSING"]))
    assert list(router.parts.fleet.replicas) == ["e0"]
    assert (await router.complete([1])).status == 200


async def test_op10_metrics_and_debug_pages_are_on_an_address_of_their_own(
    start_engine: Any, start_router: Any
) -> None:
    router = await start_router(await start_engine(), admin_listen=None)
    admin = router.parts.admin_url
    assert admin.startswith("http://127.0.0.1:")
    assert admin != router.url
    await router.complete([1])
    for path in ("/metrics", "/debug/replicas", "/debug/decisions"):
        async with router.client.get(router.url + path) as response:
            assert response.status == 404
        async with router.client.get(admin + path) as response:
            assert response.status == 200
    for path in ("/health", "/ready"):
        for url in (router.url, admin):
            async with router.client.get(url + path) as response:
                assert response.status == 200
    async with router.client.post(f"{admin}/v1/completions", json=BODY) as response:
        assert response.status == 404


@pytest.mark.parametrize(
    ("listen", "admin_listen", "address"),
    [
        ("0.0.0.0:8080", None, ("127.0.0.1", 9080)),
        ("0.0.0.0:65000", None, ("127.0.0.1", 64000)),
        ("0.0.0.0:0", None, ("127.0.0.1", 0)),
        ("0.0.0.0:8080", "[::1]:1", ("::1", 1)),
        ("0.0.0.0:8080", "same", None),
    ],
)
def test_where_operators_look(listen: str, admin_listen: str | None, address: Any) -> None:
    assert RouterSettings(listen=listen, admin_listen=admin_listen).admin_address() == address


def test_one_address_for_all_has_to_be_asked_for() -> None:
    with pytest.raises(SettingsError, match="write 'same'"):
        RouterSettings(listen="127.0.0.1:8080", admin_listen="127.0.0.1:8080").check()
    RouterSettings(listen="127.0.0.1:0", admin_listen="127.0.0.1:0").check()


async def test_https_in_and_out_with_certificates_of_ones_own(
    start_engine: Any, start_router: Any, certificates: Path
) -> None:
    def at(name: str) -> str:
        return str(certificates / name)

    engine_tls = server_context(at("server.pem"), at("server.key"), at("ca.pem"))
    engine = await start_engine(tls=engine_tls)
    assert engine.url.startswith("https://")
    router = await start_router(
        engine,
        tls_cert=at("server.pem"),
        tls_key=at("server.key"),
        tls_client_ca=at("ca.pem"),
        upstream_ca=at("ca.pem"),
        upstream_cert=at("client.pem"),
        upstream_key=at("client.key"),
    )
    assert router.url.startswith("https://")
    ours = client_context(at("ca.pem"), at("client.pem"), at("client.key"))
    async with router.client.post(f"{router.url}/v1/completions", json=BODY, ssl=ours) as response:
        assert response.status == 200
    assert engine.requests[-1].headers["X-Forwarded-Proto"] == "https"
    # Nobody comes in without a certificate, and nothing goes to an engine that another authority vouches for.
    with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
        async with router.client.get(
            f"{router.url}/health", ssl=client_context(at("ca.pem"), None, None)
        ) as response:
            await response.read()
    stranger = await start_router(engine, wait=False, upstream_ca=at("other.pem"))
    assert (await stranger.complete([1])).status == 503


@pytest.mark.parametrize("client", UPSTREAM_CLIENTS)
async def test_px05_streams_over_tls_wait_for_their_clients_and_end_with_them(
    start_engine: Any, start_router: Any, certificates: Path, kit: Any, client: str
) -> None:
    chunks = [b"data: %06d %b\n\n" % (number, b"x" * 100_000) for number in range(300)]

    async def answer(request: web.Request) -> web.StreamResponse:
        return await kit.stream(request, chunks)

    ca, cert, key = (str(certificates / name) for name in ("ca.pem", "server.pem", "server.key"))
    engine = await start_engine(tls=server_context(cert, key, None), answer=answer)
    router = await start_router(engine, tls_cert=cert, tls_key=key, upstream_ca=ca, upstream_client=client)
    ours = client_context(ca, None, None)

    async def ask(*, reads: bool) -> bytes:
        taking = socket.socket()
        # Left to itself the system takes up to 32 MB for a client that does not read.
        taking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        taking.connect(("127.0.0.1", int(router.url.rpartition(":")[2])))
        reader, writer = await asyncio.open_connection(sock=taking, ssl=ours, server_hostname="127.0.0.1")
        body = b'{"model":"m","prompt":[1],"stream":true}'
        writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.2)
        assert engine.open == 1
        got = await asyncio.wait_for(reader.read(), 10) if reads else b""
        writer.transport.abort()
        return got

    assert await ask(reads=True) == b"".join(chunks)
    assert await ask(reads=False) == b""
    await kit.wait_until(lambda: engine.cancelled == 1, "the engine is let go")
    await kit.wait_until(router.idle, "nothing is in flight")


async def test_op02_certificates_are_read_again_when_they_change_and_bad_ones_change_nothing(
    start_engine: Any, start_router: Any, kit: Any, certificates: Path, tmp_path: Path
) -> None:
    """Towards clients and towards replicas; what is open stays open."""

    def put(name: str, source: str) -> str:
        shutil.copy(certificates / source, tmp_path / name)
        return str(tmp_path / name)

    engine = await start_engine(
        tls=server_context(str(certificates / "server.pem"), str(certificates / "server.key"), None)
    )
    settings: dict[str, Any] = {
        "replica": (f"e0={engine.url}",),
        "tls_cert": put("cert.pem", "server.pem"),
        "tls_key": put("cert.key", "server.key"),
        "upstream_ca": put("ca.pem", "ca.pem"),
        "upstream_keepalive_s": 0.0,
    }
    router = await start_router(
        engine, reread=lambda: RouterSettings(**settings), discovery_interval_s=0.02, **settings
    )
    reload = router.parts.reload

    async def status(ca: str) -> int:
        ours = client_context(str(certificates / ca), None, None)
        connector = aiohttp.TCPConnector(ssl=ours)
        async with (
            aiohttp.ClientSession(connector=connector) as client,
            client.post(f"{router.url}/v1/completions", json=BODY) as response,
        ):
            return int(response.status)

    assert await status("ca.pem") == 200
    put("cert.pem", "other.pem")  # its key is another one
    await kit.wait_until(lambda: reload.bad == 1, "it is seen, and refused")
    assert await status("ca.pem") == 200
    put("cert.key", "other.key")
    await kit.wait_until(lambda: reload.good == 1, "it is taken")
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await status("ca.pem")
    open_one = client_context(str(certificates / "other.pem"), None, None)
    open_one.check_hostname = False
    async with router.client.post(f"{router.url}/v1/completions", json=BODY, ssl=open_one) as response:
        assert response.status == 200
    put("ca.pem", "other.pem")
    await kit.wait_until(lambda: reload.good == 2, "it is taken")
    async with router.client.post(f"{router.url}/v1/completions", json=BODY, ssl=open_one) as response:
        assert response.status == 503
    settings["upstream_ca"] = str(tmp_path / "new.pem")
    before = reload.bad
    reload.now()
    await kit.wait_until(lambda: reload.bad > before, "one that is not there is refused")
    put("new.pem", "ca.pem")
    await kit.wait_until(lambda: reload.error is None, "it is taken when it comes")
    async with router.client.post(f"{router.url}/v1/completions", json=BODY, ssl=open_one) as response:
        assert response.status == 200
    del settings["tls_cert"], settings["tls_key"]
    reload.now()
    await kit.wait_until(lambda: reload.error is not None, "it is refused")
    assert "between http and https is a restart" in reload.error


async def test_op02_api_keys_are_read_again_with_the_settings(
    start_engine: Any, start_router: Any, kit: Any, tmp_path: Path
) -> None:
    """Those of clients, with what they have in flight, and those for replicas."""
    gate = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        await gate.wait()
        return web.json_response({})

    engine, held = await start_engine(answer=answer), tmp_path / "key"
    held.write_text("first")
    settings: dict[str, Any] = {"replica": (f"e0={engine.url},key=file:{held}",)}

    async def reload(*keys: str) -> None:
        settings["api_key"] = keys
        before = router.parts.reload.good
        router.parts.reload.now()
        await kit.wait_until(lambda: router.parts.reload.good == before + 1, "it is taken")

    async def status(key: str | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with router.client.post(f"{router.url}/v1/files", json=BODY, headers=headers) as response:
            return int(response.status)

    router = await start_router(
        *settings["replica"], reread=lambda: RouterSettings(**settings), discovery_interval_s=600.0
    )
    open_to_all = asyncio.create_task(status(None))
    await kit.wait_until(lambda: engine.open == 1, "it comes in without a key")
    assert engine.requests[-1].headers["Authorization"] == "Bearer first"
    await reload(line(more=",concurrency=1"))
    running = asyncio.create_task(status(KEY))
    await kit.wait_until(lambda: engine.open == 2, "it comes in with the key")
    held.write_text("second")
    await reload(line(more=",concurrency=2"), line("sk-more", "more"))
    await kit.wait_until(lambda: router.parts.fleet.replicas["e0"].key == "second", "it has the new key")
    second = asyncio.create_task(status(KEY))
    await kit.wait_until(lambda: engine.open == 3, "two may come in now")
    assert await status(KEY) == 429
    assert await status(None) == 401
    gate.set()
    assert [await open_to_all, await running, await second, await status("sk-more")] == [200] * 4
    assert engine.requests[-1].headers["Authorization"] == "Bearer second"
    await reload(line("sk-more", "more"))
    assert [await status(KEY), await status("sk-more")] == [401, 200]
    held.unlink()
    router.parts.reload.now()
    await kit.wait_until(lambda: router.parts.reload.bad == 1, "a key that is gone is told of")
    assert await status("sk-more") == 200
    held.write_text("second")
    await reload()
    assert await status(None) == 200


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(
    certificates: Path, tmp_path: Path
) -> None:
    locked = str(tmp_path / "locked.key")
    of = ("-in", str(certificates / "server.key"), "-out", locked)
    subprocess.run(["openssl", "ec", *of, "-aes128", "-passout", "pass:secret"], check=True)
    program = (
        "from router.errors import SettingsError; from router.tls import server_context\n"
        f"try: server_context({str(certificates / 'server.pem')!r}, {locked!r}, None)\n"
        "except SettingsError as error: print(error)"
    )
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", program])
    said = b""
    with suppress(OSError):  # So a terminal ends whose process is gone.
        while b"pass phrase" not in said and (more := os.read(terminal, 4096)):
            said += more
    os.close(terminal)
    os.waitpid(child, 0)
    assert b"locked.key, without a password" in said
    assert b"pass phrase" not in said


@pytest.mark.parametrize("setting", ["tls_cert", "upstream_ca", "upstream_cert"])
async def test_certificates_that_cannot_be_used_are_named(
    start_router: Any, setting: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.pem").write_text("nonsense")
    for name in ("bad.pem", "gone.pem"):
        with pytest.raises(SettingsError, match=f"--{setting.replace('_', '-')} .*{name}"):
            await start_router(**{setting: str(tmp_path / name)})
