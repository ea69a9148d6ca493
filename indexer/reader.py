"""Reads the map: in the indexer's own process, or read-only in a router's on the same host."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import lmdb
import msgspec

from events.schema import token_array
from indexer.corrected import NOTHING, Corrected, CorrectionReader
from indexer.errors import MapError
from indexer.families import Families, Family, family_of
from indexer.folder import DATA_FILE, PID_CLASH, open_to_read
from indexer.groups import blocks_needed
from indexer.keys import block_keys, keys_behind, prompt_extras, root_key
from indexer.layout import (
    CPU,
    DISK,
    GPU,
    HOLDERS_CACHED,
    META_ADDRESS,
    META_BOOT,
    META_HEARTBEAT,
    NOBODY,
    TIERS,
    Name,
    StreamRecord,
    Tables,
    boot_clock,
    boot_id,
    decode_holders,
    decode_record,
    name_prefix,
    used_bytes,
)
from indexer.match import Lookup, match, restrict

HEARTBEAT_LIMIT_S = 2.0
STALE_AFTER_S = 30.0
WRONG_TOLERATED = 0.2
LEAST_CREDIT = 0.1
WEIGHTS = {"live": 1.0, "replaying": 0.5, "partial": 0.5}


class KeysOf:
    """The block keys of a prompt, as a stream with that block size has them; each kind is made once.

    ``tokens`` is how many tokens the prompt has; None where only its whole blocks are known.
    """

    def __init__(
        self,
        make: Callable[[StreamRecord, int], Sequence[bytes]],
        lora_name: str | None,
        tokens: int | None = None,
    ) -> None:
        self._make = make
        self._lora_name = lora_name
        self.tokens = tokens
        self._made: dict[tuple[Any, ...], Sequence[bytes]] = {}

    def __call__(self, record: StreamRecord, block_size: int) -> Sequence[bytes]:
        family = (*family_of(record, self._lora_name), block_size)
        if family not in self._made:
            self._made[family] = self._make(record, block_size)
        return self._made[family]

    def usable(self, keys: Sequence[bytes], block_size: int) -> Sequence[bytes]:
        """Those of ``keys`` that a hit can have: an engine always computes the last token."""
        return keys if self.tokens is None else keys[: max(0, self.tokens - 1) // block_size]


class Matched(msgspec.Struct, frozen=True, gc=False):
    """What one stream holds of a prompt.

    ``gpu``, ``cpu`` and ``disk`` are leading tokens, cumulative (what is on the GPU; there or in memory;
    anywhere), not capped to what an engine can use; only where several attention groups have to agree, a
    match leaves out the last token, because a shorter hit needs other blocks. ``weight``, 0 to 1, says how
    far the map can be trusted for the stream now; ``generation`` and ``sequence`` say as of when.
    """

    instance: str
    rank: int
    block_size: int
    state: str
    weight: float
    gpu: int
    cpu: int
    disk: int
    generation: int
    sequence: int | None


class StreamStatus(msgspec.Struct, frozen=True):
    """A stream as the map knows it, with the trust that its state deserves now."""

    record: StreamRecord
    state: str
    weight: float


class Trust:
    """How far states can be believed, by the age of the indexer's heartbeat.

    The map of a dead indexer still says ``live``. Beyond two seconds without a heartbeat such a stream counts
    as partial, with a weight that falls to zero at ``stale_after`` seconds.
    """

    def __init__(self, stale_after: float = STALE_AFTER_S) -> None:
        self._stale_after = stale_after

    def judge(self, state: str, heartbeat_age: float) -> tuple[str, float]:
        weight = WEIGHTS.get(state, 0.0)
        if heartbeat_age <= HEARTBEAT_LIMIT_S or not weight:
            return state, weight
        span = self._stale_after - HEARTBEAT_LIMIT_S
        left = max(0.0, 1.0 - (heartbeat_age - HEARTBEAT_LIMIT_S) / span) if span > 0 else 0.0
        return "partial", min(weight, WEIGHTS["partial"]) * left


def credit(wrong: float) -> float:
    """What a stream's weight is multiplied by, 1 to 0.1, when that share of its predictions was wrong."""
    return min(1.0, max(LEAST_CREDIT, (1.0 - wrong) / (1.0 - WRONG_TOLERATED)))


