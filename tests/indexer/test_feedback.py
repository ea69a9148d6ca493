"""What answers say about the map: taken by the rule, undone by events, and bounded in every way."""

import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from events.publisher import Publisher
from events.schema import AllBlocksCleared
from events.signals import Connected, Frame
from indexer import corrections as corrections_module
from indexer.client import IndexerClient
from indexer.corrections import BELIEF_S, DENIAL_S
from indexer.errors import IndexerAnswerError, MapFullError
from indexer.explain import explain
from indexer.feedback import Answered
from indexer.keys import keys_behind, root_key
from indexer.layout import boot_clock
from indexer.outcome import Outcome, refused
from indexer.reader import MapReader
from indexer.registration import Registration
from indexer.service import Indexer
from indexer.writer import MapWriter

PROMPT = list(range(28))
BRANCH = [*range(16), *range(100, 112)]
SIZE = 4


class Answers:
    """Tells the indexer what engines answered, as of the map when :meth:`sent` was called."""

    def __init__(self, rig: Any) -> None:
        self.rig = rig

    def sent(self, tokens: list[int] = PROMPT, instance: str = "A") -> dict[str, Any]:
        """What a router keeps of its decision."""
        (one,) = [each for each in self.rig.reader.query("m", tokens) if each.instance == instance]
        return {
            "stream": (one.instance, one.rank),
            "generation": one.generation,
            "sequence": one.sequence,
            "keys": keys_behind(root_key("m", None, SIZE), array("I", tokens), SIZE),
            "usable": (len(tokens) - 1) // SIZE,
            "block_size": SIZE,
            "predicted_tokens": one.gpu,
        }

    def say(self, cached: int, decision: dict[str, Any] | None = None, **changes: Any) -> Outcome:
        """An answer with so many cached tokens."""
        answered = Answered(cached_tokens=cached, **(decision or self.sent()) | changes)
        future = self.rig.ingest.learn(answered)
        self.rig.ingest.step([])
        outcome: Outcome = future.result(0)
        return outcome


@pytest.fixture
def answers(rig: Any) -> Answers:
    return Answers(rig)


def gpu(rig: Any, tokens: list[int] = PROMPT, instance: str = "A") -> int:
    held: int = rig.held(tokens)[instance][0]
    return held


def weight(rig: Any, instance: str = "A") -> float:
    return {status.record.id[0]: status.weight for status in rig.reader.streams()}[instance]


def rows(rig: Any) -> tuple[int, int]:
    """Entries of the two tables."""
    tables = rig.writer.tables
    with rig.writer.env.begin() as txn:
        return txn.stat(tables.denied)["entries"], txn.stat(tables.believed)["entries"]


# denial


def test_ev15_a_lost_removal_is_found_by_an_answer(rig: Any, engine: Any, answers: Answers) -> None:
    a, b = rig.follow("A"), rig.follow("B")
    for stream in (a, b):
        rig.say(stream, engine().stored(PROMPT))
    assert answers.say(12) == Outcome(denied=1)
    assert (gpu(rig), gpu(rig, instance="B")) == (12, 28)
    assert gpu(rig, BRANCH) == 12
    assert rows(rig) == (1, 0)
    rig.check()


def test_only_the_first_block_that_was_not_there_is_denied(rig: Any, engine: Any, answers: Answers) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    answers.say(12)
    rig.say(a, engine().stored(PROMPT, 3, 4))
    assert gpu(rig) == 28


def test_a_denial_ends_when_the_block_is_stored_again(rig: Any, engine: Any, answers: Answers) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    answers.say(0)
    assert gpu(rig) == 0
    rig.say(a, engine().stored(PROMPT, 0, 2))
    assert (gpu(rig), rows(rig)) == (28, (0, 0))


def test_a_denial_ends_when_an_answer_had_the_block(rig: Any, engine: Any, answers: Answers) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    answers.say(8)
    assert answers.say(24).ended == 1
    assert (gpu(rig), rows(rig)) == (28, (0, 0))


def test_a_denial_ends_by_itself(rig: Any, engine: Any, answers: Answers) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    answers.say(8)
    rig.now += DENIAL_S - 1
    rig.ingest.step([])
    assert gpu(rig) == 8
    rig.now += 1
    rig.ingest.step([])
    assert (gpu(rig), rows(rig)) == (28, (0, 0))


