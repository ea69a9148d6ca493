"""A recording as a trace: the requests that went through ``warmroute record``, as they came."""

from __future__ import annotations

import hashlib
from pathlib import Path

from msgspec.structs import replace

from events.recording import Done, Sent, read_recording
from events.schema import EventError
from simulator.errors import TraceError
from simulator.trace import BLOCK_TOKENS, Traced

MARK = b'{"k":'
"""How each line of a recording begins."""


def is_recording(path: Path) -> bool:
    """Whether the file is a recording and no trace; also False where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MARK)) == MARK
    except OSError:
        return False


def read_recorded(path: Path) -> list[Traced]:
    """The requests whose tokens are known, by time; prompts that begin alike have the same block ids. What
    they share of a block that is not whole is not seen. Raises TraceError, also where no tokens are known.
    """
    trace: dict[int, Traced] = {}
    numbers: dict[bytes, int] = {}
    try:
        for line in read_recording(path):
            if isinstance(line, Sent) and line.prompt:
                blocks = _blocks(str(line.body.get("model")), line.prompt, numbers)
                trace[line.id] = Traced(line.t, len(line.prompt), 0, blocks)
            elif isinstance(line, Done) and line.id in trace:
                answer_tokens = line.completion_tokens or 0
                trace[line.id] = replace(trace[line.id], answer_tokens=answer_tokens)
    except EventError as error:
        raise TraceError(str(error)) from error
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error
    if not trace:
        raise TraceError(
            f"{path} holds no request with known tokens: its engines did not answer /tokenize; "
            "record with --tokenizer MODEL=FOLDER"
        )
    begun = min(request.at_s for request in trace.values())
    requests = (replace(request, at_s=request.at_s - begun) for request in trace.values())
    return sorted(requests, key=lambda request: request.at_s)


def _blocks(model: str, tokens: list[int], numbers: dict[bytes, int]) -> tuple[int, ...]:
    """A number for each block with all in front of it; ``numbers`` are those given so far, by digest."""
    digest, blocks = hashlib.sha256(model.encode()), []
    for start in range(0, len(tokens), BLOCK_TOKENS):
        digest.update(repr(tokens[start : start + BLOCK_TOKENS]).encode())
        blocks.append(numbers.setdefault(digest.digest(), len(numbers)))
    return tuple(blocks)
