"""The front door: settings from flags, environment and file, and errors in one line."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
import types
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

import warmroute
from router.settings import RouterSettings

COMMANDS = ("indexer", "router", "engine", "record", "verify", "demo", "config")


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of the command, run as its entry point does."""
    monkeypatch.setattr(sys, "argv", ["warmroute", *arguments])
    with pytest.raises(SystemExit) as ended:
        warmroute.run()
    return int(ended.value.code or 0)


def settings(*arguments: str, **environment: str) -> dict[str, dict[str, object]]:
    """What ``warmroute config --json`` says, by setting."""
    done = CliRunner(env=environment).invoke(warmroute.main, [*arguments, "config", "--json"])
    assert done.exit_code == 0, done.output
    return {row["setting"]: row for row in json.loads(done.stdout)}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "warmroute.toml"
    path.write_text('[router]\nlisten = "127.0.0.1:1234"\nreplica = ["a=http://a:1", "b=http://b:2"]\n')
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = CliRunner().invoke(warmroute.main, [command, "--help"])
    assert done.exit_code == 0
    assert "Usage:" in done.output


def test_config_says_where_each_value_comes_from(config: Path) -> None:
    found = settings("--config", str(config), WARMROUTE_INDEXER_MAP="/there")
    assert found["router.listen"] == {
        "setting": "router.listen",
        "value": "127.0.0.1:1234",
        "source": "config file",
    }
    assert found["router.replica"]["value"] == ["a=http://a:1", "b=http://b:2"]
    assert found["indexer.map"] == {"setting": "indexer.map", "value": "/there", "source": "environment"}
    assert found["engine.block_size"]["source"] == "default"


def test_the_environment_wins_over_the_file(config: Path) -> None:
    found = settings("--config", str(config), WARMROUTE_ROUTER_LISTEN="127.0.0.1:9")
    assert (found["router.listen"]["value"], found["router.listen"]["source"]) == (
        "127.0.0.1:9",
        "environment",
    )


def test_replicas_in_the_environment_are_split_at_blanks() -> None:
    found = settings(WARMROUTE_ROUTER_REPLICA="a=http://a:1 b=http://b:2")
    assert found["router.replica"]["value"] == ["a=http://a:1", "b=http://b:2"]


@pytest.mark.parametrize("group", [[], ["indexer"]])
def test_what_a_command_does_is_not_cut_short_in_the_list_of_commands(group: list[str]) -> None:
    said = CliRunner().invoke(warmroute.main, [*group, "--help"], terminal_width=80).output
    assert "Commands:" in said
    assert not re.search(r"\.\.\.$", said.partition("Commands:")[2], re.MULTILINE)


def test_the_help_of_a_router_has_headings_and_says_once_how_variables_are_named() -> None:
    said = CliRunner().invoke(warmroute.main, ["router", "--help"], terminal_width=80).output
    headings = re.findall(r"^(\w.*):$", said, re.MULTILINE)
    assert headings == ["Options", *RouterSettings.HEADINGS.values()]
    assert said.count("WARMROUTE_ROUTER_QUEUE_LIMIT") == 1
    below = said.partition("Full replicas:")[2].partition("\n\n")[0]
    assert re.findall(r"^  (--\S+)", below, re.MULTILINE) == [
        "--max-inflight",
        "--queue-limit",
        "--queue-timeout-s",
    ]


def test_a_recording_is_of_one_process_whatever_the_file_says_of_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--workers" not in CliRunner().invoke(warmroute.main, ["record", "--help"]).output
    path = tmp_path / "warmroute.toml"
    path.write_text("[router]\nworkers = 3\n")
    assert run(["--config", str(path), "record", "--output", str(path)], monkeypatch) == 2
    assert "is there already" in capsys.readouterr().err  # It came as far as that.


def test_headings_in_the_help_are_by_settings_that_exist() -> None:
    names = {field.name for field in msgspec.structs.fields(RouterSettings)}
    assert RouterSettings.HEADINGS.keys() <= names


