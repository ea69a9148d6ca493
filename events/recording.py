"""Recordings: what an engine published and answered, one JSON object a line, in the order it happened.

======== ==================================================================================================
``k``    fields
======== ==================================================================================================
ev       a SUB multipart: ``src`` replica, ``t`` unix seconds, ``f`` base64 of topic, sequence, payload
send     a request about to be sent: ``id``, ``src``, ``path``, ``body``, ``tokens``, ``check``, ``headers``
done     its result: ``id``, ``status``, ``prompt_tokens``, ``cached_tokens``, ``completion_tokens``, ``text``
replay   a replay request and its replies: ``src``, ``start_seq``, ``replies``
mark     what the driver of the recording did
======== ==================================================================================================
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO

import msgspec

from events.schema import EventError

SEQUENCE_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQUENCE_BYTES


class RecordingError(EventError):
    """A line that is no part of a recording; the message names file and line."""


def _pack(frames: list[bytes]) -> list[str]:
    return [base64.b64encode(frame).decode() for frame in frames]


def _unpack(frame: str) -> bytes:
    return base64.b64decode(frame, validate=True)


class Published(msgspec.Struct, tag_field="k", tag="ev", kw_only=True):
    """A multipart of a replica, untouched."""

    src: str
    t: float
    f: Annotated[list[str], msgspec.Meta(min_length=3, max_length=3)]

    def __post_init__(self) -> None:
        """Raises ValueError, which the decoder turns into an error of the line."""
        for frame in self.f:
            _unpack(frame)
        if len(_unpack(self.f[1])) != SEQUENCE_BYTES:
            raise ValueError(f"a sequence frame that is not of {SEQUENCE_BYTES} bytes")

    @property
    def sequence(self) -> int:
        return int.from_bytes(_unpack(self.f[1]), "big")

    @property
    def payload(self) -> bytes:
        return _unpack(self.f[2])


class Sent(msgspec.Struct, tag_field="k", tag="send", kw_only=True, omit_defaults=True):
    """A request about to be sent. ``check``: one at a time, so that its cached tokens can be predicted."""

    id: int
    src: str
    t: float
    path: str
    body: dict[str, Any]
    check: bool = False
    tokens: list[int] | None = None
    headers: dict[str, str] | None = None

    @property
    def prompt(self) -> list[int] | None:
        """The prompt's token ids, if they are known."""
        if self.tokens is not None:
            return self.tokens
        prompt = self.body.get("prompt")
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt
        return None


class Done(msgspec.Struct, tag_field="k", tag="done", kw_only=True, omit_defaults=True):
    """The result of a request, as the engine reported it. Tokens are None where it said nothing."""

    id: int
    src: str | None = None
    t: float | None = None
    status: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    text: str | None = None
    finish: str | None = None
    out_tokens: list[int] | None = None


class Replay(msgspec.Struct, tag_field="k", tag="replay", kw_only=True, omit_defaults=True):
    """A replay request and its replies, base64 of every frame; the end marker is among them."""

    src: str
    t: float
    start_seq: int
    replies: list[list[str]]
    first_ms: float | None = None
    ms: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError, which the decoder turns into an error of the line."""
        for reply in self.replies:
            for frame in reply:
                _unpack(frame)

    def batches(self) -> list[tuple[int, bytes]]:
        """Sequence and payload of each replayed batch. Parsed from the end: before 0.26 there is no topic."""
        frames = [(_unpack(reply[-2]), _unpack(reply[-1])) for reply in self.replies if len(reply) >= 3]
        return [(int.from_bytes(at, "big"), payload) for at, payload in frames if at != END_OF_REPLAY]


class Model(msgspec.Struct):
    """A model id as ``/v1/models`` lists it; an adapter has a ``parent``."""

    id: str
    parent: str | None = None


class Mark(msgspec.Struct, tag_field="k", tag="mark", kw_only=True, omit_defaults=True):
    """What the driver did."""

    t: float
    what: str
    src: str | None = None
    body: Any = None


Line = Published | Sent | Done | Replay | Mark


def pack_published(src: str, t: float, frames: list[bytes]) -> Published:
    """A multipart as it came, at ``t`` unix seconds."""
    return Published(src=src, t=t, f=_pack(frames))


def pack_history(src: str, t: float, batches: list[tuple[int, bytes]]) -> Replay:
    """All that an engine still had when the recording began, as a replay from 0."""
    replies = [[b"", b"", sequence.to_bytes(8, "big"), payload] for sequence, payload in batches]
    replies.append([b"", b"", END_OF_REPLAY, b""])
    return Replay(src=src, t=t, start_seq=0, replies=[_pack(reply) for reply in replies])


_decoder = msgspec.json.Decoder(Line)
_encoder = msgspec.json.Encoder()


def read_recording(path: Path) -> Iterator[Line]:
    """The lines of a recording. Raises RecordingError, OSError."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield _decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise RecordingError(
                    f"{path}, line {number}: {error}; a file of `warmroute record` is needed"
                ) from error


class RecordingWriter:
    """Writes a recording to a file that only its owner may read: it holds prompts."""

    def __init__(self, path: Path) -> None:
        """Raises FileExistsError, OSError."""
        self._path = path
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file: TextIO = os.fdopen(descriptor, "w", encoding="utf-8")

    def write(self, line: Line) -> None:
        self._file.write(_encoder.encode(line).decode() + "\n")

    def close(self) -> None:
        self._file.close()

    def discard(self) -> None:
        """Takes the file away; what is written from now on goes nowhere."""
        self._path.unlink()
