"""Chats by the library's own templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")

from router.conversation import Chat, InexactError  # noqa: E402
from router.converted_tokenizer import ConvertedTemplates  # noqa: E402
from router.tool_schemas import DEEPEST  # noqa: E402
from tests.router import small_tokenizer  # noqa: E402


@pytest.mark.parametrize(("template", "bounded"), [("tojson(indent=4)", True), ("tojson", False)])
def test_px13_deep_tools_are_not_indented_by_the_library_either(
    template: str, bounded: bool, tmp_path: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(small_tokenizer.save(tmp_path))
    tokenizer.chat_template = f"{{{{ tools | {template} }}}}"
    templates = ConvertedTemplates(tokenizer)
    deep: Any = {}
    for depth in range(DEEPEST):
        said = Chat([{"role": "user", "content": "x"}], [{"function": deep}], {})
        if bounded and depth >= DEEPEST - 3:
            with pytest.raises(InexactError, match="template-refused"):
                templates.render(said)
        else:
            assert templates.render(said).count("{") == depth + 2
        deep = {"a": deep}
