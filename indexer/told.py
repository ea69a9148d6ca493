"""What ``POST /feedback`` takes: what an engine had cached of a prompt."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

TokenId = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """One answer's cached tokens. Never shown: it may hold a prompt.

    ``generation`` and ``sequence`` are those that the query gave, ``predicted_tokens`` what was expected of
    it. The prompt is told by ``token_ids``, or by ``block_hashes``, local hashes as in ``/query_by_hash``, of
    blocks of ``block_size`` tokens. Of the hashes, the first that was not cached is the last that matters;
    ``prompt_tokens`` then says how long the prompt was, otherwise it is taken to end with the last of them.
    """

    instance_id: str | int
    model_name: str
    generation: int
    cached_tokens: Count
    sequence: int | None = None
    dp_rank: int = 0
    token_ids: list[TokenId] | None = None
    block_hashes: list[int] | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    predicted_tokens: Count | None = None
    prompt_tokens: Count | None = None
    block_size: int | None = None
