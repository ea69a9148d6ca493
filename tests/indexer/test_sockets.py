"""Engines on real sockets, to answers from a real map."""

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from events.publisher import Publisher, encode
from events.schema import AllBlocksCleared, Event
from indexer import ingest as ingest_module
from indexer.blocks import StreamBlocks
from indexer.changes import Changes
from indexer.followed import Followed
from indexer.registration import Registration
from indexer.service import Indexer
from indexer.shard_reader import open_map

PROMPT = list(range(28))


def register(indexer: Indexer, name: str, publisher: Publisher, **fields: Any) -> None:
    fields.setdefault("endpoint", publisher.endpoint)
    fields.setdefault("replay_endpoint", publisher.replay_endpoint)
    indexer.ingest.register(Registration(instance_id=name, model_name="m", **fields)).result(10)


def record(indexer: Indexer, name: str, rank: int = 0) -> Any:
    found = [status.record for status in indexer.reader.streams() if status.record.id == (name, rank)]
    return found[0] if found else None


def held(indexer: Indexer, tokens: Any = PROMPT) -> dict[str, int]:
    return {one.instance: one.gpu for one in indexer.reader.query("m", tokens)}


def entries(indexer: Indexer) -> list[int]:
    """Entries of the tables that hold blocks."""
    with indexer.writer.env.begin() as txn:
        tables = indexer.writer.tables
        return [txn.stat(table)["entries"] for table in (*tables.by_slot, tables.blocks)]


@pytest.fixture
def caught_up(until: Any) -> Callable[..., None]:
    """Waits until a stream has the state and has applied the sequence."""

    def wait(indexer: Indexer, name: str, sequence: int | None, state: str = "live") -> None:
        def there() -> bool:
            one = record(indexer, name)
            return one is not None and (one.sequence, one.state) == (sequence, state)

        until(there, f"{name} is {state} at {sequence}")

    return wait


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# the way through


def test_what_an_engine_publishes_is_what_a_query_finds(
    indexers: Any, publishers: Any, engine: Any, caught_up: Any
) -> None:
    indexer, one, two = indexers(), publishers(), publishers(style="array", topic_in_replay=False)
    one.publish([engine(1).stored(PROMPT, 0, 3)], 1.0)  # Before anybody listens.
    register(indexer, "A", one)
    register(indexer, "B", two)
    caught_up(indexer, "A", 0)
    caught_up(indexer, "B", None)
    one.publish([engine(1).stored(PROMPT, 3)], 2.0)
    two.publish([engine(2).stored(PROMPT, 0, 2)], 2.0)
    caught_up(indexer, "A", 1)
    caught_up(indexer, "B", 0)
    assert held(indexer) == {"A": 28, "B": 8}
    one.publish([*engine(1).removed(PROMPT, 5)], 3.0)
    two.publish([AllBlocksCleared()], 3.0)
    caught_up(indexer, "A", 2)
    caught_up(indexer, "B", 1)
    assert held(indexer) == {"A": 20, "B": 0}


def test_an_engine_without_replay_is_partial_until_it_clears(
    indexers: Any, publishers: Any, engine: Any, caught_up: Any
) -> None:
    indexer, publisher = indexers(), publishers(replay=None)
    register(indexer, "A", publisher)
    caught_up(indexer, "A", None, "partial")
    publisher.publish([engine().stored(PROMPT)], 1.0)
    caught_up(indexer, "A", 0, "live")  # Sequence 0: it was there from the beginning.
    assert held(indexer) == {"A": 28}


