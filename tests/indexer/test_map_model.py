"""The whole map against a simple model: what engines hold is a multiset of blocks per tier, no more."""

import random
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
)

from events.schema import AllBlocksCleared, BlockRemoved, BlockStored, Event, canonical_hash, token_array
from tests.indexer.rig_machine import RigMachine, run

TRUNK = tuple(range(180))
MEDIA = ("GPU", "CPU", "DISK")
# Two of one model with different hash seeds, another model, another block size, another salt.
STREAMS: dict[str, dict[str, Any]] = {
    "A": {"seed": 1},
    "B": {"seed": 2},
    "other model": {"seed": 1, "model": "m2"},
    "small blocks": {"seed": 1, "block_size": 2},
    "salted": {"seed": 1, "additional_salt": "tenant"},
    "before 0.17": {"seed": 1, "announces": False},
}

# Mostly the same prompt on the same stream, so that things meet.
tokens = st.just(TRUNK) | st.builds(
    lambda cut, branch, length: TRUNK[:cut] + (1_000 + branch,) * length,
    st.sampled_from([0, 8, 132, 136, 180]),
    st.integers(0, 1),
    st.sampled_from([3, 16]),
)
adapters = st.sampled_from([*[None] * 7, "adapter"])
extras = st.sampled_from(
    [*[()] * 9, ((0, ("salt",)),), ((2, (("image", 1),)),), ((2, (("image", 2),)),)],
)
names = st.sampled_from(["A"] * 5 + ["before 0.17"] * 2 + sorted(STREAMS))
counts = st.sampled_from([1, 1, 2, 3, 20, 1000])
media = st.sampled_from(["GPU", "GPU", "GPU", "CPU", "DISK"])
# Which blocks of a prompt: from where, how many of the rest; mostly all of them.
parts = st.sampled_from([(0.0, 1.0), (0.0, 1.0), (0.0, 1.0), (0.0, 0.5), (0.3, 1.0), (0.3, 0.2), (0.9, 1.0)])

PROBES = [
    (TRUNK[:cut] + (1_000 + branch,) * 16, how)
    for cut, branch in [(180, 0), (132, 0), (136, 1), (8, 1), (0, 0)]
    for how in (
        {},
        {"lora_name": "adapter"},
        {"cache_salt": "salt"},
        {"lora_name": "adapter", "cache_salt": "salt"},
    )
]


KNOWN_HASHES: dict[Any, list[bytes]] = {}


class Cache:
    """What one engine holds: copies of each block per tier."""

    def __init__(self, hasher: Any) -> None:
        self.hasher = hasher
        self.copies: dict[bytes, list[int]] = defaultdict(lambda: [0, 0, 0])
        self.contents: dict[Any, set[bytes]] = defaultdict(set)  # Hashes that mean one block to us.

    def content(self, prompt: Any, number: int) -> Any:
        """What is announced of a block without its extra keys."""
        return prompt.tokens[: (number + 1) * self.hasher.block_size], prompt.lora_name

    def add(self, prompt: Any, number: int, tier: int) -> None:
        block = self.hashes(prompt)[number]
        self.copies[block][tier] += 1
        if not self.hasher.announces:
            self.contents[self.content(prompt, number)].add(block)

    def has(self, prompt: Any, number: int, block: bytes, tiers: int) -> bool:
        """Whether a block is in the first so many tiers, under any hash that means it."""
        if self.hasher.announces:
            return block in self.copies and any(self.copies[block][:tiers])
        blocks = () if prompt.extras else self.contents.get(self.content(prompt, number), ())
        return any(each in self.copies and any(self.copies[each][:tiers]) for each in blocks)

    def hashes(self, prompt: Any) -> list[bytes]:
        """The engine hashes of a prompt, computed once: the same prompts are asked for again and again."""
        key = (self.hasher.seed, self.hasher.block_size, prompt)
        if key not in KNOWN_HASHES:
            KNOWN_HASHES[key] = self.hasher.hashes(prompt)
        return KNOWN_HASHES[key]

    def held(self, tier: int | None = None) -> list[bytes]:
        return [
            block for block, copies in self.copies.items() if (any(copies) if tier is None else copies[tier])
        ]

    def leading(self, prompt: Any) -> tuple[int, int, int]:
        """Leading tokens that are on the GPU, there or in memory, anywhere."""
        counts = [0, 0, 0]
        for level in range(3):
            for number, block in enumerate(self.hashes(prompt)):
                if not self.has(prompt, number, block, level + 1):
                    break
                counts[level] += self.hasher.block_size
        return counts[0], counts[1], counts[2]