def test_a_hit_as_short_as_predicted_for_the_sake_of_a_window_denies_nothing(
    rig: Any, engine: Any, answers: Answers
) -> None:
    """The main group has the blocks that were not used; they are a hit for a prompt whose window is there."""
    window = {"group": 1, "group_kind": "sliding_window", "sliding_window": 9}
    rig.say(rig.follow("A"), engine().stored(PROMPT, group_kind="full_attention"))
    rig.say(("A", 0), engine().stored(PROMPT, 4, 6, **window))
    assert (gpu(rig), gpu(rig, PROMPT[:14])) == (24, 0)
    assert answers.say(0, answers.sent(PROMPT[:14])) == Outcome()
    assert answers.say(0, answers.sent(PROMPT[:14]), predicted_tokens=None) == Outcome()
    assert gpu(rig) == 24
    assert answers.say(8) == Outcome(denied=1)
    assert gpu(rig) == 0


def test_a_prompt_cached_as_far_as_it_can_be_denies_nothing(rig: Any, engine: Any, answers: Answers) -> None:
    """The last token is always computed, so the last block of 28 tokens is never a hit."""
    rig.say(rig.follow("A"), engine().stored(PROMPT))
    assert answers.say(24) == Outcome()
    assert gpu(rig) == 28


def test_ev15_what_was_stored_since_the_request_was_sent_is_not_denied(
    rig: Any, engine: Any, answers: Answers
) -> None:
    """The usual case: the engine had evicted the blocks, and computed and announced them for this request."""
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    decision = answers.sent()
    rig.say(a, engine().stored(PROMPT, 2))
    outcome = answers.say(8, decision)
    assert (outcome.denied, outcome.reason) == (0, "touched_since")
    assert (gpu(rig), rig.record(a).wrong) == (28, 0.0)


def test_an_answer_of_an_earlier_generation_is_refused(rig: Any, engine: Any, answers: Answers) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    decision = answers.sent()
    rig.say(a, AllBlocksCleared(), engine().stored(PROMPT))
    assert answers.say(8, decision) == refused("generation")
    assert gpu(rig) == 28


def test_a_clear_ends_denials_and_beliefs(rig: Any, engine: Any, answers: Answers) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    answers.say(8)
    answers.say(12, answers.sent(BRANCH))
    assert answers.say(24, answers.sent(BRANCH)).believed == 2
    rig.say(a, AllBlocksCleared(), engine().stored(PROMPT))
    assert (gpu(rig), gpu(rig, BRANCH)) == (28, 16)
    rig.collect()
    assert rows(rig) == (0, 0)


def test_an_answer_older_than_what_is_remembered_is_refused(
    make_rig: Any, engine: Any, tmp_path: Path
) -> None:
    rig = make_rig(tmp_path / "map")
    a = rig.follow("A", replay_endpoint=None)
    rig.say(a, engine().stored(PROMPT))
    decision = Answers(rig).sent()
    rig.say(a, engine().stored(BRANCH))
    rig.close()
    again = make_rig(tmp_path / "map")
    again.sequences = rig.sequences
    again._made = rig._made
    again.resume()
    again.say(a, engine().stored(BRANCH))
    assert Answers(again).say(8, decision) == refused("too_old")
    assert Answers(again).say(8).denied == 1
    again.close()


def test_denials_survive_a_restart_of_the_indexer_and_end_with_a_store(
    make_rig: Any, engine: Any, tmp_path: Path
) -> None:
    rig = make_rig(tmp_path / "map")
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    Answers(rig).say(8)
    rig.close()
    again = make_rig(tmp_path / "map")
    again.sequences, again._made = rig.sequences, rig._made
    again.resume()
    assert gpu(again) == 8
    again.say(a, engine().stored(PROMPT, 2, 3))
    assert (gpu(again), rows(again)) == (28, (0, 0))
    again.close()


