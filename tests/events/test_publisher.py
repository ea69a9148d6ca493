"""The publisher against real sockets and against payloads of real engines."""

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from events.address import AddressError, offset_port
from events.publisher import END_SEQUENCE, Publisher, PublisherError, binds, encode
from events.schema import AllBlocksCleared, BlockRemoved, BlockStored, Event, decode, token_array

CAPTURES = Path(__file__).parents[3] / "shared/data/vllm-events"
DEADLINE_MS = 5_000


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def connected(context: zmq.Context[Any], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.rcvtimeo = DEADLINE_MS
    if kind == zmq.SUB:
        socket.subscribe(b"")
    socket.connect(endpoint)
    return socket


def publish_until_heard(publisher: Publisher, sub: zmq.Socket[bytes]) -> list[bytes]:
    """A subscription takes a moment: publish until the first frames come through."""
    until = time.monotonic() + DEADLINE_MS / 1000
    while time.monotonic() < until:
        publisher.publish([AllBlocksCleared()], 1.0)
        if sub.poll(20):
            return sub.recv_multipart()
    raise AssertionError("nothing heard")


def replayed(dealer: zmq.Socket[bytes], start: int) -> list[list[bytes]]:
    dealer.send_multipart([b"", start.to_bytes(8, "big")])
    replies = []
    while True:
        replies.append(dealer.recv_multipart())
        if replies[-1][-2] == END_SEQUENCE:
            return replies


def test_batches_carry_topic_and_a_sequence_that_counts_from_zero(context: zmq.Context[Any]) -> None:
    publisher = Publisher("tcp://127.0.0.1:*", topic="kv@a@m", rank=3)
    sub = connected(context, zmq.SUB, publisher.endpoint)
    topic, first, payload = publish_until_heard(publisher, sub)
    sent = publisher.publish([BlockRemoved([b"\0" * 8])], 2.5)
    frames = [topic, first, payload]
    while int.from_bytes(frames[1], "big") < sent:
        frames = sub.recv_multipart()
    batch = decode(frames[2])
    assert topic == b"kv@a@m"
    assert int.from_bytes(frames[1], "big") == sent
    assert batch.timestamp == 2.5
    assert batch.rank == 3
    assert batch.events == [BlockRemoved([b"\0" * 8])]
    publisher.close()


@pytest.mark.parametrize("topic_in_replay", [True, False])
def test_replay_gives_every_kept_batch_from_the_start_and_the_end_marker(
    context: zmq.Context[Any], topic_in_replay: bool
) -> None:
    publisher = Publisher(
        "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="t", topic_in_replay=topic_in_replay
    )
    for number in range(5):
        assert publisher.publish_payload(b"batch %d" % number) == number
    assert publisher.replay_endpoint is not None
    dealer = connected(context, zmq.DEALER, publisher.replay_endpoint)
    replies = replayed(dealer, 3)
    assert [reply[-1] for reply in replies] == [b"batch 3", b"batch 4", b""]
    assert [int.from_bytes(reply[-2], "big") for reply in replies[:-1]] == [3, 4]
    assert {len(reply) for reply in replies} == {4 if topic_in_replay else 3}
    assert replayed(dealer, 99)[0][-2] == END_SEQUENCE
    publisher.close()


def test_replay_begins_silently_later_when_the_buffer_no_longer_reaches_back(
    context: zmq.Context[Any],
) -> None:
    publisher = Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", buffer_steps=2)
    for number in range(6):
        publisher.publish_payload(b"%d" % number)
    assert publisher.replay_endpoint is not None
    dealer = connected(context, zmq.DEALER, publisher.replay_endpoint)
    assert [reply[-1] for reply in replayed(dealer, 0)] == [b"4", b"5", b""]
    publisher.close()


def test_malformed_replay_requests_are_dropped_and_the_next_is_answered(context: zmq.Context[Any]) -> None:
    publisher = Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    publisher.publish_payload(b"only")
    assert publisher.replay_endpoint is not None
    dealer = connected(context, zmq.DEALER, publisher.replay_endpoint)
    dealer.send_multipart([b"", b"a", b"b", b"c"])
    assert [reply[-1] for reply in replayed(dealer, 0)] == [b"only", b""]
    publisher.close()


def test_an_endpoint_without_a_star_is_connected_to_and_the_subscriber_binds(
    context: zmq.Context[Any],
) -> None:
    sub: zmq.Socket[bytes] = context.socket(zmq.SUB)
    sub.subscribe(b"")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    publisher = Publisher(f"tcp://127.0.0.1:{port}")
    assert publisher.endpoint == f"tcp://127.0.0.1:{port}"
    assert len(publish_until_heard(publisher, sub)) == 3
    publisher.close()


def test_a_closed_publisher_refuses_batches_and_closing_again_is_fine() -> None:
    publisher = Publisher("tcp://*:0")
    publisher.publish_payload(b"x")
    publisher.close()
    publisher.close()
    with pytest.raises(PublisherError, match="is closed"):
        publisher.publish_payload(b"y")


def test_an_address_in_use_is_an_error_that_names_it_and_leaves_no_socket_behind() -> None:
    # On an address of its own: nobody else takes the port in between.
    holder = Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.7:*")
    assert holder.replay_endpoint is not None
    with pytest.raises(
        PublisherError, match=r"cannot bind tcp://127\.0\.0\.7:\d+: Address already in use; choose"
    ):
        Publisher("tcp://127.0.0.1:*", holder.replay_endpoint)
    holder.close()
    again = Publisher("tcp://127.0.0.1:*", holder.replay_endpoint)
    assert again.replay_endpoint == holder.replay_endpoint
    again.close()


def test_inproc_addresses_are_heard_in_the_shared_context() -> None:
    publisher = Publisher("inproc://kv-test")
    sub = connected(zmq.Context.instance(), zmq.SUB, "inproc://kv-test")
    assert len(publish_until_heard(publisher, sub)) == 3
    sub.close(linger=0)
    publisher.close()


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/kv", True),
        ("inproc://kv", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://0.0.0.0:5557", False),
        ("tcp://indexer:5557", False),
    ],
)
def test_binding_follows_vllms_rule(endpoint: str, bound: bool) -> None:
    assert binds(endpoint) is bound


