"""What stands in the map: the tables, their keys and values. The writer and the reader both use this page.

============  ========================================  ====================================================
table         key                                       value
============  ========================================  ====================================================
blocks        block key, 8 bytes; a group u8 behind it  which slots hold it: a bitmap per tier (``Holders``);
              for all but a stream's main group         what the other attention groups of a stream hold
shared        slot u16, key in ``blocks``               how many names more than one hold it, per tier: only
                                                        where two engine hashes of a stream mean one block
names         slot u16, group u8, engine hash           what a removal, which names only engine hashes, needs
                                                        (``Name``)
waiting       as in names                               a stored block whose key is not known (``Waiting``)
children      names key of what is not known            names keys of the blocks that wait for it (dupsort)
ages          counter u48                               names key of the block that came then, of all streams
denied        slot u16, block key                       until when (boot clock, f64) it is not credited: an
                                                        answer said that the engine does not have it
believed      slot u16, block key                       until when (boot clock, f64) it is credited, though no
                                                        event named it: an answer said that it was cached
streams       slot u16                                  ``StreamRecord``: one generation of one stream
meta          name                                      schema, boot id, clean flag, heartbeat, address
============  ========================================  ====================================================

A **slot** is one generation of one stream. Clearing or removing a stream retires its slot in one write; a
reader masks retired slots, and their entries are collected afterwards in small steps.
"""

from __future__ import annotations

import os
import struct
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import lmdb
import msgspec

from events.stream import State
from indexer.registration import Registration

SCHEMA_VERSION = 2
MAX_SLOTS = 255 * 8  # as many as a bitmap whose width is one byte can name
MOST_STREAMS = MAX_SLOTS - MAX_SLOTS // 8  # the rest is for the next generations of those that are there
MAX_READERS = 1024
DEFAULT_MAP_SIZE = 16 << 30
HOLDERS_CACHED = 1 << 14
PARTIAL_TTL_S = 1800.0
WAITING_TTL_S = 600.0
SMALL_BLOCK_TOKENS = 4
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Tier = Literal[0, 1, 2]
GPU: Tier = 0
CPU: Tier = 1
DISK: Tier = 2
TIERS = ("gpu", "cpu", "disk")
_TIER_OF_MEDIUM: dict[str, Tier] = {"GPU": GPU, "CPU": CPU}

META_SCHEMA = b"schema"
META_BOOT = b"boot"
META_CLEAN = b"clean"
META_HEARTBEAT = b"heartbeat"
META_ADDRESS = b"address"
META_GENERATION = b"generation"
META_AGE = b"age"


def tier_of(medium: str) -> Tier:
    """The tier of a medium; whatever is neither GPU nor CPU counts as the slowest."""
    return _TIER_OF_MEDIUM.get(medium, DISK)


Holders = tuple[int, int, int]
"""Bitmaps of the slots that hold a block, by tier: bit n for slot n."""

NOBODY: Holders = (0, 0, 0)


@lru_cache(HOLDERS_CACHED)
def encode_holders(holders: Holders) -> bytes:
    """The ``blocks`` value: the width of a bitmap in bytes, then the bitmaps of GPU, CPU and disk.

    Trailing empty bitmaps are left out. A width of one byte serves eight slots.
    """
    gpu, cpu, disk = holders
    width = ((gpu | cpu | disk).bit_length() + 7) // 8
    used = 3 if disk else 2 if cpu else 1
    return bytes([width]) + b"".join(bits.to_bytes(width, "little") for bits in holders[:used])


@lru_cache(HOLDERS_CACHED)
def decode_holders(value: bytes) -> Holders:
    """The bitmaps of a ``blocks`` value."""
    width = value[0]
    cpu_at, disk_at = 1 + width, 1 + 2 * width
    return (
        int.from_bytes(value[1:cpu_at], "little"),
        int.from_bytes(value[cpu_at:disk_at], "little"),
        int.from_bytes(value[disk_at : disk_at + width], "little"),
    )


