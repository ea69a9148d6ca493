"""Which replica is whose, and what a divided folder is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from indexer.errors import MapError, MapMissingError, SettingsError
from indexer.registration import Registration
from indexer.settings import IndexerSettings
from indexer.sharding import (
    check_division,
    count_shards,
    divide,
    home_of,
    map_folders,
    shard_of,
    share_of,
    whole_map,
)


def registration(instance: str | int, endpoint: str = "tcp://127.0.0.1:5557", rank: int = 0) -> Registration:
    return Registration(instance_id=instance, endpoint=endpoint, model_name="m", dp_rank=rank)


def test_a_replica_has_the_same_shard_in_every_process_and_release() -> None:
    assert [shard_of(f"vllm-{number}", 3) for number in range(8)] == [0, 1, 2, 0, 0, 1, 2, 2]


def test_replicas_are_spread() -> None:
    counts = Counter(shard_of(f"vllm-{number}", 4) for number in range(400))
    assert min(counts.values()) > 70


def test_all_ranks_of_an_instance_are_in_one_shard_and_1_is_one_instance_with_its_text() -> None:
    assert {home_of(registration("A", rank=rank), 7) for rank in range(8)} == {shard_of("A", 7)}
    assert home_of(registration(1), 7) == home_of(registration("1"), 7)


def test_replicas_that_connect_to_one_address_of_ours_are_in_one_shard() -> None:
    bound = "bind:tcp://0.0.0.0:5557"
    assert len({home_of(registration(f"vllm-{number}", bound), 7) for number in range(20)}) == 1


def test_the_room_is_shared_out() -> None:
    whole = IndexerSettings(
        map="/m", map_size=64 << 20, map_budget=12 << 20, shards=4, advertise="http://h:1"
    )
    shares = [share_of(whole, number) for number in range(4)]
    assert [share.map for share in shares] == [f"/m/shard-{number}" for number in range(4)]
    assert {(share.map_size, share.budget_bytes, share.shards) for share in shares} == {
        (16 << 20, 3 << 20, 1)
    }
    assert {(share.listen, share.advertise) for share in shares} == {("127.0.0.1:0", "http://h:1")}


def test_a_map_too_small_to_share_is_refused_and_says_what_is_enough() -> None:
    with pytest.raises(SettingsError, match="map_size is too little for 4 shards; give at least 4194304"):
        share_of(IndexerSettings(map_size=3 << 20, shards=4), 0)
    with pytest.raises(SettingsError, match="map_budget is too little for 4 shards; give at least 1048576"):
        share_of(IndexerSettings(map_size=8 << 20, map_budget=1 << 19, shards=4), 0)


def test_a_folder_is_divided_once_and_only_so(tmp_path: Path) -> None:
    assert count_shards(tmp_path) is None
    assert map_folders(tmp_path) == [tmp_path]
    divide(tmp_path, 2)
    divide(tmp_path, 2)
    assert count_shards(tmp_path) == 2
    assert map_folders(tmp_path) == [tmp_path / "shard-0", tmp_path / "shard-1"]
    for other in (1, 3):
        with pytest.raises(MapError, match=f"made with --shards 2, not {other}; give --shards 2"):
            check_division(tmp_path, other)


def test_a_map_that_is_not_divided_stays_so(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").touch()
    check_division(tmp_path, 1)
    with pytest.raises(MapError, match="made with --shards 1, not 2"):
        divide(tmp_path, 2)
    assert count_shards(tmp_path) is None


def test_a_number_of_shards_that_is_none_is_said(tmp_path: Path) -> None:
    (tmp_path / "shards").write_text("many")
    with pytest.raises(MapError, match="says 'many', no number of shards"):
        map_folders(tmp_path)


def test_a_map_is_whole_when_every_shard_has_one(tmp_path: Path) -> None:
    divide(tmp_path, 2)
    (tmp_path / "shard-0").mkdir()
    (tmp_path / "shard-0" / "data.mdb").touch()
    with pytest.raises(MapMissingError, match="shard-1 yet"):
        whole_map(tmp_path)
