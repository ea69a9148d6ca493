"""What ``warmroute engine`` can be told."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from events.address import MAX_PORT
from simulator.errors import SettingsError


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults are a small, quick engine on loopback that publishes nothing."""

    listen: Annotated[str, Meta(description="Address to serve on, HOST:PORT; port 0 picks a free one.")] = (
        "127.0.0.1:8000"
    )
    events: Annotated[
        str | None,
        Meta(description="ZeroMQ endpoint of the KV events, such as tcp://*:5557; rank r uses port + r."),
    ] = None
    replay: Annotated[
        str | None,
        Meta(description="ZeroMQ endpoint for replay requests, such as tcp://*:5558; rank r uses port + r."),
    ] = None
    topic: Annotated[str, Meta(description="Topic of the events, such as kv@POD@MODEL.")] = ""
    curve_key: Annotated[
        str | None,
        Meta(description="File NAME.key_secret (`warmroute keygen`): events and replay speak CURVE with it."),
    ] = None
    curve_server: Annotated[
        str | None,
        Meta(description="File NAME.key of the indexer, where the engine connects its events to one."),
    ] = None
    model: Annotated[str, Meta(description="Name of the served model.")] = "model"
    block_size: Annotated[int, Meta(description="Size of a KV block, tokens.")] = 16
    blocks: Annotated[int, Meta(description="KV blocks of each rank, the null block included.")] = 4096
    prefill_rate: Annotated[float, Meta(description="Speed of prefill, tokens/s of each rank.")] = 8000.0
    decode_rate: Annotated[float, Meta(description="Speed of decoding, tokens/s of each request.")] = 50.0
    ranks: Annotated[int, Meta(description="Data-parallel ranks, each with a cache and events.")] = 1
    max_batched_tokens: Annotated[int, Meta(description="Most tokens computed in one step.")] = 2048
    max_seqs: Annotated[int, Meta(description="Most requests running at a time in a rank.")] = 256
    max_model_len: Annotated[
        int | None,
        Meta(description="Most tokens of a prompt with its answer; what the blocks hold unless set."),
    ] = None
    hash_seed: Annotated[
        int | None,
        Meta(description="Seed of the block hashes; random for each process unless set."),
    ] = None

    @property
    def capacity(self) -> int:
        """Tokens that the blocks of one rank hold."""
        return (self.blocks - 1) * self.block_size

    @property
    def model_len(self) -> int:
        """Tokens of prompt and answer at most."""
        return self.capacity if self.max_model_len is None else self.max_model_len

    def check(self) -> None:
        """Raises SettingsError for values that no engine could run with."""
        for name in ("block_size", "ranks", "max_batched_tokens", "max_seqs", "prefill_rate", "decode_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise SettingsError(f"{name} {getattr(self, name)}: must be a number above 0")
        if self.blocks < 2:
            raise SettingsError(f"blocks {self.blocks}: must be at least 2, one of them is the null block")
        if not 1 < self.model_len <= self.capacity:
            raise SettingsError(
                f"max_model_len {self.model_len}: must be 2 to {self.capacity}, what {self.blocks} "
                f"blocks of {self.block_size} tokens hold; raise --blocks or lower --max-model-len"
            )
        if self.replay is not None and self.events is None:
            raise SettingsError(f"replay {self.replay} without events: set --events too")
        for name in ("events", "replay"):
            endpoint = getattr(self, name) or ""
            port = endpoint.rpartition(":")[2]
            if endpoint.startswith("tcp://") and port.isdecimal() and int(port) + self.ranks - 1 > MAX_PORT:
                raise SettingsError(
                    f"{name} {endpoint}: the last of {self.ranks} ranks would be at port "
                    f"{int(port) + self.ranks - 1}; ports end at {MAX_PORT}"
                )
        if self.max_seqs > self.max_batched_tokens:
            raise SettingsError(
                f"max_seqs {self.max_seqs}: must not be above max_batched_tokens {self.max_batched_tokens}"
            )
