from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from events.recording import Done, RecordingWriter, Sent
from simulator.errors import TraceError
from simulator.replay import load_trace
from warmroute import main

SHARED = [*range(1024)]


def recorded(path: Path, *prompts: list[int] | None, model: str = "m") -> Path:
    writer = RecordingWriter(path)
    for number, tokens in enumerate(prompts):
        at, body = 1000.0 + number, {"model": model}
        writer.write(Sent(id=number, src="e0", t=at, path="/", body=body, tokens=tokens))
        writer.write(Done(id=number, completion_tokens=7))
    writer.close()
    return path


def test_a_recording_is_a_trace_in_which_prompts_that_begin_alike_begin_with_the_same_blocks(
    tmp_path: Path,
) -> None:
    path = recorded(tmp_path / "r", [*SHARED, 1], None, [*SHARED, 2], [5, *SHARED])
    one, two, other = load_trace(str(path))
    assert (one.at_s, two.at_s, other.at_s) == (0.0, 2.0, 3.0)
    assert (one.prompt_tokens, one.answer_tokens) == (1025, 7)
    assert one.blocks[:2] == two.blocks[:2]
    assert one.blocks[2] != two.blocks[2]
    assert not set(other.blocks) & {*one.blocks, *two.blocks}


def test_a_recording_is_replayed_by_the_command(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", *([*SHARED, number] for number in range(6)))
    arguments = ["replay", str(path), "--policy", "cache-aware", "--replicas", "2", "--json"]
    said = json.loads(CliRunner().invoke(main, arguments, catch_exceptions=False).stdout)
    assert said["cache-aware"]["hit_rate"] == pytest.approx(5 * 1024 / (6 * 1025))


def test_a_recording_without_tokens_says_how_to_make_one_with_them(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="record with --tokenizer MODEL=FOLDER"):
        load_trace(str(recorded(tmp_path / "r", None)))
    broken = tmp_path / "broken"
    broken.write_text('{"k":"nothing"}\n')
    with pytest.raises(TraceError, match="line 1"):
        load_trace(str(broken))
