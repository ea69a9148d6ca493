"""Calls that correct the map from outside: what answers said, and caches that were reset without a word."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Annotated, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from events.schema import token_array
from indexer.api import LARGE_PROMPT_TOKENS, TokenId, _local_hash, answer, parse
from indexer.errors import RegistrationError, UnknownInstanceError
from indexer.feedback import Answered
from indexer.ingest import Ingest
from indexer.keys import block_keys, extra_bytes, local_hashes, root_key
from indexer.layout import StreamRecord
from indexer.outcome import refused
from indexer.reader import MapReader, serves

COMMIT_TIMEOUT_S = 10

Result = TypeVar("Result")
Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class Feedback(msgspec.Struct, frozen=True):
    """Body of ``POST /feedback``: one answer's cached tokens.

    ``generation`` and ``sequence`` are those that the query gave, ``predicted_tokens`` what was expected of
    it. The prompt is told by ``token_ids``, or by ``block_hashes``, local hashes as in ``/query_by_hash``.
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


class ResetBody(msgspec.Struct, frozen=True):
    """Body of ``POST /reset``; without ``instance_id`` all replicas, without ``dp_rank`` all ranks, without
    ``lora_name`` all that they hold.
    """

    model_name: str
    instance_id: str | int | None = None
    dp_rank: int | None = None
    lora_name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None


class FeedbackApi:
    """Handlers of ``/feedback`` and ``/reset``."""

    def __init__(self, ingest: Ingest, reader: MapReader) -> None:
        self._ingest = ingest
        self._reader = reader

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/feedback", self.feedback), web.post("/reset", self.reset)]

    async def feedback(self, request: web.Request) -> web.Response:
        """Takes an answer; one that comes too late, or of another generation, is refused and says why."""
        body = parse(await request.read(), Feedback)
        if (body.token_ids is None) == (body.block_hashes is None):
            raise RegistrationError("feedback needs the prompt: give token_ids, or block_hashes")
        (record,) = self._records(str(body.instance_id), body.model_name, body.dp_rank)
        if record.block_size is None:
            return answer(refused("block_size"))
        told = (body, record, record.block_size)
        large = len(body.token_ids or ()) > LARGE_PROMPT_TOKENS
        answered = await asyncio.to_thread(_resolve, *told) if large else _resolve(*told)
        return answer(await _done(self._ingest.learn(answered)))

    async def reset(self, request: web.Request) -> web.Response:
        """Forgets what replicas held, or of an adapter; if that fails, it is tried again until it is done."""
        body = parse(await request.read(), ResetBody)
        instance = None if body.instance_id is None else str(body.instance_id)
        for record in self._records(instance, body.model_name, body.dp_rank):
            await _done(self._ingest.purge(record.id, body.lora_name))
        return answer({"status": "ok"})

    def _records(self, instance: str | None, model: str, rank: int | None) -> list[StreamRecord]:
        found = [
            status.record
            for status in self._reader.streams()
            if instance in (None, status.record.id[0])
            and rank in (None, status.record.id[1])
            and serves(status.record, model)
        ]
        if not found:
            which = "" if rank is None else f" with a rank {rank}"
            named = "" if instance is None else f" {instance!r}"
            raise UnknownInstanceError(
                f"no instance{named} of model {model!r}{which} is registered; see GET /workers"
            )
        return found


def _resolve(body: Feedback, record: StreamRecord, block_size: int) -> Answered:
    """An answer in block keys. Engines always compute the prompt's last token."""
    registered = record.registration
    if body.token_ids is not None:
        locals_ = local_hashes(token_array(body.token_ids), block_size)
        usable = max(0, len(body.token_ids) - 1) // block_size
    else:
        locals_ = [_local_hash(value) for value in body.block_hashes or ()]
        usable = max(0, len(locals_) - 1)  # the prompt may end with its last block
    root = root_key(
        registered.model_name,
        body.lora_name,
        block_size,
        registered.additional_salt,
        record.epoch(body.lora_name),
    )
    salted = [extra_bytes([body.cache_salt])] if body.cache_salt else []
    return Answered(
        stream=record.id,
        generation=body.generation,
        sequence=body.sequence,
        keys=block_keys(root, locals_, salted),
        usable=usable,
        block_size=block_size,
        cached_tokens=body.cached_tokens,
        predicted_tokens=body.predicted_tokens,
    )


async def _done(future: Future[Result]) -> Result:
    return await asyncio.wait_for(asyncio.wrap_future(future), timeout=COMMIT_TIMEOUT_S)
