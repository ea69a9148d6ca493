"""What an engine says of its own load in ``/metrics``, under the names of vLLM 0.32."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import msgspec

RUNNING, WAITING, USAGE = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"
GENERATED, PROMPT = "generation_tokens_total", "prompt_tokens_total"
QUERIED, HIT = "prefix_cache_queries_total", "prefix_cache_hits_total"
_CACHE_CONFIG = "cache_config_info"
_START = "process_start_time_seconds"
_NAMES = "|".join((RUNNING, WAITING, USAGE, GENERATED, PROMPT, QUERIED, HIT, _CACHE_CONFIG))
_LINE = re.compile(rf"^(?:vllm:({_NAMES})|({_START}))(?:\{{([^\n]*)\}})?[ \t]+(\S+)".encode(), re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')


class Reported(msgspec.Struct, frozen=True, kw_only=True):
    """One data-parallel rank: requests ``running`` and ``waiting``, the tokens that its cache has room for,
    the share of it that requests use (0 to 1), and how many tokens it has ever worked on. ``admitted_tokens``
    are those that it had to compute of all prompts that it has ever begun with (vLLM counts both numbers when
    the scheduler admits a request, ``KVCacheManager.record_prefix_cache_stats``); None where it keeps no
    prefix cache.
    """

    running: int = 0
    waiting: int = 0
    capacity_tokens: int | None = None
    usage: float = 0.0
    worked_tokens: int = 0
    admitted_tokens: int | None = None


class Report(msgspec.Struct, frozen=True):
    """All ranks of a replica by number; ``started`` is its process's start in unix seconds, if it says so."""

    ranks: Mapping[int, Reported]
    started: float | None = None


class UnreadableReportError(Exception):
    """An answer that says nothing of any load."""


def read_report(metrics: bytes) -> Report:
    """The report in an answer of ``GET /metrics``. Raises UnreadableReportError."""
    values: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    capacity: dict[int, int] = {}
    starts: set[float] = set()
    try:
        for name, start, label_text, text in _LINE.findall(metrics):
            if start:
                starts.add(float(text))
                continue
            labels = dict(_LABEL.findall(label_text))
            rank = int(labels.get(b"engine", b"0"))
            if name.decode() == _CACHE_CONFIG:
                capacity[rank] = _number(labels, b"block_size") * _number(labels, b"num_gpu_blocks")
            else:
                values[rank][name.decode()] += float(text)
        ranks = {
            rank: _reported(said, capacity.get(rank)) for rank, said in values.items() if RUNNING in said
        }
    except (ValueError, OverflowError) as error:
        raise UnreadableReportError(f"/metrics makes no sense: {error!r}") from error
    if not ranks:
        raise UnreadableReportError(f"/metrics has no vllm:{RUNNING}")
    # One server with several API processes says no start, or one for each.
    return Report(ranks, starts.pop() if len(starts) == 1 else None)


def _number(labels: Mapping[bytes, bytes], name: bytes) -> int:
    """A label's number; 0 for what is none yet (``None`` until an engine has measured its memory)."""
    text = labels.get(name, b"")
    return int(text) if text.isdigit() else 0


def _reported(said: Mapping[str, float], capacity_tokens: int | None) -> Reported:
    return Reported(
        running=max(0, int(said[RUNNING])),
        waiting=max(0, int(said[WAITING])),
        capacity_tokens=capacity_tokens or None,
        usage=said[USAGE],
        worked_tokens=int(said[GENERATED] + said[PROMPT]),
        admitted_tokens=int(said[QUERIED] - said[HIT]) if said.get(QUERIED) else None,
    )
