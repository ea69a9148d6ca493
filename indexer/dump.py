"""What the map holds, page by page: hashes only, never tokens or salts.

Each page is read in a transaction of its own, so that a slow client pins no old pages of the map. What
changes meanwhile may be in a dump or not; what was there all the time is.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import lmdb
import msgspec
from aiohttp import web

from indexer.errors import MapError
from indexer.keys import KEY_BYTES
from indexer.layout import TIERS, Name, StreamRecord, decode_holders, slot_key
from indexer.shard_reader import Part, View

log = logging.getLogger(__name__)

PAGE_ROWS = 1_000
TENANT = "default"
STORAGE_TIERS = ("device", "host_pinned", "disk")

_encode = msgspec.json.Encoder().encode
_encode_lines = msgspec.json.Encoder().encode_lines


def dump_lines(reader: View) -> Iterator[bytes]:
    """Lines of JSON, a page at a time: the streams, the blocks with their holders, and how many there were.

    Raises MapError.
    """
    streams: list[dict[str, Any]] = []
    for part in reader.parts:
        with part.snapshot() as (_, _, records):
            streams += [{"stream": _stream(record)} for record in records]
    yield _encode_lines(streams)
    count, page = 0, []
    blocks = heapq.merge(*(_blocks(part) for part in reader.parts), key=itemgetter(0))
    for key, rows in groupby(blocks, itemgetter(0)):
        page.append({**_block(key), "holders": [holder for _, held in rows for holder in held]})
        if len(page) == PAGE_ROWS:
            yield _encode_lines(page)
            count, page = count + len(page), []
    yield _encode_lines(page)
    yield _encode_lines([{"end": {"streams": len(streams), "blocks": count + len(page)}}])


def _blocks(part: Part) -> Iterator[tuple[bytes, list[dict[str, Any]]]]:
    """Block keys in order, with their holders; read a page at a time."""
    start = b""
    while True:
        with part.snapshot() as (txn, tables, records):
            rows = _page(txn, tables.blocks, start)
        if not rows:
            return
        known = {value: _holders(value, records) for value in {value for _, value in rows}}
        yield from ((key, known[value]) for key, value in rows if known[value])
        start = rows[-1][0] + b"\0"


def dump_events(reader: View) -> Iterator[bytes]:
    """One JSON object in the shape of ``GET /dump`` of Dynamo's standalone indexer, a page at a time.

    As seen on ``dynamo.indexer`` 1.6.1: ``{"MODEL:TENANT": {"block_size", "events": [stored event, ...]}}``,
    one event a block and tier here, not in the order of the chain, of main attention groups only.
    ``tokens_hash`` is null, because local hashes are not kept; ``key`` is our block key. Raises MapError.
    """
    models: dict[str, list[tuple[Part, StreamRecord]]] = {}
    for part in reader.parts:
        with part.snapshot() as (_, _, records):
            for record in records:
                models.setdefault(record.registration.model_name, []).append((part, record))
    opening = b"{"
    for model, members in models.items():
        head = {"block_size": next((one.block_size for _, one in members if one.block_size), None)}
        yield opening + _encode(f"{model}:{TENANT}") + b":" + _encode(head)[:-1] + b',"events":['
        comma = b""
        for events in _events(members):
            yield comma + _encode(events)[1:-1]
            comma = b","
        yield b"]}"
        opening = b","
    yield b"}" if models else b"{}"


def _events(members: list[tuple[Part, StreamRecord]]) -> Iterator[list[dict[str, Any]]]:
    """Stored events of streams, page by page; a stream whose generation ends meanwhile ends there."""
    for part, member in members:
        prefix = start = slot_key(member.slot)
        while True:
            with part.snapshot() as (txn, tables, records):
                still = any(record.generation == member.generation for record in records)
                rows = _page(txn, tables.names, start, prefix) if still else []
            if not rows:
                break
            start = rows[-1][0] + b"\0"
            events = [
                event
                for key, value in rows
                if key[2] == member.main_group
                for event in _stored(member, key[3:], Name.decode(value))
            ]
            if events:
                yield events


def _page(
    txn: lmdb.Transaction, table: lmdb._Database, start: bytes, prefix: bytes = b""
) -> list[tuple[bytes, bytes]]:
    """The next rows from ``start`` on, as long as keys begin with ``prefix``."""
    rows: list[tuple[bytes, bytes]] = []
    with txn.cursor(table) as cursor:
        found = cursor.set_range(start) if start else cursor.first()
        while found and len(rows) < PAGE_ROWS:
            key, value = cursor.item()
            if not bytes(key).startswith(prefix):
                break
            rows.append((bytes(key), bytes(value)))
            found = cursor.next()
    return rows


def _stream(record: StreamRecord) -> dict[str, Any]:
    registered = record.registration
    return {
        "instance": registered.instance,
        "rank": record.id[1],
        "model_name": registered.model_name,
        "aliases": registered.aliases,
        "state": record.state,
        "generation": record.generation,
        "sequence": record.sequence,
        "block_size": record.block_size,
        "blocks": record.blocks,
        "orphans": record.orphans,
        "waiting": record.waiting,
    }


def _block(key: bytes) -> dict[str, Any]:
    """A block, and the attention group if it is not a stream's main one."""
    return {"block": key[:KEY_BYTES].hex()} | ({"group": key[KEY_BYTES]} if key[KEY_BYTES:] else {})