class EnginesAndMap(RigMachine):
    """Engines do anything in any order; after each group the map says what they hold."""

    prompt: Any

    def __init__(self) -> None:
        super().__init__()
        self.caches: dict[str, Cache] = {}
        self.batch: dict[str, list[Event]] = defaultdict(list)
        self.group: list[Any] = []

    def teardown(self) -> None:
        self.commit()
        self.rig.collect()
        self.rig.check()
        super().teardown()

    @initialize()
    def register_all(self) -> None:
        for name in STREAMS:
            self.register(name)

    def register(self, name: str) -> None:
        options = dict(STREAMS[name])
        hasher = self.engine(
            options.pop("seed"), options.pop("block_size", 4), options.pop("announces", True)
        )
        self.caches[name] = Cache(hasher)
        self.rig.follow(name, options.pop("model", "m"), **options)

    def span(self, name: str, prompt: Any, part: tuple[float, float]) -> tuple[int, int]:
        count = len(self.caches[name].hashes(prompt))
        start = int(part[0] * count)
        return start, start + int(part[1] * (count - start) + 0.5)

    # what engines do

    @rule(name=names, tokens=tokens, adapter=adapters, extras=extras, part=parts, medium=media)
    def store(self, name: str, tokens: Any, adapter: Any, extras: Any, part: Any, medium: str) -> None:
        prompt, cache = self.prompt(tokens, adapter, extras), self.caches[name]
        start, stop = self.span(name, prompt, part)
        if not cache.hasher.announces:
            start = 0  # A block that waits for its parent under one hash is not known by another.
        if start == stop:
            return
        self.batch[name].append(cache.hasher.stored(prompt, start, stop, medium=medium))
        for number in range(start, stop):
            cache.add(prompt, number, MEDIA.index(medium))

    @rule(name=names, medium=media, count=counts, seed=st.integers(0, 9))
    def evict_anything(self, name: str, medium: str, count: int, seed: int) -> None:
        cache = self.caches[name]
        blocks = sorted(cache.held(MEDIA.index(medium)))
        self.remove(name, random.Random(seed).sample(blocks, min(count, len(blocks))), medium)

    @rule(name=names, tokens=tokens, adapter=adapters, extras=extras, count=counts, medium=media)
    def evict_tail(self, name: str, tokens: Any, adapter: Any, extras: Any, count: int, medium: str) -> None:
        """As engines do; blocks that are not held are removed too, which means nothing."""
        hashes = self.caches[name].hashes(self.prompt(tokens, adapter, extras))
        self.remove(name, reversed(hashes[-count:]), medium)

    def remove(self, name: str, blocks: Any, medium: str) -> None:
        cache, tier = self.caches[name], MEDIA.index(medium)
        for block in blocks:
            self.batch[name].append(BlockRemoved([block], medium=medium))
            if block in cache.copies and cache.copies[block][tier]:
                cache.copies[block][tier] -= 1

    @rule(name=names, tokens=tokens, adapter=adapters, extras=extras, part=parts)
    def offload_by_hash(self, name: str, tokens: Any, adapter: Any, extras: Any, part: Any) -> None:
        """Of what a prompt has cached from its beginning, some blocks are copied to memory."""
        prompt, cache = self.prompt(tokens, adapter, extras), self.caches[name]
        held = cache.leading(prompt)[2] // cache.hasher.block_size
        if not cache.hasher.announces:
            held = 0
        blocks = cache.hashes(prompt)[:held][self.span(name, prompt, part)[0] :]
        for block in blocks:
            cache.copies[block][1] += 1
        self.batch[name].append(
            BlockStored(hashes=blocks, parent=None, tokens=token_array([]), block_size=0, medium="CPU")
        )

    @rule(name=names, tokens=tokens, adapter=adapters)
    def store_in_another_attention_group(self, name: str, tokens: Any, adapter: Any) -> None:
        hasher, prompt = self.caches[name].hasher, self.prompt(tokens, adapter)
        windows = {"group": 1, "group_kind": "sliding_window"}
        self.batch[name] += [hasher.stored(prompt, **windows), *hasher.removed(prompt, 1, group=1)]

    @rule(name=names, how=st.sampled_from(["clear", "restart", "register"]))
    def lose_everything(self, name: str, how: str) -> None:
        if how == "clear":
            self.batch[name].append(AllBlocksCleared())
            self.caches[name].copies.clear()
        elif how == "restart":
            self.restart(name)
        elif not self.group:
            self.batch.pop(name, None)
            self.rig.ingest.forget(name, STREAMS[name].get("model", "m"))
            self.register(name)

    def restart(self, name: str) -> None:
        """The engine is a new process, and has said something."""
        self.publish(name)
        if self.rig.sequences[name, 0]:
            self.caches[name].copies.clear()
            self.rig.sequences[name, 0] = 0
            self.group.append(self.rig.frame((name, 0)))

    # what we do

    def publish(self, name: str) -> None:
        """The engine's step ends: what happened in it is one batch."""
        if events := self.batch.pop(name, []):
            self.group.append(self.rig.frame((name, 0), *events))

    @rule(name=names)
    def step(self, name: str) -> None:
        self.publish(name)

    @rule()
    def commit(self) -> None:
        for name in list(self.batch):
            self.publish(name)
        self.rig.ingest.step(self.group)
        self.group = []
        self.rig.check()
        for tokens, how in PROBES:
            self.ask(tokens, how)

    def ask(self, tokens: Any, how: dict[str, str]) -> None:
        salt = ((0, ("salt",)),) if "cache_salt" in how else ()
        prompt = self.prompt(tokens, how.get("lora_name"), salt)
        for model in ("m", "m2"):
            expected = {
                name: cache.leading(prompt)
                for name, cache in self.caches.items()
                if STREAMS[name].get("model", "m") == model
            }
            assert self.rig.held(tokens, model, **how) == expected

    @precondition(lambda self: not self.group)
    @rule()
    def reopen(self) -> None:
        self.reopened()


