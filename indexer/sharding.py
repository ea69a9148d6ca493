"""A map divided among several writers: which replica is whose, and where each one's map is.

A divided folder has no map of its own: ``shards`` says how many there are, ``shard-0``, ``shard-1``, ... are
maps as any other, ``writer.lock`` is held by the indexer that runs their writers.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from xxhash import xxh3_64_intdigest

from indexer.errors import MapError, MapMissingError, SettingsError
from indexer.folder import DATA_FILE
from indexer.registration import Registration
from indexer.settings import LEAST_BUDGET, LEAST_SIZE, IndexerSettings

COUNT_FILE = "shards"


def shard_of(name: str, shards: int) -> int:
    """The shard of what goes by ``name``: the same in every process."""
    return xxh3_64_intdigest(name.encode()) % shards


def home_of(registration: Registration, shards: int) -> int:
    """The shard that follows a stream: all ranks of an instance are in one.

    Engines that connect to us share our address, and only one process can bind it: there it decides.
    """
    return shard_of(registration.address if registration.binds else registration.instance, shards)


def shard_folder(path: Path, number: int) -> Path:
    """The folder of one shard's map."""
    return path / f"shard-{number}"


def count_shards(path: Path) -> int | None:
    """How many shards the map in ``path`` has; None when it is not divided. Raises MapError."""
    file = path / COUNT_FILE
    try:
        told = file.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise MapError(f"cannot read {file}: {error.strerror}; give another --map folder") from error
    if not told.strip().isdecimal():
        raise MapError(f"{file} says {told[:20]!r}, no number of shards; delete the folder {path}")
    return int(told)


def map_folders(path: Path) -> list[Path]:
    """The folders of the maps in ``path``: its shards', or itself. Raises MapError."""
    shards = count_shards(path)
    return [path] if shards is None else [shard_folder(path, number) for number in range(shards)]


def check_division(path: Path, shards: int) -> None:
    """Raises MapError when the map in ``path`` is there, and divided otherwise.

    Streams would be followed twice, or forgotten, if it were used all the same.
    """
    found = count_shards(path)
    if found is None and (path / DATA_FILE).exists():
        found = 1
    if found not in (None, shards):
        raise MapError(
            f"the map in {path} was made with --shards {found}, not {shards}; give --shards {found}, another "
            "--map folder, or delete this one (engines with a replay endpoint announce again what they hold)"
        )


def divide(path: Path, shards: int) -> None:
    """Notes that the map in ``path`` has so many shards; its lock must be held. Raises MapError."""
    check_division(path, shards)
    try:
        draft = path / f"{COUNT_FILE}.new"
        draft.write_text(f"{shards}\n")
        draft.replace(path / COUNT_FILE)
    except OSError as error:
        raise MapError(f"cannot write in the map folder {path}: {error.strerror}") from error


def share_of(settings: IndexerSettings, number: int) -> IndexerSettings:
    """The settings of one shard: its map, and its share of the room. Raises SettingsError."""
    size, budget = settings.map_size // settings.shards, settings.budget_bytes // settings.shards
    for name, share, least in (("map_size", size, LEAST_SIZE), ("map_budget", budget, LEAST_BUDGET)):
        if share < least:
            raise SettingsError(
                f"{name} is too little for {settings.shards} shards; give at least {least * settings.shards}"
            )
    return msgspec.structs.replace(
        settings,
        map=str(shard_folder(Path(settings.map), number)),
        map_size=size,
        map_budget=budget,
        shards=1,
        listen="127.0.0.1:0",
    )


def whole_map(path: Path) -> list[Path]:
    """As :func:`map_folders`, of which each must have a map. Raises MapMissingError."""
    folders = map_folders(path)
    for folder in folders:
        if not (folder / DATA_FILE).exists():
            raise MapMissingError(f"no map in {folder} yet; start `warmroute indexer --map {path}`")
    return folders
