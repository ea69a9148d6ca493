"""Settings structs as options of commands: a flag and a variable for each field."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin, get_type_hints

import click
import msgspec

PREFIX = "WARMROUTE_"


def settings_options(section: type[msgspec.Struct], only: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """A click option for each field of a settings struct, or for those named alone."""
    hints = get_type_hints(section, include_extras=True)
    headings: dict[str, str] = getattr(section, "HEADINGS", {})

    def decorate(command: Any) -> Any:
        heading = "Options"
        options = []
        for field in msgspec.structs.fields(section):
            heading = headings.get(field.name, heading)
            if not only or field.name in only:
                options.append(_option(field, hints[field.name], heading))
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


class _Setting(click.Option):
    """An option that stands below ``heading`` in the help."""

    def __init__(self, *args: Any, heading: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


class Grouped(click.Command):
    """A command with so many settings that its help has headings for them."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        below: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                below.setdefault(getattr(param, "heading", "Options"), []).append(record)
        for heading, records in below.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class _Json(click.ParamType):  # type: ignore[type-arg]
    """A table: as the configuration file has it, or JSON in a flag or the environment."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, dict):
            return value
        try:
            table = json.loads(value)
        except ValueError as error:
            self.fail(f"{value!r} is no JSON: {error}", param, ctx)
        if not isinstance(table, dict):
            self.fail(f'{value!r} is no JSON object; write {{"name": value}}', param, ctx)
        return table

    def split_envvar_value(self, rv: str) -> list[Any]:
        """A JSON array of objects; what is none is left to ``convert`` to refuse."""
        try:
            tables = json.loads(rv)
        except ValueError:
            return [rv]
        return tables if isinstance(tables, list) else [tables]


def _is_table(kind: Any) -> bool:
    return get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))


def in_environment(command: str, setting: str) -> str:
    """What the help says below all settings, instead of the variable's name below each."""
    name = f"{PREFIX}{command}_{setting}".upper()
    return f"In the environment each setting is {PREFIX}{command.upper()}_..., such as {name}."


def _option(field: msgspec.structs.FieldInfo, hint: Any, heading: str) -> Callable[[Any], Any]:
    kind, help_text = _kind_and_help(hint)
    repeated = get_origin(kind) is tuple
    tables = _is_table(get_args(kind)[0] if repeated else kind)
    if repeated and tables:
        help_text += " In the environment, a JSON array."
    elif repeated:
        help_text += " In the environment, separated by blanks."
    flag = f"--{field.name.replace('_', '-')}"
    return click.option(
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        type=_Json() if tables else str if repeated else kind,
        default=field.default,
        multiple=repeated,
        help=help_text,
        show_default=field.default not in (None, ()),
        cls=_Setting,
        heading=heading,
    )


def _kind_and_help(hint: Any) -> tuple[Any, str]:
    """The type of ``Annotated[T | None, Meta(description=...)]``, and its description."""
    help_text = ""
    if hasattr(hint, "__metadata__"):
        help_text = next((meta.description for meta in hint.__metadata__ if meta.description), "")
        hint = get_args(hint)[0]
    if get_origin(hint) in (types.UnionType, Union):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if hasattr(hint, "__metadata__"):
        hint = get_args(hint)[0]
    return hint, help_text