def test_ev05_each_rank_has_its_port_and_only_the_one_that_restarts_is_cleared(
    indexers: Any, publishers: Any, engine: Any, caught_up: Any, until: Any
) -> None:
    indexer, ranks = indexers(), [publishers(rank=rank) for rank in range(4)]
    for rank, publisher in enumerate(ranks):
        register(indexer, "A", publisher, dp_rank=rank)
    caught_up(indexer, "A", None)
    ranks[0].publish([engine(0).stored(PROMPT)], 1.0)
    caught_up(indexer, "A", 0)
    spoke = [record(indexer, "A", rank).event_at is not None for rank in range(4)]
    assert spoke == [True, False, False, False], "status tells which ranks never spoke"
    ranks[2].publish([engine(2).stored(PROMPT)], 1.0)

    def matched() -> list[int]:
        found = {one.rank: one.gpu for one in indexer.reader.query("m", PROMPT)}
        return [found[rank] for rank in range(4)]

    until(lambda: matched() == [28, 0, 28, 0])
    ranks[2].close()
    again = publishers(wildcard(ranks[2].endpoint), ranks[2].replay_endpoint, rank=2)
    again.publish([engine(7).stored(PROMPT, 0, 2)], 2.0)
    until(lambda: matched() == [28, 0, 8, 0])
    assert [record(indexer, "A", rank).counters.batches for rank in range(4)] == [1, 0, 2, 0]


def test_ev06_ranks_of_one_port_are_heard_replayed_and_forgotten_together(
    indexers: Any, publishers: Any, engine: Any, until: Any, tmp_path: Path
) -> None:
    indexer, publisher = indexers(tmp_path / "map"), publishers()
    register(indexer, "A", publisher)
    for rank, stop in ((0, 7), (1, 3), (3, 5)):
        publisher.publish_payload(encode([engine(rank).stored(PROMPT, 0, stop)], 1.0, rank))

    def matched() -> dict[int, int]:
        found = indexer.reader.query("m", PROMPT)
        return {one.rank: one.gpu for one in found if one.state == "live"}

    until(lambda: matched() == {0: 28, 1: 12, 3: 20})
    indexer.close()
    publisher.publish_payload(encode([engine(1).stored(PROMPT, 3, 7)], 1.0, 1))
    indexer = indexers(tmp_path / "map")
    until(lambda: matched() == {0: 28, 1: 28, 3: 20})
    publisher.close()
    again = publishers(wildcard(publisher.endpoint), publisher.replay_endpoint)
    again.publish_payload(encode([engine(8).stored(PROMPT, 0, 1)], 2.0, 0))
    until(lambda: matched() == {0: 4})


def test_ev12_an_engine_that_restarts_in_place_loses_what_it_had(
    indexers: Any, publishers: Any, engine: Any, caught_up: Any, until: Any
) -> None:
    indexer, other = indexers(), publishers()
    first = publishers()
    for number in range(7):
        first.publish([engine(1).stored(PROMPT, number, number + 1)], 1.0)
    other.publish([engine(3).stored(PROMPT)], 1.0)
    register(indexer, "A", first)
    register(indexer, "B", other)
    caught_up(indexer, "A", 6)
    caught_up(indexer, "B", 0)
    first.close()
    until(lambda: record(indexer, "A").state == "offline")
    again = publishers(wildcard(first.endpoint), first.replay_endpoint)
    for number in range(20):  # Overtakes the old sequence.
        again.publish([engine(2).stored([500 + number, *PROMPT])], 1.0)
    caught_up(indexer, "A", 19)
    assert held(indexer) == {"A": 0, "B": 28}
    assert held(indexer, [510, *PROMPT])["A"] == 28


def wildcard(endpoint: str) -> str:
    """The same port; vLLM's rule is to bind only where there is a wildcard, and connect elsewhere."""
    return f"tcp://*:{endpoint.rpartition(':')[2]}"


# bad input


def test_ev04_bad_messages_cost_only_themselves(
    indexers: Any, publishers: Any, engine: Any, caught_up: Any
) -> None:
    indexer, publisher = indexers(), publishers()
    register(indexer, "A", publisher)
    caught_up(indexer, "A", None)
    publisher.publish([engine().stored(PROMPT, 0, 3)], 1.0)
    for bad in (b"\xc1garbage", b"\x93\xcb\x41", b""):
        publisher.publish_payload(bad)
    publisher.publish([engine().stored(PROMPT, 3)], 1.0)
    caught_up(indexer, "A", 4, "partial")
    assert held(indexer) == {"A": 28}
    assert record(indexer, "A").counters.skipped == {"payload": 3}
    machine = indexer.ingest.machine(("A", 0))
    assert (machine.gaps, machine.restarts) == (0, 0)
    publisher.publish([AllBlocksCleared(), engine().stored(PROMPT)], 1.0)
    caught_up(indexer, "A", 5, "live")


