"""A chat as its template gets it, made of the request's JSON as vLLM makes it.

vLLM checks messages and tools against schemas, which drops and reorders fields, and turns tool calls'
arguments into objects (0.32: ``renderers/chat_utils.py``,
``entrypoints/openai/chat_completion/protocol.py``). What is not sure to come out the same here raises
InexactError: the engine is asked then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from router.prompt import RequestBody, given, plain
from router.tool_schemas import SchemaCache, ToolSchemas

ContentFormat = Literal["string", "openai"]
"""Whether a template gets a message's content as one text, or as a list of parts."""

_ROLES = frozenset({"system", "user", "assistant", "tool"})
_BILLING_HEADER = "x-anthropic-billing-header"
_TEMPLATE_ARGUMENTS = frozenset(
    {
        "self",
        "conversation",
        "conversations",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "sanitize_control_tokens",
        "tokenizer_kwargs",
    }
)
"""Names that mean something to transformers' ``apply_chat_template`` before the template sees them."""
_MEDIA = {"image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio"}
"""What a part with other than text becomes for a template that gets parts (0.32:
``_parse_chat_message_content_part``).
"""
_Media = Literal["refused", "as-given", "replaced"]
_STAND_INS: dict[_Media, str] = {"as-given": "\ue000", "replaced": "\ue001"}
"""Characters for private use: no template and no text begins alike with both."""


