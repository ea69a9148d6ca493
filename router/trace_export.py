"""Spans on their way to a collector, over OTLP/HTTP."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Tracer

from events.logs import OncePerInterval

SHUTDOWN_LIMIT_S = 2.0
EXPORT_TIMEOUT_S = 5
_NOISY = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")


def exporting(environment: Mapping[str, str]) -> tuple[Tracer, Callable[[], None]]:
    """A tracer, and what exports all that is left: it returns within two seconds, collector or not. The
    exporter reads the OTEL_* variables of its own itself.
    """
    for name in _NOISY:
        logging.getLogger(name).addFilter(OncePerInterval())
    resource = Resource.create(
        {
            SERVICE_NAME: environment.get("OTEL_SERVICE_NAME", "warmroute-router"),
            SERVICE_INSTANCE_ID: f"{os.uname().nodename}-{os.getpid()}",
        }
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S)))
    return provider.get_tracer("warmroute.router"), lambda: _shut_down(provider)


def _shut_down(provider: TracerProvider) -> None:
    # The processor waits up to 30 s for a collector that does not answer; a daemon thread need not be waited
    # for.
    thread = threading.Thread(target=provider.shutdown, name="trace-shutdown", daemon=True)
    thread.start()
    thread.join(SHUTDOWN_LIMIT_S)
