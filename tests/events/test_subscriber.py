"""The subscriber over real sockets, and its queue. A deadline only ends a wait that failed."""

import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from events.inbox import Inbox, StreamId
from events.publisher import Publisher, PublisherError
from events.signals import (
    MAX_MESSAGE_BYTES,
    Connected,
    Disconnected,
    Frame,
    Overflowed,
    Replayed,
    ReplayEnded,
    Signal,
)
from events.source import Source
from events.subscriber import END_OF_REPLAY, Subscriber

DEADLINE_S = 20.0
DEADLINE_MS = int(DEADLINE_S * 1000)


def until(reached: Callable[[], bool], what: str) -> None:
    """Waits for what another thread or process does."""
    pause, by = threading.Event(), time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < by, f"never happened: {what}"
        pause.wait(0.005)


class Ear:
    """A subscriber, and all that has come out of it."""

    def __init__(self, inbox: Inbox | None = None) -> None:
        self.subscriber = Subscriber(inbox)
        self.heard: list[tuple[StreamId, Signal]] = []

    def listen(self, seconds: float = 0.02) -> None:
        self.heard += self.subscriber.inbox.take(1_000, seconds)

    def of(self, stream: StreamId) -> list[Signal]:
        return [signal for each, signal in self.heard if each == stream]

    def frames(self, stream: StreamId) -> list[int]:
        return [signal.sequence for signal in self.of(stream) if isinstance(signal, Frame)]

    def links(self, stream: StreamId) -> list[Signal]:
        return [signal for signal in self.of(stream) if isinstance(signal, Connected | Disconnected)]

    def until(self, reached: Callable[[], Any], what: str) -> None:
        by = time.monotonic() + DEADLINE_S
        while not reached():
            assert time.monotonic() < by, f"never heard: {what}; heard {self.heard[-20:]}"
            self.listen()

    def follow(self, stream: StreamId, source: Source) -> None:
        self.subscriber.add(stream, source)
        self.until(lambda: Connected() in self.of(stream), f"{stream} connected")

    def settled(self) -> None:
        """Everything asked of the subscriber so far is done."""
        self.subscriber.remove("nobody")


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    yield ear
    ear.subscriber.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Engine:
    """An engine's live socket that knows when it is subscribed to (XPUB is what PUB is made of)."""

    def __init__(
        self,
        context: zmq.Context[Any],
        *,
        binds: str = "tcp://127.0.0.1:*",
        connects: str | None = None,
        topic: bytes = b"",
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.XPUB)
        self.socket.rcvtimeo = DEADLINE_MS
        self.socket.sndhwm = 0
        self.socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        self.socket.linger = 0
        self.topic = topic
        self.next = 0
        self.links = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        if connects is not None:
            self.socket.connect(connects)
            self.address = connects
        else:
            rebound(lambda: self.socket.bind(binds))
            self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def is_connected_to(self) -> None:
        assert self.links.poll(DEADLINE_MS)

    def heard_by_one(self) -> "Engine":
        while self.socket.recv() != b"\x01":
            pass  # an earlier subscriber left
        return self

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def publish(self, count: int = 1, payload: bytes = b"x") -> None:
        for _ in range(count):
            self.send(self.topic, self.next.to_bytes(8, "big"), payload)
            self.next += 1

    def close(self) -> None:
        self.socket.disable_monitor()
        self.socket.close(0)


def rebound(make: Callable[[], Any]) -> Any:
    """Binds a port that its last owner is about to free."""
    by = time.monotonic() + DEADLINE_S
    while True:
        try:
            return make()
        except (PublisherError, zmq.ZMQError):
            assert time.monotonic() < by
            time.sleep(0.01)  # for the kernel, which tells nobody


# live, connect mode


def test_frames_come_in_order_after_the_connection_they_came_by(ear: Ear, context: zmq.Context[Any]) -> None:
    engine = Engine(context, topic=b"kv@a@m")
    ear.subscriber.add("a", Source(engine.address))
    engine.heard_by_one().publish(1_000, b"payload")
    ear.until(lambda: len(ear.frames("a")) == 1_000, "1,000 frames")
    assert ear.of("a") == [Connected(), *[Frame(number, b"payload") for number in range(1_000)]]
    assert ear.subscriber.faults.of("a") == {}