class MapReader:
    """Answers what streams hold. Read transactions are as short as one query."""

    def __init__(
        self,
        env: lmdb.Environment,
        tables: Tables,
        *,
        trust: Trust | None = None,
        clock: Callable[[], float] = boot_clock,
        owns: bool = False,
        file: Path | None = None,
    ) -> None:
        self._env = env
        self._tables = tables
        self._trust = trust or Trust()
        self._clock = clock
        self._boot = boot_id()
        self._owns = owns
        self._file = file
        self._inode = None if file is None else file.stat().st_ino
        self._decoded: dict[bytes, tuple[bytes, StreamRecord]] = {}
        self._seen: tuple[int, Families] = (-1, Families([]))
        self._beat: tuple[int, float] = (-1, float("-inf"))
        self._corrections = CorrectionReader(tables, clock)

    @classmethod
    def open(cls, path: Path, *, trust: Trust | None = None) -> MapReader:
        """The map of an indexer in another process. Raises MapError."""
        env, tables = open_to_read(path)
        try:
            env.reader_check()
            unlocked = env.readers().startswith("(no reader locks)")
        except lmdb.Error as error:
            env.close()
            raise MapError(f"cannot take part in the locks of the map in {path}: {error}") from error
        if unlocked:  # LMDB goes on without them on a read-only mount, and snapshots rot under the reader
            env.close()
            raise MapError(f"the map in {path} cannot be locked; mount the folder so that it can be written")
        return cls(env, tables, trust=trust, owns=True, file=path / DATA_FILE)

    @property
    def parts(self) -> Sequence[MapReader]:
        """The maps that this is made of: itself."""
        return (self,)

    def close(self) -> None:
        if self._owns:
            self._env.close()

    @contextmanager
    def _begin(self) -> Iterator[lmdb.Transaction]:
        try:
            try:
                txn = self._env.begin(self._tables.blocks)
            except lmdb.MapResizedError:
                self._env.set_mapsize(0)
                txn = self._env.begin(self._tables.blocks)
        except lmdb.LockError as error:
            raise MapError(f"cannot read the map: {error}; {PID_CLASH}") from error
        except lmdb.Error as error:
            raise MapError(f"cannot read the map: {error}") from error
        try:
            with txn:
                yield txn
        except lmdb.Error as error:
            raise MapError(f"cannot read the map: {error}") from error

    @contextmanager
    def snapshot(self) -> Iterator[tuple[lmdb.Transaction, Tables, list[StreamRecord]]]:
        """A short look at the tables, with the streams that are not retired. Raises MapError.

        It pins the pages that it sees: never hold it while somebody is waited for.
        """
        with self._begin() as txn:
            yield txn, self._tables, self._streams(txn)

    def _streams(self, txn: lmdb.Transaction) -> list[StreamRecord]:
        """The streams that are not retired."""
        return self._current(txn).records

    def _current(self, txn: lmdb.Transaction) -> Families:
        """The streams that are not retired. Looked at again only after a commit, and decoded again only where
        that changed them.
        """
        (version, families), now = self._seen, txn.id()
        if version != now:
            before = self._decoded
            decoded = self._decoded = {
                key: known
                if (known := before.get(key)) is not None and known[0] == value
                else (value, decode_record(value))
                for key, value in cast(Iterable[tuple[bytes, bytes]], txn.cursor(self._tables.streams))
            }
            if decoded != before:
                families = Families([record for _, record in decoded.values() if not record.retired])
            self._seen = (now, families)
        return families

    def _heartbeat_age(self, txn: lmdb.Transaction) -> float:
        (version, beat_at), now = self._beat, txn.id()
        if version != now:
            beat = txn.get(META_HEARTBEAT, db=self._tables.meta)
            # A beat of another boot, or of another host on a network file system, is of another clock.
            ours = txn.get(META_BOOT, db=self._tables.meta) == self._boot
            beat_at = float(beat) if beat is not None and ours else float("-inf")
            self._beat = (now, beat_at)
        age = max(0.0, self._clock() - beat_at)
        if age > HEARTBEAT_LIMIT_S:
            self._check_file()
        return age

    def _check_file(self) -> None:
        """A map that is silent may have been put aside, or deleted: this reader is still on the old file."""
        if self._file is None:
            return
        try:
            current = self._file.stat().st_ino
        except OSError:
            current = None
        if current != self._inode:
            raise MapError(f"the map in {self._file.parent} was replaced; it has to be opened again")

    def streams(self) -> list[StreamStatus]:
        """All streams, each with its state and weight as of now."""
        with self._begin() as txn:
            age = self._heartbeat_age(txn)
            return [
                StreamStatus(record, *self._judge(record.state, record.wrong, age))
                for record in self._streams(txn)
            ]

    def _judge(self, state: str, wrong: float, heartbeat_age: float) -> tuple[str, float]:
        """State and weight; a stream whose predictions keep being wrong weighs less."""
        state, weight = self._trust.judge(state, heartbeat_age)
        return state, weight * credit(wrong)

    def heartbeat_age(self) -> float:
        """Seconds since the indexer last said that it lives; infinite if it never did."""
        with self._begin() as txn:
            return self._heartbeat_age(txn)

    def indexer_address(self) -> str | None:
        """The URL of the indexer that writes this map, once it listens."""
        with self._begin() as txn:
            address = txn.get(META_ADDRESS, db=self._tables.meta)
        return bytes(address).decode() if address else None

    def query(
        self,
        model: str,
        tokens: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        keys: PromptKeys = keys_behind,
    ) -> list[Matched]:
        """What each stream of ``model`` (a registered name or an alias) holds of a prompt.

        Streams that match nothing are in the answer with zeros; it is empty for an unknown model. ``keys``
        may know the keys of prompts that were seen before. Raises MapError when the map cannot be read,
        ValueError for a token id outside u32.
        """
        return self.query_keys(model, keys_of_prompt(tokens, lora_name, cache_salt, keys), lora_name)

    def query_local(
        self, model: str, locals_: Sequence[bytes], *, lora_name: str | None = None
    ) -> list[Matched]:
        """As :meth:`query`, from the local hashes of the prompt's blocks."""

        return self.query_keys(model, keys_of_locals(locals_, lora_name), lora_name)

    def query_keys(self, model: str, keys_of: KeysOf, lora_name: str | None = None) -> list[Matched]:
        """As :meth:`query`, for a prompt that is told by the keys of its blocks."""
        answer: list[Matched] = []
        with self._begin() as txn:
            age = self._heartbeat_age(txn)
            for family in self._current(txn).of(model, lora_name):
                answer += self._matched(family, self._held(txn, family, keys_of), age)
        return answer

    def _matched(self, family: Family, held: list[dict[int, int]], heartbeat_age: float) -> list[Matched]:
        """What each member holds, by its slot in ``held``."""
        size, judged = family.block_size or 0, dict[tuple[str, float], tuple[str, float]]()
        on_gpu, in_memory, anywhere = (levels.get for levels in held)
        one_tier = not family.spread
        answer = []
        for slot, instance, rank, kind, generation, sequence in family.rows:
            if kind not in judged:
                judged[kind] = self._judge(*kind, heartbeat_age)
            state, weight = judged[kind]
            gpu = cpu = disk = on_gpu(slot, 0) * size
            if not one_tier:
                cpu, disk = in_memory(slot, 0) * size, anywhere(slot, 0) * size
            answer.append(Matched(instance, rank, size, state, weight, gpu, cpu, disk, generation, sequence))
        return answer

    def _held(self, txn: lmdb.Transaction, family: Family, keys_of: KeysOf) -> list[dict[int, int]]:
        """Leading blocks by slot, for GPU, GPU and CPU, all tiers.

        Holes are counted over all tiers together: a chain without one may still have gaps on the GPU alone.
        """
        block_size, members, slots, spread = family.block_size, family.members, family.slots, family.spread
        if block_size is None:
            return [{}, {}, {}]
        keys = keys_of(members[0], block_size)
        corrected = self._corrections.of(txn, members) if family.corrected else NOTHING
        holey = corrected.slots | family.orphaned
        everywhere = match(corrected.over(_lookup(txn, DISK)), keys, slots, holey)
        tiers = (GPU, CPU) if spread else ()
        levels = [
            *(match(corrected.over(_lookup(txn, tier)), keys, slots, holey | spread) for tier in tiers),
            everywhere,
        ]
        hybrids = [record for record in family.hybrids if record.slot in everywhere]
        if hybrids:
            usable = keys_of.usable(keys, block_size)
            for level, tier in enumerate((*tiers, DISK)):
                levels[level] |= self._restricted(txn, hybrids, usable, levels[level], tier, corrected)
        return levels if spread else levels * 3

    def _restricted(
        self,
        txn: lmdb.Transaction,
        hybrids: list[StreamRecord],
        keys: Sequence[bytes],
        held: dict[int, int],
        tier: int,
        corrected: Corrected,
    ) -> dict[int, int]:
        """What of ``held`` in their main groups streams can use, with what their other groups hold."""
        lookup = _lookup(txn, tier)
        usable: dict[int, int] = {}
        for record in hybrids:
            needs = {
                group: blocks_needed(window, record.block_size or 1)
                for group, window in record.restrictions.items()
            }

            def holds(group: int, number: int, slot: int = record.slot) -> bool:
                key = keys[number]
                return bool((lookup(key + bytes([group])) | corrected.believes(key)) >> slot & 1)

            usable[record.slot] = restrict(holds, min(held.get(record.slot, 0), len(keys)), needs)
        return usable

    def holders(self, key: bytes) -> list[tuple[StreamRecord, list[str]]]:
        """Who holds a block, and in which tiers, by block key."""
        with self._begin() as txn:
            value = txn.get(key, db=self._tables.blocks)
            tiers = NOBODY if value is None else decode_holders(bytes(value))
            found = []
            for record in self._streams(txn):
                names = [name for name, bits in zip(TIERS, tiers, strict=True) if bits >> record.slot & 1]
                if names:
                    found.append((record, names))
        return found

    def name(self, instance: str, rank: int, group: int, engine_hash: bytes) -> Name | None:
        """A block of a stream by its canonical engine hash."""
        with self._begin() as txn:
            for record in self._streams(txn):
                if record.id == (instance, rank):
                    key = name_prefix(record.slot, group) + engine_hash
                    value = txn.get(key, db=self._tables.names)
                    return None if value is None else Name.decode(bytes(value))
        return None

    def used_bytes(self) -> int:
        """Bytes of the pages that hold entries."""
        with self._begin() as txn:
            return used_bytes(txn, self._tables)


