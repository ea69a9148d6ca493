"""A model's tokenizer and chat template by ``transformers``: for models whose files do not say it all.

``transformers`` knows how to make a tokenizer of other files (sentencepiece, tiktoken), and has code for some
models. It takes some 90 MB, so it is loaded for those alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from router.conversation import Chat, InexactError
from router.errors import RouterError
from router.template_time import certain_time
from router.tool_schemas import check_indented

USUAL_INDENT = 4


class NoTransformersError(RouterError):
    """``transformers`` is needed and not installed."""


class ConvertedTemplates:
    """The chat templates of a tokenizer of ``transformers``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        said = tokenizer.chat_template
        self.sources: Sequence[str] = list(said.values()) if isinstance(said, dict) else [said or ""]
        self._indents = any("indent" in source for source in self.sources)
        self._says_date = any("strftime_now" in source for source in self.sources)

    def render(self, chat: Chat) -> str:
        """The text of a chat. Raises InexactError where the template refuses it, and where it may say another
        day than it does at the engine.
        """
        if self._says_date:
            certain_time("%x")
        try:
            if self._indents:
                check_indented([chat.messages, chat.tools or (), chat.kwargs], USUAL_INDENT)
            text = self._tokenizer.apply_chat_template(
                chat.messages, tools=chat.tools, tokenize=False, **chat.kwargs
            )
        except Exception as error:  # templates raise what they like; the engine will say what it thinks of it
            raise InexactError("template-refused") from error
        if not isinstance(text, str):
            raise InexactError("template-refused")
        return text


def converted(source: str) -> tuple[Any, ConvertedTemplates]:
    """The backend and the templates of the tokenizer in a folder, or of a model on the hub.

    Code that comes with a model is not run. Raises NoTransformersError, and what ``transformers`` raises.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise NoTransformersError(
            "transformers, which can make one of other files, is not installed:"
            " install the extra, warmroute[transformers]"
        ) from error
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        source, trust_remote_code=False, local_files_only=Path(source).is_dir()
    )
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("it has no fast tokenizer (tokenizer.json)")
    return tokenizer.backend_tokenizer, ConvertedTemplates(tokenizer)
