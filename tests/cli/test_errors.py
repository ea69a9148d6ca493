from __future__ import annotations

import pytest

from tests.command_line import run


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


def test_a_bad_value_in_the_environment_is_blamed_on_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARMROUTE_ROUTER_ATTEMPTS", "x")
    assert run(["router"], monkeypatch) == 2
    assert "WARMROUTE_ROUTER_ATTEMPTS" in capsys.readouterr().err
