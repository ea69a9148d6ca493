"""A host name that is slow to look up holds up no stream but those of its host."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from events.contexts import Contexts
from events.publisher import Publisher
from events.schema import AllBlocksCleared
from events.signals import Connected, Replayed, ReplayEnded
from events.source import Source
from events.subscriber import Subscriber

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0

HEARS = """
import sys, time
sys.path.insert(0, sys.argv[1])
from events.publisher import Publisher
from events.schema import AllBlocksCleared
from events.signals import Connected, Frame
from events.source import Source
from events.subscriber import Subscriber

subscriber = Subscriber()
subscriber.add("unknown", Source("tcp://engine.of.a.zone.that.answers.not:5557"))
time.sleep(1)  # its lookup has begun, and takes a minute and more
publisher = Publisher("tcp://127.0.0.1:*")
subscriber.add("known", Source(publisher.endpoint))
until, heard = time.monotonic() + 20, []
while time.monotonic() < until and not any(isinstance(signal, Frame) for _, signal in heard):
    publisher.publish([AllBlocksCleared()], 1.0)
    heard += subscriber.inbox.take(100, 0.1)
print(any(isinstance(signal, Frame) for _, signal in heard), flush=True)
"""


def test_each_name_has_a_context_and_all_numbers_share_one() -> None:
    contexts = Contexts()
    numbers = ["tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://[fe80::1%lo]:1", "ipc:///tmp/x", "tcp://*:1"]
    assert {contexts.acquire(address) for address in numbers} == {contexts.shared}
    a, b = contexts.acquire("tcp://a:1"), contexts.acquire("tcp://b:1")
    assert len({a, b, contexts.shared}) == 3
    assert contexts.acquire("tcp://a:2") is a
    contexts.release("tcp://a:1")
    assert contexts.acquire("tcp://a:3") is a, "in use until its last socket is closed"
    for address in ("tcp://a:2", "tcp://a:3", "tcp://b:1", *numbers):
        contexts.release(address)
    assert contexts.acquire("tcp://a:1") is not a
    contexts.end()
    assert contexts.shared.closed


def test_streams_and_replays_by_name_are_heard_and_leave_nothing_behind() -> None:
    publisher, subscriber = Publisher("tcp://*:*", "tcp://*:*"), Subscriber()
    port, replay = (
        address.rpartition(":")[2] for address in (publisher.endpoint, publisher.replay_endpoint or "")
    )
    publisher.publish([AllBlocksCleared()], 1.0)
    subscriber.add("a", Source(f"tcp://127.0.0.1:{port}", replay=f"tcp://localhost:{replay}"))
    subscriber.add("b", Source(f"tcp://localhost:{port}", replay=f"tcp://localhost:{replay}"))
    for stream in "ab":
        subscriber.ask_replay(stream, 1, 0)
    heard, wanted = [], {(stream, kind) for stream in "ab" for kind in (Connected, Replayed, ReplayEnded)}
    until = time.monotonic() + DEADLINE_S
    while wanted - {(stream, type(signal)) for stream, signal in heard}:
        assert time.monotonic() < until, heard
        heard += subscriber.inbox.take(100, 0.1)
    for stream in "ab":
        subscriber.remove(stream)
    assert subscriber._sockets._contexts._named == {}
    subscriber.close()
    publisher.close()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts need root")
def test_a_name_server_that_does_not_answer_holds_up_no_other_stream(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        try:
            silent.bind(("127.0.53.53", 53))
        except OSError as error:
            pytest.skip(f"no name server can be had here: {error}")
        resolver = tmp_path / "resolv.conf"
        resolver.write_text("nameserver 127.0.53.53\noptions timeout:30 attempts:5\n")
        script = 'mount --bind "$1" /etc/resolv.conf || exit 77; exec "$2" -c "$3" "$4"'
        command = ["unshare", "-m", "sh", "-c", script, "sh", str(resolver), sys.executable, HEARS, str(ROOT)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if result.returncode == 77:
        pytest.skip("no mounts here")
    assert result.stdout == "True\n", result.stderr