_NAME = struct.Struct("<8s3BII6s")  # ``again`` is the highest byte of the second u32, beside ``ghosts``
_GHOST_BITS = 24
_MAX_GHOSTS = (1 << _GHOST_BITS) - 1
_pack_name = _NAME.pack
Copies = tuple[int, int, int]
NO_COPIES: Copies = (0, 0, 0)
BESIDE = (
    b"\xff"  # stands for the group in keys of ``children`` that are of no group; no group has this number
)
MAX_GROUP = 254
REPORTS_PROVEN = 2
ONE_COPY: tuple[Copies, ...] = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
AGE_BYTES = 6
MAX_COPIES = 255


class Name:
    """A block as its engine names it: its key, copies per tier, and its place in the chain.

    ``parent`` is the parent's engine hash, empty at the start of a prompt. ``children`` counts held children.
    A name that lost its last copy stays as a *ghost* while names hang on it: blocks behind a hole must know
    their way back when it is filled. ``ghosts`` counts children that are ghosts. ``age`` is the key of its
    row in ``ages``; 0 for a ghost. ``again`` counts copies on the GPU that may be none: they were announced
    from the start of a prompt when the block was held already, as an engine does that reports reused blocks.

    Names of a group other than the stream's main one have the key of that group's block, and no place in the
    chain.
    """

    __slots__ = ("again", "age", "children", "copies", "ghosts", "key", "parent")

    def __init__(self, key: bytes, parent: bytes, copies: Copies = NO_COPIES) -> None:
        self.key = key
        self.parent = parent
        self.copies = copies
        self.children = 0
        self.ghosts = 0
        self.again = 0
        self.age = 0

    @property
    def held(self) -> bool:
        return self.copies != NO_COPIES

    def add(self, tier: int, copies: int) -> None:
        """More copies in a tier, or fewer; as many as can be counted."""
        counts = list(self.copies)
        counts[tier] = min(MAX_COPIES, counts[tier] + copies)
        self.copies = (counts[0], counts[1], counts[2])

    def encode(self) -> bytes:
        gpu, cpu, disk = self.copies
        age = self.age.to_bytes(AGE_BYTES, "big")
        ghosts = self.again << _GHOST_BITS | self.ghosts
        return _pack_name(self.key, gpu, cpu, disk, self.children, ghosts, age) + self.parent

    @staticmethod
    def encode_chain(blocks: list[bytes], parents: list[bytes], copies: Copies, age: int) -> list[bytes]:
        """Names of new blocks that follow each other; the first has the age ``age``."""
        gpu, cpu, disk = copies
        rows = [
            _pack_name(block, gpu, cpu, disk, 1, 0, (age + number).to_bytes(AGE_BYTES, "big")) + parent
            for number, (block, parent) in enumerate(zip(blocks[:-1], parents, strict=False))
        ]
        last = (age + len(rows)).to_bytes(AGE_BYTES, "big")
        return [*rows, _pack_name(blocks[-1], gpu, cpu, disk, 0, 0, last) + parents[len(rows)]]

    @classmethod
    def decode(cls, value: bytes) -> Name:
        key, gpu, cpu, disk, children, ghosts, age = _NAME.unpack_from(value)
        name = cls(key, value[_NAME.size :], (gpu, cpu, disk))
        name.again = ghosts >> _GHOST_BITS
        name.children = children
        name.ghosts = ghosts & _MAX_GHOSTS
        name.age = int.from_bytes(age, "big")
        return name


class Waiting(msgspec.Struct, array_like=True):
    """A stored block whose key is not known, with all that it will be made of. No tokens are kept.

    With a ``local`` hash it waits for its ``parent``. Without one only its engine hash is known, and it waits
    for the main group's block of that hash: a block of another attention group, or one announced by its hash
    alone. ``since`` is when that began, on the boot clock.
    """

    parent: bytes
    local: bytes
    extra: bytes
    copies: list[int]
    since: float = 0.0

    def awaits(self, key: bytes) -> bytes:
        """What it waits for, as a key of ``children``; ``key`` is its names key."""
        return key[:3] + self.parent if self.local else same_hash(key)


def same_hash(key: bytes) -> bytes:
    """The key of ``children`` for what waits until the engine hash of a names key is known."""
    return key[:2] + BESIDE + key[3:]


