"""What an engine says of itself at ``/metrics``, as far as it matters for its events.

Names as in ``vllm/v1/metrics/loggers.py`` 0.32. ``process_start_time_seconds`` is missing where one server
runs several API processes.
"""

from __future__ import annotations

import math
import re

import msgspec

_START = re.compile(rb"^process_start_time_seconds(?:\{[^}\n]*\})?[ \t]+(\S+)", re.MULTILINE)
_REQUESTS = re.compile(
    rb'^vllm:request_success_total\{([^}\n]*finished_reason="(?:stop|length)"[^}\n]*)\}[ \t]+(\S+)',
    re.MULTILINE,
)
_CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{([^}\n]*)\}", re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="([^"]*)"')


class EngineMetrics(msgspec.Struct, frozen=True):
    """``started_at`` in unix seconds; ``requests`` that came to a good end since then, of all ranks;
    ``block_size`` in tokens. None where the engine does not say, or where its ranks do not agree.
    """

    started_at: float | None = None
    requests: int | None = None
    prefix_caching: bool | None = None
    block_size: int | None = None


def read_engine_metrics(text: bytes) -> EngineMetrics:
    """Reads a Prometheus text. What makes no sense in it counts as not said."""
    caches = [dict(_LABEL.findall(labels)) for labels in _CACHE_CONFIG.findall(text)]
    caching = _agreed([cache.get(b"enable_prefix_caching") for cache in caches])
    block_size = _agreed([cache.get(b"block_size") for cache in caches])
    finished = [_number(value) for _, value in _REQUESTS.findall(text)]
    known = [count for count in finished if count is not None]
    return EngineMetrics(
        started_at=start_time(text),
        requests=int(sum(known)) if known else None,
        prefix_caching={b"True": True, b"False": False}.get(caching) if caching else None,
        block_size=int(block_size) if block_size and block_size.isdigit() else None,
    )


def start_time(text: bytes) -> float | None:
    """``process_start_time_seconds`` of a Prometheus text; None when it has none, or several that differ."""
    told = {_number(value) for value in _START.findall(text)}
    at = told.pop() if len(told) == 1 else None
    return at if at else None


def _agreed(values: list[bytes | None]) -> bytes | None:
    return values[0] if len(set(values)) == 1 else None


def _number(text: bytes) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
