"""A model's chat templates, rendered as ``transformers`` renders them, without it.

What a template finds is of ``transformers`` 5.24 (``utils/chat_template_utils.py``, ``apply_chat_template``
in ``tokenization_utils_base.py``): the settings of its environment, its globals and filters, and what is done
to messages before. It differs by its version, and an engine has its own: where that shows in a chat, the chat
is refused here, and the engine is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.utils import Namespace

from router.conversation import Chat, ContentFormat, InexactError
from router.template_time import certain_time
from router.tool_schemas import ToolSchemas, written

_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Put behind the message that goes on, to find where to cut. Its trailing space tells whether the template
keeps spaces there.
"""


_SCHEMAS = "the tools' schemas"
"""A variable that no template can name."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the model said, for training; here it is only what stands in it."""

    tags = {"generation"}  # noqa: RUF012 : as Jinja has it

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    @staticmethod
    def _said(caller: Any) -> Any:
        return caller()


class _Namespace(Namespace):
    """Without names that begin with an underscore, which could lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no {name!r}")


class _Dict:
    """``dict`` without its other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@jinja2.pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own makes it safe for HTML; this one leaves text as it is."""
    schemas: ToolSchemas | None = context.parent.get(_SCHEMAS)
    dump = schemas.tojson if schemas else written
    return dump(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_OF_DICT = frozenset(dir(dict))
_OF_LOOP = frozenset(name for name in dir(LoopContext) if not name.startswith("_"))


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """With short ways to what templates ask for again and again, which the sandbox comes to as well: a key of
    an object, and what is known of a loop.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _OF_LOOP:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def _environment() -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": certain_time,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


_ENVIRONMENT = _environment()


class ChatTemplates:
    """A model's templates by name, compiled once; ``special_tokens`` are variables of theirs.

    With tools, ``tool_use`` is taken where there is one, else ``default``. A template that cannot be compiled
    refuses every chat.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.sources: Sequence[str] = list(sources.values())
        self._special_tokens = dict(special_tokens)
        self._templates = {name: (_compiled(source), source) for name, source in sources.items()}

    def render(self, chat: Chat) -> str:
        """The text of a chat. Raises InexactError where the template refuses it, or where what comes out
        differs by the version of ``transformers``.
        """
        name = "tool_use" if chat.tools is not None and "tool_use" in self._templates else "default"
        template, source = self._templates.get(name, (None, ""))
        if template is None:
            raise InexactError("template-refused")
        try:
            said = chat.messages
            text = self._rendered(template, source, said, chat)
            if any("reasoning" in message for message in said) and text != self._rendered(
                template, source, _with_thinking(said), chat
            ):
                raise InexactError("reasoning-by-version")
        except InexactError:
            raise
        except Exception as error:  # templates raise what they like; the engine will say what it thinks of it
            raise InexactError("template-refused") from error
        return text

    def _rendered(
        self, template: jinja2.Template, source: str, messages: list[dict[str, Any]], chat: Chat
    ) -> str:
        given = {"add_generation_prompt": False, "documents": None, **self._special_tokens, **chat.kwargs}
        given |= {"tools": chat.tools, _SCHEMAS: chat.schemas}
        continued = given.pop("continue_final_message", False)
        if any(not isinstance(document, dict) for document in given["documents"] or ()):
            raise InexactError("template-refused")
        if not continued:
            return template.render(given, messages=messages)
        if given["add_generation_prompt"] or "content" not in source:
            raise InexactError("template-refused")
        messages, last = _tagged(messages)
        return _cut(template.render(given, messages=messages), last)


def _compiled(source: str) -> jinja2.Template | None:
    try:
        template = _ENVIRONMENT.from_string(source)
    except jinja2.TemplateError:
        return None
    # Jinja's own is a chain of them, which is walked in Python for each chat.
    template.globals = dict(template.globals)
    return template


def _with_thinking(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reasoning under the third of its names too, as of 5.24."""
    return [
        {"thinking": message["reasoning"], **message} if "reasoning" in message else message
        for message in messages
    ]


def _tagged(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The messages, the last one with the tag behind its text, and that text."""
    *before, final = messages
    content = final["content"]
    if isinstance(content, str):
        return [*before, {**final, "content": content + _CONTINUED}], content
    at = max(number for number, part in enumerate(content) if "text" in part)
    text = content[at]["text"]
    parts = [*content[:at], {**content[at], "text": text + _CONTINUED}, *content[at + 1 :]]
    return [*before, {**final, "content": parts}], text


def _cut(rendered: str, last: str) -> str:
    tag = _CONTINUED.strip()
    if last.strip() not in rendered or tag not in rendered:
        raise InexactError("template-refused")
    at = rendered.rindex(tag)
    kept = rendered[:at]
    return kept if rendered.startswith(_CONTINUED, at) else kept.rstrip()


def content_format(sources: Sequence[str]) -> ContentFormat:
    """What templates seem to want of a message's content, where no engine can be asked: parts if one goes
    through something called content.
    """
    return "openai" if any(_loops_over_content(source) for source in sources) else "string"


def _loops_over_content(source: str) -> bool:
    try:
        parsed = _ENVIRONMENT.parse(source)
    except jinja2.TemplateError:
        return False
    for loop in parsed.find_all(jinja2.nodes.For):
        for node in [
            loop.iter,
            *loop.iter.find_all((jinja2.nodes.Getattr, jinja2.nodes.Getitem, jinja2.nodes.Name)),
        ]:
            named = getattr(
                node, "attr", getattr(node, "name", getattr(getattr(node, "arg", None), "value", None))
            )
            if named == "content":
                return True
    return False
