"""Replicas that come and go while requests run: over real sockets."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.errors import SettingsError
from router.replicas import parse_replicas
from router.reported import Reported
from router.settings import RouterSettings
from tests.router.command import started

BODY = {"model": "m", "prompt": [1]}


def names(router: Any) -> list[str]:
    return list(router.parts.fleet.replicas)


def tasks_of(what: str) -> list[str]:
    """The names of the running tasks that do ``what`` for a replica."""
    return sorted(task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(f"{what} "))


async def test_op01_a_replica_that_is_taken_out_finishes_what_it_has_and_is_then_forgotten(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    gate = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        return await kit.stream(request, [b"data: {}\n\n", b"data: [DONE]\n\n"], gate.wait)

    leaving, staying = await start_engine(answer=answer), await start_engine()
    router = await start_router(leaving, staying, policy="round-robin")
    fleet, forgotten = router.parts.fleet, []
    forget = fleet.forgotten
    fleet.forgotten = lambda name: (forgotten.append(name), forget(name))
    async with router.client.post(f"{router.url}/v1/completions", json={**BODY, "stream": True}) as response:
        await response.content.readexactly(10)
        fleet.update(parse_replicas([f"e1={staying.url}"]))
        for _ in range(6):
            assert (await router.complete([1])).headers["x-warmroute-replica"] == "e1"
        shown = {r["name"]: r["draining"] for r in (await router.get("/debug/replicas"))["replicas"]}
        assert (shown, forgotten) == ({"e1": False, "e0": True}, [])
        gate.set()
        assert (await response.read()).endswith(b"[DONE]\n\n")
    await kit.wait_until(lambda: names(router) == ["e1"], "it is forgotten")
    assert (leaving.generated, forgotten) == (1, ["e0"])
    await kit.wait_until(lambda: tasks_of("watch") == ["watch e1"], "its tasks are over")
    assert router.idle()


async def test_op02_the_metrics_of_a_replica_go_when_it_is_gone(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    leaving, staying = await start_engine(), await start_engine()
    router = await start_router(leaving, staying, policy="round-robin")
    for streamed in (False, True, True, False):
        assert (await router.complete([1], stream=streamed)).status == 200
    await kit.wait_until(router.idle, "nothing is in flight")
    assert b'replica="e0"' in router.parts.metrics.render()
    router.parts.fleet.update(parse_replicas([f"e1={staying.url}"]))
    await kit.wait_until(lambda: names(router) == ["e1"], "it is forgotten")
    shown = router.parts.metrics.render()
    assert b'replica="e0"' not in shown
    assert b'requests_total{policy="round-robin",replica="e1",status="200"} 2.0' in shown


async def test_a_replica_that_is_back_before_it_is_gone_goes_on_as_it_was(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    gate = asyncio.Event()
    engine = await start_engine(answer=kit.gated(gate))
    router = await start_router(engine)
    fleet, specs = router.parts.fleet, parse_replicas([f"e0={engine.url}"])
    replica = fleet.replicas["e0"]
    task = asyncio.create_task(router.complete([1]))
    await kit.wait_until(lambda: engine.open == 1, "it works on it")
    fleet.update([])
    assert (await router.complete([1])).status == 503
    fleet.update(specs)
    gate.set()
    assert (await router.complete([1])).status == 200
    assert (await task).status == 200
    assert fleet.replicas["e0"] is replica
    assert tasks_of("drain") == []


async def test_a_replica_with_another_address_begins_anew(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    one, two = await start_engine(), await start_engine()
    router = await start_router(one)
    fleet, load, renewed = router.parts.fleet, router.parts.load, []
    forget = fleet.renewed
    fleet.renewed = lambda name: (forget(name), renewed.append((name, load.reported(("e0", 0)))))
    load.report(("e0", 0), Reported(running=9), 0)
    fleet.update(parse_replicas([f"e0={two.url}", "e1=http://127.0.0.1:1"]))
    assert renewed == [("e0", None)], "nothing that the one at the old address said is known of the new one"
    fleet.update(parse_replicas([f"e0={two.url}"]))
    assert len(renewed) == 1
    await kit.wait_until(lambda: router.parts.fleet.replicas["e0"].models is not None, "it is known")
    await router.complete([1])
    assert (one.generated, two.generated) == (0, 1)
    await kit.wait_until(lambda: tasks_of("watch") == ["watch e0"], "the old one's tasks are over")


@pytest.fixture
async def index(tmp_path: Path) -> AsyncIterator[str]:
    """The URL of an indexer in a process of its own."""
    process, url = await started("indexer", "--listen", "127.0.0.1:0", "--map", str(tmp_path / "map"))
    yield url
    process.terminate()
    await process.communicate()


async def test_op09_twenty_replicas_removed_and_twenty_added_cost_no_request(
    start_engine: Any, start_router: Any, kit: Any, tmp_path: Path, index: str
) -> None:
    """Nor does a stream of those that are gone stay in the index."""
    engines = [await start_engine() for _ in range(8)]

    def lines(batch: str) -> list[str]:
        events = f"events=ipc://{tmp_path}/{batch}"
        return [f"{batch}{number}={engines[number % 8].url},{events}{number}" for number in range(20)]

    router = await start_router(*lines("old"), policy="least-loaded", indexer=index)

    async def converged(batch: str) -> None:
        async with asyncio.timeout(20):
            while await followed() != {f"{batch}{number}" for number in range(20)}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def followed() -> set[str]:
        async with router.client.get(f"{index}/workers") as response:
            return {worker["instance_id"] for worker in await response.json()}

    await converged("old")
    fleet, statuses = router.parts.fleet, []
    done = asyncio.Event()

    async def client() -> None:
        while not done.is_set():
            statuses.append((await router.complete([1])).status)

    clients = [asyncio.create_task(client()) for _ in range(8)]
    await kit.wait_until(lambda: len(statuses) > 50, "requests are answered")
    fleet.update(parse_replicas([*lines("old"), *lines("new")]))
    await kit.wait_until(lambda: all(replica.models for replica in fleet.replicas.values()), "all are known")
    fleet.update(parse_replicas(lines("new")))
    await kit.wait_until(lambda: len(names(router)) == 20, "the old ones are gone")
    target = len(statuses) + 50
    await kit.wait_until(lambda: len(statuses) > target, "more requests are answered")
    done.set()
    await asyncio.gather(*clients)
    assert set(statuses) == {200}
    assert all(name.startswith("new") for name in names(router))
    await converged("new")
    await kit.wait_until(lambda: len(tasks_of("watch")) == len(tasks_of("poll")) == 20, "no more tasks")


async def test_op02_five_reloads_leave_one_checker_for_each_replica_and_a_bad_one_changes_nothing(
    start_engine: Any, start_router: Any, kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start_engine()
    said: list[str] = []

    def reread() -> RouterSettings:
        if not said:
            raise SettingsError("$.router.replicas: unknown key")
        return RouterSettings(replica=tuple(said), grace_s=7)

    router = await start_router(f"a={engine.url}", reread=reread, discovery_interval_s=60)
    reload = router.parts.reload
    for count in range(1, 6):
        said[:] = [f"a={engine.url}", *(f"r{number}={engine.url}" for number in range(count % 3))]
        reload.now()
        await kit.wait_until(lambda count=count: reload.good == count, "it is taken")
    await kit.wait_until(
        lambda: sorted(names(router)) == ["a", "r0", "r1"], "the fleet is as the last one says"
    )
    assert tasks_of("watch") == ["watch a", "watch r0", "watch r1"]
    assert "need a restart to count" in caplog.text
    assert "--grace-s" in caplog.text
    for bad in ([], ["nonsense"]):
        said[:] = bad
        reload.now()
        await kit.wait_until(lambda: reload.error is not None, "it is refused")
        assert sorted(names(router)) == ["a", "r0", "r1"]
        assert (await router.get("/debug/replicas"))["settings_errors"] == [reload.error]
        reload.error = None
    assert reload.bad == 2
    assert "the old ones stay" in caplog.text
    assert (await router.complete([1])).status == 200


@pytest.mark.parametrize("missing", ["a key", "a file of replicas", "a key that is named there"])
async def test_op02_settings_refused_for_a_file_are_taken_when_the_file_comes(
    start_engine: Any, start_router: Any, kit: Any, tmp_path: Path, missing: str
) -> None:
    engine, key, replicas = await start_engine(), tmp_path / "key", tmp_path / "replicas"
    line, read = f"b={engine.url},key=file:{key}", 0
    if missing == "a key that is named there":
        replicas.write_text(line)
    named = {"replica": (line,)} if missing == "a key" else {"replicas_file": str(replicas)}

    def reread() -> RouterSettings:
        nonlocal read
        read += 1
        return RouterSettings(**named)

    router = await start_router(f"a={engine.url}", reread=reread, discovery_interval_s=0.02)
    reload = router.parts.reload
    reload.now()
    await kit.wait_until(lambda: reload.bad == 1, "it is refused")
    for _ in range(20):
        await asyncio.sleep(0)
    assert (names(router), read) == (["a"], 1)
    if missing == "a file of replicas":
        replicas.write_text(f"b={engine.url}")
    else:
        key.write_text("the key")
    await kit.wait_until(lambda: reload.good == 1, "it is taken")
    await kit.wait_until(lambda: names(router) == ["b"], "the fleet is as it says")


async def test_op02_a_key_is_read_again_when_its_file_has_changed(
    start_engine: Any, start_router: Any, kit: Any, tmp_path: Path
) -> None:
    engine, key = await start_engine(), tmp_path / "key"
    key.write_text("first")
    line = f"a={engine.url},key=file:{key}"
    router = await start_router(
        line, reread=lambda: RouterSettings(replica=(line,)), discovery_interval_s=0.02
    )
    key.write_text("second one")
    await kit.wait_until(lambda: router.parts.fleet.replicas["a"].key == "second one", "it is taken")


async def test_replicas_come_from_a_file_and_a_name(
    start_engine: Any, start_router: Any, kit: Any, tmp_path: Path
) -> None:
    engine, path = await start_engine(), tmp_path / "replicas"
    path.write_text(f"a={engine.url}\n")
    router = await start_router(
        dns=(f"d=http://localhost:{engine.port}",), replicas_file=str(path), discovery_interval_s=0.02
    )
    await kit.wait_until(lambda: {"d-127.0.0.1", "a"} <= set(names(router)), "both are found")
    path.write_text(f"b={engine.url}\n")
    await kit.wait_until(lambda: "b" in names(router) and "a" not in names(router), "the change is seen")
    path.write_text("nonsense\n")
    await kit.wait_until(lambda: router.parts.settings_errors() != [], "the error is told")
    assert "b" in names(router)
    assert (await router.complete([1])).status == 200


async def test_a_file_that_cannot_be_used_keeps_it_from_starting(start_router: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        await start_router(replicas_file=str(tmp_path / "nowhere"))


async def test_op02_a_running_router_takes_its_file_anew_at_sighup(start_engine: Any, tmp_path: Path) -> None:
    engine, path = await start_engine(), tmp_path / "w.toml"
    path.write_text(f'[router]\nreplica = ["a={engine.url}"]\ndiscovery_interval_s = 60.0\n')
    process, url = await started(
        "--config", str(path), "router", "--listen", "127.0.0.1:0", "--admin-listen", "same"
    )
    try:
        async with aiohttp.ClientSession() as client:

            async def shown() -> tuple[list[str], list[str]]:
                async with client.get(f"{url}/debug/replicas") as response:
                    said = await response.json()
                return [replica["name"] for replica in said["replicas"]], said["settings_errors"]

            async def after(text: str, expected: tuple[list[str], int]) -> None:
                path.write_text(text)
                process.send_signal(signal.SIGHUP)
                # Waiting for another process: each question takes its time.
                async with asyncio.timeout(10):
                    while ((found := await shown())[0], len(found[1])) != expected:
                        pass

            assert await shown() == (["a"], [])
            await after(f'[router]\nreplica = ["a={engine.url}", "b={engine.url}"]\n', (["a", "b"], 0))
            await after("[router]\nreplicas = []\n", (["a", "b"], 1))
            await after(f'[router]\nreplica = ["b={engine.url}"]\n', (["b"], 0))
    finally:
        process.terminate()
        async with asyncio.timeout(10):
            await process.wait()
