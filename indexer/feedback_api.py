"""Calls that correct the map from outside: what answers said, and caches that were reset without a word."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Annotated, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from events.schema import token_array
from indexer.api import LARGE_PROMPT_TOKENS, _local_hash, answer, parse
from indexer.errors import RegistrationError, UnknownInstanceError
from indexer.families import serves
from indexer.feedback import Answered
from indexer.ingest import Ingest
from indexer.keys import block_keys, local_hashes, prompt_extras
from indexer.layout import StreamRecord
from indexer.outcome import Outcome, refused
from indexer.reader import MapReader, root_of
from indexer.told import Told

COMMIT_TIMEOUT_S = 10

Result = TypeVar("Result")


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
        """Takes an answer, or a list of them; one that comes too late, or of another generation, is refused
        and says why.
        """
        body = await request.read()
        if not is_list(body):
            return answer(await self._take(parse(body, Told)))
        # What is learned of all of them is one commit, or a few.
        return answer(await asyncio.gather(*(self._take_one(told) for told in parse(body, list[Told]))))

    async def _take_one(self, told: Told) -> Outcome:
        """One of several: that its replica is gone says nothing of the others."""
        try:
            return await self._take(told)
        except UnknownInstanceError:
            return refused("unknown")

    async def _take(self, told: Told) -> Outcome:
        if (told.token_ids is None) == (told.block_hashes is None):
            raise RegistrationError("feedback needs the prompt: give token_ids, or block_hashes")
        (record,) = self._records(str(told.instance_id), told.model_name, told.dp_rank)
        if record.block_size is None or told.block_size not in (None, record.block_size):
            return refused("block_size")
        large = len(told.token_ids or ()) > LARGE_PROMPT_TOKENS
        resolve = (told, record, record.block_size)
        answered = await asyncio.to_thread(_resolve, *resolve) if large else _resolve(*resolve)
        return await _done(self._ingest.learn(answered))

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


def _resolve(body: Told, record: StreamRecord, block_size: int) -> Answered:
    """An answer in block keys. Engines always compute the prompt's last token."""
    if body.token_ids is not None:
        locals_ = local_hashes(token_array(body.token_ids), block_size)
        usable = max(0, len(body.token_ids) - 1) // block_size
    else:
        locals_ = [_local_hash(value) for value in body.block_hashes or ()]
        tokens = len(locals_) * block_size if body.prompt_tokens is None else body.prompt_tokens
        usable = max(0, tokens - 1) // block_size
    root = root_of(record, body.lora_name, block_size)
    return Answered(
        stream=record.id,
        generation=body.generation,
        sequence=body.sequence,
        keys=block_keys(root, locals_, prompt_extras(body.cache_salt)),
        usable=usable,
        block_size=block_size,
        cached_tokens=body.cached_tokens,
        predicted_tokens=body.predicted_tokens,
    )


def is_list(body: bytes) -> bool:
    """Whether a body of JSON holds several answers."""
    return body.lstrip()[:1] == b"["


async def _done(future: Future[Result]) -> Result:
    return await asyncio.wait_for(asyncio.wrap_future(future), timeout=COMMIT_TIMEOUT_S)
