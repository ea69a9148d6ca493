from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet import Fleet
from router.introduction import model_cards
from router.replicas import Health, Models, parse_replica
from router.serving import Serving
from router.watcher import WatchPace


@pytest.fixture
async def watched() -> AsyncIterator[Callable[..., Fleet]]:
    """Begins to watch a fleet of lines of the setting, until the test ends."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())

        def start(*lines: str) -> Fleet:
            fleet = Fleet(map(parse_replica, lines), session, pace=WatchPace(health_interval_s=0.02))
            stack.push_async_callback(fleet.close)
            fleet.start()
            return fleet

        yield start


async def test_a_replica_is_discovered_and_its_ranks_come_from_its_sources(
    start_engine: Any, watched: Any, until: Any
) -> None:
    engine = await start_engine(
        cards=[{"id": "m"}, {"id": "lora", "parent": "m"}],
        event_sources={str(rank): {"endpoint": f"tcp://*:{5557 + rank}"} for rank in range(2)},
    )
    fleet = watched(f"a={engine.url}")
    replica = fleet.replicas["a"]
    await until(lambda: len(replica.sources) == 2, "sources are known")
    assert replica.streams() == [("a", 0), ("a", 1)]
    assert replica.resolve("lora") == ("m", "lora")
    assert replica.sources[1].endpoint == "tcp://127.0.0.1:5558"


async def test_a_replica_without_event_sources_has_none_and_is_no_fault(
    start_engine: Any, watched: Any, until: Any
) -> None:
    engine = await start_engine()
    fleet = watched(f"a={engine.url}")
    await until(lambda: fleet.replicas["a"].models is not None, "models are known")
    await until(lambda: fleet.replicas["a"].health is Health.UP, "it is up")
    assert fleet.replicas["a"].sources == ()
    assert fleet.replicas["a"].last_error is None


async def test_a_replica_that_comes_later_is_found(start_engine: Any, watched: Any, until: Any) -> None:
    engine = await start_engine()
    port = engine.port
    await engine.stop()
    fleet = watched(f"a={engine.url}")
    replica = fleet.replicas["a"]
    await until(lambda: replica.health is Health.DOWN, "it is down")
    assert replica.last_error
    await engine.start(port)
    await until(lambda: replica.models is not None, "it is known")
    assert replica.health is Health.UP


async def test_an_engine_whose_core_died_is_taken_out_until_it_is_back(
    start_engine: Any, watched: Any, until: Any
) -> None:
    engine = await start_engine()
    fleet = watched(f"a={engine.url}")
    replica = fleet.replicas["a"]
    await until(lambda: replica.health is Health.UP, "it is up")
    engine.health_status = 503
    await until(lambda: fleet.usable() == [], "it is taken out")
    assert replica.last_error == "/health answered 503"
    engine.health_status = 200
    await until(lambda: fleet.usable() == [replica], "it is back")


async def test_an_unreachable_replica_is_out_at_once_and_any_other_failure_is_checked_first(
    start_engine: Any, watched: Any, until: Any
) -> None:
    engine = await start_engine()
    fleet = watched(f"a={engine.url}")
    replica = fleet.replicas["a"]
    await until(lambda: replica.health is Health.UP, "it is up")
    fleet.failed("a", "broke off", unreachable=False)
    assert replica.usable
    fleet.failed("a", "refused", unreachable=True)
    assert not replica.usable
    await until(lambda: replica.usable, "the check brings it back")


async def test_an_adapter_that_was_loaded_meanwhile_is_found_by_a_refresh(
    start_engine: Any, watched: Any, until: Any
) -> None:
    engine = await start_engine()
    fleet = watched(f"a={engine.url}")
    await until(lambda: fleet.replicas["a"].models is not None, "models are known")
    engine.cards.append({"id": "new-lora", "parent": "m"})
    assert not fleet.knows("new-lora")
    await fleet.refresh()
    assert fleet.knows("new-lora")


async def test_px15_models_are_the_union_with_every_field_kept(
    start_engine: Any, watched: Any, until: Any
) -> None:
    first = await start_engine(cards=[{"id": "m", "max_model_len": 5, "owned_by": "x"}])
    second = await start_engine(cards=[{"id": "m", "max_model_len": 7}, {"id": "lora", "parent": "m"}])
    fleet = watched(f"a={first.url}", f"b={second.url}")
    await until(lambda: all(r.models for r in fleet.replicas.values()), "models are known")
    assert model_cards(fleet.replicas.values()) == [
        {"id": "m", "max_model_len": 5, "owned_by": "x"},
        {"id": "lora", "parent": "m"},
    ]


async def test_who_serves_a_model_follows_every_change_of_a_replica() -> None:
    async with aiohttp.ClientSession() as session:
        fleet = Fleet([parse_replica(f"{name}=http://127.0.0.1:1") for name in "ab"], session)
        a, b = fleet.replicas.values()

        def names(model: str = "m") -> str:
            return "".join(replica.name for replica in fleet.serving(model).replicas)

        assert (names(), names("n")) == ("ab", "ab")
        a.models = Models("m")
        assert (names(), names("n")) == ("a", "b")
        b.models = Models("m", adapters=frozenset({"n"}))
        assert (names(), names("n")) == ("ab", "b")
        assert fleet.serving("n").resolved == {("m", "n")}
        a.health = Health.DOWN
        assert names() == "b"
        b.draining = True
        assert names() == ""
        assert fleet.serving("m").known
        assert not fleet.serving("x").known
        a.health = Health.UP
        a.ranks = (0, 1)
        assert fleet.serving("m").streams == [("a", 0), ("a", 1)]
        a.port_ranks = (2,)
        assert fleet.streams == {("a", 0), ("a", 1), ("a", 2), ("b", 0)}
        del fleet.replicas["a"]
        assert names() == ""
        assert fleet.streams == {("b", 0)}
        fleet.update([parse_replica("c=http://127.0.0.1:1,model=m")])
        assert names() == "c"
        await fleet.close()


CHANGES = ["health", "draining", "models", "ranks", "port_ranks", "update", "drained"]
MODELS = [None, Models("m"), Models("m", ("alias",)), Models("n", (), frozenset({"lora"})), Models("lora")]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(CHANGES), st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=25
    )
)
def test_who_serves_a_model_is_as_if_it_were_looked_up_each_time(steps: list[tuple[str, int, int]]) -> None:
    asyncio.run(compared_at_each_step(steps))


async def compared_at_each_step(steps: list[tuple[str, int, int]]) -> None:
    lines = [f"{name}=http://127.0.0.1:{port}" for name in "abc" for port in (1, 2)]
    fleet = Fleet([parse_replica(lines[0]), parse_replica(lines[2])], None)  # type: ignore[arg-type]
    fleet._duties.clear()
    for change, which, value in steps:
        replica = (
            list(fleet.replicas.values())[which % max(1, len(fleet.replicas))] if fleet.replicas else None
        )
        if change == "update":
            chosen = {line[0]: line for line in (lines[which], lines[value])} if value else {}
            fleet.update([parse_replica(line) for line in chosen.values()])
        elif change == "drained":
            await asyncio.sleep(0)
        elif replica is not None:
            values = {
                "health": list(Health)[value % len(Health)],
                "draining": bool(value % 2),
                "models": MODELS[value],
                "ranks": tuple(range(value % 3)) or (0,),
                "port_ranks": tuple(range(value % 3)),
            }
            setattr(replica, change, values[change])
        everybody = list(fleet.replicas.values())
        for model in (None, "m", "n", "alias", "lora", "x"):
            assert fleet.serving(model) == Serving.of(model, everybody)
            assert fleet.knows(model) == any(replica.may_serve(model) for replica in everybody)
        assert fleet.streams == {stream for replica in everybody for stream in replica.streams()}
    await fleet.close()