def test_corrections_of_another_boot_are_dropped(make_rig: Any, engine: Any, tmp_path: Path) -> None:
    rig = make_rig(tmp_path / "map")
    rig.say(rig.follow("A"), engine().stored(PROMPT))
    Answers(rig).say(8)
    rig.close()
    writer = MapWriter(tmp_path / "map", map_size=1 << 28, boot=b"another", clock=lambda: 5.0)
    reader = MapReader(writer.env, writer.tables, clock=lambda: 5.0)
    with writer.env.begin() as txn:
        assert txn.stat(writer.tables.denied)["entries"] == 0
    assert [one.gpu for one in reader.query("m", PROMPT)] == [28]
    writer.close()


def test_an_answer_of_a_stream_that_is_not_trusted_is_refused(
    rig: Any, engine: Any, answers: Answers
) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    decision = answers.sent()
    rig.ingest.step([(a, Connected())])
    assert rig.record(a).state == "unverified"
    assert answers.say(8, decision) == refused("state")
    rig.ingest.forget("A", "m")
    assert answers.say(8, decision) == refused("unknown")


# belief


def test_ev15_a_lost_store_is_found_by_an_answer(rig: Any, engine: Any, answers: Answers) -> None:
    """Blocks behind the hole are held; once the hole is believed, they count."""
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    rig.say(a, *engine().removed(PROMPT, 2, 3))
    assert gpu(rig) == 8
    assert answers.say(24) == Outcome(believed=1)
    assert gpu(rig) == 28
    rig.check()


def test_ev17_a_hot_prefix_that_is_never_announced_again_converges(
    rig: Any, engine: Any, answers: Answers
) -> None:
    """The index was wiped; the engine still holds the prefix, and says nothing of it."""
    rig.follow("A", block_size=SIZE)
    rig.follow("B", block_size=SIZE)
    assert gpu(rig) == 0
    assert answers.say(24).believed == 6
    assert (gpu(rig), gpu(rig, instance="B")) == (24, 0)
    assert gpu(rig, BRANCH) == 16


def test_ev17_a_hot_prefix_converges_also_where_only_metrics_tell_the_block_size(
    rig: Any, engine: Any, answers: Answers
) -> None:
    a = rig.follow("A")
    rig.ingest.block_size_told(a, SIZE)
    rig.ingest.step([])
    assert answers.say(24).believed == 6
    assert gpu(rig) == 24


def test_an_event_knows_the_block_size_better_than_metrics(rig: Any, engine: Any, answers: Answers) -> None:
    a = rig.follow("A")
    rig.ingest.block_size_told(a, 2 * SIZE)
    rig.ingest.step([])
    rig.say(a, engine().stored(PROMPT))
    assert rig.record(a).block_size == SIZE
    assert gpu(rig) == 28
    rig.ingest.block_size_told(a, 2 * SIZE)
    rig.ingest.step([])
    rig.say(a, engine().stored(BRANCH))
    assert (rig.record(a).block_size, rig.record(a).counters.skipped) == (SIZE, {})


def test_a_belief_is_renewed_by_confirmation_and_ends_without(
    rig: Any, engine: Any, answers: Answers
) -> None:
    rig.follow("A", block_size=SIZE)
    answers.say(24)
    for _ in range(5):
        rig.now += BELIEF_S - 1
        rig.ingest.step([])
        assert gpu(rig) == 24
        assert answers.say(24, answers.sent()).denied == 0
    rig.now += BELIEF_S
    rig.ingest.step([])
    assert (gpu(rig), rows(rig)) == (0, (0, 0))


def test_answers_that_say_the_same_again_change_nothing(rig: Any, engine: Any, answers: Answers) -> None:
    """A hot prompt that is never announced is confirmed by every answer: readers need not read it anew."""
    rig.follow("A", block_size=SIZE)
    answers.say(24)
    changes = rig.record(("A", 0)).corrected
    for _ in range(10):
        rig.now += BELIEF_S / 30
        assert answers.say(24) == Outcome()
    assert rig.record(("A", 0)).corrected == changes
    rig.now += BELIEF_S / 5
    answers.say(24)
    assert rig.record(("A", 0)).corrected == changes + 6
    rig.now += BELIEF_S - 1
    assert gpu(rig) == 24


def test_a_belief_ends_when_an_answer_lacks_the_block(rig: Any, engine: Any, answers: Answers) -> None:
    rig.follow("A", block_size=SIZE)
    answers.say(24)
    assert answers.say(8).ended == 1
    assert gpu(rig) == 8


