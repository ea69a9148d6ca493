"""Why a query gives what it gives: for each stream, where its match ends, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from events.schema import token_array
from indexer.families import serves
from indexer.keys import local_hashes
from indexer.layout import TIERS, StreamRecord
from indexer.reader import Matched, keys_of_prompt
from indexer.shard_reader import View

MAX_STEPS = 512


def explain(
    reader: View,
    model: str,
    tokens: Sequence[int],
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
) -> dict[str, Any]:
    """The match of a prompt on every stream of every model, each with the block it ends at and why.

    ``usable_tokens`` is what an engine can take from its cache: it always computes the last token.
    """
    ids = token_array(tokens)
    matched = {
        (one.instance, one.rank): one
        for one in reader.query(model, tokens, lora_name=lora_name, cache_salt=cache_salt)
    }
    replicas = []
    for status in reader.streams():
        one = matched.get(status.record.id)
        if one is None:
            replicas.append(_of_another_model(status.record))
            continue
        replicas.append(
            _Explanation(reader, status.record, one).tell(ids, lora_name=lora_name, cache_salt=cache_salt)
        )
    return {
        "model_name": model,
        "known_model": any(serves(status.record, model) for status in reader.streams()),
        "prompt_tokens": len(ids),
        "replicas": replicas,
    }


def _of_another_model(record: StreamRecord) -> dict[str, Any]:
    registered = record.registration
    return {
        "instance": registered.instance,
        "rank": record.id[1],
        "state": record.state,
        "matched_tokens": 0,
        "why": f"it serves {registered.model_name!r}, another model",
    }


class _Explanation:
    """One stream's answer to one prompt."""

    def __init__(self, reader: View, record: StreamRecord, matched: Matched) -> None:
        self._reader = reader
        self._record = record
        self._matched = matched

    def tell(self, ids: Any, *, lora_name: str | None, cache_salt: str | None) -> dict[str, Any]:
        one, size = self._matched, self._matched.block_size
        told: dict[str, Any] = {
            "instance": one.instance,
            "rank": one.rank,
            "state": one.state,
            "weight": one.weight,
            "block_size": size or None,
            "matched_tokens": one.disk,
        }
        if self._record.notes:
            told["notes"] = self._record.notes
        if not size:
            return told | {"why": "no block was stored yet, so its block size is not known"}
        keys_of = keys_of_prompt(ids, lora_name, cache_salt)
        keys = keys_of(self._record, size)
        usable = min(one.disk, len(keys_of.usable(keys, size)) * size)
        if self._record.restrictions:  # the last token is left out from the start
            keys = keys_of.usable(keys, size)
        steps, held = self._steps(keys, local_hashes(ids, size))
        return told | {
            "usable_tokens": usable,
            "prompt_blocks": len(keys),
            "matched_blocks": one.disk // size,
            "tiers": {tier: getattr(one, tier) for tier in TIERS},
            "why": self._why(keys, held, usable),
            "steps": steps,
        }

    def _steps(self, keys: Sequence[bytes], locals_: list[bytes]) -> tuple[list[dict[str, Any]], list[int]]:
        """The first blocks one by one, and the numbers of those that this stream holds."""
        steps, held = [], []
        for number, key in enumerate(keys[:MAX_STEPS]):
            holders = {f"{record.id[0]}/{record.id[1]}": tiers for record, tiers in self._reader.holders(key)}
            mine = holders.get(f"{self._record.id[0]}/{self._record.id[1]}")
            if mine:
                held.append(number)
            step = {
                "block": number,
                "key": key.hex(),
                "local_hash": int.from_bytes(locals_[number], "big"),
                "held_in": mine or [],
                "holders": sorted(holders),
            }
            if self._record.restrictions:
                step["missing_in_groups"] = self._missing(key)
            steps.append(step)
        return steps, held

    def _missing(self, key: bytes) -> list[int]:
        """The attention groups beside the main one in which this stream does not hold a block."""
        return [
            group
            for group in self._record.restrictions
            if all(record.id != self._record.id for record, _ in self._reader.holders(key + bytes([group])))
        ]

    def _although_held(self, keys: Sequence[bytes], end: int) -> str:
        """Why a match ends at a block that is held."""
        for group, window in self._record.restrictions.items():
            if any(group in self._missing(key) for key in keys[: end + 1]):
                kind = self._record.group_kinds.get(group)
                which = f"attention group {group} ({kind}, {'all' if window is None else window} tokens)"
                return f"block {end} is held, but not all that a longer hit needs in {which}"
        return f"block {end} was stored here, but an answer said that the engine does not have it"

    def _why(self, keys: Sequence[bytes], held: list[int], usable: int) -> str:
        one, end = self._matched, self._matched.disk // self._matched.block_size
        if not one.weight:
            return f"the stream is {one.state} ({self._record.reason}), so nothing of it is credited"
        if not keys:
            return "the prompt is shorter than one block"
        if end == len(keys):
            whole = "all whole blocks of the prompt are held"
            return whole if usable == one.disk else f"{whole}; the last token is always computed"
        if end in held:
            return self._although_held(keys, end)
        if any(number > end for number in held):
            return f"block {end} is not held: a hole, later blocks of the prompt are"
        others = [f"{r.id[0]} rank {r.id[1]}" for r, _ in self._reader.holders(keys[end])]
        where = f"by {', '.join(others)}" if others else "by anyone"
        return f"block {end} is not held here" + (f", only {where}" if others else f", nor {where}")
