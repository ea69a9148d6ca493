"""A divided map answers as one that is not, and goes on without a shard that cannot be read."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.schema import AllBlocksCleared, token_array
from indexer.check import check_folder
from indexer.compact import compact
from indexer.dump import dump_events, dump_lines
from indexer.errors import MapError, MapMissingError
from indexer.explain import explain
from indexer.keys import keys_behind, local_hashes, root_key
from indexer.reader import MapReader
from indexer.shard_reader import REOPEN_S, ShardReader, View, open_map
from indexer.sharding import divide, shard_folder, shard_of

SHARDS = 3
REPLICAS = ("A", "B", "C", "D")
PROMPTS = (tuple(range(24)), tuple(range(100, 124)), (*range(12), *range(50, 62)))
MODELS = {"A": "m", "B": "m", "C": "m", "D": "other"}


steps = st.lists(
    st.tuples(
        st.sampled_from(("store", "remove", "clear", "forget")),
        st.sampled_from(REPLICAS),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(1, 6),
    ),
    max_size=25,
)


def play(rigs: dict[str, Any], engines: dict[str, Any], done: list[Any]) -> None:
    """The same events, to whichever map a replica is in."""
    streams = {name: rigs[name].follow(name, MODELS[name]) for name in REPLICAS}
    for verb, name, number, blocks in done:
        rig, engine, prompt = rigs[name], engines[name], PROMPTS[number]
        if verb == "store":
            rig.say(streams[name], engine.stored(prompt, 0, blocks))
        elif verb == "remove":
            rig.say(streams[name], *engine.removed(prompt, blocks - 1))
        elif verb == "clear":
            rig.say(streams[name], AllBlocksCleared())
        else:
            rig.ingest.forget(name, MODELS[name])
            streams[name] = rig.follow(name, MODELS[name])


def told(view: View) -> dict[str, Any]:
    """All that can be asked of a map, without what is a map's own: slots, generations and their order."""
    answers: dict[str, Any] = {"streams": sorted(str(status.record.id) for status in view.streams())}
    for prompt in PROMPTS:
        ids = token_array(prompt)
        for model in ("m", "other", "unknown"):
            for found in (view.query(model, prompt), view.query_local(model, local_hashes(ids, 4))):
                held = sorted((one.instance, one.state, one.weight, one.gpu, one.disk) for one in found)
                answers.setdefault(f"{prompt} of {model}", []).append(held)
            for key in keys_behind(root_key(model, None, 4), ids, 4):
                answers[key.hex()] = sorted((record.id, tiers) for record, tiers in view.holders(key))
        whys = explain(view, "m", prompt)["replicas"]
        for why in whys:
            why["steps"] = [sorted(step["holders"]) for step in why.get("steps", ())]
        answers[f"why {prompt}"] = sorted(map(str, whys))
    lines = [json.loads(line) for page in dump_lines(view) for line in page.splitlines()]
    answers["end"] = lines[-1]
    answers["blocks"] = [
        (line["block"], sorted(map(str, line["holders"]))) for line in lines if "block" in line
    ]
    dumped = json.loads(b"".join(dump_events(view)))
    answers["dump"] = {model: sorted(map(str, told["events"])) for model, told in dumped.items()}
    return answers


@pytest.fixture
def divided(make_rig: Any) -> Iterator[Callable[..., Path]]:
    """Makes a divided folder, each replica's stream in its shard's map."""
    folders: list[Path] = []

    def make(engines: dict[str, Any], done: list[Any]) -> Path:
        folders.append(Path(tempfile.mkdtemp()))
        divide(folders[-1], SHARDS)
        shards = [make_rig(shard_folder(folders[-1], number)) for number in range(SHARDS)]
        play({name: shards[shard_of(name, SHARDS)] for name in REPLICAS}, engines, done)
        for rig in shards:
            rig.collect()
            rig.close()
        return folders[-1]

    yield make
    for folder in folders:
        shutil.rmtree(folder)


