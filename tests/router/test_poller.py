"""Load that others have sent, read from engines over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from router.poller import by_stream
from router.reported import Report, Reported
from simulator.engine import Engine
from simulator.settings import EngineSettings


def metrics_of(running: int, waiting: int = 0, **labels: str) -> bytes:
    told = ",".join(f'{name}="{value}"' for name, value in ({"engine": "0"} | labels).items())
    return (
        f"vllm:num_requests_running{{{told}}} {running}\n"
        f"vllm:num_requests_waiting{{{told}}} {waiting}\n"
        f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="100",{told}}} 1\n'
        "process_start_time_seconds 1700000000\n"
    ).encode()


async def test_requests_go_where_others_have_less(start_engine: Any, start_router: Any, kit: Any) -> None:
    busy, idle = (
        await start_engine(metrics=metrics_of(20)),
        await start_engine(metrics=metrics_of(0)),
    )
    router = await start_router(busy, idle, policy="least-loaded", poll_interval_s=0.05)
    await kit.wait_until(lambda: router.parts.load.others(("e0", 0)).requests == 20, "it is polled")
    replicas = [(await router.complete([1] * 10)).headers["x-warmroute-replica"] for _ in range(10)]
    assert replicas == ["e1"] * 10
    shown = (await router.get("/debug/replicas"))["replicas"][0]
    assert shown["process_started"] == 1.7e9
    assert shown["streams"][0]["others"]["requests"] == 20
    assert shown["streams"][0]["reported"]["capacity_tokens"] == 1600
    assert await router.metric("other_requests", replica="e0", rank="0") == 20


async def test_tr07_the_age_of_the_polled_load_is_a_gauge(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    router = await start_router(await start_engine(metrics=metrics_of(0)), poll_interval_s=30)
    await kit.wait_until(lambda: router.parts.load.report_age_s(("e0", 0)) is not None, "it is polled")
    first = await router.metric("load_age_seconds", replica="e0", rank="0")
    await asyncio.sleep(0.02)
    assert 0 <= first < await router.metric("load_age_seconds", replica="e0", rank="0") < 10


@pytest.mark.parametrize(("metrics", "reason"), [(b"nothing", "unreadable"), (None, "unreadable")])
async def test_a_replica_that_does_not_say_its_load_is_counted_and_serves(
    start_engine: Any, start_router: Any, kit: Any, metrics: bytes | None, reason: str
) -> None:
    router = await start_router(await start_engine(metrics=metrics), poll_interval_s=0.05)
    await kit.wait_until(lambda: failed(router, reason), "it is counted")
    assert (await router.complete([1])).status == 200
    assert router.parts.fleet.replicas["e0"].usable


async def test_an_engine_that_is_silent_about_its_load_costs_a_bounded_wait(
    start_engine: Any, start_router: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start_engine()

    async def silent(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    monkeypatch.setattr(engine, "_metrics", silent)
    monkeypatch.setattr("router.poller.TIMEOUT_S", 0.1)
    await engine.stop()
    await engine.start()
    router = await start_router(engine, poll_interval_s=0.05)
    await kit.wait_until(lambda: failed(router, "unreachable"), "it is counted")
    assert (await router.complete([1])).status == 200


def failed(router: Any, reason: str) -> bool:
    labels = {"replica": "e0", "reason": reason}
    name = "warmroute_router_polls_failed_total"
    return (router.parts.metrics.registry.get_sample_value(name, labels) or 0) > 0


async def test_our_own_requests_are_not_others_at_a_real_scheduler(start_router: Any, kit: Any) -> None:
    settings = EngineSettings(
        listen="127.0.0.1:0", prefill_rate=1e6, decode_rate=20.0, block_size=16, blocks=500
    )
    async with Engine(settings) as engine:
        router = await start_router(f"e0={engine.url}", poll_interval_s=0.02)
        load, stream = router.parts.load, ("e0", 0)
        await kit.wait_until(lambda: load.reported(stream) is not None, "it is polled")
        tasks = [
            asyncio.create_task(router.complete([n] * 30, model="model", max_tokens=8)) for n in range(6)
        ]
        most, running = 0, 0
        while not all(task.done() for task in tasks):
            most = max(most, load.others(stream).requests)
            running = max(running, load.reported(stream).running)
            await asyncio.sleep(0.01)
        assert [(await task).status for task in tasks] == [200] * 6
        assert (most, running) == (0, 6)
        assert load.reported(stream).capacity_tokens == 500 * 16
        # A direct client's is.
        body = {"model": "model", "prompt": [1] * 30, "max_tokens": 40}
        direct = asyncio.create_task(
            router.client.post(f"{engine.url}/v1/completions", json=body).__aenter__()
        )
        await kit.wait_until(lambda: load.others(stream).requests == 1, "it is seen")
        (await direct).release()
        await kit.wait_until(lambda: load.others(stream).requests == 0, "it is gone")


def test_ranks_are_matched_by_number_and_a_single_one_by_being_alone() -> None:
    one, two = Reported(running=1), Reported(running=2)
    assert by_stream([("a", 0), ("a", 1)], Report({0: one, 1: two, 2: two})) == [
        (("a", 0), one),
        (("a", 1), two),
    ]
    assert by_stream([("a", 0)], Report({3: two})) == [(("a", 0), two)]
    assert by_stream([("a", 0), ("a", 1)], Report({3: two})) == []


async def test_an_engine_that_restarted_is_as_fast_as_nobody_knows(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    engine = await start_engine(metrics=metrics_of(0))
    router = await start_router(engine, poll_interval_s=0.02)
    replica, latency = router.parts.fleet.replicas["e0"], router.parts.load.latency
    await kit.wait_until(lambda: replica.process_started == 1.7e9, "it is polled")
    before = latency.of(("e0", 0))
    for _ in range(20):
        latency.observe(("e0", 0), 10_000, 20.0)
    latency.observe(("e1", 0), 10_000, 1.0)
    learned = latency.of(("e0", 0))
    assert learned != before
    engine.metrics = metrics_of(0).replace(b"1700000000", b"1700000001")
    await kit.wait_until(lambda: replica.process_started == 1.7e9 + 1, "its restart is seen")
    assert latency.of(("e0", 0)) != learned
