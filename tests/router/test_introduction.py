from __future__ import annotations

import pytest

from router.introduction import DiscoveryError, read_event_sources, read_models
from router.replicas import EventSource


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
