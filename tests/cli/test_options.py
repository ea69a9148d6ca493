from __future__ import annotations

import re

import msgspec
import pytest
from click.testing import CliRunner

import warmroute
from router.settings import RouterSettings
from tests.command_line import run


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


def test_headings_in_the_help_are_by_settings_that_exist() -> None:
    names = {field.name for field in msgspec.structs.fields(RouterSettings)}
    assert RouterSettings.HEADINGS.keys() <= names


def test_a_rule_that_is_no_json_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("no json", "[]"):
        assert run(["router", "--rule", flag], monkeypatch) == 2
        assert "is no JSON" in capsys.readouterr().err