def test_ranks_publish_on_port_plus_rank() -> None:
    assert offset_port("tcp://*:5557", 0) == "tcp://*:5557"
    assert offset_port("tcp://*:5557", 2) == "tcp://*:5559"
    assert offset_port("tcp://[::]:5557", 1) == "tcp://[::]:5558"
    assert offset_port("tcp://*:0", 1) == "tcp://*:0"
    assert offset_port("inproc://kv", 1) == "inproc://kv_dp1"
    with pytest.raises(AddressError, match="rank 1"):
        offset_port("ipc:///tmp/kv", 1)
    with pytest.raises(AddressError, match="lower"):
        offset_port("tcp://*:65535", 1)


@pytest.mark.parametrize("style", ["map", "array"])
def test_both_styles_are_read_back_as_the_events_that_were_written(style: Any) -> None:
    events: list[Event] = [
        AllBlocksCleared(),
        BlockRemoved([b"\0" + bytes(range(32))], "CPU", 1),
        BlockStored(
            [(1 << 63).to_bytes(8, "big"), b"\0" * 7 + b"\5"],
            b"\xff" * 8,
            token_array(range(8)),
            4,
            lora_id=1,
            lora_name="sql",
            extra_keys=[["sql", "salt"], ["sql"]],
            group_kind="full_attention",
        ),
    ]
    assert decode(encode(events, 12.5, 2, style)).events == events


@pytest.mark.parametrize(("name", "style"), [("main", "map"), ("bytes_cbor", "map"), ("v023", "array")])
def test_payloads_of_real_engines_are_written_again_byte_for_byte(name: str, style: Any) -> None:
    path = CAPTURES / f"{name}.jsonl"
    if not path.exists():
        path = Path(__file__).parents[1] / f"data/vllm-events/{name}.jsonl"
    if not path.exists():
        pytest.skip(f"no capture {name}")
    compared = 0
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if entry["k"] == "ev":
            payload = base64.b64decode(entry["f"][2])
            batch = decode(payload)
            if b"session_id" in payload:
                continue  # The structs do not carry who asked.
            assert encode(batch.events, batch.timestamp, batch.rank, style) == payload
            compared += 1
    assert compared >= 20
