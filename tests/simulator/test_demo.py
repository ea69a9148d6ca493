"""The demo, whole but small: real engines, indexer and router, three policies."""

import io
import json

import pytest
from rich.console import Console

from simulator.demo import POLICIES, Counted, Measured, _conclusion, _measured, _table, demo
from simulator.workload import Result, Shape

SMALL = Shape(systems=2, system_tokens=400, conversations=6, turns=2, new_tokens=60, answer_tokens=4)


async def test_the_demo_ends_with_one_line_of_json_and_cache_aware_computes_least(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulator.demo.ENGINES", 2)
    assert await demo(True, SMALL) == 0
    printed = capsys.readouterr()
    measured = json.loads(printed.out.splitlines()[-1])
    assert tuple(measured) == POLICIES
    for run in measured.values():
        assert set(run) == {"requests", "hit_rate", "ttft_mean_s", "ttft_p95_s", "prefill_tokens"}
        assert run["requests"] == SMALL.requests
        assert 0 < run["ttft_mean_s"] < 5
    assert measured["cache-aware"]["prefill_tokens"] < measured["round-robin"]["prefill_tokens"]
    assert measured["cache-aware"]["hit_rate"] > measured["round-robin"]["hit_rate"]
    assert "Same traffic, three policies" in printed.err


def test_measures_are_of_the_run_alone_and_the_95th_percentile_is_a_request() -> None:
    results = [
        Result(ttft_s=float(number), replica=None, fallback=None, prompt_tokens=1, cached_tokens=0)
        for number in range(1, 101)
    ]
    run = _measured(results, Counted(100, 50, 50), Counted(300, 200, 90))
    assert run.requests == 100
    assert run.hit_rate == 0.75
    assert run.ttft_mean_s == 50.5
    assert run.ttft_p95_s == 95.0
    assert run.prefill_tokens == 40


def test_what_is_shown_fits_80_columns() -> None:
    measured = {name: Measured(192, 0.711, 1.234, 2.345, 1_106_784) for name in POLICIES}
    terminal = Console(width=80, file=io.StringIO())
    terminal.print(_table(measured))
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    for name in (*POLICIES, "prefill tokens", "1,106,784", "2345 ms"):
        assert name in shown
    listed = [line for line in _conclusion(measured, 3).splitlines() if line.startswith("  ")]
    assert listed
    assert all(len(line) <= 80 for line in listed)
