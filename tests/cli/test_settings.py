"""Settings from flags, environment and file, and what is said of those that are refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tests.command_line import run, settings


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "warmroute.toml"
    path.write_text('[router]\nlisten = "127.0.0.1:1234"\nreplica = ["a=http://a:1", "b=http://b:2"]\n')
    return path


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


def test_config_refuses_what_a_start_would_refuse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARMROUTE_ENGINE_BLOCKS", "1")
    assert run(["config"], monkeypatch) == 2
    assert "engine settings: blocks 1" in capsys.readouterr().err


def test_a_misspelt_variable_is_pointed_out_and_a_strangers_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        settings(WARMROUTE_ROUTER_LISTN="x", WARMROUTE_ROUTER_SERVICE_HOST="10.0.0.1")
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == ["WARMROUTE_ROUTER_LISTN is no setting; is WARMROUTE_ROUTER_LISTEN meant?"]


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
