from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from simulator.comparison import table_of, verdict
from simulator.fleet import Shape
from simulator.replay import Replayed, replay
from simulator.trace import Traced, read_trace, spread
from warmroute import main

MOONCAKE = Path(__file__).parents[3] / "shared" / "data" / "mooncake_conversation_trace.jsonl"
NUMBERS = {
    "requests",
    "hit_rate",
    "ttft_mean_s",
    "ttft_p95_s",
    "ttft_p99_s",
    "load_max_over_mean",
    "busy",
}


def test_replay_prints_the_numbers_of_each_policy(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 500 * n, "input_length": 1030, "output_length": 5, "hash_ids": [1, 2, n]}
        for n in range(10, 30)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["replay", str(trace), "--policy", "cache-aware,pooled", "--replicas", "2"]
    said = json.loads(CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert list(said) == ["cache-aware", "pooled"]
    assert all(set(numbers) == NUMBERS for numbers in said.values())
    assert said["cache-aware"]["requests"] == 20
    assert said["cache-aware"]["hit_rate"] == pytest.approx(19 * 1024 / (20 * 1030))
    assert "cache-aware" in CliRunner().invoke(main, arguments, catch_exceptions=False).stdout


def test_a_row_of_an_overloaded_fleet_is_one_line_of_80_columns() -> None:
    one = Replayed(
        requests=123_456,
        hit_rate=0.443,
        ttft_mean_s=1372.56,
        ttft_p95_s=13297.03,
        ttft_p99_s=99.99,
        load_max_over_mean=1.03,
        busy=1.7,
    )
    terminal = Console(width=80, file=io.StringIO())
    terminal.print(table_of({"least-loaded": one}, "title"))
    rows = [line.split() for line in terminal.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert ["least-loaded", "123,456", "44.3", "%", "1,373", "s", "13,297", "s", "99.99", "s", "1.03"] in rows


def numbers(hit_rate: float, ttft_mean_s: float, busy: float = 0.5) -> Replayed:
    return Replayed(
        requests=1,
        hit_rate=hit_rate,
        ttft_mean_s=ttft_mean_s,
        ttft_p95_s=1.0,
        ttft_p99_s=1.0,
        load_max_over_mean=1.0,
        busy=busy,
    )


def test_what_gains_nothing_is_said_to_be_not_worth_it() -> None:
    alike = verdict(
        {"cache-aware": numbers(0.31, 0.98), "round-robin": numbers(0.1, 3), "random": numbers(0.3, 1)}
    )
    assert alike[0].startswith("Not worth it here: cache-aware leaves 0.99 times the prompt tokens of random")
    for gains in (numbers(0.6, 0.98), numbers(0.31, 0.5)):
        assert verdict({"cache-aware": gains, "random": numbers(0.3, 1)})[0].startswith("cache-aware leaves")
    even = {"lowest-ttft": numbers(0.38, 0.998), "cache-aware": numbers(0.4, 1.0), "random": numbers(0.1, 2)}
    assert verdict(even)[0].startswith("cache-aware leaves 0.67 times the prompt tokens of random")
    assert verdict({"cache-aware": numbers(0.9, 1), "pooled": numbers(1, 1)}) == []
    assert verdict({"session": numbers(1, 1), "random": numbers(1, 1)})[0].startswith("Not worth it here")


def test_times_of_a_fleet_that_does_not_keep_up_are_said_to_mean_little() -> None:
    shape = Shape(replicas=2, prefill_rate=1000.0)
    trace = [
        Traced(at_s=float(n), prompt_tokens=1024, answer_tokens=1, blocks=(2 * n, 2 * n + 1))
        for n in range(9)
    ]
    slow, quick = (replay(trace, "random", Shape(replicas=2, prefill_rate=rate)) for rate in (500, 5000))
    assert slow.busy == pytest.approx(9 * 1024 / 500 / 2 / 8)
    assert replay(trace, "pooled", shape).busy == pytest.approx(9 * 1024 / 1000 / 2 / 8)
    assert verdict({"random": slow})[0].startswith("Overloaded with random: ")
    assert verdict({"random": quick}) == []
    assert replay(trace[:1], "random", shape).busy == 0


def test_replay_refuses_in_one_line(tmp_path: Path) -> None:
    for arguments, complaint in (
        (["workload:none"], "unknown workload 'none'"),
        (["workload:rag", "--per-s", "0"], "must be a number above 0"),
        ([str(tmp_path / "none"), "--per-s", "1"], "is a file and has its times"),
        ([str(tmp_path / "none")], "cannot read the trace"),
        (["workload:rag", "--policy", "none"], "unknown --policy 'none'"),
        (["workload:rag", "--added-at-s", "-1"], "added_at_s -1.0: must be 0 or more"),
        (
            ["workload:rag", "--restart-at-s", "1e6"],
            "restart_at_s 1e+06: the last request of the trace comes",
        ),
    ):
        result = CliRunner().invoke(main, ["replay", *arguments])
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1
        assert complaint in result.output


@pytest.mark.skipif(not MOONCAKE.exists(), reason=f"needs {MOONCAKE}")
def test_on_the_mooncake_trace_cache_aware_is_near_the_limit() -> None:
    trace = read_trace(MOONCAKE)[:2000]
    aware, plain, limit = (replay(trace, name, Shape()) for name in ("cache-aware", "lowest-ttft", "pooled"))
    assert aware.hit_rate >= 1.1 * plain.hit_rate
    assert aware.hit_rate >= 0.93 * limit.hit_rate
    assert aware.ttft_mean_s < plain.ttft_mean_s


@pytest.mark.skipif(not MOONCAKE.exists(), reason=f"needs {MOONCAKE}")
def test_rq06_on_the_mooncake_trace_two_routers_find_what_one_finds() -> None:
    trace = spread(read_trace(MOONCAKE)[:3000])
    one, two = (replay(trace, "cache-aware", Shape(routers=routers)) for routers in (1, 2))
    assert two.hit_rate >= 0.98 * one.hit_rate
    assert two.ttft_mean_s <= 1.35 * one.ttft_mean_s
