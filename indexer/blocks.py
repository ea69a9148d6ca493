"""What stored, removed and cleared blocks of one stream do to the map."""

from __future__ import annotations

from events.schema import BlockRemoved, BlockStored
from indexer.changes import Changes
from indexer.keys import block_keys, extra_bytes, local_hashes, next_key, root_key
from indexer.layout import (
    GPU,
    MAX_COPIES,
    ONE_COPY,
    Name,
    StreamRecord,
    Waiting,
    name_prefix,
    tier_of,
)

MAX_WAITING = 100_000
PREFIX_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})


class StreamBlocks:
    """The blocks of one stream within one group of changes. Counts what it does in the stream's record."""

    def __init__(self, changes: Changes, record: StreamRecord) -> None:
        self._changes = changes
        self._record = record
        self._bit = 1 << record.slot
        self._roots: dict[tuple[str | None, int], bytes] = {}
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []

    # events

    def store(self, event: BlockStored, sequence: int | None = None) -> None:
        """Takes a stored event of batch ``sequence``, or counts why it cannot be used."""
        record, count = self._record, len(event.hashes)
        if event.group_kind is not None or event.group not in record.group_kinds:
            record.group_kinds[event.group] = event.group_kind
        if not event.tokens:
            self._copy_known(event)
        elif reason := self._unusable(event):
            record.counters.skip(reason, count)
        else:
            self._store_chain(event, sequence)

    def remove(self, event: BlockRemoved) -> None:
        """Takes one copy of each block away; what is not known is counted."""
        prefix, tier = name_prefix(self._record.slot, event.group), tier_of(event.medium)
        if self._record.group_kinds.get(event.group) not in PREFIX_KINDS:
            self._record.counters.skip("attention_group", len(event.hashes))
            return
        for engine_hash in event.hashes:
            key = prefix + engine_hash
            name = self._changes.name(key)
            if name is not None and name.copies[tier]:
                self._release(key, name, tier)
                self._record.counters.removed += 1
            elif not self._release_waiting(key, tier):
                self._record.counters.unknown_removed += 1

    def take_touched(self) -> tuple[list[bytes], list[bytes]]:
        """Block keys that were stored, and that were removed, since this was asked last."""
        stored, removed = self._stored, self._removed
        self._stored, self._removed = [], []
        return stored, removed

    def evict(self, key: bytes) -> None:
        """Forgets the block with this names key, with all its copies."""
        name = self._changes.name(key)
        assert name is not None, "an age outlived its name"
        while name.held:
            self._release(key, name, next(tier for tier, copies in enumerate(name.copies) if copies))
        self._record.counters.evicted += 1

    def give_up(self, key: bytes, waiting: Waiting) -> None:
        """Forgets a block that waits for its parent."""
        self._end_waiting(key, waiting)

    def _unusable(self, event: BlockStored) -> str | None:
        """Why no keys can be made of a stored event; learns the block size from the first good one."""
        record = self._record
        if event.group_kind not in PREFIX_KINDS:
            return "attention_group"
        if event.lora_id and not event.lora_name:
            return "lora_without_name"
        if record.block_size not in (None, event.block_size):
            return "block_size"
        if not event.block_size or len(event.tokens) != len(event.hashes) * event.block_size:
            return "sparse"
        if event.extra_keys is not None and len(event.extra_keys) != len(event.hashes):
            return "extra_keys"
        record.block_size = event.block_size
        return None

    def _copy_known(self, event: BlockStored) -> None:
        """Blocks announced by hash alone, as an offload to a lower tier: more copies of known names."""
        prefix, tier = name_prefix(self._record.slot, event.group), tier_of(event.medium)
        for engine_hash in event.hashes:
            key = prefix + engine_hash
            name = self._changes.name(key)
            if name is None or tier == GPU:
                self._record.counters.skip("hash_only")
            else:
                self._hold(key, name, tier, 1)

    def _store_chain(self, event: BlockStored, sequence: int | None) -> None:
        changes = self._changes
        prefix, tier = name_prefix(self._record.slot, event.group), tier_of(event.medium)
        names = [prefix + engine_hash for engine_hash in event.hashes]
        locals_ = local_hashes(event.tokens, event.block_size)
        extras = [extra_bytes(extra, event.lora_name) for extra in event.extra_keys or ()]
        parent = event.parent or b""
        behind = changes.name(prefix + parent) if parent else None
        before = behind.key if behind else None if parent else self._root(event.lora_name, sequence)
        number = 0
        while before is None and number < len(names):
            waiting = Waiting(parent, locals_[number], extras[number] if extras else b"", [0, 0, 0])
            before = self._wait(names[number], waiting, tier)
            parent = event.hashes[number]
            number += 1
        behind = changes.name(prefix + parent) if parent else None
        while before is not None and number < len(names):
            blocks = block_keys(before, locals_[number:], extras[number:])
            changes.fetch(names[number:], blocks)
            if changes.all_new(names[number:]) and not self._record.waiting:
                self._append(names[number:], blocks, [parent, *event.hashes[number:]], behind, tier)
                break
            for block in blocks:
                behind = self._store(names[number], block, parent, tier)
                parent, before = event.hashes[number], behind.key
                number += 1
                if before != block:
                    break
        self._record.counters.stored += len(names)

    def _root(self, lora_name: str | None, sequence: int | None) -> bytes:
        epoch = self._record.epoch(lora_name, sequence) if self._record.purged else 0
        root = self._roots.get((lora_name, epoch))
        if root is None:
            registered, size = self._record.registration, self._record.block_size
            assert size is not None
            root = root_key(registered.model_name, lora_name, size, registered.additional_salt, epoch)
            self._roots[lora_name, epoch] = root
        return root

    # one block

    def _append(
        self, names: list[bytes], blocks: list[bytes], parents: list[bytes], behind: Name | None, tier: int
    ) -> None:
        """Holds a chain of which no name is known yet: as :meth:`_hold` does block by block, in one go."""
        changes, record = self._changes, self._record
        changes.append(names, blocks, parents, ONE_COPY[tier])
        for block in blocks:
            changes.hold(block, tier, self._bit)
        self._stored += blocks
        record.blocks += len(names)
        if tier != GPU:
            record.lower_tiers = True
        if behind is not None:
            behind.children += 1
            record.orphans += not behind.held
            changes.save(names[0][:3] + parents[0], behind)

    def _store(self, key: bytes, block: bytes, parent: bytes, tier: int) -> Name:
        """Holds one more copy of a block. A known engine hash keeps the content it has."""
        name = self._changes.name(key)
        if name is None:
            name = Name(block, parent)
        elif name.key != block:
            self._record.counters.contradictions += 1
        elif name.held:
            self._record.counters.duplicates += 1
        self._hold(key, name, tier, 1)
        if self._record.waiting:
            waiting = self._changes.waiting(key)
            if waiting is not None:  # for another parent: the engine contradicts itself
                self._record.counters.contradictions += 1
                self._settle(key, waiting, name)
            self._resolve(key, name.key)
        return name

    def _hold(self, key: bytes, name: Name, tier: int, copies: int) -> None:
        """Adds copies; a block not held until now takes its place in the chain."""
        changes, record = self._changes, self._record
        was_held, was_ghost = name.held, changes.name(key) is not None
        if not name.copies[tier]:
            changes.hold(name.key, tier, self._bit)
            record.lower_tiers = record.lower_tiers or tier != GPU
        name.add(tier, copies)
        changes.save(key, name)
        self._stored.append(name.key)
        if was_held:
            return
        record.blocks += 1
        record.orphans -= name.children
        name.age = changes.came(key)
        if name.parent:
            parent_key, parent = self._parent(key, name)
            parent.children += 1
            parent.ghosts -= was_ghost
            record.orphans += not parent.held
            changes.save(parent_key, parent)

    def _release(self, key: bytes, name: Name, tier: int) -> None:
        """Takes a copy away; a block with none left leaves the chain."""
        name.add(tier, -1)
        self._changes.save(key, name)
        self._removed.append(name.key)
        if name.copies[tier]:
            return
        self._changes.unhold(name.key, tier, self._bit)
        if not name.held:
            self._unhold(key, name)

    def _unhold(self, key: bytes, name: Name) -> None:
        changes, record = self._changes, self._record
        changes.went(name.age)
        name.age = 0
        record.blocks -= 1
        record.orphans += name.children
        if name.parent:
            parent_key, parent = self._parent(key, name)
            parent.children -= 1
            parent.ghosts += 1
            record.orphans -= not parent.held
            changes.save(parent_key, parent)
        self._bury(key, name)

    def _bury(self, key: bytes, name: Name) -> None:
        """Deletes a ghost on which nothing hangs, and the ghosts that then stand alone before it."""
        while not (name.held or name.children or name.ghosts):
            self._changes.save(key, None)
            if not name.parent:
                return
            key, name = self._parent(key, name)
            name.ghosts -= 1
            self._changes.save(key, name)

    def _parent(self, key: bytes, name: Name) -> tuple[bytes, Name]:
        parent_key = key[:3] + name.parent
        parent = self._changes.name(parent_key)
        assert parent is not None, "a name outlived its parent's"
        return parent_key, parent

    # blocks before their parents

    def _wait(self, key: bytes, waiting: Waiting, tier: int) -> bytes | None:
        """Keeps a block until its parent is known; gives its block key if it is known all the same."""
        changes, record = self._changes, self._record
        name = changes.name(key)
        if name is not None:
            return self._store(key, name.key, name.parent, tier).key
        known = changes.waiting(key)
        if known is None and record.waiting >= MAX_WAITING:
            record.counters.skip("waiting_full")
            return None
        if known is None:
            record.waiting += 1
            changes.link(key[:3] + waiting.parent, key)
        else:
            waiting = known
        waiting.copies[tier] = min(MAX_COPIES, waiting.copies[tier] + 1)
        changes.wait(key, waiting)
        return None

    def _release_waiting(self, key: bytes, tier: int) -> bool:
        if not self._record.waiting:
            return False
        waiting = self._changes.waiting(key)
        if waiting is None or not waiting.copies[tier]:
            return False
        waiting.copies[tier] -= 1
        self._record.counters.removed += 1
        if any(waiting.copies):
            self._changes.wait(key, waiting)
        else:
            self._end_waiting(key, waiting)
        return True

    def _end_waiting(self, key: bytes, waiting: Waiting) -> None:
        self._changes.stop_waiting(key, key[:3] + waiting.parent)
        self._record.waiting -= 1

    def _resolve(self, key: bytes, block: bytes) -> None:
        """A block became known: so do those that waited for it, and those that waited for them."""
        known = [(key, block)]
        while known:
            parent_key, before = known.pop()
            for child in self._changes.waiting_for(parent_key):
                waiting = self._changes.waiting(child)
                if waiting is None:
                    continue
                name = Name(next_key(before, waiting.local, waiting.extra), waiting.parent)
                self._settle(child, waiting, name)
                known.append((child, name.key))

    def _settle(self, key: bytes, waiting: Waiting, name: Name) -> None:
        """A block waits no more: its copies are of ``name``."""
        self._end_waiting(key, waiting)
        for tier, copies in enumerate(waiting.copies):
            if copies:
                self._hold(key, name, tier, copies)
