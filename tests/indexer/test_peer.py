"""Our answers beside those of Dynamo's standalone indexer, on the same publishers, and beside the truth.

Engines here hash alike and announce no block twice: docs/wire.md says how the peer differs where they do.
Skipped where it is not installed: ``WARMROUTE_PEER_PYTHON`` names a Python that has ``ai-dynamo``.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from events.publisher import Publisher
from events.schema import AllBlocksCleared
from tests.bench.load import Measured, free_port

PEER = os.environ.get("WARMROUTE_PEER_PYTHON")
BLOCK_SIZE = 4
REPLICAS = 3
STEPS = 150

pytestmark = pytest.mark.skipif(not PEER, reason="the peer is not installed")


def started(command: list[str], folder: Path, name: str) -> Measured:
    port = free_port()
    process = Measured([part.format(port=port) for part in command], port, folder / f"{name}.log")
    process.await_health()
    return process


def workload(
    chance: random.Random, hashers: list[Any], publishers: list[Publisher]
) -> dict[tuple[int, ...], dict[str, int]]:
    """Prompts that grow out of each other, stored, evicted tail first, and now and then cleared.

    Gives the tokens that each replica holds of each prompt in the end.
    """
    prompts: list[list[int]] = [[chance.randrange(50) for _ in range(BLOCK_SIZE * 6)] for _ in range(4)]
    held: list[dict[tuple[int, ...], int]] = [{} for _ in publishers]
    for _ in range(STEPS):
        replica = chance.randrange(REPLICAS)
        hasher, publisher, mine = hashers[replica], publishers[replica], held[replica]
        if chance.random() < 0.02:
            publisher.publish([AllBlocksCleared()], 1.0)
            mine.clear()
        elif mine and chance.random() < 0.3:
            prompt = max(mine, key=len)
            shared = max((_shared(prompt, other) for other in mine if other != prompt), default=0)
            keep = max(shared, chance.randrange(mine[prompt]))
            if gone := hasher.removed(list(prompt), keep, mine[prompt]):
                publisher.publish(gone, 1.0)
            del mine[prompt]
            if keep:
                mine[prompt[: keep * BLOCK_SIZE]] = keep
        else:
            stem = chance.choice(prompts)[: BLOCK_SIZE * chance.randrange(1, 7)]
            prompt = stem + [chance.randrange(50) for _ in range(BLOCK_SIZE * chance.randrange(1, 5))]
            prompts.append(prompt)
            known = max((_shared(tuple(prompt), other) for other in mine), default=0)
            if known == len(prompt) // BLOCK_SIZE:
                continue
            publisher.publish([hasher.stored(prompt, known)], 1.0)
            mine[tuple(prompt)] = len(prompt) // BLOCK_SIZE
    return {tuple(prompt): _truth(tuple(prompt), held) for prompt in prompts}


def _truth(prompt: tuple[int, ...], held: list[dict[tuple[int, ...], int]]) -> dict[str, int]:
    blocks = {
        str(n): max((_shared(prompt, other) for other in mine), default=0) for n, mine in enumerate(held)
    }
    return {name: count * BLOCK_SIZE for name, count in blocks.items() if count}


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Blocks that two prompts have in common."""
    blocks = 0
    while (blocks + 1) * BLOCK_SIZE <= min(len(one), len(other)):
        if one[: (blocks + 1) * BLOCK_SIZE] != other[: (blocks + 1) * BLOCK_SIZE]:
            break
        blocks += 1
    return blocks


def scores(process: Measured, tokens: list[int]) -> dict[str, int]:
    answer = process.ask("/query", {"model_name": "m", "token_ids": tokens})
    return {name: ranks["0"] for name, ranks in answer["scores"].items() if ranks.get("0")}


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_the_peers(seed: int, engine: Any, until: Any, tmp_path: Path) -> None:
    assert PEER is not None
    ours = started(
        [
            sys.executable,
            "-m",
            "warmroute",
            "indexer",
            "--map",
            str(tmp_path / "map"),
            "--listen",
            "127.0.0.1:{port}",
        ],
        tmp_path,
        "ours",
    )
    peer = started([PEER, "-m", "dynamo.indexer", "--port", "{port}", "--threads", "1"], tmp_path, "peer")
    publishers = [Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*") for _ in range(REPLICAS)]
    try:
        for number, publisher in enumerate(publishers):
            body = {"instance_id": number, "model_name": "m", "block_size": BLOCK_SIZE}
            body |= {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
            ours.ask("/register", body)
            peer.ask("/register", body)
        truth = workload(random.Random(seed), [engine()] * REPLICAS, publishers)
        last = engine().stored([7] * BLOCK_SIZE)
        for publisher in publishers:
            publisher.publish([last], 1.0)
        everywhere = {str(number): BLOCK_SIZE for number in range(REPLICAS)}
        until(lambda: scores(ours, [7] * BLOCK_SIZE) == scores(peer, [7] * BLOCK_SIZE) == everywhere)
        for prompt, held in truth.items():
            assert scores(ours, list(prompt)) == scores(peer, list(prompt)) == held
    finally:
        for publisher in publishers:
            publisher.close()
        ours.end()
        peer.end()
