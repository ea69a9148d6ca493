"""The debug API: what is known of each replica, who holds a block, why a query gives what it gives.

It shows hashes and counts, never tokens or salts.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiohttp import web

from events.schema import canonical_hash, display_hash
from events.subscriber import Subscriber
from indexer.api import Query, answer, parse
from indexer.errors import RegistrationError, UnknownInstanceError
from indexer.explain import explain
from indexer.ingest import Ingest
from indexer.keys import KEY_BYTES
from indexer.layout import StreamRecord
from indexer.reader import MapReader, StreamStatus, credit
from indexer.seeds import seeds
from indexer.shard_reader import View


class ReplicasApi:
    """Handler of ``/debug/replicas``."""

    def __init__(self, ingest: Ingest, reader: MapReader, subscriber: Subscriber) -> None:
        self._ingest = ingest
        self._reader = reader
        self._subscriber = subscriber

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/debug/replicas", self.replicas)]

    async def replicas(self, _: web.Request) -> web.Response:
        faults, streams = self._subscriber.faults, self._reader.streams()
        ways = seeds(status.record for status in streams)
        return answer(
            {
                "replicas": [
                    self._replica(status) | {"hash_seed": ways.get(status.record.id)} for status in streams
                ],
                "unmatched_topics": dict(faults.unmatched),
                "map": {
                    "used_bytes": self._reader.used_bytes(),
                    "heartbeat_age_s": self._reader.heartbeat_age(),
                    "groups": self._ingest.groups,
                    "failures": self._ingest.failures,
                },
            }
        )

    def _replica(self, status: StreamStatus) -> dict[str, Any]:
        """What the map knows of a stream, and what only the process that follows it knows."""
        told, port = recorded(status), status.record.port
        machine, faults = self._ingest.machine(port), self._subscriber.faults
        told["reason"] = faults.broken.get(port, told["reason"])
        told["lag_batches"] = self._ingest.held(port)
        told["counters"] |= {
            "gaps": machine.gaps if machine else 0,
            "restarts": machine.restarts if machine else 0,
            "replays_failed": machine.replays_failed if machine else 0,
            "overflows": self._subscriber.inbox.overflows[port],
        }
        told["skipped"] |= faults.of(port)
        return told


def recorded(status: StreamStatus) -> dict[str, Any]:
    """What the map knows of a stream."""
    record = status.record
    registered = record.registration
    age = None if record.event_at is None else max(0.0, time.time() - record.event_at)
    return {
        "instance": registered.instance,
        "rank": record.id[1],
        "registered": record.rank is None,
        "model_name": registered.model_name,
        "aliases": registered.aliases,
        "endpoint": registered.endpoint,
        "replay_endpoint": registered.replay_endpoint,
        "state": status.state,
        "weight": status.weight,
        "reason": _reason(record),
        "accuracy": 1.0 - record.wrong,
        "sequence": record.sequence,
        "generation": record.generation,
        "lag_batches": None,
        "event_age_s": age,
        "block_size": record.block_size,
        "hash_form": record.hash_form,
        "group_kinds": {str(group): kind for group, kind in record.group_kinds.items()},
        "notes": record.notes,
        "blocks": record.blocks,
        "orphans": record.orphans,
        "waiting": record.waiting,
        "denied": record.denied,
        "believed": record.believed,
        "started_at": record.started_at,
        "lost_at": record.lost_at,
        "counters": {
            "batches": record.counters.batches,
            "stored": record.counters.stored,
            "removed": record.counters.removed,
            "cleared": record.counters.cleared,
            "duplicates": record.counters.duplicates,
            "unknown_removed": record.counters.unknown_removed,
            "contradictions": record.counters.contradictions,
            "evicted": record.counters.evicted,
        },
        "skipped": dict(record.counters.skipped),
    }


class DebugApi:
    """Handlers under ``/debug/`` that answer from the map, divided or not."""

    def __init__(self, reader: View) -> None:
        self._reader = reader

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/debug/block", self.block), web.post("/debug/explain", self.explain)]

    async def block(self, request: web.Request) -> web.Response:
        key, asked = self._block_key(request)
        holders = [
            {
                "instance": record.id[0],
                "rank": record.id[1],
                "state": record.state,
                "generation": record.generation,
                "tiers": tiers,
            }
            for record, tiers in self._reader.holders(key)
        ]
        return answer({"key": key.hex(), **asked, "holders": holders})

    def _block_key(self, request: web.Request) -> tuple[bytes, dict[str, Any]]:
        """From ``?key=HEX`` (as /debug/explain shows it), or ``?instance=I&hash=H[&rank=R][&group=G]``."""
        query = request.query
        try:
            if "key" in query:
                key = bytes.fromhex(query["key"])
                if len(key) != KEY_BYTES:
                    raise ValueError(f"{len(key)} bytes")
                return key, {}
            engine_hash = _engine_hash(query["hash"])
            instance = query["instance"]
            rank, group = int(query.get("rank", 0)), int(query.get("group", 0))
            if not 0 <= group <= 255:
                raise ValueError(f"group {group}")
        except KeyError as error:
            raise RegistrationError(
                "say which block: ?key=HEX as /debug/explain shows it, or ?instance=NAME&hash=ENGINE_HASH"
            ) from error
        except ValueError as error:
            raise RegistrationError(
                f"{request.query_string!r} names no block ({error}); a key is 16 hex digits, "
                "an engine hash a decimal or 0x and hex digits"
            ) from error
        name = self._reader.name(instance, rank, group, engine_hash)
        if name is None:
            raise UnknownInstanceError(
                f"{instance!r} rank {rank} has no block with the engine hash {display_hash(engine_hash)}"
            )
        copies = dict(zip(("gpu", "cpu", "disk"), name.copies, strict=True))
        return name.key, {"hash": display_hash(engine_hash), "copies": copies}

    async def explain(self, request: web.Request) -> web.Response:
        body = parse(await request.read(), Query)
        told = await asyncio.to_thread(
            explain,
            self._reader,
            body.model_name,
            body.token_ids,
            lora_name=body.lora_name,
            cache_salt=body.cache_salt,
        )
        return answer(told)


def _reason(record: StreamRecord) -> str:
    """Why the stream is in its state, and why it weighs less than the state says."""
    if credit(record.wrong) == 1.0:
        return record.reason
    return f"{record.reason}; of late {record.wrong:.0%} of the tokens predicted for it were not cached"


def _engine_hash(text: str) -> bytes:
    return canonical_hash(bytes.fromhex(text[2:]) if text.startswith("0x") else int(text))
