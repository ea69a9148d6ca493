"""Spans, over a real OTLP collector's socket."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from multidict import CIMultiDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from router.tracing import Tracing, start_tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes spans as an OTLP collector does."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.raw = b""

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _take(self, request: web.Request) -> web.Response:
        payload = await request.read()
        self.raw += payload
        message = ExportTraceServiceRequest.FromString(payload)
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response()

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    collector = Collector()
    await collector.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield collector
    await collector.runner.cleanup()


def attributes(span: Any) -> dict[str, Any]:
    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        if kind == "array_value":
            return [value(item) for item in any_value.array_value.values]
        return getattr(any_value, kind)

    return {item.key: value(item.value) for item in span.attributes}


async def test_a_request_and_its_decision_are_spans_that_explain_themselves(
    collector: Collector, start_engine: Any, start_router: Any, kit: Any
) -> None:
    async def answer(_: web.Request) -> web.Response:
        usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 96}}
        return web.json_response({"usage": usage})

    engines = [await start_engine(answer=answer), await start_engine(answer=answer)]
    router = await start_router(*engines, lookup=kit.lookup(kit.matched("e1", 96), kit.matched("e0", 16)))
    body = {"model": "m", "prompt": list(range(100)), "user": "prompt-text", "cache_salt": "s4lt"}
    headers = {"Authorization": "Bearer k3y"}
    async with router.client.post(f"{router.url}/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200
    await kit.wait_until(lambda: len(collector.spans) == 2, "both spans arrived")
    (request,), (decide,) = collector.named("warmroute.request"), collector.named("warmroute.decide")
    assert decide.parent_span_id == request.span_id
    said = attributes(decide)
    assert said["warmroute.candidates"] == ["e1/0", "e0/0"]
    assert said["warmroute.candidates.matched_tokens"] == [96, 16]
    assert said["warmroute.candidates.cost"] == pytest.approx([0.0104, 0.0184])
    assert (said["warmroute.chosen"], said["gen_ai.request.model"]) == ("e1/0", "m")
    assert (said["warmroute.prompt_tokens"], said["warmroute.predicted_cached_tokens"]) == (100, 96)
    said = attributes(request)
    assert (said["warmroute.replica"], said["warmroute.actual_cached_tokens"]) == ("e1", 96)
    assert said["http.response.status_code"] == 200
    for secret in (b"prompt-text", b"s4lt", b"k3y"):
        assert secret not in collector.raw


async def test_tr04_the_clients_span_is_the_parent_and_the_engine_gets_ours(
    collector: Collector, start_engine: Any, start_router: Any, kit: Any
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b", "baggage": "k=v"}
    async with router.client.post(f"{router.url}/v1/completions", json={"prompt": [1]}, headers=headers):
        pass
    await kit.wait_until(lambda: len(collector.spans) == 2, "both spans arrived")
    (request,) = collector.named("warmroute.request")
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    got = engine.requests[-1].headers
    assert got.getall("traceparent") == [f"00-{TRACE}-{request.span_id.hex()}-01"]
    assert (got["tracestate"], got["baggage"]) == ("a=b", "k=v")


async def test_tr04_an_unsampled_trace_is_not_exported_and_stays_unsampled(
    collector: Collector, start_engine: Any, start_router: Any, kit: Any
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    for flags in ("00", "01"):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
        async with router.client.post(f"{router.url}/v1/completions", json={"prompt": [1]}, headers=headers):
            pass
    await kit.wait_until(lambda: len(collector.spans) >= 2, "the sampled spans arrived")
    assert len(collector.spans) == 2
    assert engine.requests[0].headers["traceparent"].endswith("-00")


@pytest.mark.parametrize("bad", ["nonsense", "00-0-0-01", "ff-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_tr04_a_malformed_parent_starts_a_new_trace(
    collector: Collector, start_engine: Any, start_router: Any, bad: str
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    async with router.client.post(
        f"{router.url}/v1/completions", json={"prompt": [1]}, headers={"traceparent": bad}
    ) as response:
        assert response.status == 200
    assert engine.requests[-1].headers["traceparent"] != bad


async def test_tr04_repeated_tracestate_headers_are_one_list(
    collector: Collector, start_engine: Any, start_router: Any, kit: Any
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    headers = CIMultiDict(traceparent=f"00-{TRACE}-{PARENT}-01")
    headers.extend([("tracestate", "a=b"), ("tracestate", "c=d")])
    async with router.client.post(f"{router.url}/v1/completions", json={"prompt": [1]}, headers=headers):
        pass
    assert engine.requests[-1].headers.getall("tracestate") == ["a=b,c=d"]


async def test_text_of_clients_that_is_no_utf8_does_not_keep_spans_from_being_exported(
    collector: Collector, start_engine: Any, start_router: Any, kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    router = await start_router(await start_engine())
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
    writer.write(
        b"GET /v1/caf%E9 HTTP/1.1\r\nHost: r\r\nX-Request-Id: \xe9\r\ntracestate: \xe9=\xe9\r\n"
        b"traceparent: \xe9\r\nConnection: close\r\n\r\n"
    )
    await reader.read()
    writer.close()
    await kit.wait_until(lambda: len(collector.spans) == 2, "both spans arrived")
    # aiohttp's parser in C refuses such bytes in a path, the one in Python takes them.
    tracing = start_tracing()
    with tracing.request(CIMultiDict(), "/v1/caf\udce9", "id"):
        pass
    await asyncio.to_thread(tracing.close)
    await kit.wait_until(lambda: len(collector.spans) == 3, "the third span arrived")
    assert attributes(collector.spans[-1])["url.path"] == "/v1/caf?"
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_px05_a_cancelled_request_is_a_cancelled_span(
    collector: Collector, start_engine: Any, start_router: Any, kit: Any
) -> None:
    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    engine = await start_engine(answer=never)
    router = await start_router(engine)
    task = asyncio.create_task(router.complete([1]))
    await kit.wait_until(lambda: engine.open == 1, "the engine works on it")
    task.cancel()
    await kit.wait_until(lambda: len(collector.named("warmroute.request")) == 1, "the span arrived")
    assert attributes(collector.named("warmroute.request")[0])["warmroute.status"] == "cancelled"


async def test_without_a_collector_trace_headers_pass_as_they_came(
    start_engine: Any, start_router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    engine = await start_engine()
    router = await start_router(engine)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    async with router.client.post(f"{router.url}/v1/completions", json={"prompt": [1]}, headers=headers):
        pass
    assert engine.requests[-1].headers["traceparent"] == headers["traceparent"]


def test_tr01_a_dead_collector_costs_two_seconds_at_most_and_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with caplog.at_level(logging.WARNING):
        tracing = start_tracing()
        assert isinstance(tracing, Tracing)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            with tracing.request(CIMultiDict(), "/v1/x", "id"):
                time.sleep(0.01)
        begun = time.monotonic()
        tracing.close()
        assert time.monotonic() - begun < 3
    lines = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert len(lines) <= 2, [record.getMessage() for record in lines]
