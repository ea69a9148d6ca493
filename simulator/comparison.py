"""Replays a trace under several policies and shows the numbers side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from simulator.fleet import Shape
from simulator.replay import Replayed, replay
from simulator.trace import Traced

SHOW_EVERY = 100
SHOW_AFTER_S = 2.0


def compare(
    trace: Sequence[Traced], policies: Sequence[str], shape: Shape, terminal: Console
) -> dict[str, Replayed]:
    """The numbers by policy; how far it is shows on ``terminal`` once it takes more than two seconds.

    Raises SettingsError.
    """
    begun = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    results = {}
    with Progress(*columns, console=terminal, transient=True) as progress:
        for policy in policies:
            task = progress.add_task(policy, total=len(trace), visible=False)

            def show(come: int, task: object = task) -> None:
                if come % SHOW_EVERY == 0 or come == len(trace):
                    visible = time.monotonic() - begun > SHOW_AFTER_S
                    progress.update(task, completed=come, visible=visible)  # type: ignore[arg-type]

            results[policy] = replay(trace, policy, shape, show)
    return results


def table_of(results: dict[str, Replayed], title: str) -> Table:
    """The numbers for people."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in ("requests", "hit rate", "TTFT mean", "p95", "p99", "load max/mean"):
        table.add_column(name, justify="right")
    for policy, one in results.items():
        times = map(_duration, (one.ttft_mean_s, one.ttft_p95_s, one.ttft_p99_s))
        hit_rate, load = f"{100 * one.hit_rate:.1f} %", f"{one.load_max_over_mean:.2f}"
        table.add_row(policy, f"{one.requests:,}", hit_rate, *times, load)
    return table


def _duration(seconds: float) -> str:
    """As many digits as say something, so that a table of overloaded fleets fits 80 columns too."""
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:,.0f} s"
