"""Checks the map against real engines: indexes a recording and predicts each request's cached tokens.

A prediction is what the map holds of the prompt at the moment the request was sent, in whole blocks, without
the last token, which engines always compute. A restart is found as in service, from the sequences; when one
shows between a request and its result, the old blocks were dead already when it was sent, and 0 is predicted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from events.inbox import Inbox, StreamId
from events.recording import (
    Done,
    Line,
    Mark,
    Model,
    Published,
    RecordingError,
    Replay,
    Sent,
    read_recording,
)
from events.signals import Connected, Frame, Replayed, ReplayEnded
from events.source import Source
from indexer.ingest import Ingest
from indexer.reader import MapReader
from indexer.registration import Registration
from indexer.writer import MapWriter

BASE_MODEL = "recorded"
MAP_SIZE = 1 << 30


class Miss(msgspec.Struct, frozen=True):
    """A request whose prediction was wrong, in tokens."""

    request: int
    replica: str
    predicted: int
    reported: int


class Tally(msgspec.Struct):
    """The checked requests of one replica. ``restarted`` counts restarts found in its stream."""

    checked: int = 0
    exact: int = 0
    over: int = 0
    under: int = 0
    restarted: int = 0
    hits: int = 0


class Verdict(msgspec.Struct):
    """What came of one recording. ``unusable`` counts requests marked as checked that say too little."""

    file: str
    replicas: dict[str, Tally] = {}
    misses: list[Miss] = []
    unusable: int = 0

    @property
    def exact(self) -> bool:
        return not self.misses


class _Tape:
    """Stands in for the subscriber: signals come from the recording."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.asks: dict[StreamId, int] = {}

    def add(self, stream: StreamId, source: Source) -> None:
        pass

    def remove(self, stream: StreamId) -> None:
        pass

    def ask_replay(self, stream: StreamId, ask: int, start: int) -> None:
        self.asks[stream] = ask


class _Prediction(msgspec.Struct, frozen=True):
    replica: str
    tokens: int
    restarts: int


class _Verification:
    """One recording against one fresh map."""

    def __init__(self, file: str, folder: Path) -> None:
        self.verdict = Verdict(file)
        self._writer = MapWriter(folder, map_size=MAP_SIZE)
        self._reader = MapReader(self._writer.env, self._writer.tables)
        self._tape = _Tape()
        self._ingest = Ingest(self._writer, self._tape)
        self._adapters: set[str] = set()
        self._predicted: dict[int, _Prediction] = {}

    def close(self) -> None:
        self._writer.close()

    def take(self, line: Line) -> None:
        match line:
            case Published():
                self._follow(line.src)
                self._ingest.step([((line.src, 0), Frame(line.sequence, line.payload))])
                self.verdict.replicas[line.src].restarted = self._restarts(line.src)
            case Replay(start_seq=0) if line.src not in self.verdict.replicas:
                self._begin_with_history(line)
            case Sent() if line.check:
                self._predict(line)
            case Done() if line.id in self._predicted:
                self._compare(line, self._predicted.pop(line.id))
            case Mark(what="models"):
                models = msgspec.convert(line.body, list[Model])
                self._adapters = {model.id for model in models if model.parent}

    def _follow(self, replica: str, replay: str | None = None) -> None:
        if replica in self.verdict.replicas:
            return
        self.verdict.replicas[replica] = Tally()
        where = f"recording:{self.verdict.file}"
        self._ingest.follow(
            Registration(instance_id=replica, endpoint=where, model_name=BASE_MODEL, replay_endpoint=replay)
        )
        self._ingest.step([((replica, 0), Connected())])

    def _begin_with_history(self, line: Replay) -> None:
        """A replay from 0 in front of all else of a replica is what it had when the recording began."""
        stream = (line.src, 0)
        self._follow(line.src, replay=f"recording:{self.verdict.file}")
        ask = self._tape.asks[stream]
        replayed = [(stream, Replayed(ask, sequence, payload)) for sequence, payload in line.batches()]
        self._ingest.step([*replayed, (stream, ReplayEnded(ask))])
        machine = self._ingest.machine(stream)
        if machine is not None:
            machine.has_replay = False

    def _restarts(self, replica: str) -> int:
        machine = self._ingest.machine((replica, 0))
        return machine.restarts if machine else 0

    def _predict(self, sent: Sent) -> None:
        self._follow(sent.src)
        if sent.prompt is None:
            self.verdict.unusable += 1
            return
        model, salt = sent.body.get("model"), sent.body.get("cache_salt")
        found = self._reader.query(
            BASE_MODEL,
            sent.prompt,
            lora_name=model if isinstance(model, str) and model in self._adapters else None,
            cache_salt=salt if isinstance(salt, str) else None,
        )
        tokens = 0
        for matched in found:
            if matched.instance == sent.src and matched.block_size:
                usable = (len(sent.prompt) - 1) // matched.block_size * matched.block_size
                tokens = min(matched.disk, usable)
        self._predicted[sent.id] = _Prediction(sent.src, tokens, self._restarts(sent.src))

    def _compare(self, done: Done, prediction: _Prediction) -> None:
        if done.status != 200:
            self.verdict.unusable += 1
            return
        tally, reported = self.verdict.replicas[prediction.replica], done.cached_tokens or 0
        restarted = self._restarts(prediction.replica) > prediction.restarts
        predicted = 0 if restarted else prediction.tokens
        tally.checked += 1
        tally.hits += reported > 0
        tally.exact += predicted == reported
        tally.over += predicted > reported
        tally.under += predicted < reported
        if predicted != reported:
            self.verdict.misses.append(Miss(done.id, prediction.replica, predicted, reported))


def verify(path: Path) -> Verdict:
    """Verifies one recording. Raises RecordingError, OSError."""
    return verify_lines(path.name, read_recording(path))


def verify_lines(name: str, lines: Iterable[Line]) -> Verdict:
    """Verifies the lines of a recording, in their order. Raises RecordingError."""
    with tempfile.TemporaryDirectory(prefix="warmroute-verify-") as folder:
        verification = _Verification(name, Path(folder))
        try:
            for line in lines:
                verification.take(line)
        except (msgspec.ValidationError, ValueError) as error:
            raise RecordingError(f"{name}: {error}") from error
        finally:
            verification.close()
        return verification.verdict
