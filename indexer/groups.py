"""Attention groups: what of a prompt an engine keeps in each, and what a hit needs of it.

An engine with several kinds of attention keeps the blocks of a prompt once per group of layers, and evicts
them group by group; the engine hash of a block is the same in all. Groups of full attention keep whole
prefixes, those of a sliding window only what the window can still reach. A hit of L blocks needs the first L
blocks in every full group, and in every window group the last ``ceil((window - 1) / block_size)`` blocks
before L, or all L if there are fewer (``vllm/v1/core/single_type_kv_cache_manager.py`` and
``kv_cache_coordinator.py``, 0.32). Stored events of window groups list what is left of a longer range of
tokens, so their blocks have no place: their engine hashes alone say which they are.
"""

from __future__ import annotations

from events.schema import BlockStored
from indexer.layout import MAX_GROUP, StreamRecord

PREFIX_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})


def note_group(record: StreamRecord, event: BlockStored) -> None:
    """Learns from a stored event what its attention group is."""
    group, kind = event.group, event.group_kind
    known = group in record.group_kinds
    if known and kind is None:
        kind = record.group_kinds[group]
    elif not known or record.group_kinds[group] != kind:
        record.group_kinds[group] = kind
    if record.main_group is None and kind in PREFIX_KINDS and event.tokens and group <= MAX_GROUP:
        record.main_group = group
    if group != record.main_group and event.tokens:
        _note_restriction(record, event, kind)


def _note_restriction(record: StreamRecord, event: BlockStored, kind: str | None) -> None:
    """A group beside the main one restricts hits, if it is known how, and its blocks are the main group's."""
    group, window = event.group, event.sliding_window
    same = event.block_size == record.block_size or record.block_size is None
    if kind in PREFIX_KINDS and same and record.main_group is not None and group <= MAX_GROUP:
        record.restrictions[group] = None
    elif kind in WINDOW_KINDS and same and window is not None and window > 0 and group <= MAX_GROUP:
        record.restrictions[group] = window
    else:
        record.restrictions.pop(group, None)


def blocks_needed(tokens: int | None, block_size: int) -> int | None:
    """How many of its last blocks a hit needs in a group whose restriction is so many tokens; None is all."""
    return None if tokens is None else max(1, -(-(tokens - 1) // block_size))
