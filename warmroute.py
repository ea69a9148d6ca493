"""The front door: the ``warmroute`` command."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import importlib
import importlib.util
import json
import logging
import os
import re
import signal
import tomllib
import types
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import click
import msgspec
from click.core import ParameterSource

from events.schema import EventError
from indexer.errors import IndexerError
from indexer.settings import IndexerSettings
from router.errors import RouterError
from router.errors import SettingsError as RouterSettingsError
from router.processes import Worker, Workers
from router.rules import Rule
from router.settings import RouterSettings
from simulator.errors import SimulatorError
from simulator.settings import EngineSettings

__version__ = "0.1.0"

PACKAGES = ("events", "indexer", "router", "simulator")
ERRORS = (EventError, IndexerError, RouterError, SimulatorError)
SECTIONS: dict[str, type[msgspec.Struct]] = {
    "indexer": IndexerSettings,
    "router": RouterSettings,
    "engine": EngineSettings,
}
PREFIX = "WARMROUTE_"
SHOWS_SOURCES = "`warmroute config` shows the sources"
CURVE_FIELDS = ("curve_key", "curve_server", "curve_client")
RECORD_FIELDS = tuple(name for name in RouterSettings.__struct_fields__ if name != "workers")
"""One process writes a recording."""
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
WORKER_LOG_FORMAT = "%(asctime)s %(levelname)s worker {number} %(name)s: %(message)s"
SOURCES = {"DEFAULT": "default", "DEFAULT_MAP": "config file", "ENVIRONMENT": "environment"}

Config = msgspec.defstruct(
    "Config",
    [(name, section, msgspec.field(default_factory=section)) for name, section in SECTIONS.items()],
    forbid_unknown_fields=True,
)


class StartError(click.ClickException):
    """A command that cannot start: one line, exit code 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {self.format_message()}", err=True, file=file)


def _told(error: click.UsageError) -> str:
    """A usage error in one line, which names the variable when the value is from the environment."""
    command = error.ctx.command_path if error.ctx is not None else "warmroute"
    message = error.format_message()
    parameter = error.param if isinstance(error, click.BadParameter) else None
    if parameter is not None and parameter.name and error.ctx is not None:
        source = error.ctx.get_parameter_source(parameter.name)
        if source is ParameterSource.ENVIRONMENT:
            message = f"{error.ctx.auto_envvar_prefix}_{parameter.name.upper()}: {error.message}"
    if isinstance(error, click.NoSuchOption):
        of_all = {flag for each in main.params for flag in each.opts}
        if error.option_name in of_all and error.ctx is not None:
            message += (
                f" It goes in front of the command: warmroute {error.option_name} ... {error.ctx.info_name}."
            )
    return f"{message} See `{command} --help`."


# settings: one struct a section, made into flags, environment variables and TOML keys


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


class _Grouped(click.Command):
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


def _in_environment(command: str, setting: str) -> str:
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


def _settings(name: str, values: dict[str, Any]) -> Any:
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


def _read_config(path: Path) -> dict[str, Any]:
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


def _run(service: str, name: str, values: dict[str, Any], **more: Any) -> None:
    """Runs a service until it is told to stop; what keeps it from starting is one line."""
    module = importlib.import_module(service)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(module.serve(_settings(name, values), **more))
    except ERRORS as error:
        raise StartError(str(error)) from error


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loops where it is installed (extra ``uvloop``), else asyncio's own."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory


def _check_packages() -> None:
    """General package names must be this program's own, not another distribution's."""
    here = Path(__file__).resolve().parent
    for name in PACKAGES:
        found = Path(importlib.import_module(name).__file__ or "").resolve().parent.parent
        if found != here:
            raise StartError(
                f"the package {name!r} comes from {found}, not from {here}: another distribution has that "
                "name; install warmroute alone (pipx, uv tool, or a virtual environment of its own)"
            )


def _quiet() -> None:
    """For commands whose output is a result: only warnings are logged."""
    root = logging.getLogger()
    root.setLevel(max(root.level, logging.WARNING))


def _console(**options: Any) -> Any:
    """For commands that print. A service never does, and goes without the 2 MB that ``rich`` takes."""
    from rich.console import Console  # noqa: PLC0415

    return Console(**options)


def _status(text: str) -> AbstractContextManager[Any]:
    """Says on the terminal what takes its time."""
    from rich.text import Text  # noqa: PLC0415

    status: AbstractContextManager[Any] = _console(stderr=True).status(Text(text))
    return status


