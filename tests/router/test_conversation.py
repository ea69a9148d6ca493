"""``tests/data/vllm-chats.json``: requests, and what vLLM 0.32's own code makes of each for its template
(``ChatCompletionRequest``, then ``_parse_chat_message_content`` and ``_postprocess_messages``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.conversation import ContentFormat, InexactError, read_chat
from router.prompt import RequestBody, read_body

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "vllm-chats.json").read_text())
USER = {"role": "user", "content": "x"}


def body(**fields: Any) -> RequestBody:
    return read_body(json.dumps({"messages": [USER], **fields}).encode())


@pytest.mark.parametrize("form", ["string", "openai"])
def test_ix09_a_template_gets_what_vllm_gives_it_or_the_engine_is_asked(form: ContentFormat) -> None:
    exact = 0
    for recorded in RECORDED:
        try:
            chat = read_chat(read_body(json.dumps(recorded["request"]).encode()), form)
        except InexactError:
            continue
        exact += 1
        assert "refused" not in recorded, recorded["request"]
        # As text, because the order of fields shows where a template prints an object.
        assert json.dumps(chat.messages) == json.dumps(recorded[form])
        assert json.dumps(chat.tools) == json.dumps(recorded["tools"])
        assert chat.kwargs == recorded["kwargs"]
        assert chat.add_special_tokens == recorded["add_special_tokens"]
    assert exact >= 30


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"chat_template": "{{ messages }}"}, "chat-template-in-request"),
        ({"chat_template_kwargs": {"chat_template": "{{ messages }}"}}, "chat-template-kwargs"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat-template-kwargs"),
        ({"chat_template_kwargs": [1]}, "chat-template-kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": None}}, "chat-template-kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": "auto"}}, "chat-template-kwargs"),
        ({"reasoning_effort": "auto"}, "reasoning-effort"),
        ({"add_generation_prompt": "no"}, "flag"),
        ({"continue_final_message": 1}, "flag"),
        ({"messages": []}, "messages"),
        ({"messages": {"a": 1}}, "messages"),
        ({"messages": ["x"]}, "role"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": {"type": "text"}}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]}, "content-part"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "uuid": "u"}]}]},
            "content-part",
        ),
        ({"messages": [{"role": "system", "content": ["x"]}]}, "content-part"),
        ({"messages": [{"role": "system", "content": "x-anthropic-billing-header: y"}]}, "billing-header"),
        ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}]}, "tool-calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": 5}]}]}, "tool-calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f"}}]}]},
            "tool-calls",
        ),
        ({"messages": [{"role": "assistant", "reasoning": 5}]}, "reasoning"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "tools"),
        ({"tools": [{"type": "function", "defer_loading": True, "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_ix09_what_may_come_out_otherwise_is_left_to_the_engine(fields: dict[str, Any], code: str) -> None:
    with pytest.raises(InexactError) as raised:
        read_chat(body(**fields), "string")
    assert raised.value.code == code


def test_reasoning_content_is_reasoning_and_an_explicit_one_wins() -> None:
    said = [
        {"role": "assistant", "content": "x", "reasoning_content": "old"},
        {"role": "assistant", "content": "x", "reasoning_content": "old", "reasoning": "new"},
    ]
    read = read_chat(body(messages=said), "string").messages
    assert [message["reasoning_content"] for message in read] == ["old", "new"]
