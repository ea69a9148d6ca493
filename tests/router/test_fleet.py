from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from router.fleet import Fleet
from router.introduction import DiscoveryError, model_cards, read_event_sources, read_models
from router.replicas import EventSource, Health, parse_replica
from router.watcher import WatchPace


def test_the_first_id_without_a_parent_is_the_model() -> None:
    models = read_models(
        b'{"data":[{"id":"lora","parent":"m"},{"id":"m","max_model_len":99},{"id":"alias"}],"object":"list"}'
    )
    assert (models.model, models.aliases, models.adapters, models.max_model_len) == (
        "m",
        ("alias",),
        {"lora"},
        99,
    )


def test_a_configured_model_wins_and_the_first_id_becomes_an_alias() -> None:
    models = read_models(b'{"data":[{"id":"m"},{"id":"alias"}]}', "alias")
    assert (models.model, models.aliases) == ("alias", ("m",))


@pytest.mark.parametrize(
    "payload",
    [b"", b"[]", b"{}", b'{"data":[]}', b'{"data":[{"id":5}]}', b'{"data":[{"id":"l","parent":"m"}]}'],
)
def test_models_that_make_no_sense_are_an_error(payload: bytes) -> None:
    with pytest.raises(DiscoveryError):
        read_models(payload)


def test_event_sources_are_read_by_rank_with_the_replicas_host() -> None:
    sources = read_event_sources(
        b'{"1":{"endpoint":"tcp://*:5558","replay_endpoint":"tcp://*:6558","topic":""},'
        b'"0":{"endpoint":"tcp://*:5557","replay_endpoint":null,"topic":"kv"}}',
        "10.0.0.1",
    )
    assert sources == (
        EventSource(0, "tcp://10.0.0.1:5557", None, "kv"),
        EventSource(1, "tcp://10.0.0.1:5558", "tcp://10.0.0.1:6558", None),
    )


def test_sources_that_are_switched_off_are_none() -> None:
    assert read_event_sources(b'{"0":{"endpoint":"tcp://*:1","enable_kv_cache_events":false}}', "h") == ()


def test_ev32_an_engine_that_connects_its_events_is_told_what_to_do() -> None:
    with pytest.raises(DiscoveryError, match=r"publish on tcp://\*:PORT"):
        read_event_sources(b'{"0":{"endpoint":"tcp://0.0.0.0:5557"}}', "h")


@pytest.mark.parametrize("payload", [b"", b"[]", b'{"a":{"endpoint":"tcp://*:1"}}', b'{"0":{}}'])
def test_sources_that_make_no_sense_are_an_error(payload: bytes) -> None:
    with pytest.raises(DiscoveryError):
        read_event_sources(payload, "h")


async def watched(session: aiohttp.ClientSession, *lines: str) -> Fleet:
    fleet = Fleet([parse_replica(line) for line in lines], session, pace=WatchPace(health_interval_s=0.02))
    fleet.start()
    return fleet


async def test_a_replica_is_discovered_and_its_ranks_come_from_its_sources(
    start_engine: Any, until: Any
) -> None:
    engine = await start_engine(
        cards=[{"id": "m"}, {"id": "lora", "parent": "m"}],
        event_sources={str(rank): {"endpoint": f"tcp://*:{5557 + rank}"} for rank in range(2)},
    )
    async with aiohttp.ClientSession() as session:
        fleet = await watched(session, f"a={engine.url}")
        replica = fleet.replicas["a"]
        await until(lambda: len(replica.sources) == 2, "sources are known")
        assert replica.streams() == [("a", 0), ("a", 1)]
        assert replica.resolve("lora") == ("m", "lora")
        assert replica.sources[1].endpoint == "tcp://127.0.0.1:5558"
        await fleet.close()


async def test_a_replica_without_event_sources_has_none_and_is_no_fault(
    start_engine: Any, until: Any
) -> None:
    engine = await start_engine()
    async with aiohttp.ClientSession() as session:
        fleet = await watched(session, f"a={engine.url}")
        await until(lambda: fleet.replicas["a"].models is not None, "models are known")
        await until(lambda: fleet.replicas["a"].health is Health.UP, "it is up")
        assert fleet.replicas["a"].sources == ()
        assert fleet.replicas["a"].last_error is None
        await fleet.close()


async def test_a_replica_that_comes_later_is_found(start_engine: Any, until: Any) -> None:
    engine = await start_engine()
    port = engine.port
    await engine.stop()
    async with aiohttp.ClientSession() as session:
        fleet = await watched(session, f"a={engine.url}")
        replica = fleet.replicas["a"]
        await until(lambda: replica.health is Health.DOWN, "it is down")
        assert replica.last_error
        await engine.start(port)
        await until(lambda: replica.models is not None, "it is known")
        assert replica.health is Health.UP
        await fleet.close()


async def test_an_engine_whose_core_died_is_taken_out_until_it_is_back(start_engine: Any, until: Any) -> None:
    engine = await start_engine()
    async with aiohttp.ClientSession() as session:
        fleet = await watched(session, f"a={engine.url}")
        replica = fleet.replicas["a"]
        await until(lambda: replica.health is Health.UP, "it is up")
        engine.health_status = 503
        await until(lambda: fleet.usable() == [], "it is taken out")
        assert replica.last_error == "/health answered 503"
        engine.health_status = 200
        await until(lambda: fleet.usable() == [replica], "it is back")
        await fleet.close()


async def test_an_unreachable_replica_is_out_at_once_and_any_other_failure_is_checked_first(
    start_engine: Any, until: Any
) -> None:
    engine = await start_engine()
    async with aiohttp.ClientSession() as session:
        fleet = await watched(session, f"a={engine.url}")
        replica = fleet.replicas["a"]
        await until(lambda: replica.health is Health.UP, "it is up")
        fleet.failed("a", "broke off", unreachable=False)
        assert replica.usable
        fleet.failed("a", "refused", unreachable=True)
        assert not replica.usable
        await until(lambda: replica.usable, "the check brings it back")
        await fleet.close()


async def test_an_adapter_that_was_loaded_meanwhile_is_found_by_a_refresh(
    start_engine: Any, until: Any
) -> None:
    engine = await start_engine()
    async with aiohttp.ClientSession() as session:
        fleet = await watched(session, f"a={engine.url}")
        await until(lambda: fleet.replicas["a"].models is not None, "models are known")
        engine.cards.append({"id": "new-lora", "parent": "m"})
        assert not fleet.knows("new-lora")
        await fleet.refresh()
        assert fleet.knows("new-lora")
        await fleet.close()


async def test_px15_models_are_the_union_with_every_field_kept(start_engine: Any, until: Any) -> None:
    first = await start_engine(cards=[{"id": "m", "max_model_len": 5, "owned_by": "x"}])
    second = await start_engine(cards=[{"id": "m", "max_model_len": 7}, {"id": "lora", "parent": "m"}])
    async with aiohttp.ClientSession() as session:
        fleet = await watched(session, f"a={first.url}", f"b={second.url}")
        await until(lambda: all(r.models for r in fleet.replicas.values()), "models are known")
        assert model_cards(fleet.replicas.values()) == [
            {"id": "m", "max_model_len": 5, "owned_by": "x"},
            {"id": "lora", "parent": "m"},
        ]
        await fleet.close()
