from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from simulator import traffic
from simulator.errors import TraceError
from simulator.fleet import Shape
from simulator.replay import pooled
from simulator.trace import BLOCK_TOKENS, Traced, read_trace, spread
from simulator.traffic import DOCUMENTS, DURATION_S, GPU_TOKENS, LESS_PER_S, WORKLOADS, workload

LINE = '{"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [1, 2, 3]}'


def test_a_trace_is_read_by_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{LINE}\n\n{LINE.replace('1500', '500')}\n")
    early, late = read_trace(path)
    assert late == Traced(1.5, 1030, 7, (1, 2, 3))
    assert (early.at_s, late.full_blocks) == (0.5, (1, 2))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "line 2: Expected `object`"),
        ("{}", "line 2: Object missing required field"),
        (LINE.replace("1030", "1025").replace("[1, 2, 3]", "[1, 2]"), "line 2: 2 hash_ids for 1025 tokens"),
        (LINE.replace("1030", "0"), "line 2: 3 hash_ids for 0 tokens"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{LINE}\n{text}\n")
    with pytest.raises(TraceError, match=complaint):
        read_trace(path)
    with pytest.raises(TraceError, match="cannot read the trace"):
        read_trace(tmp_path / "none")


@pytest.mark.parametrize("name", WORKLOADS)
def test_made_up_traffic_repeats_with_its_seed_and_is_a_well_formed_trace(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "DURATION_S", 300.0)
    monkeypatch.setattr(traffic, "EARLIER_S", 300.0)
    requests = workload(name, 3)
    assert requests == workload(name, 3) != workload(name, 4)
    assert [r.at_s for r in requests] == sorted(r.at_s for r in requests)
    for request in requests[:1000]:
        assert len(request.blocks) == -(-request.prompt_tokens // BLOCK_TOKENS)
        assert len(set(request.blocks)) == len(request.blocks)
    firsts = {request.blocks[0] for request in requests}
    assert (len(firsts) == len(requests)) == (name == "nothing-shared")


def test_an_unknown_workload_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TraceError, match="unknown workload 'none'; choose one of chats, rag"):
        workload("none")


def test_as_much_made_up_traffic_comes_as_is_asked_for() -> None:
    asked = {per_s: len(workload("rag", per_s=per_s)) for per_s in (1.0, 2.0)}
    assert asked == pytest.approx({1.0: DURATION_S, 2.0: 2 * DURATION_S}, rel=0.1)
    for none in (0.0, -1.0, float("nan")):
        with pytest.raises(TraceError, match="a second of workload rag: must be a number above 0"):
            workload("rag", per_s=none)


def test_a_pooled_cache_leaves_of_documents_what_the_rule_says() -> None:
    for cache_tokens, per_s in ((1_000_000, None), (GPU_TOKENS, LESS_PER_S["rag"])):
        trace = workload("rag", 1, per_s)
        limit = pooled(trace, Shape(cache_tokens=cache_tokens))
        tokens = sum(request.prompt_tokens for request in trace)
        assert 0.65 < tokens * (1 - limit.hit_rate) / (8 * 4700 * DURATION_S) < 0.75


def test_what_is_stamped_alike_is_spread_until_the_next_stamp_in_its_order() -> None:
    trace = [Traced(at_s, 1, 1, (number,)) for number, at_s in enumerate((0.0, 0.0, 0.0, 3.0, 9.0, 9.0))]
    apart = spread(trace)
    assert [one.blocks for one in apart] == [one.blocks for one in trace]
    times = [one.at_s for one in apart]
    assert times == sorted(set(times))
    assert 0 <= times[0] < times[2] < 3 <= times[3] < 9 <= times[4] < times[5] < 15
    assert spread(trace) == apart != spread(trace, seed=1)


def test_made_up_chats_are_as_long_and_as_slow_as_those_they_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traffic, "EARLIER_S", 0.0)
    by_session: dict[int | None, list[Traced]] = {}
    for request in workload("chats", per_s=3.0):
        by_session.setdefault(request.session, []).append(request)
    begun = [turns for turns in by_session.values() if turns[0].at_s < DURATION_S / 3]
    gaps = sorted(after.at_s - before.at_s for turns in begun for before, after in pairwise(turns))
    assert 100 < gaps[len(gaps) // 2] < 140
    new = [after.prompt_tokens - before.prompt_tokens for t in begun for before, after in pairwise(t)]
    assert 600 < fmean(new) < 800


def test_made_up_documents_are_as_popular_as_those_they_follow() -> None:
    asked = Counter(request.blocks[2] for request in workload("rag"))
    popular = sum(count for _, count in asked.most_common(round(0.03 * DOCUMENTS)))
    assert 0.55 < popular / asked.total() < 0.65
