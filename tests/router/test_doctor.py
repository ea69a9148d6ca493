"""EV-32, OP-04: `warmroute doctor`: what it looks at, what it prints, and with what it ends."""

import asyncio
import json
import re
import socket
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from indexer.writer import MapWriter
from router.doctor import examine
from router.engine_check import _connect
from router.replicas import parse_replicas
from warmroute import main

ROOT = Path(__file__).parents[2]


async def test_ev32_replicas_with_one_address_are_told(session: aiohttp.ClientSession) -> None:
    async def shared(*lines: str) -> dict[str, str]:
        found = examine(parse_replicas(lines), None, session)
        return {finding.of: finding.found async for finding in found if finding.check == "address"}

    one, two = "http://127.0.0.1:1", "http://127.0.0.1:2"
    port = "tcp://127.0.0.1:3"
    bound = "events=bind:tcp://*:9,topic"
    assert await shared(f"e0={one}", f"e1={one}") == {"e1": f"{one} is that of e0 too"}
    assert await shared(f"e0={one},events={port}", f"e1={two},events={port}") == {
        "e1": f"{port} is that of e0 too"
    }
    assert await shared(f"e0={one},{bound}=t0", f"e1={two},{bound}=t1") == {}


def test_op04_the_map_of_the_config_file_is_looked_at_and_its_indexer_asked(tmp_path: Path) -> None:
    folder, config = tmp_path / "map", tmp_path / "warmroute.toml"
    config.write_text(f'[router]\nmap = "{folder}"\n')
    with closing(MapWriter(folder)) as writer:
        writer.set_address("http://127.0.0.1:1")
    done = CliRunner().invoke(main, ["--config", str(config), "doctor", "--wait-s", "0", "--json"])
    assert [(each["of"], each["found"]) for each in json.loads(done.stdout)["findings"]] == [
        ("indexer", "http://127.0.0.1:1: Connection refused"),
        ("map", f"{folder}: no sign of its indexer since this host started"),
    ]


def test_the_command_ends_with_1_when_something_is_wrong_and_says_what_to_give() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run = CliRunner().invoke
    lost = run(main, ["doctor", "--replica", f"e0=http://127.0.0.1:{port}", "--json"])
    assert (lost.exit_code, json.loads(lost.stdout)["findings"][0]["level"]) == (1, "bad")
    shown = run(main, ["doctor", "--replica", f"e0=http://127.0.0.1:{port}"])
    assert (shown.exit_code, "start it, or correct its URL" in shown.stdout) == (1, True)
    assert run(main, ["doctor"]).exit_code == 2
    assert run(main, ["doctor", "--replica", "nonsense"]).exit_code == 2


def test_op10_the_command_takes_the_indexers_keys_from_flags_and_from_its_table(tmp_path: Path) -> None:
    config = tmp_path / "warmroute.toml"
    config.write_text(f'[indexer]\ncurve_key = "{tmp_path}/of-the-file"\ncurve_server = ["*=x"]\n')
    run, line = CliRunner().invoke, ["doctor", "--replica", "e0=http://127.0.0.1:1"]
    by_file = run(main, ["--config", str(config), *line])
    by_flag = run(main, [*line, "--curve-key", str(tmp_path / "of-the-flag")])
    record = run(main, ["record", "--output", str(tmp_path / "r"), "--curve-server", f"e0={tmp_path}/none"])
    assert (by_file.exit_code, "--curve-server * x: no keys" in by_file.stderr) == (2, True)
    assert (by_flag.exit_code, "--curve-key alone protects nothing" in by_flag.stderr) == (2, True)
    assert (record.exit_code, "--curve-server e0" in record.stderr) == (2, True)


def test_one_resolver_looks_up_all_that_the_command_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, asked_by = socket.getaddrinfo, set()

    def noted(host: str, *more: Any, **named: Any) -> Any:
        if host == "localhost":
            asked_by.add((host, threading.current_thread().name))
        return ask(host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", noted)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    CliRunner().invoke(main, ["doctor", "--replica", f"e0=http://localhost:{port}"])
    assert asyncio.run(_connect(f"tcp://localhost:{port}")) == "Connection refused"
    assert asked_by == {("localhost", "lookup of localhost")}


def test_ev32_what_we_write_of_engines_binds() -> None:
    """vLLM connects where there is no wildcard (``tcp://0.0.0.0:5557`` too), and nobody hears it."""
    endpoints = []
    for name in ("docs/operating.md", "README.md", "compose/compose.yaml", "router/engine_check.py"):
        text = (ROOT / name).read_text()
        endpoints += re.findall(r'endpoint":\s*"([^"]+)"', text)
        endpoints += re.findall(r"- --(?:events|replay)=(\S+)", text)
    assert len(endpoints) > 8
    assert [endpoint for endpoint in endpoints if "*" not in endpoint] == []
