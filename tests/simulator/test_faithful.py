"""The block pool and the scheduler against two real vLLM 0.32 engines.

The requests of a capture go through our scheduler in virtual time. What the real engines answered
(``cached_tokens``) and announced (every batch of events) must come out of ours.
"""

import base64
import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from events.schema import BlockRemoved, BlockStored, Event, decode
from simulator.pool import BlockPool
from simulator.scheduler import Counts, Limits, Rates, Request, Scheduler

SHARED = Path(__file__).parents[3] / "shared/data/vllm-events/main.jsonl"
COPY = Path(__file__).parents[1] / "data/vllm-events/main.jsonl"
# As the engines were started: 129 blocks of 32 tokens, 8 requests and 2,048 tokens in a step.
BLOCKS, BLOCK_SIZE, LIMITS = 129, 32, Limits(batched_tokens=2048, requests=8)
# About what the captured engines reached on a CPU; it orders the few concurrent requests.
RATES = Rates(prefill=700.0, decode=13.0)

Entry = dict[str, Any]


def capture() -> list[Entry]:
    path = SHARED if SHARED.exists() else COPY
    return [json.loads(line) for line in path.read_text().splitlines()]


class Replica:
    """Our engine in the place of one captured replica, on a clock that steps and arrivals move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.coming: list[Request] = []
        self.lives: list[list[list[Event]]] = []
        self.counts: list[Counts] = []
        self.start()

    def start(self) -> None:
        """A new process: nothing cached."""
        self.scheduler = Scheduler(BlockPool(BLOCKS, BLOCK_SIZE), RATES, LIMITS, b"test")
        self.lives.append([])
        self.counts.append(self.scheduler.counts)

    def send(self, entry: Entry, done: Entry) -> Request:
        if entry["check"]:  # One at a time: nothing else is running then.
            self.finish()
        request = Request(
            entry.get("tokens") or entry["body"]["prompt"],
            entry["body"]["max_tokens"],
            done["out_tokens"].__getitem__,
            salt=entry["body"].get("cache_salt"),
            arrived=max(self.now, entry["t"]),
        )
        self.coming.append(request)
        return request

    def finish(self) -> None:
        while self.coming or self.scheduler.waiting or self.scheduler.running:
            self.arrive()
            step = self.scheduler.schedule()
            if step is None:
                self.now = self.coming[0].arrived
                continue
            self.now += step.duration
            self.arrive()
            if batch := self.scheduler.complete().events:
                self.lives[-1].append(batch)

    def arrive(self) -> None:
        while self.coming and self.coming[0].arrived <= self.now:
            self.scheduler.add(self.coming.pop(0))


class Run:
    """The whole capture, replayed: who sent what, what ours answered, what the real one did."""

    def __init__(self) -> None:
        entries = capture()
        done = {entry["id"]: entry for entry in entries if entry["k"] == "done"}
        self.replicas = {"A": Replica(), "B": Replica()}
        self.answers: list[tuple[Entry, Entry, Request]] = []
        self.real: dict[str, list[list[list[Event]]]] = {"A": [[]], "B": [[]]}
        last = {"A": -1, "B": -1}
        for entry in entries:
            source = entry.get("src", "")
            if entry["k"] == "send":
                request = self.replicas[source].send(entry, done[entry["id"]])
                self.answers.append((entry, done[entry["id"]], request))
            elif entry["k"] == "ev":
                _, sequence, payload = (base64.b64decode(frame) for frame in entry["f"])
                if int.from_bytes(sequence, "big") <= last[source]:
                    self.real[source].append([])
                last[source] = int.from_bytes(sequence, "big")
                self.real[source][-1].append(decode(payload).events)
            elif entry.get("what") in {"restarted", "reset_prefix_cache"}:
                self.replicas[source].finish()
                if entry["what"] == "restarted":
                    self.replicas[source].start()
                else:
                    assert self.replicas[source].scheduler.reset_prefix_cache()
        for replica in self.replicas.values():
            replica.finish()


@pytest.fixture(scope="module")
def run() -> Run:
    return Run()


def test_every_checked_request_hits_as_many_tokens_as_on_the_real_engine(run: Run) -> None:
    checked = [(done, request) for entry, done, request in run.answers if entry["check"]]
    wrong = {
        done["id"]: (request.cached_tokens, done["cached_tokens"])
        for done, request in checked
        if request.cached_tokens != done["cached_tokens"]
    }
    assert wrong == {}
    assert len(checked) == 71
    assert sum(1 for done, _ in checked if done["cached_tokens"]) == 40


def test_concurrent_requests_hit_as_on_the_real_engine_too(run: Run) -> None:
    concurrent = [(done, request) for entry, done, request in run.answers if not entry["check"]]
    assert [request.cached_tokens for _, request in concurrent] == [
        done["cached_tokens"] for done, _ in concurrent
    ]
    assert len(concurrent) == 10


@pytest.mark.parametrize("source", ["A", "B"])
def test_every_batch_of_events_is_the_one_the_real_engine_published(run: Run, source: str) -> None:
    ours, real = run.replicas[source].lives, run.real[source]
    assert [len(life) for life in ours] == [len(life) for life in real]
    for our_life, real_life in zip(ours, real, strict=True):
        assert list(identified(our_life)) == list(identified(real_life))


def test_the_counters_are_those_the_real_engine_showed(run: Run) -> None:
    shown = next(entry["lines"] for entry in capture() if entry.get("what") == "metrics A")
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in shown}
    before_restart = run.replicas["A"].counts[0]
    assert before_restart.queried == values["vllm:prefix_cache_queries_total"]
    assert before_restart.hit == values["vllm:prefix_cache_hits_total"]


Identified = list[tuple[Any, ...]]


def identified(life: list[list[Event]]) -> Iterator[Identified]:
    """Batches with each hash replaced by the content it was first stored for, so that engines compare.

    The content of a block is its parent's and its own tokens and keys: two engines whose hashes name the
    same contents in the same order are the same.
    """
    content: dict[bytes, tuple[Any, ...]] = {}
    for batch in life:
        seen: Identified = []
        for event in batch:
            if isinstance(event, BlockStored):
                parent = None if event.parent is None else content[event.parent]
                for index, block_hash in enumerate(event.hashes):
                    keys = event.extra_keys[index] if event.extra_keys else None
                    parent = (parent, block_tokens(event, index).tobytes(), repr(keys))
                    assert content.setdefault(block_hash, parent) == parent
                fields = (event.block_size, event.medium, event.lora_name, event.group, event.group_kind)
                seen.append(("stored", [content[one] for one in event.hashes], *fields))
            elif isinstance(event, BlockRemoved):
                seen.append(("removed", [content[one] for one in event.hashes], event.medium, event.group))
            else:
                seen.append(("cleared",))
        yield seen


def block_tokens(event: BlockStored, index: int) -> "array[int]":
    return event.tokens[index * event.block_size : (index + 1) * event.block_size]
