"""The whole path with the real indexer in a process of its own and simulated engines: prediction equals
report.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.router.whole_path import IndexerProcess, engines, until_live

SYSTEM = "You are a helpful assistant that knows everything about caches and answers at length. " * 6


@pytest.fixture(params=["map", "http"])
def index(request: pytest.FixtureRequest, indexer: IndexerProcess, tmp_path: Path) -> dict[str, str]:
    """The settings with which a router reads the index: the map itself, or the indexer's answers."""
    return {"map": str(tmp_path / "map")} if request.param == "map" else {"indexer": indexer.url}


async def turn(router: Any, messages: list[Any]) -> tuple[Any, Any]:
    body = {"model": "model", "messages": messages, "max_tokens": 8}
    async with router.client.post(f"{router.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200
        return response.headers, await response.json()


async def test_a_conversation_stays_where_it_is_warm_and_every_prediction_is_exact(
    index: dict[str, str], kit: Any
) -> None:
    async with (
        engines(2) as fleet,
        kit.running_router(*(f"v{n}={engine.url}" for n, engine in enumerate(fleet)), **index) as router,
    ):
        await until_live(router, kit.wait_until)
        replicas, hits = set(), 0
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        for number in range(5):
            messages.append({"role": "user", "content": f"question {number}?"})
            headers, answer = await turn(router, messages)
            usage = answer["usage"]
            assert int(headers["x-warmroute-prompt-tokens"]) == usage["prompt_tokens"]
            assert (
                int(headers["x-warmroute-matched-tokens"]) == usage["prompt_tokens_details"]["cached_tokens"]
            )
            replicas.add(headers["x-warmroute-replica"])
            hits += usage["prompt_tokens_details"]["cached_tokens"]
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            # Events reach the map some milliseconds after the answer.
            await asyncio.sleep(0.1)
        assert len(replicas) == 1
        assert hits > 4 * 400
        assert router.idle()


async def test_the_indexer_learns_from_streams_whose_clients_never_see_usage(
    indexer: IndexerProcess, tmp_path: Path, kit: Any
) -> None:
    async with (
        engines(1) as fleet,
        kit.running_router(f"v0={fleet[0].url}", map=str(tmp_path / "map")) as router,
    ):
        await until_live(router, kit.wait_until)

        def counted(name: str, **labels: str) -> float:
            value = router.parts.metrics.registry.get_sample_value(f"warmroute_router_{name}", labels)
            return float(value or 0)

        before = counted("compared_total", replica="v0", outcome="exact")
        told = counted("feedback_total", outcome="taken")
        for number in range(4):
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{number}?"}]
            body = {"model": "model", "messages": messages, "max_tokens": 4, "stream": True}
            async with router.client.post(f"{router.url}/v1/chat/completions", json=body) as response:
                content = await response.read()
            assert content.endswith(b"data: [DONE]\n\n")
            assert b'"usage"' not in content
            await asyncio.sleep(0.1)
        assert counted("compared_total", replica="v0", outcome="exact") == before + 4
        assert counted("cached_tokens_total", replica="v0") > 3 * 400
        await kit.wait_until(
            lambda: counted("feedback_total", outcome="taken") >= told + 4, "all of it is told"
        )


async def test_ranks_of_one_replica_are_matched_and_pinned(
    indexer: IndexerProcess, tmp_path: Path, kit: Any
) -> None:
    async with (
        engines(1, ranks=2, events=_free_pair(), replay=_free_pair()) as fleet,
        kit.running_router(f"v0={fleet[0].url}", map=str(tmp_path / "map")) as router,
    ):
        await kit.wait_until(
            lambda: router.parts.fleet.replicas["v0"].ranks == (0, 1), "both ranks are known"
        )
        await until_live(router, kit.wait_until)
        chosen = set()
        for _ in range(4):
            headers, answer = await turn(router, [{"role": "user", "content": SYSTEM}])
            assert (
                int(headers["x-warmroute-matched-tokens"])
                == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            )
            chosen.add((await router.get("/debug/decisions?limit=1"))["decisions"][0]["chosen"][1])
            await asyncio.sleep(0.1)
        assert len(chosen) == 1


def _free_pair() -> str:
    """An endpoint whose port and the next one are free."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return f"tcp://*:{port}"


async def test_a_dead_indexer_costs_no_request_and_its_return_brings_the_hits_back(
    indexer: IndexerProcess, index: dict[str, str], kit: Any
) -> None:
    address = indexer.url.removeprefix("http://")
    async with (
        engines(2) as fleet,
        kit.running_router(*(f"v{n}={engine.url}" for n, engine in enumerate(fleet)), **index) as router,
    ):
        await until_live(router, kit.wait_until)
        messages = [{"role": "user", "content": SYSTEM}]
        first, _ = await turn(router, messages)
        await asyncio.sleep(0.1)
        await indexer.kill()
        headers, _ = await turn(router, messages)
        if "indexer" in index:
            assert headers["x-warmroute-reason"].startswith("fallback: the indexer cannot be reached")
        else:
            # The map outlives its writer, and is believed for a while.
            assert headers["x-warmroute-replica"] == first["x-warmroute-replica"]
        await indexer.start(address)
        await until_live(router, kit.wait_until)
        # A stream counts again only once its continuity is proven, each at its own time.
        async with asyncio.timeout(10):
            while True:
                headers, answer = await turn(router, messages)
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                if int(headers["x-warmroute-matched-tokens"]) == cached > 400:
                    break
                await asyncio.sleep(0.05)