def test_a_belief_becomes_knowledge_when_the_block_is_stored(rig: Any, engine: Any, answers: Answers) -> None:
    a = rig.follow("A", block_size=SIZE)
    answers.say(24)
    rig.say(a, engine().stored(PROMPT))
    assert (gpu(rig), rows(rig)) == (28, (0, 0))
    rig.say(a, *engine().removed(PROMPT))
    assert gpu(rig) == 0


def test_what_was_evicted_since_the_request_was_sent_is_not_believed(
    rig: Any, engine: Any, answers: Answers
) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    decision = answers.sent()
    rig.say(a, *engine().removed(PROMPT, 3))
    assert answers.say(24, decision).believed == 0
    assert answers.say(24, decision, predicted_tokens=None).believed == 0
    assert gpu(rig) == 12


# how right


def test_ev15_a_stream_that_keeps_being_wrong_weighs_less_and_recovers(
    rig: Any, engine: Any, answers: Answers
) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    before = weight(rig)
    weights = []
    for _ in range(20):
        answers.say(0)
        rig.say(a, engine().stored(PROMPT))
        weights.append(weight(rig))
    assert rig.record(a).wrong > 0.8
    assert before == 1.0
    assert weights == sorted(weights, reverse=True)
    assert 0.1 <= weights[-1] < 0.3
    assert rig.record(a).state == "live"
    for _ in range(60):
        answers.say(24, predicted_tokens=24)
    assert (weight(rig), rig.record(a).wrong) == (1.0, 0.0)


def test_one_wrong_answer_costs_no_weight(rig: Any, engine: Any, answers: Answers) -> None:
    rig.say(rig.follow("A"), engine().stored(PROMPT))
    answers.say(0)
    assert weight(rig) == 1.0


# bounds, faults, other readers


def test_corrections_are_bounded_and_the_oldest_go_first(
    rig: Any, engine: Any, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corrections_module, "MAX_CORRECTIONS", 4)
    a = rig.follow("A", block_size=SIZE)
    answers.say(24)
    assert (rig.record(a).believed, rows(rig)) == (4, (0, 4))
    assert gpu(rig) == 0


def test_a_group_that_fails_corrects_nothing(
    rig: Any, engine: Any, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    decision = answers.sent()
    with monkeypatch.context() as patched:
        patched.setattr(
            "indexer.changes.Changes.flush", lambda _: (_ for _ in ()).throw(MapFullError("full"))
        )
        future = rig.ingest.learn(Answered(cached_tokens=8, **decision))
        with pytest.raises(MapFullError):
            rig.ingest.step([])
        with pytest.raises(MapFullError):
            future.result(0)
    assert (gpu(rig), rows(rig)) == (28, (0, 0))
    with rig.writer.group() as group:
        assert rig.ingest._followed[a].own.corrections(group).denied == {}


def test_a_reader_in_another_environment_sees_corrections_as_they_change(
    rig: Any, engine: Any, answers: Answers, script: Any
) -> None:
    rig.now = boot_clock()  # the other process has no other clock
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    code = (
        "import json, sys; from pathlib import Path; from indexer.reader import MapReader\n"
        "reader = MapReader.open(Path(sys.argv[1]))\n"
        "for line in sys.stdin: print([one.gpu for one in reader.query('m', json.loads(line))], flush=True)"
    )
    other = script(code, rig.writer.path)
    assert other.ask(PROMPT) == [28]
    answers.say(8)
    assert other.ask(PROMPT) == [8]
    answers.say(4)
    assert other.ask(PROMPT) == [4]
    rig.say(a, engine().stored(PROMPT))
    assert other.ask(PROMPT) == [28]


def test_explain_says_that_an_answer_denied_the_block(rig: Any, engine: Any, answers: Answers) -> None:
    rig.say(rig.follow("A"), engine().stored(PROMPT))
    answers.say(8)
    (told,) = explain(rig.reader, "m", PROMPT)["replicas"]
    assert told["matched_blocks"] == 2
    assert "an answer said" in told["why"]


# resets that no event tells


def test_ix02_a_cache_that_was_reset_without_an_event_is_forgotten_on_request(rig: Any, engine: Any) -> None:
    a, b = rig.follow("A"), rig.follow("B")
    for stream in (a, b):
        rig.say(stream, engine().stored(PROMPT))
    future = rig.ingest.purge(a)
    rig.ingest.step([])
    assert future.result(0) is None
    assert (gpu(rig), gpu(rig, instance="B")) == (0, 28)
    assert (rig.record(a).state, rig.record(a).sequence) == ("partial", 0)
    rig.say(a, AllBlocksCleared(), engine().stored(BRANCH))
    assert (rig.record(a).state, gpu(rig, BRANCH)) == ("live", 28)
    rig.check()


def test_ix02_a_reset_that_fails_is_tried_again(
    rig: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    with monkeypatch.context() as patched:
        patched.setattr(
            "indexer.changes.Changes.flush", lambda _: (_ for _ in ()).throw(MapFullError("full"))
        )
        rig.ingest.purge(a)
        with pytest.raises(MapFullError):
            rig.ingest.step([])
    rig.ingest._resume_from_commit()
    assert gpu(rig) == 28
    rig.now += 1
    rig.ingest.step([])
    assert gpu(rig) == 0


def test_ix02_a_reset_that_the_idle_engine_never_told_is_found_by_answers(
    rig: Any, engine: Any, answers: Answers
) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT), engine().stored(BRANCH))
    answers.say(0)
    assert (gpu(rig), gpu(rig, BRANCH)) == (0, 0)