def _warn_of_misspelt_variables() -> None:
    """Other names with our prefix are none of our business: Kubernetes makes such for its services."""
    known = {f"{PREFIX}CONFIG", f"{PREFIX}LOG_LEVEL"}
    for name, section in SECTIONS.items():
        known |= {f"{PREFIX}{name}_{field.name}".upper() for field in msgspec.structs.fields(section)}
    for name in os.environ:
        if name.startswith(PREFIX) and name not in known:
            meant = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
            if meant:
                logging.getLogger("warmroute").warning("%s is no setting; is %s meant?", name, meant[0])


# commands


@click.group(
    context_settings={
        "auto_envvar_prefix": PREFIX.rstrip("_"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 120,
    },
)
@click.version_option(__version__, prog_name="warmroute")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="TOML file with a table per command, such as [router].",
    show_envvar=True,
)
@click.option(
    "--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True, show_envvar=True
)
@click.pass_context
def main(context: click.Context, config: Path | None, log_level: str) -> None:
    """Routes every LLM request to the replica whose KV cache is already warm.

    Start with `warmroute demo`. Every setting is a flag, an environment variable (WARMROUTE_ROUTER_LISTEN)
    and a key of the --config file ([router] listen = "...").
    """
    logging.basicConfig(level=log_level.upper(), format=LOG_FORMAT)
    _check_packages()
    _warn_of_misspelt_variables()
    if config is not None:
        tables = _read_config(config)
        routing = tables.get("router", {})
        indexing = tables.get("indexer", {})
        keys = {name: indexing[name] for name in CURVE_FIELDS if name in indexing}
        looked_at = {name: routing[name] for name in ("replica", "indexer") if name in routing}
        looked_at |= {"folder": routing["map"]} if "map" in routing else {}
        context.default_map = {**tables, "record": routing | keys, "doctor": looked_at | keys}


@main.group(
    invoke_without_command=True,
    subcommand_metavar="[COMMAND DIR]",
    epilog=_in_environment("indexer", "map_size"),
)
@settings_options(IndexerSettings)
@click.pass_context
def indexer(context: click.Context, /, **values: Any) -> None:
    """Keeps the map of which replica holds which KV block.

    Without a command, runs the indexer. The commands look after the map in a folder; the settings are not
    for them.
    """
    if context.invoked_subcommand is None:
        _run("indexer.service", "indexer", values)


map_folder = click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")


@indexer.command()
@map_folder
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(folder: Path, as_json: bool) -> None:
    """Verifies every invariant between the tables of the map in DIR.

    Also beside a running indexer. Exits with 1 if there are violations, with 2 if the map cannot be read.
    """
    from indexer.check import check_folder  # noqa: PLC0415

    try:
        with _status(f"checking {folder}"):
            report = check_folder(folder)
    except IndexerError as error:
        raise StartError(str(error)) from error
    if as_json:
        click.echo(json.dumps({"clean": report.clean, **msgspec.to_builtins(report)}))
    else:
        _print_report(report)
    if not report.clean:
        raise SystemExit(1)


def _print_report(report: Any) -> None:
    for violation in report.violations:
        click.echo(f"{violation.table}: {violation.key}: {violation.problem}")
    if report.found > len(report.violations):
        click.echo(f"... and {report.found - len(report.violations):,} more")
    entries = ", ".join(f"{count:,} {table}" for table, count in report.entries.items())
    click.echo(f"{report.found or 'no'} violations; {report.streams} current streams; rows: {entries}")
    if report.commits_behind:
        click.echo(f"the indexer is running: it made {report.commits_behind} commits meanwhile")


@indexer.command()
@map_folder
def compact(folder: Path) -> None:
    """Makes the file of the map in DIR as small as what it holds.

    Stop its indexer first, and the routers that read it.
    """
    from indexer.compact import compact as compact_map  # noqa: PLC0415

    try:
        with _status(f"compacting {folder}"):
            done = compact_map(folder)
    except IndexerError as error:
        raise StartError(str(error)) from error
    click.echo(f"{folder}: {done.before:,} bytes before, {done.after:,} after")


@indexer.command()
@map_folder
def dump(folder: Path) -> None:
    """Prints streams and blocks of the map in DIR as lines of JSON.

    First the streams, then the blocks with their holders. Hashes only, never tokens or salts. The last line
    counts them.
    """
    from indexer.dump import dump_lines  # noqa: PLC0415
    from indexer.shard_reader import open_map  # noqa: PLC0415

    try:
        with contextlib.closing(open_map(folder)) as reader:
            for page in dump_lines(reader):
                click.echo(page, nl=False)
    except IndexerError as error:
        raise StartError(str(error)) from error


