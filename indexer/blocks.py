"""What stored, removed and cleared blocks of one stream do to the map."""

from __future__ import annotations

from events.schema import BlockRemoved, BlockStored
from indexer.changes import Changes
from indexer.groups import blocks_needed, note_group
from indexer.keys import block_keys, extra_bytes, local_hashes, next_key, root_key
from indexer.layout import (
    GPU,
    MAX_COPIES,
    MAX_GROUP,
    ONE_COPY,
    REPORTS_PROVEN,
    Name,
    StreamRecord,
    Waiting,
    holders_key,
    name_prefix,
    same_hash,
    slot_key,
    tier_of,
)
from indexer.seeds import sample

MAX_WAITING = 100_000


class StreamBlocks:
    """The blocks of one stream within one group of changes. Counts what it does in the stream's record."""

    def __init__(self, changes: Changes, record: StreamRecord) -> None:
        self._changes = changes
        self._record = record
        self._bit = 1 << record.slot
        self._roots: dict[tuple[str | None, int], bytes] = {}
        self._slot = slot_key(record.slot)
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []
        self._reused: bytes | None = None  # the last hash of what may have been reused, in this batch

    # events

    def store(self, event: BlockStored, sequence: int | None = None) -> None:
        """Takes a stored event of batch ``sequence``, or counts why it cannot be used."""
        record, count = self._record, len(event.hashes)
        if event.tokens:
            note_group(record, event)
        if not event.tokens:
            self._copy_known(event)
        elif event.group in record.restrictions:
            self._store_beside(event)
        elif reason := self._unusable(event):
            record.counters.skip(reason, count)
        else:
            self._store_chain(event, sequence)

    def remove(self, event: BlockRemoved) -> None:
        """Takes one copy of each block away; what is not known is counted."""
        record = self._record
        prefix, tier = name_prefix(record.slot, event.group), tier_of(event.medium)
        if event.group != record.main_group and event.group in record.unjudged:
            record.counters.skip("attention_group", len(event.hashes))
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
        self._stored, self._removed, self._reused = [], [], None
        return stored, removed

    def spare(self, age: int, key: bytes) -> bool:
        """Makes the block of this age and names key the youngest if others need it; gives whether they do."""
        name = self._changes.name(key)
        if name is None or name.age != age or not self._needed(key, name):
            return False
        self._changes.went(age)
        name.age = self._changes.came(key)
        self._changes.save(key, name)
        return True

    def evict_up(self, age: int, key: bytes, most: int) -> tuple[int, tuple[int, bytes] | None]:
        """Forgets the block of this age and names key if none needs it, and then its parents likewise.

        Gives how many went, with those of other groups beside them, and which would be next (None: none) when
        that are ``most``.
        """
        gone, name = 0, self._changes.name(key)
        while name is not None and name.held and name.age == age and not self._needed(key, name):
            if gone >= most:
                return gone, (age, key)
            before = self._before(key, name)
            gone += self._evict(key, name)
            key, name = before, self._changes.name(before) if before else None
            age = name.age if name is not None else 0
        return gone, None

    def _before(self, key: bytes, name: Name) -> bytes:
        """The names key of the held block before, over a hole that goes with this one; empty if none."""
        while name.parent:
            key, name = self._parent(key, name)
            if name.held:
                return key
            if name.children + name.ghosts > 1:
                break
        return b""

    def _needed(self, key: bytes, name: Name) -> bool:
        """Whether held blocks hang on a block, also behind a hole.

        One beside the main group's block is needed as long as that is held.
        """
        main = self._record.main_group
        if name.children or name.ghosts or main is None or key[2] == main:
            return name.children + name.ghosts > 0
        beside = self._changes.name(name_prefix(self._record.slot, main) + key[3:])
        return beside is not None and beside.held

    def _evict(self, key: bytes, name: Name) -> int:
        """Forgets a block with all its copies, and with one of the main group those beside it."""
        while name.held:
            self._release(key, name, next(tier for tier, copies in enumerate(name.copies) if copies))
        self._record.counters.evicted += 1
        gone = 1
        for group in self._record.restrictions if key[2] == self._record.main_group else ():
            other = name_prefix(self._record.slot, group) + key[3:]
            beside = self._changes.name(other) if other != key else None
            if beside is not None and beside.held:
                gone += self._evict(other, beside)
        return gone

    def give_up(self, key: bytes, waiting: Waiting) -> None:
        """Forgets a block that waits for its parent."""
        self._end_waiting(key, waiting)

    def _unusable(self, event: BlockStored) -> str | None:
        """Why no keys can be made of a stored event; learns the block size from the first good one."""
        record = self._record
        if event.group != record.main_group:
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
        record, tier = self._record, tier_of(event.medium)
        if tier == GPU:
            record.counters.skip("hash_only", len(event.hashes))
            return
        if event.group in record.unjudged or event.group > MAX_GROUP:
            record.counters.skip("attention_group", len(event.hashes))
            return
        prefix = name_prefix(record.slot, event.group)
        for engine_hash in event.hashes:
            self._store_by_hash(prefix + engine_hash, tier)

    def _store_beside(self, event: BlockStored) -> None:
        """Blocks of a group beside the main one: which they are, their engine hashes say."""
        changes, record, tier = self._changes, self._record, tier_of(event.medium)
        prefix = name_prefix(record.slot, event.group)
        names = [prefix + engine_hash for engine_hash in event.hashes]
        changes.fetch(names, [])
        again = event.parent is None and tier == GPU and self._may_be_report(event, names)
        for key in names:
            name = changes.name(key)
            if again and record.reports_reused and (name is None or not name.held):
                record.counters.skip("reused")  # reports list the whole prefix, whatever is left of it here
            else:
                self._store_by_hash(key, tier, again=again)
        record.counters.stored += len(names)

    def _may_be_report(self, event: BlockStored, names: list[bytes]) -> bool:
        """Whether blocks may be announced because they were reused: then those that a hit needs are held."""
        if len(event.tokens) != len(names) * event.block_size:
            return False
        need = blocks_needed(self._record.restrictions[event.group], event.block_size)
        return self._on_gpu(names if need is None else names[-need:])

    def _on_gpu(self, names: list[bytes]) -> bool:
        found = map(self._changes.name, names)
        return all(name is not None and name.copies[GPU] for name in found)

    def _store_by_hash(self, key: bytes, tier: int, *, again: bool = False) -> None:
        """Holds one more copy of a block of which only the engine hash is said; it may have to wait."""
        record = self._record
        name = self._changes.name(key)
        if name is None and record.main_group is not None and key[2] in record.restrictions:
            known = self._changes.name(name_prefix(record.slot, record.main_group) + key[3:])
            name = None if known is None else Name(known.key, b"")
        if name is None:
            self._wait_for_hash(key, tier)
            return
        if name.held:
            self._note_again(name, tier, again)
        self._hold(key, name, tier, 1)

    def _store_chain(self, event: BlockStored, sequence: int | None) -> None:
        changes = self._changes
        prefix, tier = name_prefix(self._record.slot, event.group), tier_of(event.medium)
        names = [prefix + engine_hash for engine_hash in event.hashes]
        self._note_report(event, names[0])
        again = False
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
            if event.parent is None and not number:
                sample(self._record, blocks[0], event.hashes[0])
            if changes.all_new(names[number:]) and not self._record.waiting:
                self._append(names[number:], blocks, [parent, *event.hashes[number:]], behind, tier)
                break
            if event.parent is None and tier == GPU and not number:
                again = self._on_gpu(names)
            for block in blocks:
                behind = self._store(names[number], block, parent, tier, again=again)
                parent, before = event.hashes[number], behind.key
                number += 1
                if before != block:
                    break
        self._reused = event.hashes[-1] if again else None
        self._record.counters.stored += len(names)

    def _note_report(self, event: BlockStored, first: bytes) -> None:
        """A held chain announced from its start, and in the same batch new blocks behind it: it was reused.

        An engine that computes a prompt anew, though it is cached, announces its new blocks with it.
        """
        if event.parent is not None and event.parent == self._reused:
            name = self._changes.name(first)
            if name is None or not name.held:
                self._record.reports = min(REPORTS_PROVEN, self._record.reports + 1)

    def _note_again(self, name: Name, tier: int, again: bool) -> None:
        """A held block is stored once more; ``again``: it may only have been reused."""
        self._record.counters.duplicates += 1
        if again and name.copies[tier] and name.copies[tier] < MAX_COPIES:
            name.again += 1

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
        for block in changes.hold_all(blocks, tier, self._bit):
            record.shared += changes.share(self._slot + block, tier, 1)
        self._stored += blocks
        record.blocks += len(names)
        if tier != GPU:
            record.lower_tiers = True
        if behind is not None:
            behind.children += 1
            record.orphans += not behind.held
            changes.save(names[0][:3] + parents[0], behind)

    def _store(self, key: bytes, block: bytes, parent: bytes, tier: int, *, again: bool = False) -> Name:
        """Holds one more copy of a block. A known engine hash keeps the content it has."""
        name = self._changes.name(key)
        if name is None:
            name = Name(block, parent)
        elif name.key != block:
            self._record.counters.contradictions += 1
        elif name.held:
            self._note_again(name, tier, again)
        self._hold(key, name, tier, 1)
        if self._record.waiting:
            waiting = self._changes.waiting(key)
            if waiting is not None and waiting.local:  # for another parent: the engine contradicts itself
                self._record.counters.contradictions += 1
                self._settle(key, waiting, name)
            self._resolve(key, name.key)
        return name

    def _hold(self, key: bytes, name: Name, tier: int, copies: int) -> None:
        """Adds copies; a block not held until now takes its place in the chain."""
        changes, record = self._changes, self._record
        was_held, was_ghost = name.held, changes.name(key) is not None
        if not name.copies[tier]:
            block = holders_key(key, name.key, record.main_group)
            if changes.hold(block, tier, self._bit):
                record.shared += changes.share(self._slot + block, tier, 1)
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
        if name.again and tier == GPU:
            self._doubt(name)
        name.add(tier, -1)
        self._changes.save(key, name)
        self._removed.append(name.key)
        if name.copies[tier]:
            return
        self._let_go(holders_key(key, name.key, self._record.main_group), tier)
        if not name.held:
            self._unhold(key, name)

    def _doubt(self, name: Name) -> None:
        """A copy goes: those that may be none never were, if the engine is known to report what it reuses."""
        if self._record.reports_reused:
            name.add(GPU, -name.again)
            name.again = 0
        else:  # one of the others is the copy that goes
            name.again = min(name.again, max(0, name.copies[GPU] - 2))

    def _let_go(self, block: bytes, tier: int) -> None:
        """A name no longer holds a block; another name of this stream may."""
        record, changes = self._record, self._changes
        if record.shared and changes.shared(self._slot + block)[tier]:
            record.shared += changes.share(self._slot + block, tier, -1)
        else:
            changes.unhold(block, tier, self._bit)

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
        name = self._changes.name(key)
        if name is not None:
            return self._store(key, name.key, name.parent, tier).key
        known = self._changes.waiting(key)
        if known is not None and not known.local:
            self._end_waiting(key, known)
            waiting.copies, known = known.copies, None
        self._begin_waiting(key, known, waiting, tier)
        return None

    def _wait_for_hash(self, key: bytes, tier: int) -> None:
        """Keeps a block until the main group's block of its engine hash is known."""
        known = self._changes.waiting(key)
        self._begin_waiting(key, known, Waiting(b"", b"", b"", [0, 0, 0]), tier)

    def _begin_waiting(self, key: bytes, known: Waiting | None, waiting: Waiting, tier: int) -> None:
        changes, record = self._changes, self._record
        if known is None and record.waiting >= MAX_WAITING:
            record.counters.skip("waiting_full")
            return
        if known is None:
            record.waiting += 1
            changes.link(waiting.awaits(key), key)
        else:
            waiting = known
        waiting.copies[tier] = min(MAX_COPIES, waiting.copies[tier] + 1)
        changes.wait(key, waiting)

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
        self._changes.stop_waiting(key, waiting.awaits(key))
        self._record.waiting -= 1

    def _resolve(self, key: bytes, block: bytes) -> None:
        """A block became known: so do those that waited for it, and those that waited for them."""
        known = [(key, block)]
        while known:
            parent_key, before = known.pop()
            self._resolve_hash(parent_key, before)
            for child in self._changes.waiting_for(parent_key):
                waiting = self._changes.waiting(child)
                if waiting is None:
                    continue
                name = Name(next_key(before, waiting.local, waiting.extra), waiting.parent)
                self._settle(child, waiting, name)
                known.append((child, name.key))

    def _resolve_hash(self, key: bytes, block: bytes) -> None:
        """What waited for the engine hash of a block: the same block in other groups, and in other tiers."""
        for other in self._changes.waiting_for(same_hash(key)):
            waiting = self._changes.waiting(other)
            if waiting is None or waiting.local:
                continue
            if other == key or other[2] in self._record.restrictions:
                self._settle(other, waiting, self._changes.name(other) or Name(block, b""))
            else:
                self._end_waiting(other, waiting)

    def _settle(self, key: bytes, waiting: Waiting, name: Name) -> None:
        """A block waits no more: its copies are of ``name``."""
        self._end_waiting(key, waiting)
        for tier, copies in enumerate(waiting.copies):
            if copies:
                self._hold(key, name, tier, copies)
