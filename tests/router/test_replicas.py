from __future__ import annotations

import pytest

from router.errors import SettingsError
from router.replicas import (
    EventSource,
    Models,
    Replica,
    at_host,
    configured_sources,
    parse_replica,
    parse_replicas,
)


def test_a_whole_line_is_understood() -> None:
    spec = parse_replica(
        "vllm-0=http://vllm-0:8000/,events=tcp://vllm-0:5557,replay=tcp://vllm-0:5558,ranks=2,topic=kv@a@m,model=m,block-size=16"
    )
    assert (spec.name, spec.url, spec.ranks, spec.topic, spec.model, spec.block_size) == (
        "vllm-0",
        "http://vllm-0:8000",
        2,
        "kv@a@m",
        "m",
        16,
    )


@pytest.mark.parametrize(
    "line",
    [
        "http://vllm-0:8000",
        "=http://vllm-0:8000",
        "a b=http://vllm-0:8000",
        "a=vllm-0:8000",
        "a=ftp://vllm-0",
        "a=http://vllm-0:99999",
        "a=http://user:pass@vllm-0:8000",
        "a=http://vllm-0:8000,evnts=tcp://h:1",
        "a=http://vllm-0:8000,events=",
        "a=http://vllm-0:8000,events=tcp://h",
        "a=http://vllm-0:8000,events=tcp://h:1,events=tcp://h:2",
        "a=http://vllm-0:8000,replay=tcp://h:1",
        "a=http://vllm-0:8000,ranks=0",
        "a=http://vllm-0:8000,ranks=two",
        "",
    ],
)
def test_a_malformed_line_is_refused_with_the_line_in_the_message(line: str) -> None:
    with pytest.raises(SettingsError, match="--replica"):
        parse_replica(line)


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(SettingsError, match="vllm-0 is given twice"):
        parse_replicas(["vllm-0=http://a:1", "vllm-0=http://b:1"])


def test_each_rank_publishes_on_the_next_port() -> None:
    spec = parse_replica("a=http://h:8000,events=tcp://*:5557,replay=tcp://*:5657,ranks=2")
    assert configured_sources(spec) == (
        EventSource(0, "tcp://h:5557", "tcp://h:5657"),
        EventSource(1, "tcp://h:5558", "tcp://h:5658"),
    )


def test_bind_endpoints_pass_through_with_their_topic() -> None:
    spec = parse_replica("a=http://h:8000,events=bind:tcp://0.0.0.0:5557,topic=kv@POD@MODEL")
    assert configured_sources(spec) == (EventSource(0, "bind:tcp://0.0.0.0:5557", None, "kv@POD@MODEL"),)


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://*:5557", "10.0.0.1", "tcp://10.0.0.1:5557"),
        ("tcp://[::]:5557", "fe80::1", "tcp://[fe80::1]:5557"),
        ("tcp://node:5557", "10.0.0.1", "tcp://node:5557"),
        ("ipc:///run/kv", "10.0.0.1", "ipc:///run/kv"),
    ],
)
def test_a_wildcard_is_the_replicas_own_host(endpoint: str, host: str, expected: str) -> None:
    assert at_host(endpoint, host) == expected


def test_ranks_beyond_the_first_need_ports() -> None:
    with pytest.raises(SettingsError, match="rank 1"):
        Replica(parse_replica("a=http://h:1,events=ipc:///run/kv,ranks=2"))


def test_event_and_replay_ports_one_apart_are_refused_for_two_ranks() -> None:
    with pytest.raises(SettingsError, match="leave at least 2"):
        Replica(parse_replica("a=http://h:1,events=tcp://h:5557,replay=tcp://h:5558,ranks=2"))


def test_each_rank_of_a_bound_endpoint_has_its_own_port() -> None:
    replica = Replica(parse_replica("a=http://h:1,events=bind:tcp://0.0.0.0:5557,ranks=2"))
    assert [source.endpoint for source in replica.sources] == [
        "bind:tcp://0.0.0.0:5557",
        "bind:tcp://0.0.0.0:5558",
    ]


def test_aliases_mean_the_base_model_and_adapters_mean_base_and_lora() -> None:
    replica = Replica(parse_replica("a=http://h:1"))
    assert replica.resolve("m") is None
    replica.models = Models("m", ("alias",), frozenset({"sql-lora"}))
    assert replica.resolve(None) == ("m", None)
    assert replica.resolve("alias") == ("m", None)
    assert replica.resolve("sql-lora") == ("m", "sql-lora")
    assert replica.resolve("other") is None