# EV-14: bounded in time


def lose(rig: Any, stream: Any) -> None:
    """A batch is lost for good."""
    rig.sequences[stream] += 1


def test_ev14_what_was_known_before_a_loss_is_forgotten_in_time(rig: Any, engine: Any) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    lose(rig, a)
    rig.say(a, engine().stored(BRANCH))
    assert (rig.record(a).state, weight(rig), gpu(rig)) == ("partial", 0.5, 28)
    rig.now += 1799
    rig.ingest.step([])
    assert gpu(rig) == 28
    rig.now += 1
    rig.ingest.step([])
    assert (rig.record(a).state, gpu(rig), gpu(rig, BRANCH)) == ("partial", 0, 0)
    rig.say(a, engine().stored(PROMPT))
    rig.now += 4000
    rig.ingest.step([])
    assert gpu(rig) == 28, "what came after the loss is known as well as ever"
    rig.say(a, AllBlocksCleared())
    assert rig.record(a).state == "live"
    rig.check()


def test_ev14_a_clock_that_is_set_back_puts_the_bound_off_by_no_more_than_itself(
    rig: Any, engine: Any
) -> None:
    a, ahead = rig.follow("A"), 86_400.0
    rig.ingest._shared.wall = lambda: rig.now + ahead
    rig.say(a, engine().stored(PROMPT))
    lose(rig, a)
    rig.say(a, engine().stored(BRANCH))
    rig.now += 1000
    ahead = 0.0
    rig.ingest.step([])
    rig.now += 1799
    rig.ingest.step([])
    assert gpu(rig) == 28
    rig.now += 1
    rig.ingest.step([])
    assert gpu(rig) == 0


def test_ev14_the_bound_counts_from_the_first_loss_and_survives_a_restart(
    make_rig: Any, engine: Any, tmp_path: Path
) -> None:
    rig = make_rig(tmp_path / "map")
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    lose(rig, a)
    rig.say(a, engine().stored(BRANCH))
    rig.now += 1000
    lose(rig, a)
    rig.say(a, engine().stored(BRANCH))
    rig.close()
    again = make_rig(tmp_path / "map")
    again.sequences, again._made = rig.sequences, rig._made
    again.now = rig.now
    again.resume()
    again.say(a, engine().stored(BRANCH))
    assert gpu(again) == 28
    again.now += 800
    again.ingest.step([])
    assert gpu(again) == 0
    again.close()


def test_ev14_a_clear_in_time_keeps_what_comes_after_it(rig: Any, engine: Any) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    lose(rig, a)
    rig.say(a, AllBlocksCleared(), engine().stored(BRANCH))
    rig.now += 4000
    rig.ingest.step([])
    assert (rig.record(a).state, gpu(rig, BRANCH)) == ("live", 28)


def test_ev14_a_stream_that_knew_nothing_before_forgets_nothing(rig: Any, engine: Any) -> None:
    """Without a replay endpoint every stream that is joined late is partial from its start."""
    a = rig.follow("A")
    lose(rig, a)
    rig.say(a, engine().stored(PROMPT))
    assert rig.record(a).state == "partial"
    rig.now += 4000
    rig.ingest.step([])
    assert gpu(rig) == 28


