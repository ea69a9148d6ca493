"""The stream against a model of an engine and its network, driven by hypothesis.

The engine publishes, restarts, is cut off and overtakes its old sequence; the network drops, delays and
truncates as far as ZeroMQ can. Whatever they do, what was applied since the last reset must be batches of one
process in order, and ``live`` must mean that nothing is missing.
"""

from collections import deque
from random import Random

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from events.signals import Connected, Disconnected, Frame, Overflowed, Replayed, ReplayEnded, Signal
from events.stream import Action, Apply, AskReplay, Limits, Reset, Stream

LIMITS = Limits(held_frames=6, held_bytes=200)
SETTLED = ("live", "partial")
PATIENCE_S = 1200  # beyond the longest cool-down and the deadline of a verification
PLAIN, CLEAR, BAD = "plain", "clear", "bad"


class Batch(msgspec.Struct, frozen=True):
    """A batch of the model: unique by process and sequence."""

    process: int
    sequence: int
    kind: str = PLAIN

    @property
    def payload(self) -> bytes:
        return msgspec.json.encode(self)


read_batch = msgspec.json.Decoder(Batch).decode


class EngineAndStream(RuleBasedStateMachine):
    """``live_line`` and ``replay_line`` hold what is under way; each keeps its order."""

    has_replay = True

    @initialize(buffer=st.sampled_from([1, 2, 5, 1000, 1000]), past=st.integers(0, 4), prompt=st.booleans())
    def start(self, buffer: int, past: int, prompt: bool) -> None:
        self.now = 1000.0
        self.buffer = buffer
        self.process = 0
        self.log: list[Batch] = []
        self.connected = False
        self.live_line: deque[Signal] = deque()
        self.replay_line: deque[Signal] = deque()
        self.overflown: deque[Batch] = deque()  # what the Overflowed of the live line stand for
        self.ask: AskReplay | None = None
        self.asked = 0
        self.applied: list[Batch] = []
        self.known = -1  # the highest sequence of this process that the stream was told of
        self.highest_live = -1  # of this process and connection
        self.fresh_link = True  # nothing has come through this connection yet
        self.stream = Stream(has_replay=self.has_replay, limits=LIMITS)
        for _ in range(past):
            self.append(PLAIN)
        self.connect()
        if prompt:
            self.settle_once()

    # the engine

    def append(self, kind: str) -> Batch:
        batch = Batch(self.process, len(self.log), kind)
        self.log.append(batch)
        return batch

    def send(self, batch: Batch, fate: str) -> None:
        if not self.connected:
            return
        if fate == "dropped" and not self.must_come_through(batch):
            return
        if fate == "overflow":
            self.live_line.append(Overflowed())
            self.overflown.append(batch)
            return
        self.live_line.append(Frame(batch.sequence, batch.payload))
        self.highest_live = batch.sequence
        self.fresh_link = False

    def must_come_through(self, batch: Batch) -> bool:
        """Without a replay endpoint, the first sequence after a reconnect is the only witness there is."""
        return not self.has_replay and self.fresh_link

    @rule(
        kind=st.sampled_from([PLAIN] * 6 + [CLEAR, BAD]),
        fates=st.lists(st.sampled_from(["sent"] * 4 + ["dropped", "overflow"]), min_size=1, max_size=4),
        arrives=st.booleans(),
    )
    def publish(self, kind: str, fates: list[str], arrives: bool) -> None:
        for fate in fates:
            self.send(self.append(kind), fate)
        if arrives:
            self.deliver_all()

    @precondition(lambda self: not self.connected)
    @rule(count=st.integers(1, 12))
    def publish_unheard(self, count: int) -> None:
        for _ in range(count):
            self.append(PLAIN)

    @rule(
        kind=st.sampled_from(["disconnect", "restart", "restart unseen", "indexer restart"]),
        late=st.booleans(),
        skipped=st.integers(0, 3),
    )
    def trouble(self, kind: str, late: bool, skipped: int) -> None:
        if kind == "disconnect":
            self.disconnect(late)
        elif kind == "restart":
            self.restart(late)
        elif kind == "indexer restart":
            self.indexer_restarts()
        elif self.connected and self.highest_live >= 0:
            self.restart_unseen(skipped)

    def restart(self, late: bool) -> None:
        self.disconnect(late)
        self.replace_process()

    def replace_process(self) -> None:
        self.process += 1
        self.log = []
        self.known = -1
        self.highest_live = -1

    def restart_unseen(self, skipped: int) -> None:
        """The link stays up, as behind a proxy; only the sequence that goes back tells."""
        self.deliver_all(replays=False)
        skipped = min(skipped, self.highest_live)
        self.replace_process()
        self.ask = None
        self.replay_line.clear()
        for _ in range(skipped):
            self.append(PLAIN)
        self.send(self.append(PLAIN), "sent")
        self.deliver_all(replays=False)

    # the network

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        self.connected = True
        self.fresh_link = True
        self.highest_live = -1
        if not self.has_replay:
            self.deliver_all()
            if self.applied and self.applied[-1].process != self.process:
                self.avoid_the_next_sequence()
        self.live_line.append(Connected())

    def avoid_the_next_sequence(self) -> None:
        """A new process that goes on at exactly the next sequence cannot be told from the old one."""
        if len(self.log) == self.applied[-1].sequence + 1:
            self.append(PLAIN)

    def disconnect(self, late: bool) -> None:
        """``late``: frames of the old link come after its end was noticed."""
        if not self.connected:
            return
        self.connected = False
        self.ask = None  # its own link breaks in the same moment
        self.replay_line.clear()
        only_frames = all(isinstance(each, Frame) for each in self.live_line)
        if late and only_frames:
            self.live_line.appendleft(Disconnected())
        else:
            self.live_line.append(Disconnected())

    @precondition(lambda self: self.ask is not None and Disconnected() not in self.live_line)
    @rule(
        fate=st.sampled_from(["whole", "whole", "cut", "silent", "older", "overflow"]),
        lost=st.sets(st.integers(0, 8), max_size=2),
        arrives=st.booleans(),
    )
    def answer(self, fate: str, lost: set[int], arrives: bool) -> None:
        """``lost`` replies leave a hole; a lost last reply takes the end marker with it."""
        ask, self.ask = self.ask, None
        assert ask is not None
        if fate == "silent" or not self.connected:
            return
        start = 0 if fate == "older" else ask.start
        kept = [batch for batch in self.log[-self.buffer :] if batch.sequence >= start]
        kept_or_none = [None if number in lost else batch for number, batch in enumerate(kept)]
        if fate == "cut" or (kept_or_none and kept_or_none[-1] is None):
            kept_or_none = kept_or_none[: len(kept_or_none) // 2 + 1]
            fate = "cut"
        for batch in kept_or_none:
            if batch is not None:
                self.replay_line.append(Replayed(ask.ask, batch.sequence, batch.payload))
            elif fate == "overflow":
                self.replay_line.append(Overflowed())
        if fate != "cut":
            self.replay_line.append(ReplayEnded(ask.ask))
        if arrives:
            self.deliver_all()

    # the stream

    @precondition(lambda self: self.live_line)
    @rule(count=st.integers(1, 5))
    def deliver_live(self, count: int) -> None:
        for _ in range(min(count, len(self.live_line))):
            self.hear_live()

    @precondition(lambda self: self.replay_line)
    @rule(count=st.integers(1, 5))
    def deliver_replay(self, count: int) -> None:
        for _ in range(count):
            if self.replay_line:  # a new request empties it
                self.hear(self.replay_line.popleft())

    @rule(answered=st.booleans())
    def everything_arrives(self, answered: bool) -> None:
        self.deliver_all()
        if answered:
            self.settle_once()

    def deliver_all(self, replays: bool = True) -> None:
        while self.live_line or (replays and self.replay_line):
            if self.live_line:
                self.hear_live()
            else:
                self.hear(self.replay_line.popleft())

    def hear_live(self) -> None:
        signal = self.live_line.popleft()
        if isinstance(signal, Frame | Overflowed):
            frame = isinstance(signal, Frame)
            batch = read_batch(signal.payload) if frame else self.overflown.popleft()
            if batch.process == self.process:
                self.known = max(self.known, batch.sequence)
        self.hear(signal)

    def hear(self, signal: Signal) -> None:
        before = self.stream.copy()
        actions = self.stream.on(signal, self.now)
        assert before.on(signal, self.now) == actions  # nothing of what came after is in the copy
        self.perform(actions)

    def tick(self) -> list[Action]:
        due = self.stream.is_due(self.now)
        state = (self.stream.state, self.stream.reason, self.stream.lost)
        actions = self.stream.tick(self.now)
        assert due or (not actions and state == (self.stream.state, self.stream.reason, self.stream.lost))
        return actions

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.9, 5.0, 11.0, 31.0, 301.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(3):
            self.perform(self.tick())

    def indexer_restarts(self) -> None:
        """A new stream takes up what the old one committed."""
        old = self.stream
        for line in (self.live_line, self.replay_line, self.overflown):
            line.clear()
        self.connected, self.ask = False, None
        self.stream = Stream(
            has_replay=self.has_replay,
            last=old.last,
            digest=old.digest,
            lost=old.lost,
            started_at=old.started_at,
            limits=LIMITS,
        )

    def perform(self, actions: object) -> None:
        """As the indexer does: in order, telling the stream what the batches said."""
        assert isinstance(actions, list)
        for action in actions:
            match action:
                case Reset():
                    self.applied = []
                case AskReplay():
                    self.asked += 1
                    self.ask = action
                    self.replay_line = deque(s for s in self.replay_line if isinstance(s, Overflowed))
                case Apply():
                    batch = read_batch(action.payload)
                    assert batch.sequence == action.sequence
                    self.applied.append(batch)
                    if batch.kind == CLEAR:
                        self.stream.cleared(action.sequence)
                    if batch.kind == BAD:
                        self.stream.damaged("bad")

    # what must hold

    @invariant()
    def what_was_applied_is_of_one_process_in_order_and_once(self) -> None:
        if not hasattr(self, "stream"):
            return
        assert len({batch.process for batch in self.applied}) <= 1, self.applied
        sequences = [batch.sequence for batch in self.applied]
        assert sequences == sorted(set(sequences))
        assert self.stream.last == (sequences[-1] if sequences else None)

    @invariant()
    def live_means_that_nothing_is_missing(self) -> None:
        if not hasattr(self, "stream") or self.stream.state != "live":
            return
        clears = [number for number, batch in enumerate(self.applied) if batch.kind == CLEAR]
        since = self.applied[clears[-1] :] if clears else self.applied
        assert BAD not in [batch.kind for batch in since]
        if since:
            first = since[0].sequence if clears else 0
            assert [b.sequence for b in since] == list(range(first, first + len(since)))
        if not self.live_line and not self.replay_line:
            self.is_complete()

    def is_complete(self) -> None:
        assert self.connected
        last = self.applied[-1].sequence if self.applied else -1
        assert last >= self.known, "told of a batch, and live without it"
        assert not self.applied or self.applied[-1].process == self.process
        assert not self.stream.lost

    @invariant()
    def held_frames_are_bounded(self) -> None:
        if hasattr(self, "stream"):
            assert self.stream.held <= LIMITS.held_frames

    def teardown(self) -> None:
        """The network heals: the stream comes out of every state, with all the engine still keeps."""
        if not hasattr(self, "stream"):
            return
        self.deliver_all()
        if not self.connected:
            self.connect()
        self.send(self.append(PLAIN), "sent")
        self.asked = 0
        self.settle_once()
        until = self.now + PATIENCE_S
        while self.now < until:
            self.now += 1.0
            if self.stream.is_due(self.now):  # else a tick is nothing, as :meth:`tick` sees to
                self.perform(self.tick())
                self.settle_once()
        self.send(self.append(PLAIN), "sent")
        self.settle_once()
        assert self.stream.state in SETTLED, (self.stream.state, self.stream.reason)
        assert self.stream.held == 0
        assert self.stream.last == len(self.log) - 1
        assert {batch.process for batch in self.applied} == {self.process}
        assert self.asked <= 12, "a recovery loop"
        self.live_means_that_nothing_is_missing()

    def settle_once(self) -> None:
        for _ in range(50):
            self.deliver_all()
            if self.ask is None:
                return
            self.answer("whole", set(), True)
        raise AssertionError("asks again and again")


class EngineWithoutReplay(EngineAndStream):
    """Sequences and connections are all there is: incomplete is said, and never denied."""

    has_replay = False


class EngineThatSaysWhenItStarted(EngineAndStream):
    """Its answers take a while: another process may run, and another link be there, when one comes."""

    reading: tuple[float, float] | None = None

    @rule()
    def start_is_asked(self) -> None:
        self.now += 0.001
        self.reading = (1e9 + 100.0 * self.process, self.now)
        self.now += 0.001

    @precondition(lambda self: self.reading and not self.live_line and not self.replay_line)
    @rule()
    def start_is_told(self) -> None:
        """Not while frames still wait: they may be of the process before."""
        assert self.reading is not None
        (at, asked), self.reading = self.reading, None
        self.perform(self.stream.process_started(at, self.now, asked))


class EngineWithoutReplayThatSaysWhenItStarted(EngineThatSaysWhenItStarted):
    has_replay = False


_EFFORT = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

TestStreamWithReplay = EngineAndStream.TestCase
TestStreamWithReplay.settings = _EFFORT
TestStreamWithoutReplay = EngineWithoutReplay.TestCase
TestStreamWithoutReplay.settings = _EFFORT
TestStreamWithStartTime = EngineThatSaysWhenItStarted.TestCase
TestStreamWithStartTime.settings = _EFFORT
TestStreamWithStartTimeWithoutReplay = EngineWithoutReplayThatSaysWhenItStarted.TestCase
TestStreamWithStartTimeWithoutReplay.settings = _EFFORT


class Life:
    """A random walk over the same rules: a tenth of the cost of hypothesis, so it comes to rarer turns."""

    def __init__(self, machine: EngineAndStream, seed: int) -> None:
        self.machine = machine
        self.random = Random(seed)
        self.misery = self.random.choice([0.02, 0.1, 0.3])

    def chance(self, probability: float = 0.5) -> bool:
        return self.random.random() < probability

    def begin(self) -> None:
        buffer = self.random.choice([1, 2, 5, 1000, 1000])
        self.machine.start(buffer=buffer, past=self.random.randrange(5), prompt=self.chance(0.6))

    def step(self) -> None:
        machine, random = self.machine, self.random
        if self.chance(self.misery):
            kind = random.choice(["disconnect", "restart", "restart unseen", "indexer restart"])
            machine.trouble(kind=kind, late=self.chance(), skipped=random.randrange(4))
            return
        if isinstance(machine, EngineThatSaysWhenItStarted):
            self.ask_when_it_started(machine)
        turn = random.randrange(10)
        if turn < 4:
            fates = random.choices(["sent", "dropped", "overflow"], [6, 1, 1], k=random.randrange(1, 5))
            kind = random.choices([PLAIN, CLEAR, BAD], [8, 1, 1])[0]
            machine.publish(kind=kind, fates=fates, arrives=self.chance())
        elif turn == 4 and not machine.connected:
            machine.publish_unheard(count=random.randrange(1, 13))
        elif turn == 5 and not machine.connected:
            machine.connect()
        elif turn == 6 and machine.ask is not None and Disconnected() not in machine.live_line:
            fate = random.choice(["whole", "whole", "cut", "silent", "older", "overflow"])
            lost = set(random.sample(range(9), random.choice([0, 0, 1, 2])))
            machine.answer(fate=fate, lost=lost, arrives=self.chance())
        elif turn == 7 and machine.live_line:
            machine.deliver_live(count=random.randrange(1, 6))
        elif turn == 7 and machine.replay_line:
            machine.deliver_replay(count=random.randrange(1, 6))
        elif turn == 8:
            machine.everything_arrives(answered=self.chance())
        elif turn == 9:
            machine.time_passes(seconds=random.choice([0.1, 1.0, 4.9, 5.0, 5.0, 11.0, 31.0, 301.0]))

    def ask_when_it_started(self, machine: EngineThatSaysWhenItStarted) -> None:
        if machine.reading is None and self.chance(0.4):
            machine.start_is_asked()
        if machine.reading and not machine.live_line and not machine.replay_line and self.chance(0.3):
            machine.start_is_told()

    def check(self) -> None:
        self.machine.what_was_applied_is_of_one_process_in_order_and_once()
        self.machine.live_means_that_nothing_is_missing()
        self.machine.held_frames_are_bounded()


@pytest.mark.parametrize(
    "machine",
    [
        EngineAndStream,
        EngineWithoutReplay,
        EngineThatSaysWhenItStarted,
        EngineWithoutReplayThatSaysWhenItStarted,
    ],
)
def test_random_lives_of_an_engine_never_break_a_promise(machine: type[EngineAndStream]) -> None:
    for seed in range(3_000):
        life = Life(machine(), seed)
        try:
            life.begin()
            for _ in range(life.random.choice([5, 10, 20, 40])):
                life.step()
                life.check()
            life.machine.teardown()
        except AssertionError as error:
            raise AssertionError(f"in the life of seed {seed}: {error}") from error
