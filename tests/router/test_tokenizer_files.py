"""Models' folders, read here and by ``transformers``: tokens, templates and their variables are the same."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers", reason="the extra local-tokenizer is not installed")

from router.conversation import read_chat  # noqa: E402
from router.local_tokenizer import TokenizerLoadError, load_tokenizer  # noqa: E402
from router.prompt import read_body  # noqa: E402
from router.token_cache import TokenCache  # noqa: E402
from router.tokenizer_files import NotPlainError, read_files  # noqa: E402
from tests.router import small_tokenizer  # noqa: E402
from tests.router.chats import text  # noqa: E402

Change = Callable[[Path, dict[str, Any], dict[str, Any]], None]


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content, **plain, **flags}


def as_it_is(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> None: ...


def added_tokens_with_other_flags(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    config["added_tokens_decoder"] = {
        "400": token("<new>", special=False),
        "1": token("</s>", lstrip=True, rstrip=True),
        "0": token("<s>"),
        "30": token("word", normalized=True, special=False),
    }


def tokens_that_only_the_configuration_names(
    folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]
) -> None:
    config["added_tokens_decoder"] = {"0": token("<s>"), "1": token("</s>")}
    config |= {
        "pad_token": "<pad>",
        "unk_token": None,
        "image_token": "<image>",
        "mask_token": {"__type": "AddedToken", **token("<mask>", lstrip=True)},
        "extra_special_tokens": ["<x1>", "<x2>", "<pad>"],
    }


def named_extra_tokens(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    config["added_tokens_decoder"] = {"0": token("<s>"), "1": token("</s>")}
    config["extra_special_tokens"] = {"audio_token": "<audio>", "eoi_token": "</i>"}
    config["additional_special_tokens"] = ["<never>"]


def old_files(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    del config["bos_token"]
    named = {"bos_token": {**token("<s>"), "normalized": True}, "cls_token": "<cls>"}
    del named["bos_token"]["special"]  # type: ignore[attr-defined]
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    (folder / "added_tokens.json").write_text(json.dumps({"<b>": 401, "<a>": 400, "<cls>": 399}))


def additional_tokens(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    config["additional_special_tokens"] = ["<one>", "<two>"]


def truncation_and_padding(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    tokenizer["truncation"] = {
        "max_length": 5,
        "stride": 0,
        "strategy": "LongestFirst",
        "direction": "Right",
    }
    tokenizer["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Left",
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<s>",
        "pad_to_multiple_of": None,
    }


def a_bos_token_of_the_post_processor(
    folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]
) -> None:
    config |= {"add_bos_token": False, "add_eos_token": True}  # the file says it
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }


def special_tokens_in_text(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    config["split_special_tokens"] = True


def a_normalizer(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    tokenizer["normalizer"] = {"type": "NFC"}
    config["added_tokens_decoder"] = {"2": token("é", normalized=True, special=False)}


def a_template_in_a_file(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    (folder / "chat_template.jinja").write_text("file {{ messages[0].content }}\n")


def more_templates(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    a_template_in_a_file(folder, config, tokenizer)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ tools | length }}")


def named_templates(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    config["chat_template"] = [
        {"name": "default", "template": "{{ bos_token }}{{ image_token }}"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]


def no_template(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    del config["chat_template"]


CHANGES: list[Change] = [
    as_it_is,
    added_tokens_with_other_flags,
    tokens_that_only_the_configuration_names,
    named_extra_tokens,
    old_files,
    additional_tokens,
    truncation_and_padding,
    a_bos_token_of_the_post_processor,
    special_tokens_in_text,
    a_normalizer,
    a_template_in_a_file,
    more_templates,
    named_templates,
    no_template,
]
TEXTS = ["<new>x<pad> <mask> word </s> a", "<x1><x2><audio></i><image><a><b><cls><one><two>", "e\u0301 Word"]


NAMES = ("bos", "eos", "pad", "cls", "mask", "image", "audio", "eoi")


def changed(folder: Path, change: Change) -> Path:
    small_tokenizer.save(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config["chat_template"] += (
        "{{ bos_token }}{{ image_token }}{{ audio_token }}{{ pad_token }}{{ cls_token }}"
    )
    change(folder, config, tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_ix09_a_folder_says_what_it_says_to_transformers(change: Change, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
    folder, rng = changed(tmp_path, change), random.Random(3)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(str(folder), "m#1", TokenCache(10_000))
    assert ours.is_plain
    for prompt in [*TEXTS, *(text(rng, 6) for _ in range(60))]:
        for add in (False, True):
            assert list(ours.encode(prompt, add)) == theirs(prompt, add_special_tokens=add)["input_ids"]
    assert ours._backend.get_added_tokens_decoder() == theirs.backend_tokenizer.get_added_tokens_decoder()
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        fields = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
        said = read_chat(read_body(json.dumps(fields).encode()), "string")
        if theirs.chat_template is not None:
            made = theirs.apply_chat_template(said.messages, tools=said.tools, tokenize=False, **said.kwargs)
            assert ours.render(said) == made


def test_a_folder_that_asks_for_code_is_not_plain(tmp_path: Path) -> None:
    def asks(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
        config["auto_map"] = {"AutoTokenizer": ["a.B", None]}

    with pytest.raises(NotPlainError, match="auto_map"):
        read_files(changed(tmp_path, asks))


@pytest.mark.parametrize("odd", [{"added_tokens_decoder": {"0": 5}}, {"bos_token": {"content": "x", "a": 1}}])
def test_a_token_that_is_not_understood_is_not_guessed(odd: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(NotPlainError, match="is not understood"):
        read_files(changed(tmp_path, lambda folder, config, tokenizer: config.update(odd)))


def test_a_folder_without_tokenizer_json_is_read_by_transformers_or_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = changed(tmp_path, as_it_is)
    (folder / "tokenizer.json").unlink()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerLoadError, match=r"there is no tokenizer.json.*warmroute\[transformers\]"):
        load_tokenizer(str(folder), "m#1", TokenCache(10_000))


def test_transformers_is_not_imported_for_files_that_say_it_all(tmp_path: Path) -> None:
    program = (
        "import sys; from router.local_tokenizer import load_tokenizer as load;"
        "from router.token_cache import TokenCache;"
        f"assert load({str(small_tokenizer.save(tmp_path))!r}, 'm', TokenCache(9)).is_plain;"
        "assert not {'transformers', 'huggingface_hub'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
