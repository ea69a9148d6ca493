from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
from array import array
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from events.curve import read_curve, write_pair
from events.recording import RecordingWriter
from router import tap
from router.answer import Answer
from router.errors import RouterError
from router.recorder import TrafficRecorder, record
from router.settings import RouterSettings
from simulator.engine import Engine
from simulator.settings import EngineSettings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "recording.jsonl"


def sent(exchange: int, **fields: Any) -> tap.Sent:
    values: dict[str, Any] = {"request_id": "same", "replica": "a", "rank": 0, "path": "/v1/completions"}
    values |= {"body": b'{"model":"m"}', "tokens": array("I", [1, 2]), "headers": {}}
    return tap.Sent(exchange=exchange, **(values | fields))


def done(exchange: int, text: str) -> tap.Done:
    return tap.Done(
        exchange=exchange,
        request_id="same",
        replica="a",
        rank=0,
        status=200,
        complete=True,
        answer=Answer(2, 0, 1, text),
    )


def lines(file: Path, kind: str) -> list[dict[str, Any]]:
    return [line for text in file.read_text().splitlines() if (line := json.loads(text))["k"] == kind]


def test_requests_that_share_a_request_id_keep_their_own_outcomes(file: Path) -> None:
    recorder = TrafficRecorder(RecordingWriter(file), clock=lambda: 100.0)
    for number in (7, 8):
        recorder.on_send(sent(number, tokens=array("I", [number])))
    for number in (8, 7):
        recorder.on_done(done(number, f"answer {number}"))
    recorder.close()
    tokens = {line["id"]: line["tokens"] for line in lines(file, "send")}
    answers = {line["id"]: line["text"] for line in lines(file, "done")}
    assert [(tokens[id_], answers[id_]) for id_ in sorted(tokens)] == [([7], "answer 7"), ([8], "answer 8")]


@pytest.mark.parametrize("body", [b'{"a":' * 100_000, b'{"x":NaN}', b"\xff"])
def test_what_clients_send_besides_utf8_costs_no_line(file: Path, body: bytes) -> None:
    recorder = TrafficRecorder(RecordingWriter(file), clock=lambda: 100.0)
    recorder.on_send(sent(1, path="/v1/caf\udce9", headers={"X-User": "Jos\udce9"}, body=body))
    recorder.on_done(done(1, "x"))
    recorder.close()
    (line,) = lines(file, "send")
    assert (line["path"], line["headers"], line["body"]) == ("/v1/caf?", {"X-User": "Jos?"}, {})
    assert len(lines(file, "done")) == 1


def test_a_full_disk_costs_lines_that_are_counted_and_no_request(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = TrafficRecorder(RecordingWriter(file))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordingWriter, "write", full)
    recorder.on_send(sent(1))
    recorder.on_done(done(1, "text"))
    recorder.close()
    assert recorder.lost == 2


async def test_op10_what_an_engine_with_keys_publishes_is_recorded_too(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (public, held), (_, ours) = (write_pair(tmp_path / name) for name in ("engine", "ours"))
    told, write_history = asyncio.Event(), TrafficRecorder.history

    def history(*told_of: Any) -> None:
        write_history(*told_of)
        told.set()

    monkeypatch.setattr(TrafficRecorder, "history", history)
    anywhere = "tcp://127.0.0.1:*"
    engine = EngineSettings(listen="127.0.0.1:0", events=anywhere, replay=anywhere, curve_key=str(held))
    async with Engine(engine) as running, aiohttp.ClientSession() as client:
        body = {"model": "model", "prompt": list(range(64)), "max_tokens": 1}
        async with client.post(f"{running.url}/v1/completions", json=body) as answer:
            assert answer.status == 200
        settings = RouterSettings(
            listen="127.0.0.1:0", admin_listen="127.0.0.1:0", replica=(f"e0={running.url}",)
        )
        curve = read_curve(str(ours), (f"e0={public}",), ())
        recording = asyncio.create_task(record(settings, file, one_at_a_time=False, curve=curve))
        async with asyncio.timeout(20):
            await told.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await recording
    (replay,) = lines(file, "replay")
    assert len(replay["replies"]) > 1


def test_a_recording_that_cannot_start_leaves_no_file_behind(file: Path) -> None:
    with pytest.raises(RouterError):
        asyncio.run(record(RouterSettings(listen="nowhere"), file, one_at_a_time=False))
    assert not file.exists()