def test_config_shows_values_as_they_are_written_and_settings_in_one_piece(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("WARMROUTE_ROUTER_RULE", '[{"name": "x", "policy": "random"}]')
    run(["config"], monkeypatch)
    said = capsys.readouterr().out
    assert re.search(r"router.forwarded +true +default", said)
    assert re.search(r'router.rule +{"name": "x", "policy": +environment', said)
    assert "router.tokenizer_check_interval_s" in said
    assert max(map(len, said.splitlines())) <= 80


def test_a_long_value_is_shown_whole_by_config(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"a=http://a:1,events=tcp://{'a' * 60}:5557"
    monkeypatch.setenv("WARMROUTE_ROUTER_REPLICA", line)
    run(["config"], monkeypatch)
    assert line in re.sub(r"\s|│|default|environment", "", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[router]\nlistn = 'x'\n", "is 'listen' meant?"),
        ("[router]\nmax-inflight = 1\n", "is 'max_inflight' meant?"),
        ("[router]\nqqq = 'x'\n", "`warmroute router --help` lists them"),
        ("[Router]\n", "is 'router' meant?"),
        ("[qqq]\n", "known are indexer, router, engine"),
        ("[router]\nworkers = 'two'\n", "it says 'two'"),
        ("router = 1\n", "Expected `object`"),
        ("[[router.rule]]\nname = 'x'\npolcy = 'session'\n", "is 'policy' meant?"),
        ("[[router.rule]]\nname = 3\n", "$.router.rule[0].name"),
        ("[router]\nlistn = 'x'\n", "$.router"),
        ("[router]\nattempts = 'many'\n", "$.router.attempts"),
        ("[indexer]\nmap_size = 1\n", "$.indexer.map_size"),
        ("[indxer]\n", "indxer"),
        ("[router\n", "no TOML"),
    ],
)
def test_a_bad_config_file_is_refused_in_a_line_with_the_key_what_may_be_meant_and_the_value(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    assert run(["--config", str(path), "config"], monkeypatch) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--config", "/nonexistent.toml", "config"], "/nonexistent.toml"),
        (["router", "--attempts", "x"], "--attempts"),
        (["router", "--policy", "nope"], "nope"),
        (["router", "--replica", "bogus"], "bogus"),
        (["indexer", "--listen", "nowhere"], "--listen"),
        (["indexer", "--map-size", "1"], "--map-size 1: Expected `int` >= 1048576"),
        (["router", "--workers", "0"], "--workers 0: Expected `int` >= 1"),
        (["router", "--rule", '{"name": "x", "polcy": "y"}'], "`polcy`; is 'policy' meant?"),
        (
            ["router", "--rule", '{"name": "x"}'],
            '--rule {"name": "x"}: Object missing required field `policy`',
        ),
        (["router", "--rule", '{"name": 3, "policy": "y"}'], "got `int` at `name`"),
        (["engine", "--prefill-rate", "nan"], "prefill_rate"),
        (["engine", "--blocks", "1"], "blocks"),
        (["engine", "--events", "tcp://*:99999"], "events tcp://*:99999"),
        (["engine", "--events", "tcp://*:65535", "--ranks", "2"], "port 65536"),
        (["router", "--config", "w.toml"], "in front of the command: warmroute --config ... router."),
        (["verify", "/nonexistent.jsonl"], "/nonexistent.jsonl"),
        (["verify"], "FILE"),
        (["nope"], "nope"),
    ],
)
def test_what_cannot_start_is_one_line_and_exit_code_2(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments, monkeypatch) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_config_refuses_what_a_start_would_refuse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARMROUTE_ENGINE_BLOCKS", "1")
    assert run(["config"], monkeypatch) == 2
    assert "engine settings: blocks 1" in capsys.readouterr().err


def test_a_bad_value_in_the_environment_is_blamed_on_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARMROUTE_ROUTER_ATTEMPTS", "x")
    assert run(["router"], monkeypatch) == 2
    assert "WARMROUTE_ROUTER_ATTEMPTS" in capsys.readouterr().err


def test_a_misspelt_variable_is_pointed_out_and_a_strangers_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        settings(WARMROUTE_ROUTER_LISTN="x", WARMROUTE_ROUTER_SERVICE_HOST="10.0.0.1")
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == ["WARMROUTE_ROUTER_LISTN is no setting; is WARMROUTE_ROUTER_LISTEN meant?"]


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


RULES = """
[router]
policy = "prefix-hash"
policy_parameters = { messages = 0 }

[[router.rule]]
name = "agents"
headers = { x-app = "agent*" }
policy = "session"
parameters = { bound = 1.5 }
"""


def test_rules_are_tables_in_the_file_and_json_in_flags_and_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "warmroute.toml"
    path.write_text(RULES)
    table = {
        "name": "agents",
        "headers": {"x-app": "agent*"},
        "policy": "session",
        "parameters": {"bound": 1.5},
    }
    found = settings("--config", str(path))
    assert found["router.rule"] == {"setting": "router.rule", "value": [table], "source": "config file"}
    assert found["router.policy_parameters"]["value"] == {"messages": 0}
    assert settings(WARMROUTE_ROUTER_RULE=json.dumps([table, table | {"name": "b"}]))["router.rule"][
        "value"
    ] == [table, table | {"name": "b"}]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("headers", "haeders", "unknown field `haeders` - at `$.router.rule[0]`"),
        ('"session"', '"sesion"', "unknown rule[0] (agents) policy 'sesion'"),
        (
            "bound",
            "buond",
            "rule[0] (agents) policy session, parameters: Object contains unknown field `buond`",
        ),
        (
            "bound = 1.5",
            "bound = 0.5",
            "rule[0] (agents) policy session, parameters: Expected `float` >= 1.0",
        ),
        ("messages = 0", "message = 0", "--policy prefix-hash, parameters: Object contains unknown"),
    ],
)
def test_rq16_a_bad_rule_is_refused_at_start_with_its_place(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    told: str,
) -> None:
    path = tmp_path / "warmroute.toml"
    path.write_text(RULES.replace(old, new))
    assert run(["--config", str(path), "router"], monkeypatch) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_rule_that_is_no_json_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("no json", "[]"):
        assert run(["router", "--rule", flag], monkeypatch) == 2
        assert "is no JSON" in capsys.readouterr().err


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