class Counters(msgspec.Struct):
    """What happened in a stream, since its registration."""

    batches: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    duplicates: int = 0
    unknown_removed: int = 0
    contradictions: int = 0
    evicted: int = 0
    skipped: dict[str, int] = {}

    def skip(self, reason: str, blocks: int = 1) -> None:
        """Counts what was left out of the map, by reason."""
        self.skipped[reason] = self.skipped.get(reason, 0) + blocks


def small_blocks(block_size: int) -> str:
    """What is said of a replica with such blocks: an entry costs as much as one of 16 tokens."""
    return (
        f"blocks of {block_size} tokens make {round(16 / block_size)} times the entries of blocks of 16: "
        "the map reaches its bounds that much earlier; raise the engine's block or page size"
    )


class Purge(msgspec.Struct, array_like=True, frozen=True):
    """An adapter was loaded anew under its name, for the ``epoch``-th time, after batch ``sequence``."""

    epoch: int
    sequence: int


class StreamRecord(msgspec.Struct):
    """One generation of one stream: where it stands, and what it holds.

    ``sequence`` and ``digest`` are of the last batch that is in the map. ``blocks`` counts held names,
    ``orphans`` those whose parent is not held (a hole in front), ``waiting`` those whose parent is unknown.
    ``event_at`` is unix seconds.

    ``purged`` has the LoRA adapters that were loaded anew: what was stored before no longer matches.

    ``rank`` is the number of a rank that only the events of its port name; None for the registered one, whose
    record also says where the port stands. ``batch_rank`` is the number in the port's first batches.

    Attention groups: ``main_group`` is the first that keeps whole prefixes; its chain of blocks is the map's.
    ``restrictions`` says how many tokens before the end of a hit each other group must hold too (None: all
    of them). ``group_kinds`` has every kind that was announced. ``reports`` counts, up to two, what only
    an engine does that reports reused blocks; ``shared`` counts the rows of its table.
    ``samples`` has the engine hashes of a few first blocks of prompts, by block key.

    ``started_at`` is when the engine's process started, ``lost_at`` since when what is known may be outdated
    (unix seconds both, None: not known, nothing lost). ``denied`` and ``believed`` count corrections by
    answers, ``corrected`` how often they changed; ``wrong`` is the share of predicted tokens that were not
    there, averaged over answers.
    """

    slot: int
    generation: int
    registration: Registration
    rank: int | None = None
    purged: dict[str, Purge] = {}
    batch_rank: int | None = None
    state: State = "connecting"
    reason: str = ""
    sequence: int | None = None
    digest: bytes | None = None
    lost: bool = False
    retired: bool = False
    block_size: int | None = None
    hash_form: str | None = None
    group_kinds: dict[int, str | None] = {}
    main_group: int | None = None
    restrictions: dict[int, int | None] = {}
    reports: int = 0
    shared: int = 0
    samples: dict[bytes, bytes] = {}
    blocks: int = 0
    orphans: int = 0
    waiting: int = 0
    lower_tiers: bool = False
    event_at: float | None = None
    started_at: float | None = None
    lost_at: float | None = None
    denied: int = 0
    believed: int = 0
    corrected: int = 0
    wrong: float = 0.0
    counters: Counters = msgspec.field(default_factory=Counters)

    @property
    def id(self) -> StreamKey:
        rank = self.registration.dp_rank if self.rank is None else self.rank
        return (self.registration.instance, rank)

    @property
    def port(self) -> StreamKey:
        """The stream whose port its events come from: itself, unless only events name its rank."""
        return (self.registration.instance, self.registration.dp_rank)

    def epoch(self, lora_name: str | None, sequence: int | None = None) -> int:
        """What tells an adapter's blocks from those of its namesakes before it, in a block's root key.

        Without ``sequence`` that of a query; with it, of a block stored in that batch: one that comes again
        in a replay is of a namesake if it was then.
        """
        purge = self.purged.get(lora_name or "")
        if purge is None:
            return 0
        return purge.epoch if sequence is None or sequence > purge.sequence else -purge.epoch

    @property
    def reports_reused(self) -> bool:
        """Whether the engine announces blocks that it merely reused."""
        return self.reports >= REPORTS_PROVEN

    @property
    def unjudged(self) -> dict[int, str | None]:
        """Groups, with their kinds, of which it is not known what a hit needs of them."""
        known = {self.main_group, *self.restrictions}
        return {group: kind for group, kind in self.group_kinds.items() if group not in known}

    @property
    def notes(self) -> list[str]:
        """What limits the answers of this stream, or costs more than need be, for people."""
        small = self.block_size is not None and self.block_size < SMALL_BLOCK_TOKENS
        return ([small_blocks(self.block_size or 0)] if small else []) + [
            f"attention group {group} ({kind or 'no kind'}) is not judged: hits may be shorter than matched"
            for group, kind in self.unjudged.items()
        ]

    @property
    def is_empty(self) -> bool:
        """Whether nothing of this generation is in the map."""
        return not (self.blocks or self.waiting)


