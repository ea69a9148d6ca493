from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from router import tokenizing
from router.errors import SettingsError
from router.tokenizing import check_tokenizers


@pytest.mark.parametrize(
    ("missing", "named"),
    [({"jinja2"}, "jinja2"), ({"tokenizers", "jinja2"}, "tokenizers and jinja2"), (set(), None)],
)
def test_what_a_local_tokenizer_needs_is_named_at_the_start(
    missing: set[str], named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> Any:
        return None if name in missing else importlib.util.find_spec("json")

    monkeypatch.setattr(tokenizing, "find_spec", found)
    check_tokenizers([])
    if named is None:
        check_tokenizers(["m=folder"])
        return
    with pytest.raises(SettingsError, match=rf"^--tokenizer needs {named}: .* warmroute\[local-tokenizer\]"):
        check_tokenizers(["m=folder"])
