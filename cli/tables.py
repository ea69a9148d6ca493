"""What commands print for people: tables and sentences, of 80 columns where it has to be.

``rich`` is imported where it is needed: a service never prints, and goes without the 2 MB that it takes.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import click

DEFAULT = "default"
"""The source of a value that nobody has set."""


def new_console(**options: Any) -> Any:
    """For commands that print. A service never does, and goes without the 2 MB that ``rich`` takes."""
    from rich.console import Console  # noqa: PLC0415

    return Console(**options)


def status(text: str) -> AbstractContextManager[Any]:
    """Says on the terminal what takes its time."""
    from rich.text import Text  # noqa: PLC0415

    status: AbstractContextManager[Any] = new_console(stderr=True).status(Text(text))
    return status


def show_report(report: Any) -> None:
    for violation in report.violations:
        click.echo(f"{violation.table}: {violation.key}: {violation.problem}")
    if report.found > len(report.violations):
        click.echo(f"... and {report.found - len(report.violations):,} more")
    entries = ", ".join(f"{count:,} {table}" for table, count in report.entries.items())
    click.echo(f"{report.found or 'no'} violations; {report.streams} current streams; rows: {entries}")
    if report.commits_behind:
        click.echo(f"the indexer is running: it made {report.commits_behind} commits meanwhile")


def show_findings(findings: list[Any]) -> None:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "of", "check", "found, and what to do"):
        # Folded, not cut: an address of which the end is missing says nothing.
        table.add_column(name, overflow="fold")
    marks = {"ok": Text("ok", "green"), "warning": Text("warning", "yellow"), "bad": Text("bad", "bold red")}
    for finding in findings:
        told = Text(finding.found)
        if finding.fix and finding.level != "ok":
            told.append(f"\n-> {finding.fix}", "bold")
        table.add_row(marks[finding.level], Text(finding.of), Text(finding.check), told)
    console = new_console(highlight=False)
    console.print(table)
    counts = Counter(finding.level for finding in findings)
    console.print(
        ", ".join(f"{counts[level]} {level}" for level in ("bad", "warning", "ok") if counts[level])
    )


def show_verdicts(verdicts: list[Any]) -> None:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    title = "Predicted against reported cached tokens, request by request"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("recording", "replica"):
        table.add_column(name, no_wrap=True)
    for name in ("checked", "hits", "exact", "over", "under", "restarted"):
        table.add_column(name, justify="right")
    console = new_console(markup=False)
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


def show_reuse(found: Any, top: int) -> None:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = new_console(markup=False, highlight=False)
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


def show_settings(rows: list[dict[str, Any]]) -> None:
    """``setting``, ``value`` and ``source`` of each."""
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for name in ("value", "from"):
        table.add_column(name, overflow="fold")
    for row in rows:
        # What somebody has set stands out from some ninety settings that nobody touched.
        style = "dim" if row["source"] == DEFAULT else None
        table.add_row(row["setting"], _as_written(row["value"]), row["source"], style=style)
    new_console(markup=False, highlight=False).print(table)


def _as_written(value: Any) -> str:
    """A setting's value as a flag takes it; nothing for one that is not set."""
    if isinstance(value, tuple):
        return "\n".join(map(_as_written, value))
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, bool | dict) else str(value)