def test_ev04_frames_that_are_no_message_leave_the_socket_open(
    indexers: Any, engine: Any, until: Any
) -> None:

    indexer, context = indexers(), zmq.Context()
    pub = context.socket(zmq.XPUB)
    port = pub.bind_to_random_port("tcp://127.0.0.1")
    registration = Registration(instance_id="A", endpoint=f"tcp://127.0.0.1:{port}", model_name="m")
    indexer.ingest.register(registration).result(10)
    assert pub.poll(10_000)  # The subscription came.
    first, second = bytes(8), b"\0" * 7 + b"\1"
    pub.send_multipart([b"t", first, encode([engine().stored(PROMPT, 0, 3)], 1.0, None)])
    bad = [
        [b"t"],
        [b""],
        [b"t", second],
        [b"t", second, b"x", b"y"],
        [b"t", b"\1", b"x"],
        [b"t", b"", b""],
        [b"\xff\xfe", second[:7], b""],
    ]
    for frames in bad:
        pub.send_multipart(frames)
    pub.send_multipart([b"t", second, encode([engine().stored(PROMPT, 3)], 1.0, None)])
    until(lambda: held(indexer) == {"A": 28})
    assert indexer.subscriber.faults.of(("A", 0)) == {"frames": 4, "sequence": 3}
    context.destroy(linger=0)


def test_ev31_in_bind_mode_topics_name_streams_and_what_names_nobody_is_counted(
    indexers: Any, publishers: Any, engine: Any, until: Any, free_port: int
) -> None:
    indexer, address = indexers(), f"tcp://127.0.0.1:{free_port}"
    topics = {"A": "kv@a@m", "B": "kv@b@m", "nobody": "kv@a@m-events"}
    makers = {name: publishers(address, None, topic=topic) for name, topic in topics.items()}
    for name in ("A", "B"):
        registration = Registration(
            instance_id=name, endpoint=f"bind:{address}", model_name="m", topic=topics[name]
        )
        indexer.ingest.register(registration).result(10)

    def all_heard() -> bool:
        for number, publisher in enumerate(makers.values()):
            publisher.publish([AllBlocksCleared(), engine(number).stored(PROMPT, 0, 2 + 2 * number)], 1.0)
        return held(indexer) == {"A": 8, "B": 16} and indexer.subscriber.faults.unmatched["kv@a@m-events"] > 0

    until(all_heard)
    assert list(indexer.subscriber.faults.unmatched) == ["kv@a@m-events"]


def test_an_address_that_cannot_be_bound_is_counted(indexers: Any, until: Any) -> None:
    indexer = indexers()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"bind:tcp://127.0.0.1:{taken.getsockname()[1]}"
        indexer.ingest.register(Registration(instance_id="A", endpoint=endpoint, model_name="m")).result(10)
        until(lambda: indexer.subscriber.faults.of(("A", 0)) == {"address": 1})


# registrations


def test_ev13_a_stream_registered_again_begins_at_the_beginning(
    indexers: Any, publishers: Any, engine: Any, caught_up: Any
) -> None:
    indexer, publisher = indexers(), publishers()
    for number in range(7):
        publisher.publish([engine().stored(PROMPT, number, number + 1)], 1.0)
    register(indexer, "A", publisher)
    caught_up(indexer, "A", 6)
    indexer.ingest.unregister("A", "m").result(10)
    assert held(indexer) == {}
    register(indexer, "A", publisher)
    caught_up(indexer, "A", 6)
    assert held(indexer) == {"A": 28}
    assert record(indexer, "A").counters.batches == 7


