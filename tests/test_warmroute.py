"""The front door: its commands, how they start and how they end."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

import warmroute
from tests.command_line import run

COMMANDS = ("indexer", "router", "engine", "record", "verify", "demo", "config")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = CliRunner().invoke(warmroute.main, [command, "--help"])
    assert done.exit_code == 0
    assert "Usage:" in done.output


@pytest.mark.parametrize("group", [[], ["indexer"]])
def test_what_a_command_does_is_not_cut_short_in_the_list_of_commands(group: list[str]) -> None:
    said = CliRunner().invoke(warmroute.main, [*group, "--help"], terminal_width=80).output
    assert "Commands:" in said
    assert not re.search(r"\.\.\.$", said.partition("Commands:")[2], re.MULTILINE)


def test_a_recording_is_of_one_process_whatever_the_file_says_of_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--workers" not in CliRunner().invoke(warmroute.main, ["record", "--help"]).output
    path = tmp_path / "warmroute.toml"
    path.write_text("[router]\nworkers = 3\n")
    assert run(["--config", str(path), "record", "--output", str(path)], monkeypatch) == 2
    assert "is there already" in capsys.readouterr().err  # It came as far as that.


@pytest.mark.parametrize("command", ["indexer", "router", "engine"])
def test_a_port_in_use_is_named(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        more = ["--map", str(tmp_path)] if command == "indexer" else []
        assert run([command, "--listen", address, *more], monkeypatch) == 2
    said = capsys.readouterr().err
    assert f"cannot listen on {address}: address already in use; choose another --listen" in said


def test_another_distributions_package_of_the_same_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger = types.ModuleType("events")
    stranger.__file__ = str(tmp_path / "events" / "__init__.py")
    monkeypatch.setitem(sys.modules, "events", stranger)
    assert run(["config"], monkeypatch) == 2
    assert "the package 'events' comes from" in capsys.readouterr().err


def test_an_interrupted_command_does_not_look_like_one_that_found_something_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("indexer.verify.verify", interrupted)
    assert run(["verify", "some.jsonl"], monkeypatch) == 130


def test_a_router_is_imported_without_what_it_has_no_use_for() -> None:
    """Each is a megabyte or more."""
    program = (
        "import sys, warmroute, router.service\n"
        "unused = {'rich', 'zmq', 'tokenizers', 'jinja2', 'kubernetes_asyncio', 'huggingface_hub'}\n"
        "unused |= {'opentelemetry.sdk', 'indexer.service', 'simulator.engine'}\n"
        "assert not unused & sys.modules.keys(), unused & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(warmroute.__file__).parent)
