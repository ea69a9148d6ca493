"""Replays a trace under several policies and shows the numbers side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from router.policies import policy_named
from simulator.fleet import Shape
from simulator.replay import POOLED, Replayed, replay
from simulator.trace import Traced

SHOW_EVERY = 100
SHOW_AFTER_S = 2.0
BLIND = ("least-loaded", "round-robin", "random")
"""Policies that look at no cache: what the others are measured against."""
ALIKE = 1.01
"""Mean TTFT against the shortest, up to which policies are told apart by what they leave to compute."""
WORTH = 0.95
"""A policy that leaves more than this share of the prompt tokens to compute, and of the mean TTFT, gains
nothing that one would notice.
"""


def compare(
    trace: Sequence[Traced], policies: Sequence[str], shape: Shape, terminal: Console
) -> dict[str, Replayed]:
    """The numbers by policy; how far it is shows on ``terminal`` once it takes more than two seconds.

    Raises SettingsError.
    """
    shape.check_for(trace)
    for policy in policies:
        if policy != POOLED:
            policy_named(policy)
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


def verdict(results: dict[str, Replayed]) -> list[str]:
    """What the numbers say, in sentences: whether looking at caches is worth it, and whether the fleet is too
    small for any of it to count.
    """
    said = []
    blind = _best({name: one for name, one in results.items() if name in BLIND})
    aware = _best({name: one for name, one in results.items() if name not in (*BLIND, POOLED)})
    if blind and aware:
        said.append(_comparison(aware, results[aware], blind, results[blind]))
    drowned = [name for name, one in results.items() if one.busy > 1]
    if drowned:
        said.append(
            f"Overloaded with {', '.join(drowned)}: requests come faster than the replicas compute prompts, "
            "so the times are those of a queue that only grows. Give more --replicas, or a higher "
            "--prefill-rate."
        )
    return said


def _best(results: dict[str, Replayed]) -> str | None:
    """The one with the shortest mean TTFT; of those that are as good as that, the one with most hits."""
    shortest = min((one.ttft_mean_s for one in results.values()), default=0.0)
    alike = [name for name, one in results.items() if one.ttft_mean_s <= ALIKE * shortest]
    return max(alike, key=lambda name: results[name].hit_rate, default=None)


def _comparison(aware: str, one: Replayed, blind: str, other: Replayed) -> str:
    computed = (1 - one.hit_rate) / (1 - other.hit_rate) if other.hit_rate < 1 else 1.0
    waited = one.ttft_mean_s / other.ttft_mean_s
    numbers = (
        f"{aware} leaves {computed:.2f} times the prompt tokens of {blind} to compute, and its mean TTFT is "
        f"{waited:.2f} times as long."
    )
    if min(computed, waited) > WORTH:
        return f"Not worth it here: {numbers} {blind} will do."
    return numbers


def _duration(seconds: float) -> str:
    """As many digits as say something, so that a table of overloaded fleets fits 80 columns too."""
    if seconds < 0.1:
        return f"{1000 * seconds:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:,.0f} s"