def test_another_endpoint_replaces_the_stream(
    indexers: Any, publishers: Any, engine: Any, caught_up: Any, until: Any
) -> None:
    indexer, old, new = indexers(), publishers(), publishers()
    old.publish([engine(1).stored(PROMPT)], 1.0)
    new.publish([engine(2).stored(PROMPT, 0, 2)], 1.0)
    register(indexer, "A", old)
    caught_up(indexer, "A", 0)
    register(indexer, "A", new)
    caught_up(indexer, "A", 0)
    assert held(indexer) == {"A": 8}
    old.publish([engine(1).stored(PROMPT)], 1.0)
    new.publish([engine(2).stored(PROMPT, 2, 3)], 1.0)
    caught_up(indexer, "A", 1)
    assert held(indexer) == {"A": 12}
    until(lambda: sum(entries(indexer)) == 6)


def test_ix03_a_stream_removed_with_10_000_batches_queued_leaves_nothing(
    indexers: Any, publishers: Any, engine: Any, caught_up: Any, until: Any
) -> None:
    indexer, publisher = indexers(), publishers()
    register(indexer, "A", publisher)
    publisher.publish([engine().stored(PROMPT)], 1.0)
    caught_up(indexer, "A", 0)
    stands, goes_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        stands.set()
        goes_on.wait(60)

    busy = indexer.ingest._command(stand_still)
    assert stands.wait(10)
    for number in range(9_999):
        publisher.publish([engine().stored([number] * 4)], 1.0)
    until(lambda: indexer.subscriber.inbox.depth(("A", 0)) == 9_999)
    removed = indexer.ingest.unregister("A", "m")
    goes_on.set()
    busy.result(10)
    removed.result(10)
    assert indexer.reader.query("m", PROMPT) == []
    until(lambda: not any(entries(indexer)))
    publisher.publish([engine().stored(PROMPT)], 1.0)
    register(indexer, "B", publishers())
    caught_up(indexer, "B", None)
    assert not any(entries(indexer))
    assert held(indexer) == {"B": 0}


# failures


@pytest.fixture
def quick_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest_module, "RECOVERY_PAUSE_S", 0.01)


@pytest.mark.usefixtures("quick_recovery")
def test_the_ingest_thread_survives_an_error_and_goes_on_from_the_last_commit(
    indexers: Any,
    publishers: Any,
    engine: Any,
    caught_up: Any,
    monkeypatch: pytest.MonkeyPatch,
    tables_agree: Any,
) -> None:
    indexer, publisher = indexers(), publishers()
    register(indexer, "A", publisher)
    publisher.publish([engine().stored(PROMPT, 0, 2)], 1.0)
    caught_up(indexer, "A", 0)
    store, failures = StreamBlocks.store, iter(range(3))

    def fail_three_times(self: StreamBlocks, event: Any, *rest: Any) -> None:
        store(self, event, *rest)
        if next(failures, None) is not None:
            raise RuntimeError("in the middle of a group")

    monkeypatch.setattr(StreamBlocks, "store", fail_three_times)
    for number in range(2, 7):
        publisher.publish([engine().stored(PROMPT, number, number + 1)], 1.0)
    caught_up(indexer, "A", 5)
    assert indexer.ingest.failures == 3
    assert held(indexer) == {"A": 28}
    assert record(indexer, "A").counters.duplicates == 0  # Nothing was applied twice.
    tables_agree(indexer.writer.env, indexer.writer.tables)