class InexactError(Exception):
    """What the engine's template would get is not known for sure; ``code`` is a bounded label that says
    why.
    """

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Chat(msgspec.Struct, frozen=True):
    """What a template is applied to, and whether the tokenizer adds special tokens of its own.

    ``kwargs`` hold ``add_generation_prompt`` and ``continue_final_message`` too. ``schemas`` know the
    ``tools`` as JSON.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    kwargs: dict[str, Any]
    add_special_tokens: bool = False
    schemas: ToolSchemas | None = None


def read_chat(body: RequestBody, content_format: ContentFormat) -> Chat:
    """The chat of a request, all of it text. Raises InexactError."""
    return _read_chat(body, content_format, "refused")


def read_media_chat(body: RequestBody, content_format: ContentFormat) -> tuple[Chat, Chat]:
    """A chat with images and the like as its template gets it, and with something else in their place.

    Up to the first of them, both are rendered alike. Where a template gets one text, vLLM puts placeholders
    into it that only the model knows, and where only it knows: something else stands for all of the message
    then, in both. Raises InexactError.
    """
    return _read_chat(body, content_format, "as-given"), _read_chat(body, content_format, "replaced")


def _read_chat(body: RequestBody, content_format: ContentFormat, media: _Media) -> Chat:
    if given(body.chat_template):
        raise InexactError("chat-template-in-request")
    messages = body.said
    if not isinstance(messages, list) or not messages:
        raise InexactError("messages")
    schemas = _schemas(body)
    return Chat(
        [_message(message, content_format, media) for message in messages],
        schemas.schemas if schemas else None,
        _kwargs(body),
        _flag(body.add_special_tokens, False),
        schemas,
    )


_seen = SchemaCache()


def knows_tools(body: RequestBody) -> bool:
    """Whether the tools of a request, if it has any, were read before."""
    return not given(body.tools) or _seen.get(memoryview(body.tools)) is not None


def _schemas(body: RequestBody) -> ToolSchemas | None:
    if not given(body.tools):
        return None
    field = memoryview(body.tools)
    found = _seen.get(field)
    if found is None:
        found = ToolSchemas(_tools(plain(body.tools)), len(field))
        _seen.put(field, found)
    return found


def _flag(field: msgspec.Raw, default: bool) -> bool:
    if not given(field):
        return default
    value = plain(field)
    if not isinstance(value, bool):
        raise InexactError("flag")
    return value


def _kwargs(body: RequestBody) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    if given(body.chat_template_kwargs):
        kwargs = plain(body.chat_template_kwargs)
        if not isinstance(kwargs, dict) or not _TEMPLATE_ARGUMENTS.isdisjoint(kwargs):
            raise InexactError("chat-template-kwargs")
        if any(value is None or value == "auto" for value in kwargs.values()):
            # 0.32 takes them for not given (``renderers/params.py``: ``merge_kwargs``), others may not.
            raise InexactError("chat-template-kwargs")
    if given(body.reasoning_effort):
        effort = plain(body.reasoning_effort)
        if effort == "auto":
            raise InexactError("reasoning-effort")
        kwargs.setdefault("enable_thinking", effort != "none")
        kwargs["reasoning_effort"] = effort
    if given(body.documents):
        kwargs["documents"] = plain(body.documents)
    return kwargs | {
        "add_generation_prompt": _flag(body.add_generation_prompt, True),
        "continue_final_message": _flag(body.continue_final_message, False),
    }


def _message(message: Any, content_format: ContentFormat, media: _Media) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise InexactError("role")
    role = message["role"]
    content = _content(message.get("content"), role, content_format, media)
    made: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        made |= _assistant(message)
    elif role == "tool" and "tool_call_id" in message:
        if not isinstance(message["tool_call_id"], str):
            raise InexactError("tool-call-id")
        made["tool_call_id"] = message["tool_call_id"]
    made |= {name: message[name] for name in ("name", "task") if isinstance(message.get(name), str)}
    return made


def _content(
    content: Any, role: str, content_format: ContentFormat, media: _Media
) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        if role == "system" and content.startswith(_BILLING_HEADER):
            raise InexactError("billing-header")
        as_parts = content_format == "openai" and role != "tool"
        return [{"type": "text", "text": content}] if as_parts else content
    parts = [] if content is None else content
    if not isinstance(parts, list):
        raise InexactError("content")
    made = [_part(part, role, media) for part in parts]
    if role == "system" and any(part["text"].startswith(_BILLING_HEADER) for part in made):
        raise InexactError("billing-header")
    if content_format == "openai" and role != "tool":
        return made
    if media != "refused" and any(_modality(part, role) for part in parts):
        return _STAND_INS[media]
    texts = [part["text"] for part in made]
    return "\n".join(texts if content_format == "openai" else filter(None, texts))


def _part(part: Any, role: str, media: _Media) -> dict[str, Any]:
    if media != "refused" and (modality := _modality(part, role)) is not None:
        stand_in = {"type": "text", "text": _STAND_INS[media]}
        return {"type": modality} if media == "as-given" else stand_in
    if isinstance(part, str) and role == "user":
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InexactError("content-part")
    if not part.keys() <= {"type", "text", "cache_control"}:
        raise InexactError("content-part")
    return {"type": "text", "text": part["text"], **part}


def _modality(part: Any, role: str) -> str | None:
    """``image``, ``video`` or ``audio`` for such a part of a plain form."""
    if role != "user" or not isinstance(part, dict):
        return None
    kind = part.get("type")
    if not isinstance(kind, str) or part.keys() != {"type", kind} or not isinstance(part[kind], dict):
        return None
    return _MEDIA.get(kind) if part[kind].get("url") or part[kind].get("data") else None


def _assistant(message: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise InexactError("tool-calls")
        made["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise InexactError("reasoning")
        made |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return made


def _tool_call(call: Any) -> dict[str, Any]:
    """Its fields in the order of the schema, and the others, as ``index``, behind them."""
    if not isinstance(call, dict) or call.get("type") != "function" or not isinstance(call.get("id"), str):
        raise InexactError("tool-calls")
    function = call.get("function")
    if not isinstance(function, dict) or function.keys() != {"name", "arguments"}:
        raise InexactError("tool-calls")
    if not isinstance(function["name"], str) or not isinstance(function["arguments"], str):
        raise InexactError("tool-calls")
    function = {"arguments": _arguments(function["arguments"]), "name": function["name"]}
    return {"id": call["id"], "function": function, "type": "function"} | {
        name: value for name, value in call.items() if name not in ("id", "function", "type")
    }


def _arguments(text: str) -> dict[str, Any]:
    """What is no JSON object becomes an empty one, as there."""
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        value = {}
    return value if isinstance(value, dict) else {}


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list) or not tools:
        raise InexactError("tools")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function" or "defer_loading" in tool:
        raise InexactError("tools")
    function = tool.get("function")
    if not isinstance(function, dict) or "defer_loading" in function:
        raise InexactError("tools")
    name, description = function.get("name"), function.get("description")
    parameters, strict = function.get("parameters"), function.get("strict")
    if (
        not isinstance(name, str)
        or not isinstance(description, str | None)
        or not isinstance(parameters, dict | None)
        or not isinstance(strict, bool | None)
    ):
        raise InexactError("tools")
    made: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    if strict is not None:
        made["strict"] = strict
    return {"type": "function", "function": made}
