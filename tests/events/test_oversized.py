"""OP-10: one batch too large to take, from an engine in a process of its own to a stream's state."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from events.source import Source
from events.stream import Apply, AskReplay, Limits, Reset, Stream
from events.subscriber import Subscriber

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0
LARGE = 100 << 20
QUICK = Limits(replay_silence=0.3, cool_down=0.05, cool_down_max=0.05)

ENGINE = """
import sys
from events.publisher import Publisher
publisher = Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
print(f'["{publisher.endpoint}", "{publisher.replay_endpoint}"]', flush=True)
for line in sys.stdin:
    publisher.publish_payload(bytes(int(line)))
"""


class Engine:
    """Publishes batches of so many bytes."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", ENGINE]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout is not None
        self.endpoint, self.replay_endpoint = json.loads(self.process.stdout.readline())

    def publish(self, *sizes: int) -> None:
        assert self.process.stdin is not None
        for size in sizes:
            print(size, file=self.process.stdin, flush=True)


class Follower:
    """A subscriber and a stream's state machine, as the indexer drives them."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.subscriber = Subscriber(**options)
        self.stream = Stream(has_replay=True, limits=QUICK)
        self.applied: list[int] = []
        self.asked = 0
        self.resets = 0
        self.subscriber.add("a", Source(engine.endpoint, replay=engine.replay_endpoint))

    def step(self) -> None:
        now = time.monotonic()
        taken = self.subscriber.inbox.take(100, 0.01)
        actions = [action for _, signal in taken for action in self.stream.on(signal, now)]
        for action in [*actions, *self.stream.tick(now)]:
            match action:
                case Apply():
                    self.applied.append(action.sequence)
                case AskReplay():
                    self.asked += 1
                    self.subscriber.ask_replay("a", action.ask, action.start)
                case Reset():
                    self.resets += 1

    def until(self, reached: Callable[[], Any], what: str) -> None:
        by = time.monotonic() + DEADLINE_S
        while not reached():
            assert time.monotonic() < by, f"never: {what}; {self.stream.state}, {self.applied}"
            self.step()

    def steps(self, seconds: float) -> None:
        by = time.monotonic() + seconds
        while time.monotonic() < by:
            self.step()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.process.kill()
    engine.process.communicate()


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def test_op10_an_oversized_batch_costs_its_sequence_and_no_memory_and_is_not_fetched_for_ever(
    engine: Engine,
) -> None:
    follower = Follower(engine)
    try:
        follower.until(lambda: follower.stream.state == "live", "the stream is live")
        engine.publish(10, 11)
        follower.until(lambda: follower.applied == [0, 1], "the batches before")
        forget_peak()
        before = peak_bytes()
        engine.publish(LARGE)
        follower.until(lambda: follower.stream.state == "partial", "the stream is partial")
        engine.publish(13, 14)
        follower.until(lambda: follower.applied[-2:] == [3, 4], "the batches after")
        asked = follower.asked
        follower.steps(1.5)
        engine.publish(15)
        follower.until(lambda: follower.applied[-1] == 5, "it goes on")
        assert follower.stream.state == "partial"
        assert follower.resets == 0, "what was known before stays"
        assert 2 not in follower.applied
        assert follower.asked <= asked + 3
        assert peak_bytes() - before < LARGE // 4
    finally:
        follower.subscriber.close()


def test_op10_the_limit_can_be_lower(engine: Engine) -> None:
    follower = Follower(engine, max_message_bytes=1000)
    try:
        follower.until(lambda: follower.stream.state == "live", "the stream is live")
        engine.publish(1000)
        follower.until(lambda: follower.applied == [0], "as large as may be")
        engine.publish(1001)
        follower.until(lambda: follower.stream.state == "partial", "too large")
    finally:
        follower.subscriber.close()
