"""The query API, in the shape of Mooncake RFC #1403 that Dynamo's standalone indexer serves.

We add ``states`` (and ``streams``, with what a router wants to know) to answers, accept instance ids as
strings or integers, and accept the same registration again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from indexer.errors import IndexerError, MapError, RegistrationError, ShardDownError, UnknownInstanceError
from indexer.families import serves
from indexer.ingest import Ingest
from indexer.keys import KEY_BYTES
from indexer.layout import StreamRecord
from indexer.metrics import IndexerMetrics
from indexer.reader import Matched
from indexer.registration import Registration
from indexer.shard_reader import View
from indexer.told import TokenId

LARGE_PROMPT_TOKENS = 16_384
LARGE_PROMPT_BLOCKS = 1_024
_U64 = (1 << 64) - 1

Body = TypeVar("Body")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Query(msgspec.Struct, frozen=True):
    """Body of ``POST /query``."""

    model_name: str
    token_ids: list[TokenId]
    lora_name: str | None = None
    cache_salt: str | None = None


class QueryByHash(msgspec.Struct, frozen=True):
    """Body of ``POST /query_by_hash``: local hashes of the prompt's blocks, as i64 or u64."""

    model_name: str
    block_hashes: list[int]
    lora_name: str | None = None


class Unregister(msgspec.Struct, frozen=True):
    """Body of ``POST /unregister``; without ``dp_rank``, all ranks."""

    instance_id: str | int
    model_name: str
    dp_rank: int | None = None


class RegisterApi:
    """Handlers that say which streams are followed."""

    def __init__(self, ingest: Ingest) -> None:
        self._ingest = ingest

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/register", self.register), web.post("/unregister", self.unregister)]

    async def register(self, request: web.Request) -> web.Response:
        registration = parse(await request.read(), Registration).checked()
        await _done(self._ingest.register(registration))
        return answer({"status": "ok"}, 201)

    async def unregister(self, request: web.Request) -> web.Response:
        body = parse(await request.read(), Unregister)
        await _done(self._ingest.unregister(str(body.instance_id), body.model_name, body.dp_rank))
        return answer({"status": "ok"})


class QueryApi:
    """Handlers that answer from the map, divided or not."""

    def __init__(self, reader: View, metrics: IndexerMetrics) -> None:
        self._reader = reader
        self._metrics = metrics

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/workers", self.workers),
            web.post("/query", self.query),
            web.post("/query_by_hash", self.query_by_hash),
        ]

    async def workers(self, _: web.Request) -> web.Response:
        found: dict[tuple[str, str], list[StreamRecord]] = {}
        for status in self._reader.streams():
            registered = status.record.registration
            found.setdefault((registered.instance, registered.model_name), []).append(status.record)
        return answer([_worker(records) for records in found.values()])

    async def query(self, request: web.Request) -> web.Response:
        body = parse(await request.read(), Query)
        self._check_model(body.model_name)

        def match() -> list[Matched]:
            return self._reader.query(
                body.model_name, body.token_ids, lora_name=body.lora_name, cache_salt=body.cache_salt
            )

        return await self._answer(match, len(body.token_ids) > LARGE_PROMPT_TOKENS)

    async def query_by_hash(self, request: web.Request) -> web.Response:
        body = parse(await request.read(), QueryByHash)
        self._check_model(body.model_name)
        locals_ = [_local_hash(value) for value in body.block_hashes]

        def match() -> list[Matched]:
            return self._reader.query_local(body.model_name, locals_, lora_name=body.lora_name)

        return await self._answer(match, len(locals_) > LARGE_PROMPT_BLOCKS)

    async def _answer(self, match: Callable[[], list[Matched]], large: bool) -> web.Response:
        """Small prompts are matched on the loop, where it costs less than going to a thread."""
        with self._metrics.query_seconds.time():
            matched = await asyncio.to_thread(match) if large else match()
        return answer(_scores(matched))

    def _check_model(self, model: str) -> None:
        if not any(serves(status.record, model) for status in self._reader.streams()):
            raise UnknownInstanceError(f"model {model!r} is not registered; see GET /workers")


def _local_hash(value: int) -> bytes:
    if not -(1 << 63) <= value <= _U64:
        raise RegistrationError(f"block_hashes: {value} is neither an i64 nor a u64")
    return (value & _U64).to_bytes(KEY_BYTES, "big")


def _worker(records: list[StreamRecord]) -> dict[str, Any]:
    first = records[0].registration
    ranks = {str(record.id[1]): record for record in records}
    live = all(record.state == "live" for record in records)
    return {
        "instance_id": first.instance_id,
        "source": "zmq",
        "status": "active" if live else "pending",
        "model_name": first.model_name,
        "block_size": records[0].block_size,
        "endpoints": {rank: record.registration.endpoint for rank, record in ranks.items()},
        "listeners": {
            rank: {
                "endpoint": record.registration.endpoint,
                "status": record.state,
                "registered": record.rank is None,
            }
            for rank, record in ranks.items()
        },
    }


def _scores(matched: list[Matched]) -> dict[str, Any]:
    """What holds of a prompt by instance and rank, in tokens; a stream without trust scores nothing."""
    scores: dict[str, dict[str, int]] = {}
    instances: dict[str, dict[str, Any]] = {}
    states: dict[str, dict[str, str]] = {}
    for one in matched:
        gpu, cpu, disk = (one.gpu, one.cpu, one.disk) if one.weight else (0, 0, 0)
        rank = str(one.rank)
        scores.setdefault(one.instance, {})[rank] = disk
        states.setdefault(one.instance, {})[rank] = one.state
        total = instances.setdefault(
            one.instance, {"longest_matched": 0, "gpu": 0, "cpu": 0, "disk": 0, "dp": {}}
        )
        for tier, tokens in (("longest_matched", disk), ("gpu", gpu), ("cpu", cpu), ("disk", disk)):
            total[tier] = max(total[tier], tokens)
        total["dp"][rank] = disk
    return {"scores": scores, "instances": instances, "states": states, "streams": matched}


async def _done(future: Future[None]) -> None:
    await asyncio.wait_for(asyncio.wrap_future(future), timeout=10)


# shared by all of the indexer's handlers


def parse(body: bytes, shape: type[Body]) -> Body:
    """A request body as ``shape``. Raises RegistrationError that names the field."""
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RegistrationError(f"the request body cannot be used: {error}") from error


def answer(body: Any, status: int = 200) -> web.Response:
    """A JSON response, of one line that ends: some are read in a terminal."""
    return web.Response(
        body=msgspec.json.encode(body) + b"\n", status=status, content_type="application/json"
    )


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error is ``{"error": message}`` with the status that fits."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        told = f"{error.reason}: {request.method} {request.path}"
        if error.status == 404:
            here = sorted({resource.canonical for resource in request.app.router.resources()})
            told += f"; here are {', '.join(here)}"
        return answer({"error": told}, error.status)
    except UnknownInstanceError as error:
        return answer({"error": str(error)}, 404)
    except RegistrationError as error:
        return answer({"error": str(error)}, 400)
    except (MapError, ShardDownError) as error:
        return answer({"error": str(error)}, 503)
    except (IndexerError, TimeoutError) as error:
        return answer({"error": str(error) or "the indexer did not answer in time"}, 500)
