"""Replicas that fail requests, and what the client sees of it: over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from aiohttp import web

from router.outliers import Standing
from router.settings import UPSTREAM_CLIENTS

BODY = {"model": "m", "prompt": [1]}


@pytest.fixture(params=UPSTREAM_CLIENTS)
def upstream_client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def answering(status: int, body: bytes = b'{"error":{"code":500}}', *, chunked: bool = False) -> Any:
    """A handler that always answers so."""

    async def answer(request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": "application/problem+json", "Retry-After": "7"}
        response = web.StreamResponse(status=status, headers=headers)
        if not chunked:
            response.content_length = len(body)
        await response.prepare(request)
        await response.write(body)
        return response

    return answer


async def dropping(request: web.Request) -> web.StreamResponse:
    """A handler that cuts the connection."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_px09_a_server_error_goes_to_the_next_best_replica(
    start_engine: Any, start_router: Any, status: int, chunked: bool
) -> None:
    sick, well = await start_engine(answer=answering(status, chunked=chunked)), await start_engine()
    router = await start_router(sick, well, policy="round-robin", eject_after=0)
    for _ in range(4):
        response = await router.complete([1])
        assert (response.status, response.headers["x-warmroute-replica"]) == (200, "e1")
    assert (sick.generated, well.generated) == (2, 4)
    assert response.headers["x-warmroute-reason"]
    assert await router.metric("retries_total", replica="e0", reason=str(status)) == 2
    assert await router.metric("requests_total", policy="round-robin", replica="e1", status="200") == 4
    assert router.idle()


@pytest.mark.parametrize("others", [answering(503), dropping])
async def test_px06_the_last_server_error_is_relayed_as_it_came_when_nobody_can_do_better(
    start_engine: Any, start_router: Any, others: Any
) -> None:
    engines = [await start_engine(answer=answering(503)), await start_engine(answer=others)]
    router = await start_router(*engines, policy="round-robin", eject_after=0)
    async with router.client.post(f"{router.url}/v1/completions", json=BODY) as response:
        assert (response.status, await response.read()) == (503, b'{"error":{"code":500}}')
        assert response.headers["Content-Type"] == "application/problem+json"
        assert response.headers["Retry-After"] == "7"
    replica = "e1" if others is not dropping else "e0"
    assert response.headers["x-warmroute-replica"] == replica
    assert [engine.generated for engine in engines] == [1, 1]
    assert await router.metric("requests_total", policy="round-robin", replica=replica, status="503") == 1
    assert router.idle()


async def test_px09_the_attempt_budget_holds_for_server_errors(start_engine: Any, start_router: Any) -> None:
    engines = [await start_engine(answer=answering(500)) for _ in range(4)]
    router = await start_router(*engines, attempts=2, eject_after=0)
    assert (await router.complete([1])).status == 500
    assert sum(engine.generated for engine in engines) == 2


