"""CURVE keys for events: files, and who gets on with whom over real sockets."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from events.curve import (
    Curve,
    CurveError,
    Gate,
    KeyPair,
    read_curve,
    read_pair,
    read_public,
    speak_as_server,
    write_pair,
)
from events.publisher import Publisher
from events.schema import AllBlocksCleared
from events.signals import Frame, Replayed, ReplayEnded
from events.source import Source
from events.subscriber import Subscriber

DEADLINE_S = 20.0


def pair(folder: Path, name: str) -> KeyPair:
    return read_pair("--curve-key", str(write_pair(folder / name)[1]))


@pytest.fixture
def keys(tmp_path: Path) -> Callable[[str], KeyPair]:
    return lambda name: pair(tmp_path, name)


class Ear:
    """A subscriber with keys, and what it hears."""

    def __init__(self, curve: Curve | None) -> None:
        self.subscriber = Subscriber(curve=curve)
        self.heard: list[object] = []

    def until(self, reached: Callable[[], bool], what: str) -> None:
        by = time.monotonic() + DEADLINE_S
        while not reached():
            assert time.monotonic() < by, f"never: {what}; heard {self.heard[-20:]}"
            self.heard += [signal for _, signal in self.subscriber.inbox.take(1_000, 0.02)]

    @property
    def frames(self) -> int:
        return sum(isinstance(signal, Frame) for signal in self.heard)

    def refused(self, stream: str) -> bool:
        return self.subscriber.faults.of(stream).get("handshake", 0) > 0


@pytest.fixture
def ear() -> Iterator[Callable[[Curve | None], Ear]]:
    made: list[Ear] = []

    def make(curve: Curve | None) -> Ear:
        made.append(Ear(curve))
        return made[-1]

    yield make
    for each in made:
        each.subscriber.close()


def publish_until(publisher: Publisher, ear: Ear, reached: Callable[[], bool], what: str) -> None:
    """Publishes again and again: what was sent before a connection is there is lost."""
    pause, by = threading.Event(), time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < by, f"never: {what}"
        publisher.publish([AllBlocksCleared()], 0.0)
        ear.heard += [signal for _, signal in ear.subscriber.inbox.take(1_000, 0.01)]
        pause.wait(0.01)


def test_events_and_replay_come_from_an_engine_that_has_the_right_key(
    keys: Callable[[str], KeyPair], ear: Callable[[Curve | None], Ear]
) -> None:
    ours, theirs = keys("indexer"), keys("engine")
    with closing(Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", keys=theirs)) as publisher:
        listener = ear(Curve(ours, {"e0": theirs.public}))
        source = Source(publisher.endpoint, replay=publisher.replay_endpoint, peer="e0")
        listener.subscriber.add("e0", source)
        publish_until(publisher, listener, lambda: listener.frames > 0, "frames come")
        listener.subscriber.ask_replay("e0", 1, 0)
        listener.until(lambda: ReplayEnded(1) in listener.heard, "the replay ends")
        assert any(isinstance(signal, Replayed) for signal in listener.heard)
        assert listener.subscriber.faults.broken == {}


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("plain for a key", r"it speaks no CURVE, and a key is given for it|, or none,"),
        ("another key", r"it has another CURVE key than is given for it"),
        ("a key for plain", r"it wants a CURVE key, and none is given for it"),
    ],
)
def test_nothing_is_taken_from_who_has_not_the_key(
    case: str, why: str, keys: Callable[[str], KeyPair], ear: Callable[[Curve | None], Ear]
) -> None:
    ours, theirs, wrong = keys("indexer"), keys("engine"), keys("wrong")
    curve = None if case == "a key for plain" else Curve(ours, {"*": theirs.public})
    held = {"plain for a key": None, "another key": wrong, "a key for plain": theirs}[case]
    with closing(Publisher("tcp://127.0.0.1:*", keys=held)) as publisher:
        listener = ear(curve)
        listener.subscriber.add("e0", Source(publisher.endpoint, peer="e0"))
        publish_until(publisher, listener, lambda: listener.refused("e0"), "the handshake fails")
        assert listener.frames == 0
        told = listener.subscriber.faults.broken["e0"]
        assert re.search(why, told)
        assert not any(key.decode() in told for key in (ours.secret, theirs.public))


def test_a_publisher_that_does_not_let_our_key_in_is_told_of(
    keys: Callable[[str], KeyPair], ear: Callable[[Curve | None], Ear]
) -> None:
    ours, theirs = keys("indexer"), keys("engine")
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        gate = Gate(context, [keys("another").public])
        with closing(gate.socket):
            speak_as_server(socket, theirs, gated=True)
            address = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
            listener = ear(Curve(ours, {"e0": theirs.public}))
            listener.subscriber.add("e0", Source(address, peer="e0"))

            def refused() -> bool:
                if gate.socket.poll(0):
                    gate.answer()
                return listener.refused("e0")

            listener.until(refused, "our key is refused")
            assert "it does not let our CURVE key in" in listener.subscriber.faults.broken["e0"]


def test_a_bound_address_takes_the_listed_keys_and_nobody_else(
    keys: Callable[[str], KeyPair], ear: Callable[[Curve | None], Ear], caplog: pytest.LogCaptureFixture
) -> None:
    ours, friend, stranger = keys("indexer"), keys("friend"), keys("stranger")
    with zmq.Context() as context, context.socket(zmq.SUB) as probe:
        address = f"tcp://127.0.0.1:{probe.bind_to_random_port('tcp://127.0.0.1')}"
    listener = ear(Curve(ours, clients=frozenset({friend.public})))
    for name in ("friend", "stranger", "plain"):
        listener.subscriber.add(name, Source(address, binds=True, topic=name))
    publishers = {
        "friend": Publisher(address, topic="friend", keys=friend, server_key=ours.public),
        "stranger": Publisher(address, topic="stranger", keys=stranger, server_key=ours.public),
        "plain": Publisher(address, topic="plain"),
    }
    heard: set[object] = set()
    by = time.monotonic() + DEADLINE_S
    try:
        while "friend" not in heard or "refused a publisher" not in caplog.text:
            assert time.monotonic() < by, f"heard only {heard}"
            for publisher in publishers.values():
                publisher.publish([AllBlocksCleared()], 0.0)
            taken = listener.subscriber.inbox.take(1_000, 0.02)
            heard |= {stream for stream, signal in taken if isinstance(signal, Frame)}
    finally:
        for publisher in publishers.values():
            publisher.close()
    assert heard == {"friend"}
    assert not any(key.decode() in caplog.text for key in (ours.secret, stranger.public, friend.public))


def test_a_key_that_others_may_read_is_refused_and_no_key_is_ever_told(tmp_path: Path) -> None:
    public, secret = write_pair(tmp_path / "indexer")
    assert secret.stat().st_mode & 0o777 == 0o600
    own = read_pair("--curve-key", str(secret))
    assert read_public("--curve-server", str(public)) == own.public
    assert own.secret.decode() not in repr(own) + repr(Curve(own))
    with pytest.raises(CurveError, match="File exists"):
        write_pair(tmp_path / "indexer")
    (tmp_path / "own.key").write_text(public.read_text())
    (tmp_path / "own.key").chmod(0o600)
    with pytest.raises(CurveError, match="holds no secret key"):
        read_pair("--curve-key", str(tmp_path / "own.key"))
    secret.chmod(0o640)
    with pytest.raises(CurveError, match=r"others may read it .*0640.*chmod 600"):
        read_pair("--curve-key", str(secret))
    for text in ("nonsense", 'curve\n    public-key = "short"\n', f'curve\n    public-key = "{"~" * 40}"\n'):
        (tmp_path / "bad.key").write_text(text)
        with pytest.raises(CurveError, match=r"--curve-client .*bad\.key") as caught:
            read_public("--curve-client", str(tmp_path / "bad.key"))
        assert text not in str(caught.value)


def test_settings_that_would_protect_nothing_are_refused(tmp_path: Path) -> None:
    public, secret = (str(path) for path in write_pair(tmp_path / "k"))
    assert read_curve(None, (), ()) is None
    for key, servers, clients in (
        (None, (f"*={public}",), ()),
        (None, (), (public,)),
        (secret, (), ()),
        (secret, (public,), ()),
        (secret, (f"a={public}", f"a={public}"), ()),
        (str(tmp_path / "gone"), (f"*={public}",), ()),
    ):
        with pytest.raises(CurveError, match="--curve-"):
            read_curve(key, servers, clients)
    curve = read_curve(secret, (f"a={public}",), (public,))
    assert curve is not None
    assert (curve.server_of("a") is None, curve.server_of("b")) == (False, None)