@given(done=steps)
@settings(max_examples=25, deadline=None)
def test_a_divided_map_answers_as_one_that_is_not_on_the_same_events(
    done: list[Any], make_rig: Any, engine: Any
) -> None:
    engines = {name: engine(seed) for seed, name in enumerate(REPLICAS)}
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder) / "whole", Path(folder) / "parts"
        parts.mkdir()
        divide(parts, SHARDS)
        rig = make_rig(whole)
        shards = [make_rig(shard_folder(parts, number)) for number in range(SHARDS)]
        play(dict.fromkeys(REPLICAS, rig), engines, done)
        play({name: shards[shard_of(name, SHARDS)] for name in REPLICAS}, engines, done)
        for each in (rig, *shards):
            each.collect()
            each.close()
        with closing(open_map(whole)) as one, closing(open_map(parts)) as divided:
            assert told(divided) == told(one)
        assert check_folder(parts).clean
        assert check_folder(parts).streams == len(REPLICAS)


STORED = [("store", name, 0, 6) for name in REPLICAS]


@pytest.fixture
def engines(engine: Any) -> dict[str, Any]:
    return {name: engine(seed) for seed, name in enumerate(REPLICAS)}


def instances(view: View) -> set[str]:
    return {status.record.id[0] for status in view.streams()}


def test_a_shard_that_cannot_be_read_is_left_out_and_comes_back(divided: Any, engines: Any) -> None:
    folder = divided(engines, STORED)
    missing = shard_of("A", SHARDS)
    file = shard_folder(folder, missing) / "data.mdb"
    file.rename(file.with_suffix(".away"))
    now = [100.0]
    with closing(ShardReader(folder, clock=lambda: now[0])) as reader:
        others = {name for name in REPLICAS if shard_of(name, SHARDS) != missing}
        assert instances(reader) == others
        file.with_suffix(".away").rename(file)
        assert instances(reader) == others
        now[0] += REOPEN_S
        assert instances(reader) == set(REPLICAS)


def test_a_map_of_which_no_shard_can_be_read_is_an_error(tmp_path: Path) -> None:
    divide(tmp_path, 2)
    with pytest.raises(MapMissingError, match="shard-0"):
        open_map(tmp_path)


def test_a_shard_that_fails_while_another_thread_is_in_it_is_closed_when_that_one_leaves(
    divided: Any, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = ShardReader(divided(engines, STORED))
    shard = reader.shards[0]
    closed: list[MapReader] = []
    close = MapReader.close

    def noted(self: MapReader) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(MapReader, "close", noted)
    inside, go_on = threading.Event(), threading.Event()

    def stay() -> None:
        with shard.open():
            inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(10)
    with pytest.raises(MapError, match="broken"), shard.open():
        raise MapError("broken")
    assert closed == []
    with pytest.raises(MapError, match="broken"), shard.open():
        pass
    go_on.set()
    thread.join()
    assert len(closed) == 1
    reader.close()


def test_check_finds_a_stream_that_is_in_two_shards(divided: Any, engines: Any, make_rig: Any) -> None:
    folder = divided(engines, STORED)
    other = make_rig(shard_folder(folder, (shard_of("A", SHARDS) + 1) % SHARDS))
    other.follow("A")
    other.close()
    report = check_folder(folder)
    assert [(each.key, each.problem) for each in report.violations] == [("A rank 0", "is in 2 shards")]


def test_check_counts_all_shards_and_says_in_which_one_something_is_wrong(divided: Any, engines: Any) -> None:
    folder = divided(engines, STORED)
    report = check_folder(folder)
    assert (report.clean, report.entries["names"], report.streams) == (True, 24, 4)
    damage(shard_folder(folder, shard_of("B", SHARDS)))
    assert check_folder(folder).violations[0].key.startswith(f"shard-{shard_of('B', SHARDS)} ")


def damage(folder: Path) -> None:
    with lmdb.open(str(folder), max_dbs=16, map_size=256 << 20) as env, env.begin(write=True) as txn:
        txn.drop(env.open_db(b"blocks", txn=txn), delete=False)


def test_compact_makes_all_shards_small(divided: Any, engines: Any) -> None:
    folder = divided(engines, STORED)
    done = compact(folder)
    files = [shard_folder(folder, number) / "data.mdb" for number in range(SHARDS)]
    assert done.after == sum(file.stat().st_size for file in files) <= done.before
    with closing(open_map(folder)) as reader:
        assert instances(reader) == set(REPLICAS)