@main.command(cls=_Grouped, epilog=_in_environment("router", "queue_limit"))
@settings_options(RouterSettings)
@click.pass_context
def router(context: click.Context, /, **values: Any) -> None:
    """Routes OpenAI requests to the replica with the warmest cache.

    Replicas that are added to or taken from the --config file come and go while it runs, also at SIGHUP.
    """
    path = context.parent.params.get("config") if context.parent is not None else None
    more = {"reread": lambda: _reread(context, values, path), "config": path}
    settings: RouterSettings = _settings("router", values)
    if settings.workers == 1:
        _run("router.service", "router", values, **more)
        return
    try:
        code = Workers(settings, lambda worker: _work(worker, values, more)).run()
    except RouterError as error:
        raise StartError(str(error)) from error
    raise SystemExit(code)


def _work(worker: Worker, values: dict[str, Any], more: dict[str, Any]) -> None:
    """One of several router processes. All write to one log, so each of its lines says whose it is."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter(WORKER_LOG_FORMAT.format(number=worker.number)))
    try:
        _run("router.service", "router", values, worker=worker, **more)
    except StartError as error:
        error.show()
        raise SystemExit(error.exit_code) from error


def _reread(context: click.Context, values: dict[str, Any], path: Path | None) -> RouterSettings:
    """The router's settings with what the file says now. Flags and the environment cannot have changed.

    Raises SettingsError.
    """
    fields = {field.name: field.default for field in msgspec.structs.fields(RouterSettings)}
    given = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    try:
        said = _read_config(path).get("router", {}) if path is not None else {}
        now = {
            name: values[name] if context.get_parameter_source(name) in given else said.get(name, default)
            for name, default in fields.items()
        }
        settings: RouterSettings = _settings("router", now)
    except StartError as error:
        raise RouterSettingsError(error.format_message()) from error
    return settings


@main.command()
@click.argument("name", type=click.Path(path_type=Path), metavar="NAME")
def keygen(name: Path) -> None:
    """Makes CURVE keys for events.

    NAME.key is to give away, NAME.key_secret (mode 0600) to keep. They are for
    `warmroute indexer --curve-key`, and for what publishes: a proxy beside each engine.
    """
    from events.curve import write_pair  # noqa: PLC0415

    try:
        public, secret = write_pair(name)
    except EventError as error:
        raise StartError(str(error)) from error
    click.echo(f"{public}: the public key, for the others\n{secret}: both keys, for {name.name} alone")


@main.command(epilog=_in_environment("engine", "block_size"))
@settings_options(EngineSettings)
def engine(**values: Any) -> None:
    """Simulates a vLLM replica without a GPU.

    It has a cache, events and an HTTP API as vLLM has them; its answers are made-up words. To play with, and
    to try a set-up before it gets a model.
    """
    _run("simulator.engine", "engine", values)


@main.command()
@click.option(
    "--replica", multiple=True, metavar="LINE", help="A replica, as for `warmroute router`; may be repeated."
)
@click.option("--indexer", metavar="URL", help="The indexer: what it says of the replicas is looked at too.")
@click.option(
    "--map",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The map that a router on this host reads; its indexer is asked, unless --indexer names one.",
)
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0.0),
    default=5.0,
    show_default=True,
    help="How long to listen, seconds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@settings_options(IndexerSettings, CURVE_FIELDS)
def doctor(
    replica: tuple[str, ...],
    indexer: str | None,
    folder: Path | None,
    wait_s: float,
    as_json: bool,
    **keys: Any,
) -> None:
    """Says why no events come of a replica, or that all is well.

    Looks at its HTTP API and metrics, its event and replay ports, listens to its events, reads the map, and
    asks the indexer. With --config it looks at what [router] says there. Changes nothing. Exits with 1 if
    something is wrong.
    """
    _quiet()
    if not replica and indexer is None and folder is None:
        raise StartError("give --replica LINE, --indexer URL, --map DIR, or a --config file with a [router]")
    try:
        findings = asyncio.run(_examine(replica, indexer, folder, wait_s, _curve(keys)))
    except ERRORS as error:
        raise StartError(str(error)) from error
    if as_json:
        click.echo(json.dumps({"findings": msgspec.to_builtins(findings)}))
    else:
        _print_findings(findings)
    if any(finding.level == "bad" for finding in findings):
        raise SystemExit(1)


def _curve(keys: dict[str, Any]) -> Any:
    """The keys for events that the options of :data:`CURVE_FIELDS` name. Raises EventError."""
    from events.curve import read_curve  # noqa: PLC0415

    return read_curve(*(keys[name] for name in CURVE_FIELDS))


async def _examine(
    lines: tuple[str, ...], indexer: str | None, folder: Path | None, wait_s: float, curve: Any
) -> list[Any]:
    import aiohttp  # noqa: PLC0415

    from events.names import NameResolver  # noqa: PLC0415
    from router.doctor import examine  # noqa: PLC0415
    from router.index_check import check_map  # noqa: PLC0415
    from router.replicas import checked_url, parse_replicas  # noqa: PLC0415

    specs = parse_replicas(lines)
    if indexer is not None:
        checked_url("--indexer", indexer)
    of_folder, kept_by = check_map(folder) if folder is not None else (None, None)
    with _status(f"looking, and listening for {wait_s:g} s"):
        connector = aiohttp.TCPConnector(resolver=NameResolver())
        async with aiohttp.ClientSession(connector=connector) as session:
            looks = examine(specs, indexer or kept_by, session, wait_s=wait_s, curve=curve)
            return [finding async for finding in looks] + ([] if of_folder is None else [of_folder])


def _print_findings(findings: list[Any]) -> None:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table("", "of", "check", "found, and what to do", box=box.SIMPLE_HEAD, pad_edge=False)
    marks = {"ok": Text("ok", "green"), "warning": Text("warning", "yellow"), "bad": Text("bad", "bold red")}
    for finding in findings:
        told = Text(finding.found)
        if finding.fix and finding.level != "ok":
            told.append(f"\n-> {finding.fix}", "bold")
        table.add_row(marks[finding.level], Text(finding.of), Text(finding.check), told)
    console = _console(highlight=False)
    console.print(table)
    counts = Counter(finding.level for finding in findings)
    console.print(
        ", ".join(f"{counts[level]} {level}" for level in ("bad", "warning", "ok") if counts[level])
    )


@main.command(cls=_Grouped, epilog=_in_environment("record", "listen"))
@click.option("--output", required=True, type=click.Path(path_type=Path), help="File to write; must be new.")
@click.option(
    "--one-at-a-time",
    is_flag=True,
    help="Hold each request until the one before is done and quiet, so that `verify` can check all of them.",
)
@settings_options(IndexerSettings, CURVE_FIELDS)
@settings_options(RouterSettings, RECORD_FIELDS)
def record(output: Path, one_at_a_time: bool, **values: Any) -> None:
    """Records requests and events, for `reuse`, `replay` and `verify`.

    A router that writes down: send requests to --listen, end with Ctrl-C. The file holds prompts, answers and
    tokens as they are, whatever the policy; only its owner may read it (mode 0600).
    """
    from router.recorder import record as run_record  # noqa: PLC0415

    keys = {name: values.pop(name) for name in CURVE_FIELDS}
    try:
        settings, curve = _settings("router", values), _curve(keys)
        done = asyncio.run(run_record(settings, output, one_at_a_time=one_at_a_time, curve=curve))
    except (EventError, RouterError) as error:
        raise StartError(str(error)) from error
    counts = f"{done.events} event batches, {done.requests} requests, {done.checkable} of them checkable"
    click.echo(f"{output}: {counts}", err=True)
    if done.requests:
        click.echo(
            f"next: `warmroute reuse {output}` says what can be gained, `warmroute replay {output}` compares "
            f"policies, `warmroute verify {output}` checks the index",
            err=True,
        )
    if done.lost:
        raise StartError(f"{done.lost} lines could not be written to {output}")


@main.command()
@click.argument("recordings", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def verify(recordings: tuple[Path, ...], as_json: bool) -> None:
    """Checks predictions against what engines reported in recordings.

    Exits with 1 if any checked request was predicted wrongly.
    """
    from indexer.verify import verify as verify_recording  # noqa: PLC0415

    _quiet()
    try:
        verdicts = [verify_recording(path) for path in recordings]
    except OSError as error:
        raise StartError(f"cannot read {error.filename}: {error.strerror}") from error
    except (EventError, IndexerError) as error:
        raise StartError(str(error)) from error
    if as_json:
        click.echo(json.dumps({"recordings": msgspec.to_builtins(verdicts)}))
    else:
        _print_verdicts(verdicts)
    if not all(verdict.exact for verdict in verdicts):
        raise SystemExit(1)


def _print_verdicts(verdicts: list[Any]) -> None:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    title = "Predicted against reported cached tokens, request by request"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("recording", "replica"):
        table.add_column(name, no_wrap=True)
    for name in ("checked", "hits", "exact", "over", "under", "restarted"):
        table.add_column(name, justify="right")
    console = _console(markup=False)
    for verdict in verdicts:
        for replica, tally in verdict.replicas.items():
            counts = (tally.checked, tally.hits, tally.exact, tally.over, tally.under, tally.restarted)
            table.add_row(verdict.file, replica, *(str(count) for count in counts))
    console.print(table)
    for verdict in verdicts:
        for miss in verdict.misses:
            console.print(
                f"{verdict.file} request {miss.request} on {miss.replica}: "
                f"predicted {miss.predicted} tokens, reported {miss.reported}"
            )
        if not any(tally.checked for tally in verdict.replicas.values()):
            console.print(f"{verdict.file}: nothing to check, no request in it is marked for it")
        if verdict.unusable:
            console.print(f"{verdict.file}: {verdict.unusable} requests say too little to be checked")


@main.command()
@click.argument("recordings", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the tables.")
@click.option("--top", default=10, show_default=True, help="Places shown of each recording.")
def reuse(recordings: tuple[Path, ...], as_json: bool, top: int) -> None:
    """Says what in recorded prompts breaks their reuse.

    How much engines had cached, how much one cache that forgets nothing would have, and at which places
    prompts part that are alike again behind it. FILE is of `warmroute record`. Shows text of the prompts.
    """
    from router.reuse import measure  # noqa: PLC0415

    _quiet()
    try:
        measured = []
        for path in recordings:
            with _status(f"reading {path}"):
                measured.append(measure(path))
    except OSError as error:
        raise StartError(f"cannot read {error.filename}: {error.strerror}") from error
    except EventError as error:
        raise StartError(str(error)) from error
    if as_json:
        told = [{"verdict": each.verdict(), **msgspec.to_builtins(each)} for each in measured]
        click.echo(json.dumps({"recordings": told}))
        return
    for each in measured:
        _print_reuse(each, top)


def _print_reuse(found: Any, top: int) -> None:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = _console(markup=False, highlight=False)
    console.print(f"{found.file}: {found.requests:,} requests, {found.prompt:,} prompt tokens")
    if found.guessed:
        console.print(f"  tokens of {found.guessed:,} are guessed, four characters each: none were recorded")
    for name, part, whole in (
        ("cached, as engines reported", found.cached, found.reported),
        ("in one cache that forgets nothing", found.reusable, found.prompt),
        ("repeated behind a first difference", found.lost, found.prompt),
    ):
        console.print(f"  {name:<36}{f'{100 * part / whole:.1f} %' if whole else 'not told':>9}")
    if found.breaks:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("where prompts part")
        table.add_column("requests", justify="right")
        table.add_column("tokens lost", justify="right")
        table.add_column("...in common [here | earlier]", overflow="fold")
        for each in found.breaks[:top]:
            text = f"...{each.before}[{each.here} | {each.earlier}]"
            table.add_row(each.place, f"{each.requests:,}", f"{each.lost_tokens:,}", Text(repr(text)[1:-1]))
        console.print(table)
    console.print(found.verdict())


@main.command()
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
@click.option("--seed", default=0, show_default=True, help="Of the traffic; the same for every policy.")
def demo(as_json: bool, seed: int) -> None:
    """Shows what cache-aware routing gains, on simulated engines.

    Takes about a minute and free ports of this machine; starts four engines, the indexer and the router for
    each policy, and leaves nothing behind.
    """
    from simulator.demo import demo as run_demo  # noqa: PLC0415
    from simulator.workload import Shape  # noqa: PLC0415

    _quiet()
    try:
        raise SystemExit(asyncio.run(run_demo(as_json, Shape(seed=seed))))
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    except ERRORS as error:
        raise StartError(str(error)) from error


@main.command()
@click.argument("trace")
@click.option(
    "--policy",
    "policies",
    default="cache-aware,lowest-ttft,session,prefix-hash,least-loaded,round-robin",
    show_default=True,
    help="Policies, separated by commas; `pooled` is the limit: one cache as large as all, and no load.",
)
@click.option("--replicas", default=8, show_default=True, help="How many there are.")
@click.option(
    "--cache-tokens",
    default=1_000_000,
    show_default=True,
    help="Of each replica: `GPU KV cache size` in the log of vLLM.",
)
@click.option(
    "--prefill-rate",
    default=4700.0,
    show_default=True,
    help="Prompt tokens/s of each replica when nothing else runs.",
)
@click.option(
    "--decode-rate",
    type=float,
    help="Tokens/s of each request; a request then keeps its blocks until its answer is done.",
)
@click.option("--routers", default=1, show_default=True, help="Routers that share events and metrics alone.")
@click.option(
    "--event-delay-s", default=0.01, show_default=True, help="From a cache to the index; 0: perfect."
)
@click.option("--slower", default=1.0, show_default=True, help="How many times slower the first replica is.")
@click.option("--restart-at-s", type=float, help="When the first replica restarts, empty.")
@click.option("--added-at-s", type=float, help="When one more replica comes.")
@click.option(
    "--poll-s", default=1.0, show_default=True, help="Between two looks of several routers at the load."
)
@click.option(
    "--spread", is_flag=True, help="Spread requests that a trace stamps alike until its next timestamp."
)
@click.option(
    "--per-s",
    type=float,
    help="Sessions (chats, agents) or requests of a made-up workload that begin in a second.  "
    "[default: what such a fleet can bear]",
)
@click.option("--seed", default=0, show_default=True, help="Of chance, and of a made-up workload.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def replay(
    trace: str,
    policies: str,
    spread: bool,
    per_s: float | None,
    seed: int,
    as_json: bool,
    **shape: Any,
) -> None:
    """Compares policies on a trace, with a simulated fleet.

    On virtual time, with the router's own code. Says when knowing caches is not worth it. TRACE is a file of
    `warmroute record` or in Mooncake's format, or made-up traffic: workload:chats, workload:rag,
    workload:agents, workload:nothing-shared, workload:one-prefix.
    """
    from simulator.comparison import compare, table_of, verdict  # noqa: PLC0415
    from simulator.fleet import Shape  # noqa: PLC0415
    from simulator.replay import load_trace  # noqa: PLC0415

    terminal = _console(stderr=True)
    try:
        requests = load_trace(trace, seed, spread_out=spread, per_s=per_s)
        results = compare(
            requests, [name.strip() for name in policies.split(",")], Shape(seed=seed, **shape), terminal
        )
    except ERRORS as error:
        raise StartError(str(error)) from error
    if as_json:
        click.echo(msgspec.json.encode(results))
    else:
        console = _console(markup=False, highlight=False)
        console.print(table_of(results, f"{trace}, {shape['replicas']} replicas"))
        for sentence in verdict(results):
            console.print(sentence)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_context
def config(context: click.Context, as_json: bool) -> None:
    """Prints the settings in effect, and where each comes from."""
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    rows = []
    for name, section in SECTIONS.items():
        command = main.commands[name]
        inner = command.make_context(name, [], parent=context.parent)
        _settings(name, inner.params)
        for field in msgspec.structs.fields(section):
            source = inner.get_parameter_source(field.name)
            origin = SOURCES.get(source.name, source.name.lower()) if source else "default"
            rows.append(
                {"setting": f"{name}.{field.name}", "value": inner.params[field.name], "source": origin}
            )
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for name in ("value", "from"):
        table.add_column(name, overflow="fold")
    for row in rows:
        # What somebody has set stands out from some ninety settings that nobody touched.
        style = "dim" if row["source"] == SOURCES["DEFAULT"] else None
        table.add_row(row["setting"], _as_written(row["value"]), row["source"], style=style)
    _console(markup=False, highlight=False).print(table)


def _as_written(value: Any) -> str:
    """A setting's value as a flag takes it; nothing for one that is not set."""
    if isinstance(value, tuple):
        return "\n".join(map(_as_written, value))
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, bool | dict) else str(value)


def run() -> None:
    """The entry point: as click's own, but a usage error is one line."""
    try:
        raise SystemExit(main.main(prog_name="warmroute", standalone_mode=False))
    except click.Abort:  # Ctrl-C; 1 says of some commands that they found something wrong
        raise SystemExit(128 + signal.SIGINT) from None
    except click.UsageError as error:
        StartError(_told(error)).show()
        raise SystemExit(StartError.exit_code) from None
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    run()
