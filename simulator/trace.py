"""Traces: what came when, with prompts as block ids, in the format of Mooncake's published traces."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec.structs import replace

from simulator.errors import TraceError

BLOCK_TOKENS = 512
"""Tokens of the block that an id in ``hash_ids`` stands for."""


class Traced(msgspec.Struct, frozen=True):
    """One request: when it comes, tokens of prompt and answer, and an id for each block of the prompt, the
    last one perhaps not full. Prompts that begin alike begin with the same ids.

    Nobody goes on before they are answered: a request of a ``session`` comes as long after the first token of
    the one before as their times are apart. Without a session it comes at its time, whatever happens.
    """

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[int, ...]
    session: int | None = None

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """The blocks that an engine can store."""
        return self.blocks[: self.prompt_tokens // BLOCK_TOKENS]


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path) -> list[Traced]:
    """The requests of a file, a JSON object a line, by time. Raises TraceError, which names the line."""
    try:
        with path.open("rb") as file:
            return sorted(_requests(path, file), key=lambda request: request.at_s)
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error


def spread(trace: Sequence[Traced], seed: int = 0) -> list[Traced]:
    """The trace with the requests of one moment spread by chance until the next, in their order.

    Timestamps of published traces are rounded: Mooncake's come every three seconds, some ten requests at
    once.
    """
    chance = random.Random(seed)
    counts = Counter(request.at_s for request in trace)
    moments = sorted(counts)
    gaps = [after - before for before, after in pairwise(moments)]
    rounded = zip(moments, [*gaps, gaps[-1] if gaps else 0.0], strict=True)
    times = (at_s + gap * part for at_s, gap in rounded for part in _parts(chance, counts[at_s]))
    ordered = sorted(trace, key=lambda request: request.at_s)
    return [replace(request, at_s=at_s) for request, at_s in zip(ordered, times, strict=True)]


def _parts(chance: random.Random, count: int) -> list[float]:
    """``count`` numbers from 0 to 1, in order."""
    return sorted(chance.random() for _ in range(count))


def _requests(path: Path, lines: Iterable[bytes]) -> Iterable[Traced]:
    decoder = msgspec.json.Decoder(_Line)
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise TraceError(
                f"{path}, line {number}: {error}; a Mooncake trace or a file of `warmroute record` is needed"
            ) from error
        if line.input_length < 1 or len(line.hash_ids) != -(-line.input_length // BLOCK_TOKENS):
            raise TraceError(
                f"{path}, line {number}: {len(line.hash_ids)} hash_ids for {line.input_length} tokens; "
                f"one for each {BLOCK_TOKENS} tokens is needed"
            )
        yield Traced(line.timestamp / 1000, line.input_length, line.output_length, line.hash_ids)
