"""The settings in effect: of flags, environment and file, checked; errors name the key and the value."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from cli.errors import ERRORS, StartError
from cli.options import PREFIX
from indexer.settings import IndexerSettings
from router.errors import SettingsError
from router.rules import Rule
from router.settings import RouterSettings
from simulator.settings import EngineSettings

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "indexer": IndexerSettings,
    "router": RouterSettings,
    "engine": EngineSettings,
}
SHOWS_SOURCES = "`warmroute config` shows the sources"

Config = msgspec.defstruct(
    "Config",
    [(name, section, msgspec.field(default_factory=section)) for name, section in SECTIONS.items()],
    forbid_unknown_fields=True,
)


def settings_of(name: str, values: dict[str, Any]) -> Any:
    try:
        settings: Any = msgspec.convert(values, SECTIONS[name])
        settings.check()
    except msgspec.ValidationError as error:
        raise StartError(f"{name} settings: {_as_flag(str(error), values)}; {SHOWS_SOURCES}") from error
    except ERRORS as error:
        raise StartError(f"{name} settings: {error}; {SHOWS_SOURCES}") from error
    return settings


def _as_flag(error: str, values: dict[str, Any]) -> str:
    """A validation error as one who wrote a flag reads it: with the flag and its value, not msgspec's path.

    ``Expected `int` >= 1 - at `$.workers` `` becomes ``--workers 0: Expected `int` >= 1``.
    """
    problem, _, path = error.partition(" - at `$.")
    place = re.match(r"([a-z_]+)(?:\[(\d+)\])?(.*)`", path)
    if place is None:
        return error
    field, index, inner = place.groups()
    value = values[field] if index is None else values[field][int(index)]
    shown = json.dumps(value) if isinstance(value, dict) else value
    within = f" at `{inner.lstrip('.')}`" if inner else ""
    meant = _hint(error.replace("`$.", "`$.router."), {}) if index is not None else ""
    return f"--{field.replace('_', '-')} {shown}: {problem}{within}{meant}"


def read_config(path: Path) -> dict[str, Any]:
    """A TOML file, checked whole: unknown keys and bad values are refused with their path."""
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
        msgspec.convert(tables, Config)
    except OSError as error:
        raise StartError(f"cannot read --config {path}: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise StartError(f"--config {path}: {error} (`$` is the file){_hint(str(error), tables)}") from error
    except ValueError as error:
        raise StartError(f"--config {path} is no TOML: {error}") from error
    return tables


def reread(context: click.Context, values: dict[str, Any], path: Path | None) -> RouterSettings:
    """The router's settings with what the file says now. Flags and the environment cannot have changed.

    Raises SettingsError.
    """
    fields = {field.name: field.default for field in msgspec.structs.fields(RouterSettings)}
    given = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    try:
        said = read_config(path).get("router", {}) if path is not None else {}
        now = {
            name: values[name] if context.get_parameter_source(name) in given else said.get(name, default)
            for name, default in fields.items()
        }
        settings: RouterSettings = settings_of("router", now)
    except StartError as error:
        raise SettingsError(error.format_message()) from error
    return settings


def _hint(error: str, tables: dict[str, Any]) -> str:
    """What a validation error leaves out: the value that is of the wrong type, or what may have been meant by
    a key that does not exist, and where to read what there is.
    """
    section, *rest = re.findall(r"[.]([a-z_]+)", error.partition(" - at `$")[2]) or [""]
    found = re.search(r"unknown field `(.*?)`", error)
    if found is None:
        value: Any = tables.get(section, {})
        for key in rest:
            value = value.get(key) if isinstance(value, dict) else None
        return f"; it says {value!r}" if rest and value is not None else ""
    if not section:
        known, where = list(SECTIONS), ""
    elif rest:  # inside of a rule
        known, where = [field.name for field in msgspec.structs.fields(Rule)], ""
    else:
        known = [field.name for field in msgspec.structs.fields(SECTIONS[section])]
        where = f"; `warmroute {section} --help` lists them"
    meant = difflib.get_close_matches(found[1].lower().replace("-", "_"), known, n=1)
    if meant:
        return f"; is {meant[0]!r} meant?"
    return where or f"; known are {', '.join(known)}"


def warn_of_misspelt_variables() -> None:
    """Other names with our prefix are none of our business: Kubernetes makes such for its services."""
    known = {f"{PREFIX}CONFIG", f"{PREFIX}LOG_LEVEL"}
    for name, section in SECTIONS.items():
        known |= {f"{PREFIX}{name}_{field.name}".upper() for field in msgspec.structs.fields(section)}
    for name in os.environ:
        if name.startswith(PREFIX) and name not in known:
            meant = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
            if meant:
                logging.getLogger("warmroute").warning("%s is no setting; is %s meant?", name, meant[0])
