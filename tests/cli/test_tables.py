from __future__ import annotations

import re

import pytest

from cli.tables import show_findings
from router.finding import Finding
from tests.command_line import run


def test_a_long_address_that_the_doctor_found_is_shown_whole_and_levels_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    url = f"http://vllm-0.{'inference-' * 6}fleet.svc.cluster.local:8000"
    show_findings(
        [
            Finding("vllm-0", "http", "ok", f"{url} answers"),
            Finding("vllm-1", "http", "bad", f"no answer at {url}", "start it"),
            Finding("vllm-1", "prefix caching", "ok", "on"),
        ]
    )
    said = capsys.readouterr().out
    assert re.sub(r"\s", "", said).count(url) == 2
    assert max(map(len, said.splitlines())) <= 80
    assert said.splitlines()[-1] == "1 bad, 2 ok"


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
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"a=http://a:1,events=tcp://{'a' * 60}:5557"
    monkeypatch.setenv("WARMROUTE_ROUTER_REPLICA", line)
    run(["config"], monkeypatch)
    assert line in re.sub(r"\s|│|default|environment", "", capsys.readouterr().out)