class PromptKeys(Protocol):
    """Gives the keys of a prompt's whole blocks, as :func:`indexer.keys.keys_behind` does."""

    def __call__(
        self, root: bytes, tokens: array[int], block_size: int, extras: Sequence[bytes] = (), /
    ) -> Sequence[bytes]: ...


def keys_of_prompt(
    tokens: Sequence[int], lora_name: str | None, cache_salt: str | None, keys: PromptKeys = keys_behind
) -> KeysOf:
    """The block keys of a prompt by stream, each kind made once by ``keys``.

    Raises ValueError for a token beyond u32.
    """
    ids, extras = token_array(tokens), prompt_extras(cache_salt)

    def keys_of(record: StreamRecord, block_size: int) -> Sequence[bytes]:
        return keys(root_of(record, lora_name, block_size), ids, block_size, extras)

    return KeysOf(keys_of, lora_name, len(ids))


def keys_of_locals(locals_: Sequence[bytes], lora_name: str | None) -> KeysOf:
    """As :func:`keys_of_prompt`, from the local hashes of the prompt's blocks."""

    def keys_of(record: StreamRecord, block_size: int) -> list[bytes]:
        return block_keys(root_of(record, lora_name, block_size), locals_)

    return KeysOf(keys_of, lora_name)


def root_of(record: StreamRecord, lora_name: str | None, block_size: int) -> bytes:
    """The key before block 0 of what is asked of a stream now."""
    registered = record.registration
    return root_key(
        registered.model_name, lora_name, block_size, registered.additional_salt, record.epoch(lora_name)
    )


class _SlotsOf(dict[bytes | None, int]):
    """Bitmaps of slots in the tiers up to ``level``, by the ``blocks`` value; None is that of no block."""

    def __init__(self, level: int) -> None:
        super().__init__({None: 0})
        self._level = level

    def __missing__(self, value: bytes | None) -> int:
        if len(self) >= HOLDERS_CACHED:
            self.clear()
        gpu, cpu, disk = NOBODY if value is None else decode_holders(value)
        slots = self[value] = (gpu, gpu | cpu, gpu | cpu | disk)[self._level]
        return slots


_SLOTS_OF = tuple(map(_SlotsOf, (GPU, CPU, DISK)))


def _lookup(txn: lmdb.Transaction, level: int) -> Lookup:
    """Bitmaps of the slots that hold a key in the tiers up to ``level``."""
    get, slots_of = cast(Callable[[bytes], bytes | None], txn.get), _SLOTS_OF[level]

    def lookup(key: bytes) -> int:
        return slots_of[get(key)]

    return lookup
