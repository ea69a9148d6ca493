"""Recordings: the captures are read, a bad line is named, and what is written is private and reads back."""

import base64
import json
import os
import stat
from collections import Counter
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.recording import (
    Done,
    Line,
    Mark,
    Published,
    RecordingError,
    RecordingWriter,
    Replay,
    Sent,
    pack_history,
    pack_published,
    read_recording,
)

CAPTURES = Path(__file__).parents[1] / "data/vllm-events"
KINDS = {Published: "ev", Sent: "send", Done: "done", Replay: "replay", Mark: "mark"}


@pytest.mark.parametrize("name", ["main", "bytes_cbor", "lora", "v023", "connect", "dp2"])
def test_every_capture_is_read_line_by_line(name: str) -> None:
    path = CAPTURES / f"{name}.jsonl"
    raw = [json.loads(line) for line in path.read_text().splitlines()]
    lines = list(read_recording(path))
    assert [KINDS[type(line)] for line in lines] == [each["k"] for each in raw]
    for line, each in zip(lines, raw, strict=True):
        if isinstance(line, Published):
            assert (line.src, line.t) == (each["src"], each["t"])
            assert line.sequence == int.from_bytes(base64.b64decode(each["f"][1]), "big")
            assert line.payload == base64.b64decode(each["f"][2])
        if isinstance(line, Replay):
            replies = [reply for reply in each["replies"] if reply[-1]]
            sequences = [int.from_bytes(base64.b64decode(reply[-2]), "big") for reply in replies]
            assert line.batches() == [
                (sequence, base64.b64decode(reply[-1]))
                for sequence, reply in zip(sequences, replies, strict=True)
            ]
        if isinstance(line, Done):
            assert line.cached_tokens == each.get("cached_tokens")
            assert line.status == each["status"]
        if isinstance(line, Sent):
            assert line.prompt == (each.get("tokens") or each["body"]["prompt"])
            assert line.check == each["check"]


def test_the_restart_in_the_main_capture_is_a_sequence_that_goes_back() -> None:
    lines = read_recording(CAPTURES / "main.jsonl")
    sequences = [line.sequence for line in lines if isinstance(line, Published) and line.src == "A"]
    backwards = [(a, b) for a, b in pairwise(sequences) if b <= a]
    assert backwards == [(41, 0)]


GOOD = '{"k": "mark", "t": 1.0, "what": "start"}'


@pytest.mark.parametrize(
    "bad",
    [
        "not json",
        "{",
        "[]",
        "null",
        '"\udcff"',
        "{}",
        '{"k": "unknown"}',
        '{"k": 5}',
        '{"k": "mark", "what": "no time"}',
        '{"k": "mark", "t": "noon", "what": "start"}',
        '{"k": "ev", "src": "A", "t": 1.0, "f": ["", "AAAAAAAAAAA="]}',
        '{"k": "ev", "src": "A", "t": 1.0, "f": ["", "AAAAAAAAAAA=", "", ""]}',
        '{"k": "ev", "src": "A", "t": 1.0, "f": ["", "AAAAAAAAAAA=", "***"]}',
        '{"k": "ev", "src": "A", "t": 1.0, "f": ["", "AAA", ""]}',
        '{"k": "replay", "src": "A", "t": 1.0, "start_seq": 0, "replies": [["", "***", ""]]}',
        '{"k": "send", "id": "one", "src": "A", "t": 1.0, "path": "/", "body": {}}',
        '{"k": "mark", "t": 1.0, "what": "deep", "body": ' + "[" * 100_000 + "}",
    ],
    ids=lambda bad: bad[:30],
)
def test_a_line_that_is_none_is_an_error_that_names_file_and_line(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{GOOD}\n\n{bad}\n{GOOD}\n", errors="surrogateescape")
    lines = read_recording(path)
    assert isinstance(next(lines), Mark)
    with pytest.raises(RecordingError) as caught:
        next(lines)
    assert str(caught.value).startswith(f"{path}, line 3: ")


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        next(read_recording(tmp_path / "none.jsonl"))


def test_a_file_cut_in_the_middle_of_a_line_gives_the_lines_before(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_text(f"{GOOD}\n{GOOD[:20]}")
    lines = read_recording(path)
    next(lines)
    with pytest.raises(RecordingError, match="line 2"):
        next(lines)


LINES: list[Line] = [
    Mark(t=1.5, what="start", src="A", body={"models": [1, None]}),
    Sent(id=1, src="A", t=2.0, path="/v1/completions", body={"prompt": [1, 2]}, check=True),
    Sent(
        id=2, src="A", t=2.0, path="/v1/chat/completions", body={"model": "ü"}, tokens=[1], headers={"a": "b"}
    ),
    Done(id=1, src="A", t=3.0, status=200, prompt_tokens=2, cached_tokens=0, completion_tokens=1),
    Done(id=2),
]


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    writer = RecordingWriter(path)
    for line in LINES:
        writer.write(line)
    writer.write(pack_published("A", 4.0, [b"topic", (7).to_bytes(8, "big"), b"\x00\xff"]))
    writer.write(pack_history("A", 5.0, [(0, b"first"), (2**64 - 2, b"")]))
    writer.close()
    *lines, published, history = read_recording(path)
    assert lines == LINES
    assert isinstance(published, Published)
    assert isinstance(history, Replay)
    assert history.batches() == [(0, b"first"), (2**64 - 2, b"")]
    assert (published.src, published.t, published.sequence, published.payload) == ("A", 4.0, 7, b"\x00\xff")


multiparts = st.tuples(st.binary(max_size=20), st.integers(0, 2**64 - 1), st.binary(max_size=60))


@given(st.lists(multiparts, max_size=5))
@settings(deadline=None)
def test_any_frames_read_back_untouched(said: list[tuple[bytes, int, bytes]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "out.jsonl"
        writer = RecordingWriter(path)
        for topic, sequence, payload in said:
            writer.write(pack_published("A", 1.0, [topic, sequence.to_bytes(8, "big"), payload]))
        writer.close()
        lines = [line for line in read_recording(path) if isinstance(line, Published)]
    assert [(base64.b64decode(line.f[0]), line.sequence, line.payload) for line in lines] == said


def test_a_recording_is_for_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        RecordingWriter(tmp_path / "private.jsonl").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "private.jsonl").stat().st_mode) == 0o600


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "there.jsonl"
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        RecordingWriter(path)
    assert path.read_text() == "precious"


def test_a_capture_written_again_is_the_same_recording(tmp_path: Path) -> None:
    path = tmp_path / "again.jsonl"
    writer = RecordingWriter(path)
    lines = list(read_recording(CAPTURES / "lora.jsonl"))
    for line in lines:
        writer.write(line)
    writer.close()
    assert list(read_recording(path)) == lines
    assert Counter(map(type, lines))[Published] == 6