def test_an_engine_that_restarts_on_its_port_is_lost_and_found_again(ear: Ear) -> None:
    first = Publisher("tcp://127.0.0.1:*")
    ear.follow("a", Source(first.endpoint))
    heard_from(ear, first)
    first.close()
    ear.until(lambda: ear.links("a")[-1] == Disconnected(), "the loss")
    second = rebound(lambda: Publisher(first.endpoint.replace("127.0.0.1", "*")))
    ear.until(lambda: ear.links("a")[-1] == Connected(), "the reconnect")
    before = len(ear.frames("a"))
    heard_from(ear, second)
    assert ear.links("a") == [Connected(), Disconnected(), Connected()]
    assert len(ear.frames("a")) > before
    second.close()


def heard_from(ear: Ear, publisher: Publisher) -> None:
    """A subscription takes a moment to be known: publishes until a frame comes through."""
    before = len(ear.heard)

    def comes() -> bool:
        publisher.publish_payload(b"x")
        return any(isinstance(signal, Frame) for _, signal in ear.heard[before:])

    ear.until(comes, "a frame")


class Gate(Inbox):
    """An inbox that can keep the subscriber's thread waiting, as a busy machine does."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.opened.set()
        self.waiting = threading.Event()

    def put(self, stream: StreamId, signal: Signal) -> bool:
        if not self.opened.is_set():
            self.waiting.set()
            assert self.opened.wait(DEADLINE_S)
        return super().put(stream, signal)


def test_frames_of_two_processes_are_never_taken_for_one_however_late_they_are_read(
    context: zmq.Context[Any],
) -> None:
    gate = Gate()
    ear = Ear(gate)
    old = Engine(context)
    ear.follow("a", Source(old.address))
    gate.opened.clear()
    old.heard_by_one().publish(500, b"old")
    assert gate.waiting.wait(DEADLINE_S)
    old.close()
    new = Engine(context, binds=old.address)
    new.is_connected_to()
    gate.opened.set()
    new.heard_by_one().publish(500, b"new")
    ear.until(lambda: still_heard(ear, new), "a frame of the new process")
    assert ear.links("a") == [Connected(), Disconnected(), Connected()]
    lost = ear.of("a").index(Disconnected()) + 1
    before = [signal.payload for signal in ear.of("a")[:lost] if isinstance(signal, Frame)]
    after = [signal for signal in ear.of("a")[lost:] if isinstance(signal, Frame)]
    assert set(before) <= {b"old"}
    first = after[0].sequence  # what came while nobody could tell, the replay gives again
    assert after == [Frame(first + number, b"new") for number in range(len(after))]
    assert ear.of("a")[lost] == Connected()
    ear.subscriber.close()


def still_heard(ear: Ear, engine: Engine) -> bool:
    engine.publish(1, b"new")
    return any(isinstance(signal, Frame) and signal.payload == b"new" for signal in ear.of("a"))


def test_what_a_lost_connection_left_is_read_before_its_loss(context: zmq.Context[Any]) -> None:
    gate = Gate()
    ear = Ear(gate)
    engine = Engine(context)
    ear.follow("a", Source(engine.address))
    gate.opened.clear()
    engine.heard_by_one().publish(2_000)
    assert gate.waiting.wait(DEADLINE_S)
    engine.close()
    gate.opened.set()
    ear.until(lambda: ear.links("a")[-1] == Disconnected(), "the loss")
    ear.settled()
    ear.listen()
    assert ear.of("a")[-1] == Disconnected()
    assert ear.frames("a")
    assert ear.frames("a") == list(range(len(ear.frames("a"))))
    ear.subscriber.close()


# replay


@pytest.fixture
def silent(context: zmq.Context[Any]) -> Engine:
    """An engine that publishes nothing while its batches are replayed."""
    return Engine(context)


@pytest.mark.parametrize("topic_in_replay", [True, False], ids=["four frames", "three frames"])
def test_ev08_a_replay_is_read_in_both_framings(ear: Ear, silent: Engine, topic_in_replay: bool) -> None:
    engine = Publisher(
        "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="kv@a@m", topic_in_replay=topic_in_replay
    )
    for number in range(5):
        engine.publish_payload(b"batch %d" % number)
    ear.follow("a", Source(silent.address, replay=engine.replay_endpoint))
    ear.subscriber.ask_replay("a", 7, 2)
    ear.until(lambda: ReplayEnded(7) in ear.of("a"), "the end of the replay")
    assert ear.of("a")[1:] == [*[Replayed(7, n, b"batch %d" % n) for n in (2, 3, 4)], ReplayEnded(7)]
    engine.close()


def test_ev08_a_new_replay_request_replaces_the_one_before(ear: Ear, context: zmq.Context[Any]) -> None:
    engine, router, client = asked(ear, context, ask=1)
    router.send_multipart([client, b"", b"t", (0).to_bytes(8, "big"), b"x"])
    ear.until(lambda: Replayed(1, 0, b"x") in ear.of("a"), "one reply, and no end marker")
    ear.subscriber.ask_replay("a", 2, 0)
    other, _, _ = router.recv_multipart()
    assert other != client
    router.send_multipart([client, b"", b"t", END_OF_REPLAY, b""])
    router.send_multipart([other, b"", b"t", END_OF_REPLAY, b""])
    ear.until(lambda: ReplayEnded(2) in ear.of("a"), "the end of the second")
    engine.publish()
    ear.until(lambda: ear.frames("a") == [0], "live frames")
    assert ReplayEnded(1) not in ear.of("a")


def test_ev08_a_replay_endpoint_that_answers_nothing_does_not_hold_up_live_frames(
    ear: Ear, context: zmq.Context[Any]
) -> None:
    engine, _, _ = asked(ear, context, ask=1)
    engine.publish(10)
    ear.until(lambda: len(ear.frames("a")) == 10, "live frames")
    ear.subscriber.remove("a")


def asked(ear: Ear, context: zmq.Context[Any], ask: int) -> tuple[Engine, zmq.Socket[bytes], bytes]:
    """An engine with a ROUTER that the test answers by hand, and a request that has come to it."""
    engine = Engine(context)
    router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    router.rcvtimeo = DEADLINE_MS
    port = router.bind_to_random_port("tcp://127.0.0.1")
    ear.follow("a", Source(engine.address, replay=f"tcp://127.0.0.1:{port}"))
    engine.heard_by_one()
    ear.subscriber.ask_replay("a", ask, 5)
    client, empty, start = router.recv_multipart()
    assert (empty, start) == (b"", (5).to_bytes(8, "big"))
    return engine, router, client


def test_replies_that_are_none_are_counted_and_the_rest_is_taken(ear: Ear, context: zmq.Context[Any]) -> None:
    _, router, client = asked(ear, context, ask=1)
    for frames in ([b""], [b"", b"x"], [b"", b"t", b"short", b"x"], [b"", b"t", b"9 bytes!!", b"x"]):
        router.send_multipart([client, *frames])
    router.send_multipart([client, b"", b"t", (1 << 63).to_bytes(8, "big"), b"x"])
    router.send_multipart([client, b"", b"t", (5).to_bytes(8, "big"), b"good"])
    router.send_multipart([client, b"", END_OF_REPLAY, b""])
    ear.until(lambda: ReplayEnded(1) in ear.of("a"), "the end")
    assert ear.of("a")[1:] == [Replayed(1, 5, b"good"), ReplayEnded(1)]
    assert ear.subscriber.faults.of("a") == {"replay_frames": 5}


def test_a_replay_address_that_cannot_be_used_is_counted(ear: Ear, context: zmq.Context[Any]) -> None:
    engine = Engine(context)
    ear.follow("a", Source(engine.address, replay="tcp://no port"))
    ear.subscriber.ask_replay("a", 1, 0)
    ear.settled()
    assert ear.subscriber.faults.of("a") == {"replay_address": 1}


def test_a_replay_asked_of_nobody_is_nothing(ear: Ear, context: zmq.Context[Any]) -> None:
    engine = Engine(context)
    ear.follow("a", Source(engine.address))
    ear.subscriber.ask_replay("a", 1, 0)
    ear.subscriber.ask_replay("nobody", 1, 0)
    ear.settled()
    assert ear.of("a") == [Connected()]


def test_a_replay_larger_than_the_queue_pauses_and_resumes_and_loses_nothing(silent: Engine) -> None:
    ear = Ear(Inbox(max_frames=20))
    engine = Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    for number in range(500):
        engine.publish_payload(b"%d" % number)
    ear.follow("a", Source(silent.address, replay=engine.replay_endpoint))
    ear.subscriber.ask_replay("a", 1, 0)
    until(lambda: ear.subscriber.inbox.depth("a") >= 10, "a queue half full")
    ear.settled()
    assert ear.subscriber.inbox.depth("a") == 10
    ear.until(lambda: ReplayEnded(1) in ear.of("a"), "the end of the replay")
    assert ear.of("a")[1:-1] == [Replayed(1, number, b"%d" % number) for number in range(500)]
    engine.close()
    ear.subscriber.close()


def test_a_paused_replay_can_be_replaced_and_its_stream_removed(silent: Engine) -> None:
    ear = Ear(Inbox(max_frames=20))
    engine = Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    for _ in range(100):
        engine.publish_payload(b"x")
    ear.follow("a", Source(silent.address, replay=engine.replay_endpoint))
    ear.subscriber.ask_replay("a", 1, 0)
    until(lambda: ear.subscriber.inbox.depth("a") >= 10, "a queue half full")
    ear.subscriber.ask_replay("a", 2, 90)
    ear.until(lambda: ReplayEnded(2) in ear.of("a"), "the end of the second replay")
    assert ReplayEnded(1) not in ear.of("a")
    ear.subscriber.ask_replay("a", 3, 0)
    until(lambda: ear.subscriber.inbox.depth("a") >= 10, "a queue half full")
    ear.subscriber.remove("a")
    ear.follow("b", Source(engine.endpoint))
    assert ear.subscriber.inbox.depth("a") == 0
    engine.close()
    ear.subscriber.close()


# bad messages


def test_ev04_messages_of_another_shape_are_counted_and_the_socket_stays_open(
    ear: Ear, context: zmq.Context[Any]
) -> None:
    engine = Engine(context)
    ear.follow("a", Source(engine.address))
    engine.heard_by_one().publish()
    sequence = (7).to_bytes(8, "big")
    for frames in ([b"x"], [b""], [b"t", sequence], [b"t", sequence, b"x", b"y"], [b"t"] * 7):
        engine.send(*frames)
    beyond = [(1 << 63).to_bytes(8, "big"), END_OF_REPLAY]  # nothing can be counted on from there
    for bad in (b"", b"1234567", b"123456789", *beyond):
        engine.send(b"t", bad, b"x")
    engine.send(b"\xff\xfe not utf-8", sequence, b"\xc1 garbage")
    engine.send(b"t", (8).to_bytes(8, "big"), b"")
    ear.until(lambda: len(ear.frames("a")) == 3, "the good messages")
    assert ear.of("a") == [Connected(), Frame(0, b"x"), Frame(7, b"\xc1 garbage"), Frame(8, b"")]
    assert ear.subscriber.faults.of("a") == {"frames": 5, "sequence": 5}


def test_op10_an_oversized_message_costs_the_connection_and_its_own_sequence_only(
    ear: Ear, context: zmq.Context[Any]
) -> None:
    engine = Engine(context)
    ear.follow("a", Source(engine.address))
    engine.heard_by_one().publish()
    engine.publish(payload=bytes(MAX_MESSAGE_BYTES + 1))
    ear.until(lambda: ear.links("a") == [Connected(), Disconnected(), Connected()], "the reconnect")
    engine.heard_by_one().publish()
    ear.until(lambda: ear.frames("a") == [0, 2], "the frames around it")
    assert ear.of("a")[1] == Frame(0, b"x")


def test_the_largest_message_that_is_allowed_comes_through(ear: Ear, context: zmq.Context[Any]) -> None:
    engine = Engine(context)
    ear.follow("a", Source(engine.address))
    engine.heard_by_one().publish(payload=bytes(MAX_MESSAGE_BYTES))
    ear.until(lambda: ear.frames("a") == [0], "the frame")
    assert ear.links("a") == [Connected()]


# bind mode


@pytest.fixture
def bound() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def test_ev32_an_engine_that_connects_is_heard_where_we_bind(ear: Ear, bound: str) -> None:
    ear.subscriber.add("a", Source(bound, binds=True))
    engine = Publisher(bound, topic="kv@a@m")
    heard_from(ear, engine)
    assert ear.of("a")[0] == Connected()
    engine.close()
    ear.until(lambda: ear.links("a")[-1] == Disconnected(), "the loss")


def test_ev31_topics_name_their_stream_exactly_and_others_are_counted(
    ear: Ear, context: zmq.Context[Any], bound: str
) -> None:
    topics = {"short": "kv", "long": "kv-events", "host": "kv@10.0.0.1@m", "port": "kv@10.0.0.1:8000@m"}
    for stream, topic in topics.items():
        ear.subscriber.add(stream, Source(bound, binds=True, topic=topic))
    engine = Engine(context, connects=bound).heard_by_one()
    said = [*topics.values(), "", "k", "kv@10.0.0.1@m2", "kv-events", "KV"]
    for number, topic in enumerate(said):
        engine.send(topic.encode(), number.to_bytes(8, "big"), b"x")
    ear.until(lambda: ear.frames("long") == [1, 7], "the frames")
    assert [ear.frames(stream) for stream in topics] == [[0], [1, 7], [2], [3]]
    until(lambda: ear.subscriber.faults.unmatched.total() == 4, "unmatched topics counted")
    assert dict(ear.subscriber.faults.unmatched) == {"": 1, "k": 1, "kv@10.0.0.1@m2": 1, "KV": 1}


def test_ev31_topics_without_a_name_do_not_fill_the_memory(
    ear: Ear, context: zmq.Context[Any], bound: str
) -> None:
    ear.subscriber.add("a", Source(bound, binds=True, topic="a"))
    engine = Engine(context, connects=bound).heard_by_one()
    for number in range(1_000):
        engine.send(b"%d " % number + b"x" * 5_000, bytes(8), b"x")
    engine.send(b"a", bytes(8), b"x")
    ear.until(lambda: ear.frames("a") == [0], "the frame after them")
    unmatched = ear.subscriber.faults.unmatched
    assert unmatched.total() == 1_000
    assert len(unmatched) <= 101
    assert max(map(len, unmatched)) <= 200


@pytest.mark.parametrize("order", [["all", "a"], ["a", "all"]])
def test_ev31_a_stream_of_all_topics_takes_what_no_other_names(
    ear: Ear, context: zmq.Context[Any], bound: str, order: list[str]
) -> None:
    for stream in order:
        ear.subscriber.add(stream, Source(bound, binds=True, topic=None if stream == "all" else stream))
    engine = Engine(context, connects=bound).heard_by_one()
    for number, topic in enumerate([b"a", b"b", b"a"]):
        engine.send(topic, number.to_bytes(8, "big"), b"x")
    ear.until(lambda: ear.frames("a") == [0, 2], "the frames of a")
    assert ear.frames("all") == [1]


def test_in_connect_mode_the_topic_is_only_information(ear: Ear, context: zmq.Context[Any]) -> None:
    engine = Engine(context, topic=b"kv@elsewhere@m")
    ear.follow("a", Source(engine.address, topic="kv@here@m"))
    engine.heard_by_one().publish()
    ear.until(lambda: ear.frames("a") == [0], "the frame")


def test_two_engines_on_one_address_are_two_streams_and_prove_themselves_when_one_leaves(
    ear: Ear, context: zmq.Context[Any], bound: str
) -> None:
    for stream in ("a", "b"):
        ear.subscriber.add(stream, Source(bound, binds=True, topic=stream))
    a = Engine(context, connects=bound, topic=b"a").heard_by_one()
    b = Engine(context, connects=bound, topic=b"b").heard_by_one()
    a.publish(3)
    b.publish(2)
    ear.until(lambda: (ear.frames("a"), ear.frames("b")) == ([0, 1, 2], [0, 1]), "both")
    assert ear.links("a") == ear.links("b") == [Connected()], "an engine that joins disturbs nobody"
    a.close()
    ear.until(lambda: ear.links("b")[1:] == [Disconnected(), Connected()], "one left")
    b.publish()
    ear.until(lambda: ear.frames("b") == [0, 1, 2], "the other goes on")
    b.close()
    ear.until(lambda: ear.links("b")[3:] == [Disconnected()], "both left")
    ear.until(lambda: ear.links("a") == ear.links("b"), "told to both")


def test_a_stream_added_to_an_address_with_engines_is_connected_at_once(
    ear: Ear, context: zmq.Context[Any], bound: str
) -> None:
    ear.subscriber.add("a", Source(bound, binds=True, topic="a"))
    _engine = Engine(context, connects=bound).heard_by_one()
    ear.until(lambda: ear.of("a") == [Connected()], "the engine")
    ear.follow("b", Source(bound, binds=True, topic="b"))
    ear.subscriber.remove("a")
    ear.settled()
    assert ear.links("b") == [Connected()]


def test_a_port_scan_or_health_check_on_a_bound_address_disturbs_no_stream(
    ear: Ear, context: zmq.Context[Any], bound: str
) -> None:
    ear.subscriber.add("a", Source(bound, binds=True))
    engine = Engine(context, connects=bound).heard_by_one()
    ear.until(lambda: ear.of("a") == [Connected()], "the engine")
    for said in (
        b"",
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 500,
    ):
        scan(bound, said)
    engine.publish()
    ear.until(lambda: ear.frames("a") == [0], "the engine's frame")
    engine.close()
    ear.until(lambda: ear.links("a") == [Connected(), Disconnected()], "the engine's end, and only that")


def scan(address: str, said: bytes) -> None:
    """A stranger who connects, says something, and leaves; returns when we have hung up."""
    host, _, port = address.removeprefix("tcp://").partition(":")
    with socket.create_connection((host, int(port)), DEADLINE_S) as stranger:
        stranger.settimeout(DEADLINE_S)
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            pass


def test_a_stranger_who_speaks_zeromq_makes_engines_prove_themselves_at_most(
    ear: Ear, context: zmq.Context[Any], bound: str
) -> None:
    ear.subscriber.add("a", Source(bound, binds=True))
    engine = Engine(context, connects=bound).heard_by_one()
    ear.until(lambda: ear.of("a") == [Connected()], "the engine")
    stranger = context.socket(zmq.REQ)
    watch = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.connect(bound)
    assert watch.poll(DEADLINE_MS)
    stranger.close(0)
    engine.publish()
    ear.until(lambda: ear.frames("a") == [0], "the engine's frame")
    assert ear.links("a")[-1] == Connected()


def test_a_bound_port_is_free_once_its_last_stream_is_removed(ear: Ear, bound: str) -> None:
    ear.subscriber.add("a", Source(bound, binds=True, topic="a"))
    ear.subscriber.add("b", Source(bound, binds=True, topic="b"))
    ear.settled()
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", int(bound.rpartition(":")[2])))
    ear.subscriber.remove("a")
    ear.subscriber.remove("b")
    rebound_plainly(bound).close()


def rebound_plainly(address: str) -> socket.socket:
    by = time.monotonic() + DEADLINE_S
    while True:
        try:
            return socket.create_server(("127.0.0.1", int(address.rpartition(":")[2])))
        except OSError:
            assert time.monotonic() < by
            time.sleep(0.01)  # for the kernel, which tells nobody


# addresses


def test_a_port_in_use_is_counted_and_logged_and_harms_no_other_stream(
    ear: Ear, context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        ear.subscriber.add("a", Source(address, binds=True))
        ear.settled()
    assert ear.subscriber.faults.of("a") == {"address": 1}
    assert address in caplog.text
    assert "in use" in caplog.text
    engine = Engine(context)
    ear.follow("b", Source(engine.address))
    ear.subscriber.remove("a")
    ear.subscriber.add("a", Source(address, binds=True))
    _engine = Engine(context, connects=address).heard_by_one()
    ear.until(lambda: ear.of("a") == [Connected()], "the port, free again")
    assert ear.subscriber.faults.of("a") == {}


@pytest.mark.parametrize("address", ["", "tcp://", "tcp://127.0.0.1", "udp:x", "nonsense", "tcp://*:5557"])
def test_an_address_that_is_none_is_counted(ear: Ear, address: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        ear.subscriber.add("a", Source(address))
        ear.settled()
    assert ear.subscriber.faults.of("a") == {"address": 1}


def test_an_engine_on_ipv6_is_heard(ear: Ear, context: zmq.Context[Any]) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    engine = Publisher("tcp://[::1]:*", "tcp://[::1]:*")
    ear.follow("a", Source(engine.endpoint, replay=engine.replay_endpoint))
    heard_from(ear, engine)
    ear.subscriber.ask_replay("a", 1, 0)
    ear.until(lambda: ReplayEnded(1) in ear.of("a"), "the replay")
    engine.close()


def test_an_engine_that_comes_later_than_its_stream_is_found(ear: Ear) -> None:
    port = free_port()
    ear.subscriber.add("a", Source(f"tcp://127.0.0.1:{port}"))
    ear.settled()
    engine = Publisher(f"tcp://*:{port}")
    ear.until(lambda: ear.of("a") == [Connected()], "the engine")
    engine.close()


def test_as_many_streams_are_followed_as_a_large_fleet_has(ear: Ear, context: zmq.Context[Any]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 4_096:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4_096 if hard < 0 else min(hard, 4_096), hard))
    engine = Engine(context)
    streams = [("replica", rank) for rank in range(400)]
    for stream in streams:
        ear.subscriber.add(stream, Source(engine.address))
    ear.until(lambda: len(ear.heard) >= len(streams), "every connection")
    assert {stream for stream, _ in ear.heard} == set(streams)
    for stream in streams:
        assert ear.subscriber.faults.of(stream) == {}


# queue, threads


def test_op06_what_does_not_fit_is_an_overflow_and_the_thread_goes_on(context: zmq.Context[Any]) -> None:
    ear = Ear(Inbox(max_frames=10))
    noisy, quiet = Engine(context), Engine(context)
    ear.follow("noisy", Source(noisy.address))
    ear.follow("quiet", Source(quiet.address))
    noisy.heard_by_one().publish(1_000)
    until(lambda: ear.subscriber.inbox.overflows["noisy"] == 990, "990 frames dropped")
    quiet.heard_by_one().publish(3)
    until(lambda: ear.subscriber.inbox.depth("quiet") == 3, "the quiet stream's frames")
    ear.until(lambda: ear.frames("quiet") == [0, 1, 2], "the quiet stream's frames")
    assert ear.of("noisy") == [Connected(), *[Frame(number, b"x") for number in range(10)], Overflowed()]
    noisy.publish()
    ear.until(lambda: ear.frames("noisy")[-1] == 1_000, "frames again")
    assert ear.subscriber.inbox.overflows["quiet"] == 0
    ear.subscriber.close()


def test_commands_never_wait_and_never_fail_while_the_thread_is_held_up(context: zmq.Context[Any]) -> None:
    gate = Gate()
    ear = Ear(gate)
    engine = Engine(context)
    gate.opened.clear()
    ear.subscriber.add("a", Source(engine.address))
    assert gate.waiting.wait(DEADLINE_S)
    for ask in range(5_000):
        ear.subscriber.ask_replay("a", ask, 0)
    gate.opened.set()
    ear.follow("b", Source(engine.address))
    ear.subscriber.close()


def test_ix03_removing_a_stream_drops_what_is_queued_and_what_is_still_to_come(
    ear: Ear, context: zmq.Context[Any]
) -> None:
    engine = Engine(context)
    ear.subscriber.add("a", Source(engine.address))
    engine.heard_by_one().publish(10_000)
    until(lambda: ear.subscriber.inbox.depth("a") > 100, "a full queue")
    ear.subscriber.remove("a")
    assert ear.subscriber.inbox.depth("a") == 0
    assert ear.subscriber.inbox.take(10, 0) == []
    engine.publish(100)
    ear.subscriber.add("b", Source(engine.address))
    ear.until(lambda: ear.of("b") == [Connected()], "another stream")
    assert ear.of("a") == []
    assert ear.subscriber.faults.of("a") == {}


def test_a_stream_that_is_added_again_begins_with_its_connection(ear: Ear, context: zmq.Context[Any]) -> None:
    engine = Engine(context)
    ear.follow("a", Source(engine.address))
    engine.heard_by_one()
    ear.subscriber.remove("a")
    assert engine.socket.recv() == b"\x00"
    engine.publish()
    ear.subscriber.add("a", Source(engine.address))
    engine.heard_by_one().publish()
    ear.until(lambda: ear.frames("a") == [1], "the new frame")
    assert ear.of("a") == [Connected(), Connected(), Frame(1, b"x")]


class Failing(Inbox):
    """Fails once, as no code should."""

    failed = False

    def put(self, stream: StreamId, signal: Signal) -> bool:
        if not self.failed:
            self.failed = True
            raise RuntimeError("once")
        return super().put(stream, signal)


def test_ev04_a_failure_in_one_turn_is_logged_and_the_thread_goes_on(
    context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()
    ear = Ear(failing)
    engine = Engine(context)
    ear.subscriber.add("a", Source(engine.address))
    until(lambda: failing.failed, "the failure")
    engine.heard_by_one().publish(3)
    ear.until(lambda: ear.frames("a") == [0, 1, 2], "the frames")
    assert "goes on" in caplog.text
    ear.subscriber.close()


def test_closing_leaves_no_thread_and_no_socket_and_may_be_done_twice(
    context: zmq.Context[Any], bound: str
) -> None:
    before = threading.active_count()
    ear = Ear()
    engine, _, _ = asked(ear, context, ask=1)
    ear.subscriber.add("b", Source(bound, binds=True))
    ear.settled()
    assert threading.active_count() == before + 1
    ear.subscriber.close()
    ear.subscriber.close()
    assert threading.active_count() == before
    assert engine.socket.recv() == b"\x00"
    rebound_plainly(bound).close()


# the inbox alone


def put_frames(inbox: Inbox, stream: StreamId, count: int, size: int = 1) -> list[bool]:
    return [inbox.put(stream, Frame(number, bytes(size))) for number in range(count)]


def test_streams_take_turns_whatever_one_of_them_has_queued() -> None:
    inbox = Inbox()
    put_frames(inbox, "noisy", 1_000)
    put_frames(inbox, "quiet", 2)
    taken = inbox.take(100, 0, share=32)
    assert [stream for stream, _ in taken] == ["noisy"] * 32 + ["quiet"] * 2 + ["noisy"] * 66
    put_frames(inbox, "late", 1)
    assert "late" in [stream for stream, _ in inbox.take(40, 0, share=32)]


def test_a_stream_keeps_its_order_over_many_takes() -> None:
    inbox = Inbox()
    put_frames(inbox, "a", 500)
    put_frames(inbox, "b", 300)
    taken = [each for _ in range(100) for each in inbox.take(17, 0, share=5)]
    for stream, count in (("a", 500), ("b", 300)):
        assert [s.sequence for name, s in taken if name == stream and isinstance(s, Frame)] == list(
            range(count)
        )


def test_a_queue_is_bounded_in_frames_and_in_bytes_for_each_stream() -> None:
    inbox = Inbox(max_frames=3, max_bytes=100)
    assert put_frames(inbox, "many", 5) == [True] * 3 + [False] * 2
    assert put_frames(inbox, "large", 3, size=50) == [True, True, False]
    assert put_frames(inbox, "other", 1) == [True]
    assert inbox.overflows == {"many": 2, "large": 1}
    assert inbox.depth("many") == 4


def test_a_single_frame_larger_than_the_bound_is_taken_when_nothing_waits() -> None:
    inbox = Inbox(max_bytes=100)
    assert put_frames(inbox, "a", 2, size=500) == [True, False]


def test_signals_that_carry_nothing_are_never_dropped() -> None:
    inbox = Inbox(max_frames=1)
    signals: list[Signal] = [Connected(), Frame(0, b"x"), Disconnected(), Connected(), ReplayEnded(1)]
    for signal in signals:
        inbox.put("a", signal)
    assert [signal for _, signal in inbox.take(10, 0)] == [
        Connected(), Overflowed(), Disconnected(), Connected(), ReplayEnded(1),
    ]  # fmt: skip


def test_room_is_less_than_half_full() -> None:
    inbox = Inbox(max_frames=4, max_bytes=100)
    assert inbox.has_room("a")
    put_frames(inbox, "a", 1)
    assert inbox.has_room("a")
    put_frames(inbox, "a", 1)
    assert not inbox.has_room("a")
    put_frames(inbox, "b", 1, size=50)
    assert not inbox.has_room("b")
    inbox.take(10, 0)
    assert inbox.has_room("a")
    assert inbox.has_room("b")


def test_forgetting_a_stream_leaves_the_others_their_turn() -> None:
    inbox = Inbox(max_frames=2)
    put_frames(inbox, "a", 5)
    put_frames(inbox, "b", 2)
    inbox.forget("a")
    inbox.forget("nobody")
    assert inbox.take(10, 0) == [("b", Frame(0, b"\0")), ("b", Frame(1, b"\0"))]
    assert put_frames(inbox, "a", 1) == [True]
    assert inbox.take(10, 0) == [("a", Frame(0, b"\0"))]


def test_taking_from_an_empty_inbox_ends_at_the_timeout_or_when_woken() -> None:
    inbox = Inbox()
    assert inbox.take(10, 0.001) == []
    taken: list[Any] = []
    taker = threading.Thread(target=lambda: taken.append(inbox.take(10, DEADLINE_S)))
    taker.start()
    until(lambda: woken(inbox, taker), "the take to end")
    assert taken == [[]]


def woken(inbox: Inbox, taker: threading.Thread) -> bool:
    inbox.wake()
    return not taker.is_alive()


def test_an_address_that_is_taken_is_tried_again_until_it_is_free(
    ear: Ear, context: zmq.Context[Any], bound: str
) -> None:
    holder = context.socket(zmq.PULL)
    holder.bind(bound)
    ear.subscriber.add("a", Source(bound, binds=True))
    ear.until(lambda: "a" in ear.subscriber.faults.broken, "the address is refused")
    assert bound in ear.subscriber.faults.broken["a"]
    holder.close(0)
    ear.until(lambda: "a" not in ear.subscriber.faults.broken, "the address is had")
    engine = Engine(context, connects=bound).heard_by_one()
    engine.publish()
    ear.until(lambda: ear.frames("a") == [0], "the engine is heard")