StreamKey = tuple[str, int]

_encode_record = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(StreamRecord).decode
_UNTIL = struct.Struct(">d")


def encode_until(until: float) -> bytes:
    """The value of ``denied`` and ``believed``."""
    return _UNTIL.pack(until)


def decode_until(value: bytes) -> float:
    until: float = _UNTIL.unpack(value)[0]
    return until


encode_waiting = msgspec.msgpack.Encoder().encode
decode_waiting = msgspec.msgpack.Decoder(Waiting).decode


def encode_record(record: StreamRecord) -> bytes:
    return _encode_record(record)


def decode_record(value: bytes) -> StreamRecord:
    return _decode_record(value)


_SHARED = struct.Struct(">3I")
encode_shared = _SHARED.pack


def decode_shared(value: bytes) -> Copies:
    gpu, cpu, disk = _SHARED.unpack(value)
    return gpu, cpu, disk


def holders_key(key: bytes, block: bytes, main_group: int | None) -> bytes:
    """Where the holders of a name's block stand in ``blocks``; ``key`` is the names key."""
    return block if key[2] == main_group else block + key[2:3]


def slot_key(slot: int) -> bytes:
    return slot.to_bytes(2, "big")


def age_key(age: int) -> bytes:
    return age.to_bytes(AGE_BYTES, "big")


def name_prefix(slot: int, group: int) -> bytes:
    """What all names keys of a group start with; the engine hash follows."""
    return slot.to_bytes(2, "big") + bytes([group])


def read_untils(txn: lmdb.Transaction, table: lmdb._Database, slot: bytes) -> dict[bytes, float]:
    """A slot's rows in ``denied`` or ``believed``: block key -> until when."""
    found: dict[bytes, float] = {}
    with txn.cursor(table) as cursor:
        more = cursor.set_range(slot)
        while more and bytes(cursor.key()).startswith(slot):
            found[bytes(cursor.key())[len(slot) :]] = decode_until(bytes(cursor.value()))
            more = cursor.next()
    return found


class Tables:
    """The opened tables of a map."""

    def __init__(self, env: lmdb.Environment, *, create: bool) -> None:
        def table(name: bytes, **options: Any) -> lmdb._Database:
            return env.open_db(name, create=create, **options)

        self.blocks = table(b"blocks")
        self.names = table(b"names")
        self.shared = table(b"shared")
        self.waiting = table(b"waiting")
        self.children = table(b"children", dupsort=True)
        self.ages = table(b"ages")
        self.denied = table(b"denied")
        self.believed = table(b"believed")
        self.streams = table(b"streams")
        self.meta = table(b"meta")

    @property
    def every(self) -> tuple[lmdb._Database, ...]:
        """All tables."""
        return (*self.by_slot, self.ages, self.blocks, self.streams, self.meta)

    @property
    def by_slot(self) -> tuple[lmdb._Database, ...]:
        """The tables whose keys start with a slot."""
        return (self.names, self.shared, self.waiting, self.children, self.denied, self.believed)


def boot_clock() -> float:
    """Seconds since this host booted: one clock for all processes on it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> bytes:
    """What tells one boot of this host from the next."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b"unknown"


def used_bytes(txn: lmdb.Transaction, tables: Tables) -> int:
    """Bytes of the pages that hold entries, free ones in the file not counted."""
    pages = 0
    for table in tables.every:
        stat = txn.stat(table)
        pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
    return pages * PAGE_BYTES