def test_the_map_says_what_engines_hold_whatever_they_do(make_rig: Any, engine: Any, prompt: Any) -> None:
    """EV-16, EV-18, EV-21, EV-22, EV-23, EV-30, IX-01, IX-05, IX-06, IX-08 in any mixture."""

    run(EnginesAndMap, examples=60, steps=30, make_rig=make_rig, engine=engine, prompt=prompt)


hashes = st.integers(1, 6)
nonsense = st.one_of(
    st.builds(
        lambda each, parent, medium: BlockStored(
            hashes=[canonical_hash(one) for one in each],
            parent=None if parent is None else canonical_hash(parent),
            tokens=token_array([one for one in each for _ in range(2)]),
            block_size=2,
            medium=medium,
        ),
        st.lists(hashes, min_size=1, max_size=4),
        st.none() | hashes,
        media,
    ),
    st.builds(
        lambda each, medium: BlockRemoved([canonical_hash(one) for one in each], medium=medium),
        st.lists(hashes, min_size=1, max_size=4),
        media,
    ),
    st.builds(
        lambda each: BlockStored(
            hashes=[canonical_hash(one) for one in each],
            parent=None,
            tokens=token_array([]),
            block_size=2,
            medium="CPU",
        ),
        st.lists(hashes, max_size=3),
    ),
)


@settings(max_examples=150, deadline=None)
@given(batches=st.lists(st.lists(nonsense, max_size=6), max_size=8))
def test_events_that_contradict_each_other_break_no_invariant(
    batches: list[list[Event]], make_rig: Any
) -> None:
    """An engine whose hashes say nothing about content: each block has any parent, and its own."""
    with tempfile.TemporaryDirectory() as folder:
        rig = make_rig(Path(folder))
        stream = rig.follow("A", block_size=2)
        for batch in batches:
            rig.say(stream, *batch)
            rig.check()
        everything = [canonical_hash(each) for each in range(1, 7)]
        rig.say(stream, *[BlockRemoved(everything, medium=each) for each in MEDIA] * 60)
        rig.check()
        assert (rig.record(stream).blocks, rig.record(stream).waiting) == (0, 0)
        assert rig.reader.streams()[0].record.counters.batches == len(batches) + 1
        rig.close()
