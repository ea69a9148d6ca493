"""The front door: the ``warmroute`` command."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from cli.errors import ERRORS, StartError, told
from cli.options import PREFIX, Grouped, in_environment, settings_options
from cli.settings import SECTIONS, read_config, reread, settings_of, warn_of_misspelt_variables
from cli.tables import (
    DEFAULT,
    new_console,
    show_findings,
    show_report,
    show_reuse,
    show_settings,
    show_verdicts,
    status,
)
from events.schema import EventError
from indexer.errors import IndexerError
from indexer.settings import IndexerSettings
from router.errors import RouterError
from router.processes import Worker, Workers
from router.settings import RouterSettings
from simulator.settings import EngineSettings

__version__ = "0.1.0"

PACKAGES = ("cli", "events", "indexer", "router", "simulator")
CURVE_FIELDS = ("curve_key", "curve_server", "curve_client")
RECORD_FIELDS = tuple(name for name in RouterSettings.__struct_fields__ if name != "workers")
"""One process writes a recording."""
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
WORKER_LOG_FORMAT = "%(asctime)s %(levelname)s worker {number} %(name)s: %(message)s"
SOURCES = {"DEFAULT": DEFAULT, "DEFAULT_MAP": "config file", "ENVIRONMENT": "environment"}


def _run(service: str, name: str, values: dict[str, Any], **more: Any) -> None:
    """Runs a service until it is told to stop; what keeps it from starting is one line."""
    module = importlib.import_module(service)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(module.serve(settings_of(name, values), **more))
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
    warn_of_misspelt_variables()
    if config is not None:
        tables = read_config(config)
        routing = tables.get("router", {})
        indexing = tables.get("indexer", {})
        keys = {name: indexing[name] for name in CURVE_FIELDS if name in indexing}
        looked_at = {name: routing[name] for name in ("replica", "indexer") if name in routing}
        looked_at |= {"folder": routing["map"]} if "map" in routing else {}
        context.default_map = {**tables, "record": routing | keys, "doctor": looked_at | keys}


@main.group(
    invoke_without_command=True,
    subcommand_metavar="[COMMAND DIR]",
    epilog=in_environment("indexer", "map_size"),
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
        with status(f"checking {folder}"):
            report = check_folder(folder)
    except IndexerError as error:
        raise StartError(str(error)) from error
    if as_json:
        click.echo(json.dumps({"clean": report.clean, **msgspec.to_builtins(report)}))
    else:
        show_report(report)
    if not report.clean:
        raise SystemExit(1)


@indexer.command()
@map_folder
def compact(folder: Path) -> None:
    """Makes the file of the map in DIR as small as what it holds.

    Stop its indexer first, and the routers that read it.
    """
    from indexer.compact import compact as compact_map  # noqa: PLC0415

    try:
        with status(f"compacting {folder}"):
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


@main.command(cls=Grouped, epilog=in_environment("router", "queue_limit"))
@settings_options(RouterSettings)
@click.pass_context
def router(context: click.Context, /, **values: Any) -> None:
    """Routes OpenAI requests to the replica with the warmest cache.

    Replicas that are added to or taken from the --config file come and go while it runs, also at SIGHUP.
    """
    path = context.parent.params.get("config") if context.parent is not None else None
    more = {"reread": lambda: reread(context, values, path), "config": path}
    settings: RouterSettings = settings_of("router", values)
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


@main.command(epilog=in_environment("engine", "block_size"))
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
        show_findings(findings)
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
    with status(f"looking, and listening for {wait_s:g} s"):
        connector = aiohttp.TCPConnector(resolver=NameResolver())
        async with aiohttp.ClientSession(connector=connector) as session:
            looks = examine(specs, indexer or kept_by, session, wait_s=wait_s, curve=curve)
            return [finding async for finding in looks] + ([] if of_folder is None else [of_folder])


@main.command(cls=Grouped, epilog=in_environment("record", "listen"))
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
        settings, curve = settings_of("router", values), _curve(keys)
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
        show_verdicts(verdicts)
    if not all(verdict.exact for verdict in verdicts):
        raise SystemExit(1)


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
            with status(f"reading {path}"):
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
        show_reuse(each, top)


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

    terminal = new_console(stderr=True)
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
        console = new_console(markup=False, highlight=False)
        console.print(table_of(results, f"{trace}, {shape['replicas']} replicas"))
        for sentence in verdict(results):
            console.print(sentence)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_context
def config(context: click.Context, as_json: bool) -> None:
    """Prints the settings in effect, and where each comes from."""
    rows = []
    for name, section in SECTIONS.items():
        command = main.commands[name]
        inner = command.make_context(name, [], parent=context.parent)
        settings_of(name, inner.params)
        for field in msgspec.structs.fields(section):
            source = inner.get_parameter_source(field.name)
            origin = SOURCES.get(source.name, source.name.lower()) if source else "default"
            rows.append(
                {"setting": f"{name}.{field.name}", "value": inner.params[field.name], "source": origin}
            )
    if as_json:
        click.echo(json.dumps(rows))
        return
    show_settings(rows)


def run() -> None:
    """The entry point: as click's own, but a usage error is one line."""
    try:
        raise SystemExit(main.main(prog_name="warmroute", standalone_mode=False))
    except click.Abort:  # Ctrl-C; 1 says of some commands that they found something wrong
        raise SystemExit(128 + signal.SIGINT) from None
    except click.UsageError as error:
        StartError(told(error, main)).show()
        raise SystemExit(StartError.exit_code) from None
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    run()