async def test_px09_a_prompt_that_kills_engines_reaches_two_of_them(
    start_engine: Any, start_router: Any
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        poison = b"poison" in await request.read()
        return await dropping(request) if poison else web.json_response({})

    engines = [await start_engine(answer=answer) for _ in range(4)]
    router = await start_router(*engines, attempts=4, policy="round-robin")
    async with router.client.post(f"{router.url}/v1/completions", json={"prompt": "poison"}) as response:
        said = await response.json()
    assert response.status == 502
    assert "broke off while they worked on this request" in said["error"]["message"]
    assert sum(engine.generated for engine in engines) == 2
    assert await router.metric("retries_refused_total", reason="deaths") == 1
    assert (await router.complete([1])).status == 200
    assert router.idle()


async def test_px09_an_outage_is_not_multiplied_by_the_attempts(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    """All engines fail: of 40 requests at once only the share of the budget is tried again."""
    gate, first = asyncio.Event(), asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        if sum(engine.open for engine in engines) == 40:
            first.set()
        await first.wait()
        if sum(engine.generated for engine in engines) > 40:
            await gate.wait()
        return web.json_response({}, status=500)

    engines: list[Any] = []
    engines += [await start_engine(answer=answer) for _ in range(4)]
    router = await start_router(*engines, policy="round-robin", eject_after=0, retry_share=0.2, retry_least=1)
    tasks = [asyncio.create_task(router.complete([1])) for _ in range(40)]
    await kit.wait_until(lambda: sum(task.done() for task in tasks) >= 20, "most are not tried again")
    gate.set()
    assert {response.status for response in await asyncio.gather(*tasks)} == {500}
    assert sum(engine.generated for engine in engines) < 60
    assert await router.metric("retries_refused_total", reason="budget") > 20
    assert router.idle()


async def test_px09_the_budget_never_keeps_a_request_from_a_replica_that_works(
    start_engine: Any, start_router: Any
) -> None:
    engines = [await start_engine(answer=answering(500)) for _ in range(2)] + [await start_engine()]
    router = await start_router(*engines, policy="round-robin", eject_after=0, retry_share=0, retry_least=0)
    tasks = [asyncio.create_task(router.complete([1])) for _ in range(30)]
    assert {response.status for response in await asyncio.gather(*tasks)} == {200}
    assert await router.metric("retries_refused_total", reason="budget") == 0
    assert router.idle()


@pytest.mark.parametrize(
    ("settings", "method", "path"),
    [
        ({"retry_server_errors": False}, "POST", "/v1/completions"),
        ({"attempts": 1}, "POST", "/v1/completions"),
        ({}, "POST", "/v1/files"),
    ],
)
async def test_what_may_not_be_done_twice_is_sent_to_one_replica_only(
    start_engine: Any, start_router: Any, settings: dict[str, Any], method: str, path: str
) -> None:
    for handler, status in ((answering(500), 500), (dropping, None)):
        engines = [await start_engine(answer=handler), await start_engine(answer=handler)]
        router = await start_router(*engines, **settings)
        async with router.client.request(method, router.url + path, json=BODY) as response:
            assert status is None or response.status == status
            assert response.status >= 500
        assert sum(engine.generated for engine in engines) == 1


async def test_a_server_error_that_is_about_the_request_is_not_tried_elsewhere(
    start_engine: Any, start_router: Any
) -> None:
    engines = [await start_engine(answer=answering(501)), await start_engine(answer=answering(501))]
    router = await start_router(*engines, eject_after=1)
    assert (await router.complete([1])).status == 501
    assert sum(engine.generated for engine in engines) == 1
    assert router.parts.fleet.outliers.standing("e0") is Standing.IN


async def test_an_error_answer_that_is_too_long_to_keep_is_passed_on(
    start_engine: Any, start_router: Any
) -> None:
    body = b"x" * (2 << 20)
    engines = [
        await start_engine(answer=answering(500, body)),
        await start_engine(answer=answering(500, body)),
    ]
    router = await start_router(*engines)
    async with router.client.post(f"{router.url}/v1/completions", json=BODY) as response:
        assert (response.status, await response.read()) == (500, body)
    assert sum(engine.generated for engine in engines) == 1


async def test_px09_an_error_answer_that_turns_out_to_be_too_long_is_no_answer(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=500)
        await response.prepare(request)
        while True:
            await response.write(b"x" * 100_000)

    failing, working = await start_engine(answer=endless), await start_engine()
    router = await start_router(failing, working, policy="round-robin")
    for _ in range(2):
        assert (await router.complete([1])).status == 200
    assert working.generated == 2
    assert router.parts.fleet.replicas["e0"].last_error == "the body of its 500 does not end"
    await kit.wait_until(lambda: not failing.open, "its connection is closed")


async def test_px08_a_replica_whose_requests_fail_is_left_alone_and_taken_back(
    start_engine: Any, start_router: Any
) -> None:
    sick, well = await start_engine(answer=answering(500)), await start_engine()
    router = await start_router(sick, well, policy="round-robin", eject_after=3)
    outliers, now = router.parts.fleet.outliers, 0.0
    outliers._clock = lambda: now
    for _ in range(20):
        assert (await router.complete([1])).status == 200
    assert sick.generated == 3
    assert outliers.standing("e0") is Standing.EJECTED
    shown = (await router.get("/debug/replicas"))["replicas"]
    assert [(replica["health"], replica["standing"]) for replica in shown] == [
        ("up", "ejected"),
        ("up", "in"),
    ]
    assert await router.metric("replica_ejected", replica="e0") == 1
    assert await router.metric("ejections_total", replica="e0") == 1
    now = 5.0
    for _ in range(4):
        assert (await router.complete([1])).status == 200
    assert sick.generated == 4
    sick.answer = sick._answer
    now = 15.0
    for _ in range(4):
        assert (await router.complete([1])).status == 200
    assert outliers.standing("e0") is Standing.SLOW_START
    now = 25.0
    before = sick.generated
    for _ in range(4):
        await router.complete([1])
    assert sick.generated == before + 2


async def test_px08_client_errors_neither_eject_nor_go_elsewhere(
    start_engine: Any, start_router: Any
) -> None:
    engines = [await start_engine(answer=answering(status)) for status in (400, 429)]
    router = await start_router(*engines, policy="round-robin", eject_after=1)
    for _ in range(50):
        assert (await router.complete([1])).status in (400, 429)
    assert [engine.generated for engine in engines] == [25, 25]
    assert await router.metric("ejections_total", replica="e0") == 0


async def test_px14_the_only_replica_is_asked_however_often_it_fails(
    start_engine: Any, start_router: Any
) -> None:
    engine = await start_engine(answer=answering(500))
    router = await start_router(engine, eject_after=1)
    for _ in range(10):
        assert (await router.complete([1])).status == 500
    assert engine.generated == 10


async def test_px09_a_killed_replica_costs_no_request_and_gets_traffic_again_when_it_is_back(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    engines = [await start_engine() for _ in range(4)]
    router = await start_router(*engines, policy="least-loaded")
    statuses: list[int] = []

    async def client(number: int) -> None:
        while not done.is_set():
            stream = bool(number % 2)
            body = {**BODY, "stream": stream}
            async with router.client.post(f"{router.url}/v1/completions", json=body) as response:
                content = await response.read()
                statuses.append(response.status)
                assert not stream or content.endswith(b"[DONE]\n\n")

    async def more(count: int) -> None:
        target = len(statuses) + count
        await kit.wait_until(lambda: len(statuses) >= target, "requests are answered")

    done = asyncio.Event()
    clients = [asyncio.create_task(client(number)) for number in range(8)]
    await more(100)
    port = engines[0].port
    await engines[0].stop()
    await more(100)
    seen = engines[0].generated
    await engines[0].start(port)
    await kit.wait_until(lambda: engines[0].generated > seen, "it gets requests again")
    await more(50)
    done.set()
    await asyncio.gather(*clients)
    assert set(statuses) == {200}
    await kit.wait_until(router.idle, "nothing is in flight")


async def test_px09_stale_connections_are_no_attempts_and_no_failures(
    start_router: Any, start_engine: Any, kit: Any
) -> None:
    """The engine closes each connection at its second request, unanswered; the budget is one attempt."""
    seen: set[int] = set()
    gate = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        port = request.transport.get_extra_info("peername")[1]
        if port in seen:
            return await dropping(request)
        seen.add(port)
        await gate.wait()
        return web.json_response({})

    engines = [await start_engine(answer=answer), await start_engine(answer=answer)]
    router = await start_router(*engines, attempts=1, eject_after=1, policy="round-robin")
    tasks = [asyncio.create_task(router.complete([1])) for _ in range(8)]
    await kit.wait_until(lambda: sum(engine.open for engine in engines) == 8, "all are being answered")
    gate.set()
    await asyncio.gather(*tasks)
    # Eight connections are kept now, and all of them are stale: each costs one try, and one only.
    for path in ("/v1/completions", "/v1/files"):
        for _ in range(2):
            async with router.client.post(router.url + path, data=json.dumps(BODY)) as response:
                assert response.status == 200
    retries = [await router.metric("retries_total", replica=name, reason="stale") for name in ("e0", "e1")]
    assert sum(retries) == 4
    assert [router.parts.fleet.outliers.standing(name) for name in ("e0", "e1")] == [Standing.IN] * 2


async def test_px08_a_connect_that_times_out_is_tried_elsewhere_and_does_not_take_the_replica_out(
    start_router: Any, start_engine: Any
) -> None:
    """A host that is short of time, ours or theirs, would else lose all its replicas at once."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        well = await start_engine(cards=[{"id": "m"}, {"id": "w"}])
        router = await start_router(
            f"e0=http://127.0.0.1:{port},model=m",
            well,
            policy="round-robin",
            connect_timeout_s=0.1,
            health_timeout_s=60,
        )
        # To connect to the other one may take as long, where the machine has much to do.
        while (await router.complete([1], model="w")).status != 200:
            pass
        for _ in range(2):
            response = await router.complete([1])
            assert (response.status, response.headers["x-warmroute-replica"]) == (200, "e1")
        assert router.parts.fleet.replicas["e0"].usable
        assert await router.metric("retries_total", replica="e0", reason="connect-timeout") == 1
        for each in waiting:
            each.close()
