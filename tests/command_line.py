"""The ``warmroute`` command in this process, as its entry point runs it."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

import warmroute


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
