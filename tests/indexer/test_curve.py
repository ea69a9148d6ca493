"""Events by CURVE, from the command that makes the keys to the map: over processes and sockets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from events.curve import read_pair
from events.publisher import Publisher

ROOT = Path(__file__).resolve().parents[2]


def keygen(stem: Path) -> str:
    command = [sys.executable, "-m", "warmroute", "keygen", str(stem)]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_op10_an_indexer_follows_who_has_the_key_and_its_keys_are_nowhere_else(
    tmp_path: Path, indexer_process: Callable[..., Any], engine: Any, until: Any
) -> None:
    for name in ("indexer", "engine"):
        said = keygen(tmp_path / name)
        assert f"{name}.key_secret" in said
    theirs = read_pair("--curve-key", str(tmp_path / "engine.key_secret"))
    ours = read_pair("--curve-key", str(tmp_path / "indexer.key_secret"))
    folder = tmp_path / "map"
    indexer = indexer_process(
        folder,
        *("--curve-key", str(tmp_path / "indexer.key_secret")),
        *(
            "--curve-server",
            f"safe={tmp_path / 'engine.key'}",
            "--curve-server",
            f"*={tmp_path / 'engine.key'}",
        ),
    ).listening()
    protected = Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", keys=theirs)
    plain = Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    with closing(protected), closing(plain):
        for name, publisher in (("safe", protected), ("plain", plain)):
            publisher.publish([engine(1).stored(list(range(28)), 0, 3)], 1.0)
            registered = indexer.call(
                "/register",
                {
                    "instance_id": name,
                    "model_name": "m",
                    "endpoint": publisher.endpoint,
                    "replay_endpoint": publisher.replay_endpoint,
                },
            )
            assert "error" not in registered
        until(lambda: indexer.replicas()["safe"]["state"] == "live", "the one with the key is live")
        until(lambda: "CURVE" in indexer.replicas()["plain"]["reason"], "the other one is told of")
        assert indexer.replicas()["safe"]["blocks"] == 3
        assert indexer.replicas()["plain"]["blocks"] == 0
        told = str(indexer.replicas()) + str(indexer.call("/workers"))
    assert indexer.stop() == 0
    kept = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    logged = b"".join(path.read_bytes() for path in tmp_path.glob("*.log"))
    for key in (ours.secret, ours.public, theirs.public):
        assert key not in kept + logged + told.encode()


def test_an_indexer_whose_key_others_may_read_does_not_start(
    tmp_path: Path, indexer_process: Callable[..., Any]
) -> None:
    keygen(tmp_path / "k")
    (tmp_path / "k.key_secret").chmod(0o644)
    for shards in ("1", "2"):
        options = ("--curve-key", str(tmp_path / "k.key_secret"), "--curve-client", str(tmp_path / "k.key"))
        indexer = indexer_process(tmp_path / shards, *options, "--shards", shards)
        assert indexer.process.wait(30) == 2
        said = indexer._log.read_text()
        assert "others may read it (mode 0644)" in said
        assert "Traceback" not in said
