"""OpenTelemetry spans of requests and decisions, where the environment names a collector for them.

Attributes hold names, counts and reasons: never a prompt, tokens, a salt or a key.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from multidict import CIMultiDict, MultiMapping
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.decision import Decision
from router.headers import shown

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

_NO_SPAN: AbstractContextManager[Span] = nullcontext(INVALID_SPAN)


class _Headers(Getter[MultiMapping[str]]):
    def get(self, carrier: MultiMapping[str], key: str) -> list[str] | None:
        return carrier.getall(key, None)

    def keys(self, carrier: MultiMapping[str]) -> list[str]:
        return list(carrier.keys())


class Tracing:
    """Makes spans. Without a tracer it does nothing and leaves trace headers as they came."""

    def __init__(self, tracer: Tracer | None = None, close: Callable[[], None] = lambda: None) -> None:
        self._tracer = tracer
        self._close = close
        self._propagator = TraceContextTextMapPropagator()

    def request(self, headers: MultiMapping[str], path: str, request_id: str) -> AbstractContextManager[Span]:
        """The span of one request; a valid inbound ``traceparent`` is its parent, a malformed one is as
        none.
        """
        if self._tracer is None:
            return _NO_SPAN
        parent: Context = self._propagator.extract(headers, getter=_Headers())
        attributes = {"url.path": shown(path), "warmroute.request_id": request_id}
        return self._tracer.start_as_current_span(
            "warmroute.request", parent, kind=SpanKind.SERVER, attributes=attributes, record_exception=False
        )

    def decide(self) -> AbstractContextManager[Span]:
        """The span of one decision, inside the request's."""
        if self._tracer is None:
            return _NO_SPAN
        return self._tracer.start_as_current_span("warmroute.decide", record_exception=False)

    def inject(self, headers: CIMultiDict[str]) -> None:
        """Makes the current span the parent of what the replica traces. Baggage passes as it came."""
        if self._tracer is not None:
            for name in ("traceparent", "tracestate"):
                headers.popall(name, None)
            self._propagator.inject(headers)

    def close(self) -> None:
        """Exports what is left; returns within two seconds, collector or not."""
        self._close()


def start_tracing(environment: Mapping[str, str] = os.environ) -> Tracing:
    """Tracing as the environment asks for it."""
    if not any(environment.get(name) for name in ENDPOINT_VARIABLES):
        return Tracing()
    # Not above: with its exporter it takes memory that a router without a collector has no use for.
    export: Any = importlib.import_module("router.trace_export")
    return Tracing(*export.exporting(environment))


def describe_decision(span: Span, decision: Decision) -> None:
    """Writes a decision into its span: every candidate with its match and cost, and which one was taken."""
    if not span.is_recording():
        return
    ranked = decision.ranked
    span.set_attributes(
        {
            "warmroute.policy": decision.policy,
            "warmroute.mode": decision.mode,
            "warmroute.reason": decision.reason,
            "warmroute.attempt": decision.attempt,
            "warmroute.chosen": _stream_name(decision.chosen),
            "warmroute.candidates": [_stream_name(item.candidate.stream) for item in ranked],
            "warmroute.candidates.matched_tokens": [item.candidate.matched_tokens or 0 for item in ranked],
            "warmroute.candidates.cost": [item.cost for item in ranked],
            "warmroute.candidates.terms": [
                " ".join(f"{name}={value:g}" for name, value in item.terms.items()) for item in ranked
            ],
        }
    )
    counts = {
        "gen_ai.request.model": decision.model,
        "warmroute.prompt_tokens": decision.prompt_tokens,
        "warmroute.predicted_cached_tokens": decision.matched_tokens,
        "warmroute.best_available_tokens": decision.best_available_tokens,
        "warmroute.fallback": decision.fallback,
        "warmroute.rule": decision.rule,
    }
    span.set_attributes({name: value for name, value in counts.items() if value is not None})


def describe_request(
    span: Span, decision: Decision | None, status: str, actual_cached_tokens: int | None
) -> None:
    """Writes the outcome into the request's span."""
    if not span.is_recording():
        return
    span.set_attribute("warmroute.status", status)
    if status.isdecimal():
        span.set_attribute("http.response.status_code", int(status))
    if not status.isdecimal() or int(status) >= 500:
        span.set_status(Status(StatusCode.ERROR, status))
    if decision is None:
        return
    span.set_attributes(
        {
            "warmroute.replica": decision.chosen[0],
            "warmroute.rank": decision.chosen[1],
            "warmroute.policy": decision.policy,
            "warmroute.reason": decision.reason,
        }
    )
    counts = {
        "gen_ai.request.model": decision.model,
        "warmroute.prompt_tokens": decision.prompt_tokens,
        "warmroute.predicted_cached_tokens": decision.matched_tokens,
        "warmroute.best_available_tokens": decision.best_available_tokens,
        "warmroute.actual_cached_tokens": actual_cached_tokens,
    }
    span.set_attributes({name: value for name, value in counts.items() if value is not None})


def _stream_name(stream: tuple[str, int]) -> str:
    return f"{stream[0]}/{stream[1]}"
