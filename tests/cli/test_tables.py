from __future__ import annotations

import re

import pytest

from cli.tables import show_findings
from router.finding import Finding


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