def test_ev14_a_loss_that_was_none_is_no_reason_to_forget(rig: Any, engine: Any) -> None:
    """The start time says that it is the same process, the next sequence that all of it came."""
    a = rig.follow("A", replay_endpoint=None)
    rig.say(a, engine().stored(PROMPT))
    for _ in range(2):
        rig.ingest.process_started(a, 1e9, rig.now)
        rig.ingest.step([])
        rig.ingest.step([(a, Connected())])
    assert (rig.record(a).state, rig.record(a).started_at) == ("unverified", 1e9)
    rig.ingest.process_started(a, 1e9, rig.now)
    rig.ingest.step([])
    assert (rig.record(a).state, rig.record(a).lost_at) == ("partial", rig.now)
    rig.say(a, engine().stored(BRANCH))
    assert (rig.record(a).state, rig.record(a).lost_at) == ("live", None)
    rig.now += 4000
    rig.ingest.step([])
    assert gpu(rig) == 28


def test_ev12_a_start_time_is_not_believed_while_frames_still_wait(rig: Any, engine: Any) -> None:
    """They may be of the process before."""
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    rig.feed.inbox.put(*rig.frame(a, engine().stored(BRANCH)))
    rig.ingest.process_started(a, 1e9, rig.now)
    rig.ingest.step([])
    assert rig.record(a).started_at is None
    rig.ingest.step(rig.feed.inbox.take(9, 0))
    rig.ingest.process_started(a, 1e9, rig.now)
    rig.ingest.step([])
    assert rig.record(a).started_at == 1e9


# over HTTP


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def fed(indexer: Indexer, publisher: Publisher, engine: Any, until: Any) -> None:
    indexer.ingest.register(
        Registration(
            instance_id="A",
            endpoint=publisher.endpoint,
            replay_endpoint=publisher.replay_endpoint,
            model_name="m",
            aliases=("alias",),
        )
    ).result(10)
    publisher.publish([engine().stored(PROMPT)], 1.0)
    until(lambda: [one.gpu for one in indexer.reader.query("m", PROMPT) if one.weight == 1.0] == [28])


async def test_ev15_the_client_tells_an_answer(
    indexers: Any, publishers: Any, engine: Any, until: Any, session: aiohttp.ClientSession
) -> None:
    indexer = indexers()
    await fed(indexer, publishers(), engine, until)
    async with TestServer(indexer.application()) as server:
        client = IndexerClient(str(server.make_url("")), session, timeout_s=10)
        (one,) = await client.query("alias", PROMPT)
        told = {"generation": one.generation, "sequence": one.sequence, "predicted_tokens": one.gpu}
        outcome = await client.feedback("A", "alias", PROMPT, cached_tokens=8, **told)
        assert outcome == Outcome(denied=1)
        assert [each.gpu for each in await client.query("m", PROMPT)] == [8]
        late = await client.feedback("A", "m", PROMPT, cached_tokens=8, generation=0, sequence=None)
        assert late == refused("generation")
        async with session.get(server.make_url("/metrics")) as answer:
            metrics = await answer.text()
        assert 'warmroute_indexer_feedback_total{result="taken"} 1.0' in metrics
        assert 'warmroute_indexer_feedback_total{result="generation"} 1.0' in metrics
        assert 'warmroute_indexer_corrections{instance="A",kind="denied",rank="0"} 1.0' in metrics
        async with session.get(server.make_url("/debug/replicas")) as answer:
            (replica,) = (await answer.json())["replicas"]
        assert (replica["denied"], replica["believed"]) == (1, 0)
        assert replica["accuracy"] == pytest.approx(1 - 0.1 * 20 / 28)
        with pytest.raises(IndexerAnswerError) as unknown:
            await client.feedback("B", "m", PROMPT, cached_tokens=8, generation=1, sequence=0)
        assert unknown.value.status == 404


