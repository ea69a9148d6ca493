"""What the files of a model say of its tokenizer, read as ``transformers`` reads them.

By ``transformers`` 5.24 (``tokenization_utils_base.py``: ``_from_pretrained``;
``tokenization_utils_tokenizers.py``). The files say all that there is to know where ``tokenizer.json`` is one
of them and nothing asks for code of the library or of the model; else NotPlainError is raised.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
_TOKENS_MAP, _ADDED = "special_tokens_map.json", "added_tokens.json"
_TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"
WANTED = (TOKENIZER, CONFIG, _TOKENS_MAP, _ADDED, _TEMPLATE, f"{_TEMPLATES}/*.jinja")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BY_CODE = ("auto_map", "fast_tokenizer_files", "fix_mistral_regex")
"""What in the configuration is for code to carry out."""


class NotPlainError(Exception):
    """The files alone do not say what the tokenizer is, and why."""


class AddedToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token that is looked for in the text, as files and ``tokenizers.AddedToken`` have it."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False

    def as_arguments(self) -> dict[str, Any]:
        """For ``tokenizers.AddedToken``; one that does not say whether it is normalised is, unless it is
        special.
        """
        said = msgspec.structs.asdict(self)
        return said if self.normalized is not None else said | {"normalized": not self.special}


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """``tokens`` are to be added to those of the ``tokenizer`` file, in place of what it says of them, and
    behind them ``more`` where they are missing, each in its order. ``special_tokens`` are by the name that
    templates know them under, ``templates`` by their own.
    """

    tokenizer: Path
    tokens: tuple[AddedToken, ...]
    more: tuple[AddedToken, ...]
    special_tokens: dict[str, str]
    templates: dict[str, str]
    splits_special_tokens: bool


def fetched(source: str) -> Path:
    """The folder with a model's files: the one that ``source`` names, or that of a model on the Hugging Face
    hub, as far as it is not there already (which may take as long as it takes).

    Raises what ``huggingface_hub`` raises.
    """
    if Path(source).is_dir():
        return Path(source)
    hub: Any = importlib.import_module("huggingface_hub")
    return Path(hub.snapshot_download(source, allow_patterns=list(WANTED)))


def read_files(folder: Path) -> TokenizerFiles:
    """Raises NotPlainError; OSError and ValueError for files that cannot be read."""
    if not (folder / TOKENIZER).is_file():
        raise NotPlainError(f"there is no {TOKENIZER}")
    config = _json(folder / CONFIG)
    by_code = [name for name in _BY_CODE if config.get(name)]
    if by_code:
        raise NotPlainError(f"{CONFIG} has {' and '.join(by_code)}")
    try:
        old = _of_old_files(folder, config)
        named = _named(config)
        added = _added(config, {token.content for token in named.values()})
        extra = [_token(value, special=True) for value in _extra(config)]
    except (msgspec.ValidationError, TypeError, AttributeError) as error:
        raise NotPlainError(f"a token of {CONFIG} is not understood: {error}") from error
    return TokenizerFiles(
        tokenizer=folder / TOKENIZER,
        tokens=tuple(added),
        more=(*old, *named.values(), *extra),
        special_tokens={name: token.content for name, token in named.items()},
        templates=_templates(folder, config),
        splits_special_tokens=bool(config.get("split_special_tokens")),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text("utf-8"))
    if not isinstance(value, dict):
        raise NotPlainError(f"{path.name} is no object")
    return value


def _token(value: Any, *, special: bool = False) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(content=value, special=special)
    fields = {name: said for name, said in value.items() if name != "__type"}
    return msgspec.convert({"special": special, **fields}, AddedToken)


def _added(config: Mapping[str, Any], named: set[str]) -> list[AddedToken]:
    """By their ids. One that has a name is special."""
    found = {int(number): _token(value) for number, value in config.get("added_tokens_decoder", {}).items()}
    tokens = [found[number] for number in sorted(found)]
    return [replace(token, special=token.special or token.content in named) for token in tokens]


def _of_old_files(folder: Path, config: dict[str, Any]) -> list[AddedToken]:
    """Where the configuration has no added tokens, models of before 2023 have files of their own for them and
    for those with a name, which go into ``config`` here.
    """
    if "added_tokens_decoder" in config:
        return []
    for name, value in _json(folder / _TOKENS_MAP).items():
        if name in ("extra_special_tokens", "additional_special_tokens"):
            raise NotPlainError(f"{_TOKENS_MAP} has {name}")
        config[name] = value
    special = {token.content for token in _named(config).values()}
    ids: dict[str, int] = _json(folder / _ADDED)
    return [AddedToken(content=text, special=text in special) for text in sorted(ids, key=ids.__getitem__)]


def _named(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Those with a name for templates: the usual ones, then the model's own."""
    values = {name: config[name] for name in _NAMED if config.get(name) is not None}
    values |= {
        name: value
        for name, value in config.items()
        if name not in _NAMED and name.endswith("_token") and isinstance(value, str)
    }
    more = config.get("extra_special_tokens")
    values |= more if isinstance(more, dict) else {}
    return {name: replace(_token(value, special=True), special=True) for name, value in values.items()}


def _extra(config: Mapping[str, Any]) -> Iterable[Any]:
    """Those without a name."""
    more = config.get("extra_special_tokens")
    return more if more and isinstance(more, list) else config.get("additional_special_tokens") or ()


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Those in files of their own, or else those in the configuration."""
    found = {
        path.name.removesuffix(".jinja"): path.read_text("utf-8")
        for path in (folder / _TEMPLATES).glob("*.jinja")
    }
    if (folder / _TEMPLATE).is_file():
        found.setdefault("default", (folder / _TEMPLATE).read_text("utf-8"))
    if found:
        return found
    said = config.get("chat_template")
    if isinstance(said, list):
        return {one["name"]: one["template"] for one in said}
    if isinstance(said, dict):
        return dict(said)
    return {"default": said} if isinstance(said, str) else {}