def _holders(value: bytes, records: list[StreamRecord]) -> list[dict[str, Any]]:
    """The streams that hold a block; those of retired slots are none."""
    tiers = decode_holders(value)
    holders = []
    for record in records:
        names = [name for name, bits in zip(TIERS, tiers, strict=True) if bits >> record.slot & 1]
        if names:
            holders.append({"instance": record.id[0], "rank": record.id[1], "tiers": names})
    return holders


def _stored(record: StreamRecord, engine_hash: bytes, name: Name) -> Iterator[dict[str, Any]]:
    block = {"block_hash": _u64(engine_hash), "tokens_hash": None, "key": name.key.hex()}
    stored = {"parent_hash": _u64(name.parent) if name.parent else None, "blocks": [block]}
    for tier, copies in zip(STORAGE_TIERS, name.copies, strict=True):
        if copies:
            yield {
                "worker_id": record.registration.instance_id,
                "storage_tier": tier,
                "event": {"event_id": 0, "data": {"stored": stored}},
                "dp_rank": record.id[1],
            }


def _u64(engine_hash: bytes) -> int:
    """The low 64 bits, which is how engines that announce ints shorten a longer hash."""
    return int.from_bytes(engine_hash[-8:], "big")


class DumpApi:
    """Handlers of dumps, streamed."""

    def __init__(self, reader: View) -> None:
        self._reader = reader

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/dump", self.dump), web.get("/debug/dump", self.debug_dump)]

    async def dump(self, request: web.Request) -> web.StreamResponse:
        return await _streamed(request, dump_events(self._reader), "application/json")

    async def debug_dump(self, request: web.Request) -> web.StreamResponse:
        return await _streamed(request, dump_lines(self._reader), "application/x-ndjson")


async def _streamed(request: web.Request, pages: Iterator[bytes], content_type: str) -> web.StreamResponse:
    """Sends pages as the client takes them. A dump that breaks off ends the connection, so that it shows."""
    page = await asyncio.to_thread(next, pages, None)
    response = web.StreamResponse(headers={"Content-Type": content_type})
    await response.prepare(request)
    try:
        while page is not None:
            await response.write(page)
            page = await asyncio.to_thread(next, pages, None)
    except MapError as error:
        log.warning("a dump broke off: %s", error)
        if request.transport is not None:
            request.transport.close()
        return response
    await response.write_eof()
    return response