async def test_feedback_takes_local_hashes_and_salts_and_refuses_nonsense(
    indexers: Any, publishers: Any, engine: Any, until: Any, session: aiohttp.ClientSession
) -> None:
    indexer = indexers()
    await fed(indexer, publishers(), engine, until)
    (one,) = indexer.reader.query("m", PROMPT)
    body = {"instance_id": "A", "model_name": "m", "generation": one.generation, "sequence": one.sequence}
    async with TestServer(indexer.application()) as server:

        async def told(**fields: Any) -> tuple[int, Any]:
            async with session.post(server.make_url("/feedback"), json=body | fields) as answer:
                return answer.status, await answer.json()

        salted = await told(token_ids=PROMPT, cached_tokens=4, cache_salt="tenant")
        assert salted == (200, {"status": "taken", "reason": None, "denied": 0, "believed": 1, "ended": 0})
        hashes = [step["local_hash"] for step in explain(indexer.reader, "m", PROMPT)["replicas"][0]["steps"]]
        status, outcome = await told(block_hashes=hashes, cached_tokens=12)
        assert (status, outcome["denied"]) == (200, 1)
        assert [each.gpu for each in indexer.reader.query("m", PROMPT)] == [12]
        assert (await told(cached_tokens=4))[0] == 400
        assert (await told(token_ids=PROMPT, block_hashes=hashes, cached_tokens=4))[0] == 400
        assert (await told(token_ids=PROMPT, cached_tokens=-1))[0] == 400
        assert (await told(token_ids=PROMPT, cached_tokens=4, dp_rank=3))[0] == 404


async def test_ev15_several_answers_are_told_at_once_and_one_that_cannot_be_used_costs_only_itself(
    indexers: Any, publishers: Any, engine: Any, until: Any, session: aiohttp.ClientSession
) -> None:
    indexer = indexers()
    await fed(indexer, publishers(), engine, until)
    (one,) = indexer.reader.query("m", PROMPT)
    hashes = [step["local_hash"] for step in explain(indexer.reader, "m", PROMPT)["replicas"][0]["steps"]]
    told = {"model_name": "m", "generation": one.generation, "sequence": one.sequence, "cached_tokens": 8}
    # Of the hashes, only those up to the first that was not there.
    short = {"block_hashes": hashes[:3], "block_size": 4, "prompt_tokens": len(PROMPT)}
    several = [
        {"instance_id": "B", **told, **short},
        {"instance_id": "A", **told, **short, "block_size": 16},
        {"instance_id": "A", **told, **short},
        {"instance_id": "A", **told, **short, "generation": 77},
    ]
    async with TestServer(indexer.application()) as server:
        client = IndexerClient(str(server.make_url("")), session, timeout_s=10)
        outcomes = await client.feedback_all(json.dumps(several).encode(), len(several))
        expected = [refused("unknown"), refused("block_size"), Outcome(denied=1), refused("generation")]
        assert outcomes == expected
        assert [each.gpu for each in await client.query("m", PROMPT)] == [8]
        assert await client.feedback_all(b"[]", 0) == []
        with pytest.raises(IndexerAnswerError, match="1 of 2"):
            await client.feedback_all(json.dumps(several[:1]).encode(), 2)


async def test_ix02_a_reset_over_http_forgets_an_instance(
    indexers: Any, publishers: Any, engine: Any, until: Any, session: aiohttp.ClientSession
) -> None:
    indexer = indexers()
    await fed(indexer, publishers(), engine, until)
    async with TestServer(indexer.application()) as server:
        url = server.make_url("/reset")
        async with session.post(url, json={"instance_id": "A", "model_name": "m"}) as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "ok"})
        assert [(one.gpu, one.state) for one in indexer.reader.query("m", PROMPT)] == [(0, "partial")]
        async with session.post(url, json={"instance_id": "B", "model_name": "m"}) as answer:
            assert answer.status == 404


def test_a_stored_frame_that_comes_with_the_answer_in_one_group_counts_first(
    rig: Any, engine: Any, answers: Answers
) -> None:
    a = rig.follow("A")
    rig.say(a, engine().stored(PROMPT))
    future = rig.ingest.learn(Answered(cached_tokens=8, **answers.sent()))
    stream, frame = rig.frame(a, engine().stored(PROMPT, 2, 3))
    assert isinstance(frame, Frame)
    rig.ingest.step([(stream, frame)])
    assert future.result(0).reason == "touched_since"
    assert gpu(rig) == 28
