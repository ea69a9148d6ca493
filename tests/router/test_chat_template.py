"""Chats through templates, here and by ``transformers``: texts and refusals are the same."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2", reason="the extra local-tokenizer is not installed")

from router.chat_template import ChatTemplates, content_format
from router.conversation import Chat, InexactError, read_chat
from router.prompt import read_body
from tests.router import small_tokenizer
from tests.router.chats import chat

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<i>"}
SMOLLM2 = Path(__file__).parents[3] / "shared" / "data" / "smollm2-tokenizer" / "tokenizer_config.json"
CHATML = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful, today is ' + strftime_now('%Y')[:2] + '.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1, found=false) %}
{%- for m in messages[::-1] %}
    {%- if not ns.found and m.role == 'user' %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
        {%- set ns.found = true %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'system' and loop.first %}{% continue %}{% endif %}
    {%- if m.role == 'tool' %}
        {%- if not loop.previtem or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' }}
        {%- if m.reasoning_content is defined and loop.index0 > ns.last %}
            {{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content | trim }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{ call.function.arguments }}
            {%- else %}{{ call.function.arguments | tojson }}{% endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA = """
{{- bos_token }}
{% macro said(m) -%}
    {% if m.content is string %}{{ m.content | trim }}{% else %}
    {% for part in m.content %}{% if part.type == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}
    {% endif %}
{%- endmacro %}
{% set tail = namespace(system='') %}
{% if messages[0]['role'] == 'system' %}
    {% set tail.system = said(messages[0]) %}
    {% set messages = messages[1:] %}
{% endif %}
{% if not messages %}{{ raise_exception('nobody has said anything') }}{% endif %}
<|header|>system<|end|>
{{ tail.system }}
{% if tools is not none %}{{ tools | tojson(indent=4) }}{% endif %}
{% if documents %}{% for d in documents %}{{ d.title }}: {{ d.text }}{% endfor %}{% endif %}
{% for m in messages %}
    {% if m.role in ['user', 'assistant', 'system'] %}
        {{- '<|header|>' + m['role'] + '<|end|>\n\n' }}
        {% generation %}{{- said(m) }}{% endgeneration %}
        {% for call in m.tool_calls | default([]) %}{{ call | tojson(sort_keys=true) }}{% endfor %}
        {{- eos_token }}
    {% elif m.role == 'tool' %}
        {{- m.content | tojson }}{{ m.tool_call_id }}
    {% endif %}
{% endfor %}
{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}
{% if add_generation_prompt %}<|header|>assistant<|end|>{% endif %}
"""
ALTERNATING = """{{ bos_token }}
{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}
{{ m['content'] + eos_token }}{% endif %}{% endfor %}"""
WHOLE_MESSAGES = (
    "{{ messages | tojson(ensure_ascii=true, separators=(',', ':')) }}{{ messages | length }}"
    "{% for m in messages %}{{ m.items() | list }}{{ m.content }}"
    "{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}"
    "{{ dict(a=1) }}{{ range(3) | list }}{{ image_token }}{{ documents }}{{ nothing }}"
)
THINKING = "{% for m in messages %}{{ m.role }}{{ m.thinking }}{{ m.content }}{% endfor %}"
BROKEN = "{% for m in messages %}"
OUTSIDE = "{{ ''.__class__.__mro__ }}{{ messages[0].content }}"
CHANGING = "{{ messages.append(1) }}{{ messages[0].content }}"
HIDDEN = "{% set n = namespace(_a=1) %}{{ messages[0].content }}"
TEMPLATES = {
    "string": small_tokenizer.STRING,
    "parts": small_tokenizer.PARTS,
    "chatml": CHATML,
    "llama": LLAMA,
    "alternating": ALTERNATING,
    "whole messages": WHOLE_MESSAGES,
    "broken": BROKEN,
    "outside": OUTSIDE,
    "changing": CHANGING,
    "hidden": HIDDEN,
    "none": "",
}
if SMOLLM2.exists():
    TEMPLATES["smollm2"] = json.loads(SMOLLM2.read_text())["chat_template"]


class Theirs:
    """``transformers`` with a template; its tokenizer has no part in it."""

    def __init__(self, template: str | dict[str, str], folder: Path) -> None:
        transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(small_tokenizer.save(folder))
        self._tokenizer.chat_template = template
        self._tokenizer.add_special_tokens({"eos_token": "</s>", "bos_token": "<s>"})
        self._tokenizer._set_model_specific_special_tokens({"image_token": "<i>"})

    def render(self, chat: Chat) -> str | None:
        try:
            made = self._tokenizer.apply_chat_template(
                chat.messages, tools=chat.tools, tokenize=False, **chat.kwargs
            )
        except Exception:  # as templates do
            return None
        assert isinstance(made, str)
        return made


def rendered(templates: ChatTemplates, chat: Chat) -> str | None:
    try:
        return templates.render(chat)
    except InexactError as error:
        return None if error.code == "template-refused" else error.code


def chats(count: int, seed: int) -> list[Chat]:
    rng, made = random.Random(seed), []
    while len(made) < count:
        fields = chat(rng)
        if rng.random() < 0.2:
            fields["documents"] = rng.choice([[{"title": "ä", "text": "b"}], [], ["x"], None])
        for form in ("string", "openai"):
            try:
                made.append(read_chat(read_body(json.dumps(fields).encode()), form))
            except InexactError:
                continue
    return made


@pytest.mark.parametrize("name", TEMPLATES)
def test_ix09_a_chat_has_the_text_that_transformers_gives_it(name: str, tmp_path: Path) -> None:
    theirs = Theirs(TEMPLATES[name], tmp_path)
    ours = ChatTemplates({"default": TEMPLATES[name]}, SPECIAL)
    texts = set()
    for said in chats(150, seed=7):
        text = rendered(ours, said)
        if text == "reasoning-by-version":
            assert any("reasoning" in message for message in said.messages)
            assert name == "whole messages", "no other template sees that it has another name"
            continue
        assert text == theirs.render(said), said
        texts.add(text)
    assert len(texts) > 10 or name in ("broken", "outside", "changing", "hidden", "none")


@pytest.mark.parametrize("name", ["chatml", "llama"])
def test_ix09_tools_that_were_seen_before_have_the_same_text(name: str, tmp_path: Path) -> None:
    theirs = Theirs(TEMPLATES[name], tmp_path)
    ours = ChatTemplates({"default": TEMPLATES[name]}, SPECIAL)
    for content in ("x", "y"):
        for number in (1, 2, 1):
            tools = [{"type": "function", "function": {"name": f"f{number}", "description": "<ä>"}}]
            fields = {"messages": [{"role": "user", "content": content}], "tools": tools}
            said = read_chat(read_body(json.dumps(fields).encode()), "string")
            assert ours.render(said) == theirs.render(said)
            assert said.schemas is read_chat(read_body(json.dumps(fields).encode()), "string").schemas


def test_ix09_a_template_that_another_version_would_render_otherwise_leaves_the_chat_to_the_engine() -> None:
    templates = ChatTemplates({"default": THINKING}, {})
    plain: dict[str, Any] = {"role": "assistant", "content": "c"}
    thought = {**plain, "reasoning": "r", "reasoning_content": "r"}
    assert templates.render(Chat([plain], None, {})) == "assistantc"
    with pytest.raises(InexactError) as raised:
        templates.render(Chat([thought], None, {}))
    assert raised.value.code == "reasoning-by-version"


def test_ix09_with_tools_the_template_for_tools_is_taken(tmp_path: Path) -> None:
    sources = {"default": "plain {{ messages[0].content }}", "tool_use": "tools {{ tools | length }}"}
    theirs, ours = Theirs(sources, tmp_path), ChatTemplates(sources, {})
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        said = Chat([{"role": "user", "content": "x"}], tools, {"add_generation_prompt": True})
        assert ours.render(said) == theirs.render(said)
    without = {"other": "x"}
    assert rendered(ChatTemplates(without, {}), said) is Theirs(without, tmp_path).render(said) is None


def test_ix09_what_the_client_sets_stands_before_the_special_tokens() -> None:
    templates = ChatTemplates({"default": "{{ bos_token }}{{ a }}"}, {"bos_token": "<s>"})
    said = Chat([{"role": "user", "content": "x"}], None, {"bos_token": "<x>", "a": 1})
    assert templates.render(said) == "<x>1"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (small_tokenizer.STRING, "string"),
        (small_tokenizer.PARTS, "openai"),
        (CHATML, "string"),
        (LLAMA, "openai"),
        (BROKEN, "string"),
    ],
)
def test_a_template_that_goes_through_parts_wants_parts(template: str, form: str) -> None:
    assert content_format([template]) == form
