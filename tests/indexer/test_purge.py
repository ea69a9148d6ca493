"""EV-27: an adapter that was loaded anew under its name."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from events.schema import AllBlocksCleared
from events.signals import Connected, Disconnected, Replayed, ReplayEnded
from indexer.feedback_api import _resolve
from indexer.rank import MAX_PURGED
from indexer.reader import MapReader
from indexer.registration import Registration
from indexer.told import Told

PROMPT = list(range(28))
REPLAY = {"replay_endpoint": "tcp://127.0.0.1:5558"}


def of(rig: Any, lora_name: str | None = "a", tokens: list[int] = PROMPT) -> dict[str, int]:
    return {one.instance: one.disk for one in rig.reader.query("m", tokens, lora_name=lora_name)}


def purge(rig: Any, stream: Any, lora_name: str = "a") -> None:
    rig.ingest.purge(stream, lora_name)
    rig.ingest.step([])


@pytest.fixture
def adapted(rig: Any, engine: Any, prompt: Any) -> Any:
    """Two replicas that hold the same prompt for the base model and for two adapters."""
    for seed, name in enumerate("AB"):
        stream = rig.follow(name)
        for lora_name in (None, "a", "b"):
            rig.say(stream, engine(seed).stored(prompt(tuple(PROMPT), lora_name)))
    return rig


def test_ev27_a_purged_adapter_no_longer_matches_and_all_else_does(adapted: Any) -> None:
    purge(adapted, ("A", 0))
    assert of(adapted) == {"A": 0, "B": 28}
    assert of(adapted, None) == of(adapted, "b") == {"A": 28, "B": 28}
    assert {one.state for one in adapted.reader.query("m", PROMPT)} == {"live"}
    adapted.check()


def test_ev27_what_is_stored_of_the_new_adapter_matches_and_the_old_ones_removals_take_nothing(
    adapted: Any, engine: Any, prompt: Any
) -> None:
    purge(adapted, ("A", 0))
    old = prompt(tuple(PROMPT), "a")
    adapted.say(("A", 0), *engine(0).removed(old, 4))
    adapted.say(("A", 0), engine(7).stored(old, 0, 3))
    assert of(adapted) == {"A": 12, "B": 28}
    adapted.say(("A", 0), *engine(0).removed(old, 0, 4))
    assert of(adapted) == {"A": 12, "B": 28}
    purge(adapted, ("A", 0))
    assert of(adapted) == {"A": 0, "B": 28}
    adapted.check()


def test_ev27_a_purge_survives_a_restart_a_clear_and_is_seen_by_readers_elsewhere(
    rig: Any, engine: Any, prompt: Any, tmp_path: Path, make_rig: Any
) -> None:
    folder = tmp_path / "other"
    first = make_rig(folder)
    a = first.follow("A")
    first.say(a, engine().stored(prompt(tuple(PROMPT), "a")))
    purge(first, a)
    first.abandon()
    again = make_rig(folder)
    again.sequences = first.sequences
    again.resume()
    again.say(a, engine().stored(prompt(tuple(range(100, 108)), "a")))
    assert of(again) == {"A": 0}
    assert of(again, tokens=list(range(100, 108))) == {"A": 8}
    again.say(a, AllBlocksCleared())
    again.say(a, engine(9).stored(prompt(tuple(PROMPT), "a")))
    assert of(again) == {"A": 28}
    again.close()
    reader = MapReader.open(folder)
    assert [one.disk for one in reader.query("m", PROMPT, lora_name="a")] == [28]
    reader.close()


def test_ev27_a_replay_of_everything_brings_nothing_back(rig: Any, engine: Any, prompt: Any) -> None:
    """A rebuild of a stream applies again what was stored before the purge."""
    a = rig.follow("A", **REPLAY)
    said = [rig.frame(a, engine().stored(prompt(tuple(PROMPT), lora)))[1] for lora in ("a", "b")]
    asks = rig.feed.asks
    for number, frame in enumerate(said):
        rig.ingest.step([(a, Replayed(asks[-1][1].ask, number, frame.payload))])
    rig.ingest.step([(a, ReplayEnded(asks[-1][1].ask))])
    purge(rig, a)
    lost, late = rig.frame(a, engine().stored(prompt(tuple(PROMPT)))), rig.frame(a)
    rig.ingest.step([late])
    rig.now += 6  # the replay of the gap is silent
    rig.ingest.step([])
    rig.now += 6  # everything is asked again
    rig.ingest.step([])
    ask = asks[-1][1]
    assert ask.start == 0
    whole = [*said, lost[1], late[1]]
    replay = [(a, Replayed(ask.ask, number, frame.payload)) for number, frame in enumerate(whole)]
    rig.ingest.step([*replay, (a, ReplayEnded(ask.ask))])
    assert rig.record(a).state == "live"
    assert (of(rig), of(rig, "b"), of(rig, None)) == ({"A": 0}, {"A": 28}, {"A": 28})
    rig.say(a, engine(5).stored(prompt(tuple(PROMPT), "a")))
    assert of(rig) == {"A": 28}


@pytest.mark.parametrize("lora", ["a", None])
def test_ev27_a_purge_while_the_connection_is_lost_counts_for_what_was_said_meanwhile(
    rig: Any, engine: Any, prompt: Any, lora: str | None
) -> None:
    a, later = rig.follow("A", **REPLAY), list(range(100, 108))
    said = [rig.frame(a, engine().stored(prompt(tuple(each), "a")))[1] for each in (PROMPT, later)]
    asks = rig.feed.asks
    rig.ingest.step([(a, Replayed(asks[-1][1].ask, 0, said[0].payload)), (a, ReplayEnded(asks[-1][1].ask))])
    rig.ingest.step([(a, Disconnected())])
    rig.ingest.purge(a, lora)
    rig.ingest.step([])
    rig.ingest.step([(a, Connected())])
    replayed = [(a, Replayed(asks[-1][1].ask, number, frame.payload)) for number, frame in enumerate(said)]
    rig.ingest.step([*replayed, (a, ReplayEnded(asks[-1][1].ask))])
    rig.now += 1
    rig.ingest.step([])
    assert (of(rig), of(rig, tokens=later)) == ({"A": 0}, {"A": 0})
    rig.say(a, engine(5).stored(prompt(tuple(later), "a")))
    rig.now += 1
    rig.ingest.step([])
    assert of(rig, tokens=later) == {"A": 8}, "purged once more, not for ever"
    rig.check()


def test_ev27_a_purge_while_the_connection_is_lost_takes_nothing_of_the_next_process(
    rig: Any, engine: Any, prompt: Any
) -> None:
    a = rig.follow("A", **REPLAY)
    asks = rig.feed.asks
    rig.ingest.step([(a, ReplayEnded(asks[-1][1].ask))])
    rig.say(a, engine().stored(prompt(tuple(PROMPT), "a")))
    rig.ingest.step([(a, Disconnected())])
    rig.ingest.purge(a)
    rig.ingest.step([])
    rig.ingest.step([(a, Connected())])
    new = rig.frame(a, engine(2).stored(prompt(tuple(PROMPT), "a")))[1].payload
    rig.ingest.step([(a, Replayed(asks[-1][1].ask, 0, new))])
    rig.ingest.step([(a, Replayed(asks[-1][1].ask, 0, new)), (a, ReplayEnded(asks[-1][1].ask))])
    rig.now += 1
    rig.ingest.step([])
    assert (of(rig), rig.record(a).state) == ({"A": 28}, "live")


def test_ev27_after_a_restart_of_the_engine_nothing_of_a_purge_is_left(
    rig: Any, engine: Any, prompt: Any
) -> None:
    a, b = rig.follow("A"), rig.follow("B")
    rig.say(a, engine().stored(prompt(tuple(PROMPT), "a")))
    purge(rig, a)
    rig.sequences[a] = 0
    rig.say(a, engine().stored(prompt(tuple(PROMPT), "a")))
    rig.say(b, engine().stored(prompt(tuple(PROMPT), "a")))
    assert rig.record(a).purged == {}
    assert of(rig) == {"A": 28, "B": 28}


@pytest.mark.parametrize("why", ["waiting", "many"])
def test_ev27_where_an_adapter_cannot_be_told_the_whole_rank_is_forgotten(
    rig: Any, engine: Any, prompt: Any, why: str
) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(prompt(tuple(PROMPT), "a")))
    if why == "waiting":
        rig.say(a, engine().stored(prompt(tuple(range(500, 528)), "a"), 3))
    for number in range(MAX_PURGED if why == "many" else 0):
        rig.ingest.purge(a, f"other {number}")
    purge(rig, a)
    assert of(rig) == {"A": 0}
    assert (rig.record(a).blocks, rig.record(a).state) == (0, "partial")


def test_ev27_answers_about_the_new_adapter_are_of_the_new_one(rig: Any, engine: Any, prompt: Any) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(prompt(tuple(PROMPT), "a")))
    purge(rig, a)
    rig.say(a, engine(3).stored(prompt(tuple(PROMPT), "a")))
    record = rig.record(a)
    told = Told("A", "m", record.generation, 8, record.sequence, token_ids=PROMPT, lora_name="a")
    rig.ingest.learn(_resolve(told, record, 4))
    rig.ingest.step([])
    assert of(rig) == {"A": 8}, "the rest is denied"


async def test_ev27_a_purge_over_http_is_of_one_replica_or_of_all(
    indexers: Any, publishers: Any, engine: Any, until: Any, prompt: Any
) -> None:
    indexer = indexers()
    for name in "AB":
        publisher = publishers()
        publisher.publish([engine().stored(prompt(tuple(PROMPT), "a")), engine().stored(PROMPT)], 1.0)
        indexer.ingest.register(
            Registration(
                instance_id=name,
                endpoint=publisher.endpoint,
                replay_endpoint=publisher.replay_endpoint,
                model_name="m",
            )
        ).result(10)
    until(lambda: [one.disk for one in indexer.reader.query("m", PROMPT, lora_name="a")] == [28, 28])
    async with TestServer(indexer.application()) as server, aiohttp.ClientSession() as session:
        for body, left in (({"instance_id": "A"}, {"A": 0, "B": 28}), ({}, {"A": 0, "B": 0})):
            said = {"model_name": "m", "lora_name": "a"} | body
            async with session.post(server.make_url("/reset"), json=said) as answer:
                assert answer.status == 200
            assert of(indexer) == left
        assert of(indexer, None) == {"A": 28, "B": 28}
        async with session.post(server.make_url("/reset"), json={"model_name": "m"}) as answer:
            assert answer.status == 200
        assert of(indexer, None) == {"A": 0, "B": 0}
        async with session.post(server.make_url("/reset"), json={"model_name": "x"}) as answer:
            assert answer.status == 404
