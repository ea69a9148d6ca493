"""Predictions against what real vLLM engines reported, request by request."""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from events.recording import Mark, RecordingError, read_recording
from indexer.verify import verify, verify_lines
from warmroute import main

CAPTURES = Path(__file__).parents[1] / "data/vllm-events"
CHECKED = {"main": 71, "bytes_cbor": 34, "lora": 11, "v023": 15}


def capture(name: str) -> Path:
    return CAPTURES / f"{name}.jsonl"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


@pytest.mark.parametrize("name", CHECKED)
def test_every_checked_request_of_a_real_engine_is_predicted_exactly(name: str) -> None:
    verdict = verify(capture(name))
    tallies = verdict.replicas.values()
    assert sum(tally.checked for tally in tallies) == sum(tally.exact for tally in tallies) == CHECKED[name]
    assert sum(tally.over + tally.under for tally in tallies) == 0
    assert sum(tally.hits for tally in tallies) > 0
    assert verdict.exact
    assert verdict.misses == []
    assert verdict.unusable == 0


def test_ev12_the_restart_in_the_middle_is_found() -> None:
    replicas = verify(capture("main")).replicas
    assert {name: tally.restarted for name, tally in replicas.items()} == {"A": 1, "B": 0}
    assert sum(tally.hits for tally in replicas.values()) == 40


@pytest.mark.parametrize("name", CHECKED)
def test_no_mark_but_the_models_is_needed(name: str) -> None:
    lines = list(read_recording(capture(name)))
    kept = [line for line in lines if not isinstance(line, Mark) or line.what == "models"]
    assert len(kept) < len(lines)
    assert verify_lines(capture(name).name, kept) == verify(capture(name))


def test_the_command_prints_a_table_and_succeeds() -> None:
    result = run(*map(capture, CHECKED))
    assert result.exit_code == 0
    for word in ("main.jsonl", "bytes_cbor.jsonl", "lora.jsonl", "v023.jsonl", "restarted"):
        assert word in result.output.replace("restar…", "restarted")


def test_the_command_prints_json() -> None:
    result = run("--json", capture("main"), capture("lora"))
    assert result.exit_code == 0
    first, second = json.loads(result.output)["recordings"]
    assert (first["file"], second["file"]) == ("main.jsonl", "lora.jsonl")
    assert first["replicas"]["A"] == {
        "checked": 47,
        "exact": 47,
        "over": 0,
        "under": 0,
        "restarted": 1,
        "hits": 25,
    }
    assert first["misses"] == second["misses"] == []


def tampered(folder: Path, change: Any) -> Path:
    """A copy of the main capture with every line changed, or left out where ``change`` gives None."""
    lines = [change(json.loads(line)) for line in capture("main").read_text().splitlines()]
    copy = folder / "tampered.jsonl"
    copy.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))
    return copy


def test_a_report_that_was_tampered_with_is_a_miss(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in capture("main").read_text().splitlines()]
    checked = {line["id"] for line in lines if line["k"] == "send" and line["check"]}
    hits = [line for line in lines if line["k"] == "done" and line["id"] in checked and line["cached_tokens"]]
    more, less = hits[3], hits[10]
    changes = {more["id"]: 32, less["id"]: -32}

    def change(line: dict[str, Any]) -> dict[str, Any]:
        if line["k"] == "done" and line["id"] in changes:
            return line | {"cached_tokens": line["cached_tokens"] + changes[line["id"]]}
        return line

    copy = tampered(tmp_path, change)
    result = run("--json", copy)
    assert result.exit_code == 1
    (recording,) = json.loads(result.output)["recordings"]
    assert [(miss["request"], miss["reported"] - miss["predicted"]) for miss in recording["misses"]] == [
        (more["id"], 32),
        (less["id"], -32),
    ]
    assert sum(each["under"] for each in recording["replicas"].values()) == 1
    assert sum(each["over"] for each in recording["replicas"].values()) == 1
    table = run(copy)
    assert table.exit_code == 1
    assert f"request {more['id']} on " in table.output


def test_events_that_are_missing_are_misses(tmp_path: Path) -> None:
    """The engine's events are needed: without the first stores its hits are not predicted."""
    stores = [0]

    def change(line: dict[str, Any]) -> dict[str, Any] | None:
        if line["k"] != "ev" or line["src"] != "B":
            return line
        batch = msgspec.msgpack.decode(base64.b64decode(line["f"][2]))
        batch[1] = [event for event in batch[1] if "BlockStored" not in str(event) or stores[0] > 10]
        stores[0] += 1
        return line | {"f": [*line["f"][:2], base64.b64encode(msgspec.msgpack.encode(batch)).decode()]}

    result = run("--json", tampered(tmp_path, change))
    assert result.exit_code == 1
    replicas = json.loads(result.output)["recordings"][0]["replicas"]
    assert replicas["B"]["under"] > 0
    assert replicas["A"]["exact"] == 47


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        '{"k": "of the future"}',
        '{"k": "ev", "src": "A", "t": 1, "f": ["", "", "not base64!"]}',
        '{"k": "ev", "src": "A", "t": 1, "f": ["", ""]}',
        '{"k": "mark", "t": 1, "what": "models", "body": 7}',
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(RecordingError, match=r"bad\.jsonl"):
        verify(file)
    result = run(file)
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1
    assert "bad.jsonl" in result.output


def test_a_file_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    result = run(tmp_path / "nothing.jsonl")
    assert result.exit_code == 2
    assert "nothing.jsonl: No such file" in result.output


def test_requests_that_say_too_little_are_counted_not_guessed(tmp_path: Path) -> None:
    file = tmp_path / "little.jsonl"
    sent = {"k": "send", "src": "A", "t": 1, "path": "/v1/completions", "check": True}
    lines = [
        sent | {"id": 1, "body": {"prompt": "text"}},
        {"k": "done", "id": 1, "status": 200, "cached_tokens": 0},
        sent | {"id": 2, "body": {"prompt": [1, 2, 3]}},
        {"k": "done", "id": 2, "status": 500},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdict = verify(file)
    assert verdict.unusable == 2
    assert verdict.replicas["A"].checked == 0