@pytest.mark.usefixtures("quick_recovery")
def test_going_on_is_tried_until_it_succeeds(
    indexers: Any, publishers: Any, engine: Any, caught_up: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexer, publisher = indexers(), publishers()
    register(indexer, "A", publisher)
    publisher.publish([engine().stored(PROMPT, 0, 2)], 1.0)
    caught_up(indexer, "A", 0)
    follow_all, on = indexer.ingest._follow_all, Followed.on
    failures = iter(range(4))

    def fail(self: Any = None, *signal: Any) -> None:
        if next(failures, None) is not None:
            raise RuntimeError("no luck")
        on(self, *signal) if signal else follow_all()

    monkeypatch.setattr(indexer.ingest, "_follow_all", fail)
    monkeypatch.setattr(Followed, "on", fail)
    publisher.publish([engine().stored(PROMPT, 2)], 1.0)
    caught_up(indexer, "A", 1)
    assert indexer.ingest.failures == 4
    assert held(indexer) == {"A": 28}


@pytest.mark.usefixtures("quick_recovery")
def test_pe02_a_reader_that_pins_old_pages_stops_nothing_for_good(
    indexers: Any, publishers: Any, engine: Any, caught_up: Any, until: Any
) -> None:
    indexer, publisher, hasher = indexers(map_size=4 << 20), publishers(), engine()
    register(indexer, "A", publisher)
    publisher.publish([hasher.stored(PROMPT)], 1.0)
    caught_up(indexer, "A", 0)
    with indexer.writer.env.begin():
        number = 0
        while not indexer.ingest.failures:
            number += 1
            assert number < 400, "the map never filled"
            publisher.publish([hasher.stored(range(number * 10_000, number * 10_000 + 800))], 1.0)
            until(lambda n=number: indexer.ingest.failures or record(indexer, "A").sequence == n)
    number += 1
    publisher.publish([hasher.stored(range(number * 10_000, number * 10_000 + 800))], 1.0)
    until(lambda: record(indexer, "A").sequence == number)
    assert held(indexer, range(number * 10_000, number * 10_000 + 800)) == {"A": 800}
    lost = record(indexer, "A").counters.skipped.get("no_room", 0)  # If the reader pinned for too long.
    assert record(indexer, "A").state == ("partial" if lost else "live")


# more than can be written


def test_op06_slow_commits_hold_up_no_receiving_and_what_is_dropped_is_asked_for_again(
    indexers: Any,
    publishers: Any,
    engine: Any,
    caught_up: Any,
    until: Any,
    monkeypatch: pytest.MonkeyPatch,
    tables_agree: Any,
) -> None:
    indexer, batches, room = indexers(), 5_000, 1_000
    inbox, fleet = indexer.subscriber.inbox, {name: publishers() for name in "ABCD"}
    inbox._max_frames = room
    for name, publisher in fleet.items():
        register(indexer, name, publisher)
        publisher.publish([engine().stored(PROMPT)], 1.0)
        caught_up(indexer, name, 0)
    gate, begun, write = threading.Event(), threading.Event(), Changes.flush

    def slow(self: Changes) -> None:
        begun.set()
        if not gate.wait(60):
            raise AssertionError("the gate was never opened")
        threading.Event().wait(0.05)
        write(self)

    monkeypatch.setattr(Changes, "flush", slow)
    assert begun.wait(10)
    for number in range(1, batches):
        event = engine().stored([number] * 4)
        for publisher in fleet.values():
            publisher.publish([event], 1.0)
    # No commit ends, and yet every frame is read: kept, or dropped and counted.
    until(lambda: all(inbox.overflows[name, 0] >= batches - 1 - room - 1 for name in fleet), "all is read")
    assert all(inbox.depth((name, 0)) <= room + 1 for name in fleet)
    gate.set()
    for name in fleet:
        caught_up(indexer, name, batches - 1)
    assert {record(indexer, name).blocks for name in fleet} == {7 + batches - 1}
    assert held(indexer, [batches - 1] * 4) == dict.fromkeys(fleet, 4)
    assert all(record(indexer, name).counters.duplicates == 0 for name in fleet)
    monkeypatch.undo()
    tables_agree(indexer.writer.env, indexer.writer.tables)


def test_op06_a_noisy_replica_starves_no_other(rig: Any, engine: Any) -> None:
    noisy, quiet = rig.follow("A"), rig.follow("B")
    for number in range(5_000):
        rig.feed.inbox.put(*rig.frame(noisy, engine().stored([number] * 4)))
    for number in range(10):
        rig.feed.inbox.put(*rig.frame(quiet, engine(1).stored([number] * 4)))
    rig.ingest.work()
    assert rig.record(quiet).sequence == 9
    assert rig.feed.inbox.depth(noisy) > 4_000


# the death of the indexer


class Traffic(threading.Thread):
    """An engine at work: stores, duplicates, evictions and now and then a clear, until it is told to stop."""

    def __init__(self, publisher: Publisher, hasher: Any, seed: int) -> None:
        super().__init__(daemon=True)
        self.random = random.Random(seed)
        self.prompts = [self._prompt() for _ in range(40)]
        self.last = -1
        self._publisher = publisher
        self._hasher = hasher
        self._ends = threading.Event()

    def _prompt(self) -> list[int]:
        trunk = self.random.choice([0, 1_000, 2_000])
        return [*range(trunk, trunk + self.random.randrange(0, 200)), *[self.random.randrange(9)] * 40]

    def run(self) -> None:
        while not self._ends.wait(0.001):
            self.last = self._publisher.publish(list(self._step()), time.time())

    def _step(self) -> Iterator[Event]:
        prompt = self.random.choice(self.prompts)
        blocks = len(prompt) // self._hasher.block_size
        start = self.random.choice([0, 0, 0, self.random.randrange(blocks)])
        if self.random.random() < 0.005:
            yield AllBlocksCleared()
        elif self.random.random() < 0.4:
            yield from self._hasher.removed(prompt, start, start + self.random.randrange(blocks))
        else:
            yield self._hasher.stored(prompt, start)

    def end(self) -> None:
        self._ends.set()
        self.join()


@pytest.fixture
def traffic() -> Iterator[Callable[..., Traffic]]:
    started: list[Traffic] = []

    def start(*arguments: Any) -> Traffic:
        started.append(Traffic(*arguments))
        started[-1].start()
        return started[-1]

    yield start
    for each in started:
        each.end()


def answers(indexer: Any, prompts: list[list[int]]) -> list[Any]:
    """What /query says of each prompt."""
    return [indexer.call("/query", {"model_name": "m", "token_ids": prompt})["scores"] for prompt in prompts]


def test_pe01_pe09_an_indexer_killed_again_and_again_answers_as_one_that_never_was(
    indexers: Any,
    publishers: Any,
    indexer_process: Any,
    traffic: Any,
    engine: Any,
    caught_up: Any,
    until: Any,
    tmp_path: Path,
    make_rig: Any,
) -> None:
    publisher, folder, uninterrupted = publishers(), tmp_path / "killed", indexers()
    register(uninterrupted, "A", publisher)
    work = traffic(publisher, engine(), 7)
    body = {"instance_id": "A", "model_name": "m", "endpoint": publisher.endpoint}
    for kill in range(4):
        killed = indexer_process(folder).listening()
        if not kill:
            killed.call("/register", body | {"replay_endpoint": publisher.replay_endpoint})
        lives_until = work.last + work.random.randrange(5, 150)
        until(lambda: (killed.replicas()["A"]["sequence"] or 0) >= lives_until)  # noqa: B023
        killed.kill()
    survivor = indexer_process(folder).listening()
    work.end()
    caught_up(uninterrupted, "A", work.last)
    until(lambda: [survivor.replicas()["A"][each] for each in ("sequence", "state")] == [work.last, "live"])
    expected = [
        {one.instance: {"0": one.disk} for one in uninterrupted.reader.query("m", prompt)}
        for prompt in work.prompts
    ]
    assert answers(survivor, work.prompts) == expected
    assert any(each["A"]["0"] for each in expected)
    ours, theirs = record(uninterrupted, "A"), survivor.replicas()["A"]
    assert (theirs["blocks"], theirs["orphans"], theirs["waiting"]) == (
        ours.blocks,
        ours.orphans,
        ours.waiting,
    )
    for name in ("stored", "removed", "duplicates", "unknown_removed", "batches"):
        assert theirs["counters"][name] == getattr(ours.counters, name)  # Nothing twice, nothing skipped.
    assert survivor.stop() == 0
    rig = make_rig(folder)
    rig.check()
    rig.close()


def test_pe01_over_a_kill_fewer_than_a_twentieth_of_decisions_lose_a_hit(
    indexers: Any, publishers: Any, indexer_process: Any, engine: Any, until: Any, tmp_path: Path
) -> None:
    """Decided before the kill, from the map that it leaves behind, and once the next one is ready.

    While streams are unverified, between its start and the engines' first replays, nothing is credited.
    """
    folder, fleet, uninterrupted = tmp_path / "killed", {name: publishers() for name in "ABCD"}, indexers()
    hashers = {name: engine(seed) for seed, name in enumerate(fleet)}
    first, prompts = indexer_process(folder).listening(), list[list[int]]()
    for name, publisher in fleet.items():
        register(uninterrupted, name, publisher)
        body = {"instance_id": name, "model_name": "m", "endpoint": publisher.endpoint}
        first.call("/register", body | {"replay_endpoint": publisher.replay_endpoint})

    def publish(rounds: int) -> None:
        for _ in range(rounds):
            for name, publisher in fleet.items():
                prompts.append([1_000 + len(prompts), *PROMPT])
                publisher.publish([hashers[name].stored(prompts[-1])], 1.0)

    def hits(reader: Any) -> list[bool]:
        return [any(one.weight * one.gpu for one in reader.query("m", prompt)) for prompt in prompts]

    lost = []

    def decide(reader: Any) -> None:
        until(lambda: all(hits(uninterrupted.reader)), "the one that is never killed knows every prompt")
        lost.extend(not hit for hit in hits(reader))

    publish(25)
    with closing(open_map(folder)) as reader:  # as a router has it, all the time
        until(lambda: all(hits(reader)), "the map knows every prompt")
        decide(reader)
        first.kill()
        publish(2)
        decide(reader)
        assert sum(lost) == 8, "what was stored since the kill"
        again = indexer_process(folder).listening()
        until(lambda: again.call("/ready")["ready"], "every stream has proven itself")
        decide(reader)
    assert len(lost) == 100 + 108 + 108
    assert sum(lost) < len(lost) / 20


def test_pe01_an_engine_that_restarts_while_the_indexer_is_dead_is_never_credited_for_its_past(
    publishers: Any, indexer_process: Any, engine: Any, until: Any, tmp_path: Path
) -> None:
    folder, first = tmp_path / "killed", publishers()
    dead = indexer_process(folder).listening()
    body = {"instance_id": "A", "model_name": "m", "endpoint": first.endpoint}
    dead.call("/register", body | {"replay_endpoint": first.replay_endpoint})
    for number in range(7):
        first.publish([engine(1).stored(PROMPT, number, number + 1)], 1.0)
    until(lambda: answers(dead, [PROMPT]) == [{"A": {"0": 28}}])
    dead.kill()
    first.close()
    again = publishers(wildcard(first.endpoint), first.replay_endpoint)
    for number in range(9):  # As many batches as before, and more.
        again.publish([engine(2).stored([500 + number, *PROMPT])], 1.0)
    born = indexer_process(folder).listening()
    while (state := born.replicas()["A"])["sequence"] != 8 or state["state"] != "live":
        assert answers(born, [PROMPT]) == [{"A": {"0": 0}}]
    assert answers(born, [PROMPT, [505, *PROMPT]]) == [{"A": {"0": 0}}, {"A": {"0": 28}}]
    assert born.replicas()["A"]["blocks"] == 9 * 7


def test_without_a_replay_endpoint_only_the_next_batch_proves_that_the_engine_went_on(
    publishers: Any, indexers: Any, engine: Any, caught_up: Any, until: Any, tmp_path: Path
) -> None:
    publisher, folder = publishers(replay=None), tmp_path / "map"
    first = indexers(folder)
    register(first, "A", publisher)
    caught_up(first, "A", None, "partial")
    publisher.publish([engine().stored(PROMPT, 0, 4)], 1.0)
    caught_up(first, "A", 0)
    first.close()
    second = indexers(folder)
    until(lambda: "no replay endpoint" in record(second, "A").reason)
    assert second.reader.query("m", PROMPT)[0].weight == 0.0
    publisher.publish([engine().stored(PROMPT, 4)], 1.0)
    caught_up(second, "A", 1)
    assert held(second) == {"A": 28}
