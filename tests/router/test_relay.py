"""The relay against engines that misbehave, over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from router.settings import UPSTREAM_CLIENTS

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
Connection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(params=UPSTREAM_CLIENTS)
def upstream_client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def read_head(reader: asyncio.StreamReader) -> bytes:
    """One request, head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        (
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        ),
        0,
    )
    return head + await reader.readexactly(length)


class RawServer:
    """A server below HTTP. Health checks and models are answered; other requests are ``act``'s."""

    def __init__(self, act: Connection) -> None:
        self._act = act
        self.acted = 0

    async def __aenter__(self) -> RawServer:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await read_head(reader)
                if request.startswith(b"POST /v1/"):
                    self.acted += 1
                    await self._act(reader, writer)
                    return
                models = b'{"data":[{"id":"m"}]}' if b"/v1/models" in request else b"{}"
                status = b"404 Not Found" if b"/tokenize" in request or b"/kv_event" in request else b"200 OK"
                writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(models), models))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """Ends the connection with a RST."""
    writer.transport.abort()


async def test_a_stream_passes_chunk_by_chunk_and_byte_for_byte(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    chunks = [b'data: {"n":%d}\n\n' % number for number in range(5)] + [
        b": comment\r\n\r\n",
        b"data: [DONE]\n\n",
    ]
    gate = asyncio.Semaphore(0)

    async def answer(request: web.Request) -> web.StreamResponse:
        return await kit.stream(request, chunks, gate.acquire)

    router = await start_router(await start_engine(answer=answer))
    async with router.client.post(
        f"{router.url}/v1/chat/completions", json={**CHAT, "stream": True}
    ) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        for chunk in chunks:
            # The next chunk is not sent before this one has come all the way.
            assert await response.content.readexactly(len(chunk)) == chunk
            gate.release()
        assert await response.content.read() == b""
    await kit.wait_until(router.idle, "nothing is in flight")


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
async def test_px06_an_upstream_error_keeps_its_status_body_type_and_retry_after(
    start_engine: Any, start_router: Any, status: int
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(
            status=status,
            text='{"error":{}}',
            content_type="application/problem+json",
            headers={"Retry-After": "7"},
        )

    router = await start_router(await start_engine(answer=answer))
    body = {**CHAT, "stream": True}
    async with router.client.post(f"{router.url}/v1/chat/completions", json=body) as response:
        assert (response.status, await response.text()) == (status, '{"error":{}}')
        assert response.headers["Content-Type"].startswith("application/problem+json")
        assert response.headers["Retry-After"] == "7"
        assert response.headers["x-warmroute-replica"] == "e0"
    assert router.idle()


async def test_px07_a_stream_that_dies_ends_with_an_error_event_and_no_done(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    async def die(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for _number in range(5):
            writer.write(b"b\r\ndata: {}\n\n\n\r\n")
        writer.write(b"8\r\ndata: {")
        await writer.drain()
        await asyncio.sleep(0.05)
        reset(writer)

    async with RawServer(die) as server:
        other = await start_engine()
        router = await start_router(f"e0={server.url}", other, health_interval_s=60, policy="round-robin")
        async with router.client.post(
            f"{router.url}/v1/completions", json={"prompt": [1], "stream": True}
        ) as response:
            content = await response.content.read()
        assert response.status == 200
        assert content.count(b"data: {}") == 5
        assert b"[DONE]" not in content
        # A client reads each event, and goes no further than the first that it cannot read.
        parts = [event.strip() for event in content.split(b"\n\n") if event.strip()]
        events = [json.loads(event.removeprefix(b"data: ")) for event in parts]
        assert events[:5] == [{}] * 5
        assert [event["error"]["code"] for event in events[5:]] == [502]
        assert (server.acted, other.generated) == (1, 0)  # somebody could have been asked again
        assert router.parts.fleet.outliers.failing(["e0"]) == {"e0"}
        assert router.parts.fleet.replicas["e0"].last_error
        assert await router.metric("broken_answers_total", replica="e0") == 1
        await kit.wait_until(router.idle, "nothing is in flight")


async def test_a_client_that_takes_nothing_of_its_answer_does_not_keep_its_place(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await kit.stream(request, [b"data: " + b"x" * 100_000 + b"\n\n"] * 500)

    engine = await start_engine(answer=answer)
    router = await start_router(engine, client_idle_timeout_s=0.2)
    host, port = router.url.removeprefix("http://").split(":")
    body = b'{"model":"m","prompt":[1],"stream":true}'
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    await kit.wait_until(lambda: engine.cancelled == 1, "the engine is let go")
    await kit.wait_until(router.idle, "nothing is in flight")
    assert router.parts.fleet.replicas["e0"].last_error is None
    writer.transport.abort()


@pytest.mark.parametrize("header", [b"Content-Length: 1000", b"Content-Encoding: gzip"])
@pytest.mark.parametrize("said", [b"data: {}\n\n", b"data: {}\n\ndata: [DONE]\n\n"])
async def test_px07_a_stream_with_a_length_or_a_coding_is_cut_where_it_broke_off(
    start_router: Any, kit: Any, header: bytes, said: bytes
) -> None:
    """An event of ours would be taken for the rest of its length, which the client then waits for, or for
    compressed bytes.
    """

    async def die(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sized = header.startswith(b"Content-Length")
        framing = header if sized else header + b"\r\nTransfer-Encoding: chunked"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + framing + b"\r\n\r\n")
        writer.write(said if sized else b"%x\r\n%s\r\n" % (len(said), said))
        await writer.drain()
        await asyncio.sleep(0.05)
        reset(writer)

    async with RawServer(die) as server:
        router = await start_router(f"e0={server.url}", health_interval_s=60)
        body = {"prompt": [1], "stream": True}
        async with router.client.post(f"{router.url}/v1/completions", json=body) as response:
            assert await response.content.readexactly(len(said)) == said
            with pytest.raises(aiohttp.ClientError):
                await asyncio.wait_for(response.content.read(), 5)
        await kit.wait_until(router.idle, "nothing is in flight")


async def test_a_client_that_hangs_up_on_done_has_the_whole_answer(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    """As the official client does, while the engine's connection is still open."""

    class Recorder:
        done: Any = None

        def on_send(self, _: Any) -> None:
            pass

        def on_done(self, done: Any) -> None:
            self.done = done

    async def answer(request: web.Request) -> web.StreamResponse:
        async def wait() -> None:
            if len(seen) == 2:
                await asyncio.Event().wait()
            seen.append(b"")

        seen: list[bytes] = [b""]
        return await kit.stream(request, [b"data: {}\n\n", b"data: [DONE]\n\n"], wait)

    engine, recorder = await start_engine(answer=answer), Recorder()
    router = await start_router(engine, recorder=recorder)
    async with router.client.post(
        f"{router.url}/v1/completions", json={"prompt": [1], "stream": True}
    ) as response:
        await response.content.readexactly(len(b"data: {}\n\ndata: [DONE]\n\n"))
    await kit.wait_until(lambda: engine.cancelled == 1, "the engine's connection is closed")
    await kit.wait_until(router.idle, "nothing is in flight")
    assert (await router.get("/debug/decisions"))["decisions"][0]["outcome"]["status"] == "200"
    assert await router.metric("requests_total", policy="cache-aware", replica="e0", status="200") == 1
    assert (recorder.done.complete, recorder.done.status) == (True, 200)


async def test_px07_a_stream_that_dies_after_its_done_is_complete(start_router: Any, kit: Any) -> None:
    async def die(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"e\r\ndata: [DONE]\n\n\r\n"
        )
        await writer.drain()
        await asyncio.sleep(0.05)
        reset(writer)

    async with RawServer(die) as server:
        router = await start_router(f"e0={server.url}", health_interval_s=60)
        async with router.client.post(
            f"{router.url}/v1/completions", json={"prompt": [1], "stream": True}
        ) as response:
            assert await response.read() == b"data: [DONE]\n\n"
        assert await router.metric("broken_answers_total", replica="e0") == 0
        assert router.parts.fleet.replicas["e0"].last_error is None


async def test_errors_name_the_replica_and_neither_its_address_nor_our_libraries(
    start_engine: Any, start_router: Any
) -> None:
    async def die_in_stream(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        writer.write(b"b\r\ndata: {}\n\n\n\r\n8\r\ndata: {")
        await writer.drain()
        await asyncio.sleep(0.05)
        reset(writer)

    async def no_http(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        await writer.drain()

    for act, says in (
        (die_in_stream, "the answer of replica e0 broke off"),
        (no_http, "the answer of replica e0 failed"),
    ):
        async with RawServer(act) as server:
            router = await start_router(f"e0={server.url}", health_interval_s=60)
            async with router.client.post(f"{router.url}/v1/completions", json={"prompt": [1]}) as response:
                content = await response.read()
            error = json.loads(content.rstrip(b"\n").rpartition(b"\n")[2].removeprefix(b"data: "))["error"]
            assert (error["message"], error["code"]) == (says, 502)


@pytest.mark.parametrize("body", [b"{}", b""])
async def test_an_answer_without_a_content_type_gains_none(start_router: Any, body: bytes) -> None:
    async def untyped(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()

    async with RawServer(untyped) as server:
        router = await start_router(f"e0={server.url}")
        async with router.client.post(f"{router.url}/v1/completions", json={"prompt": [1]}) as response:
            assert await response.read() == body
            assert "Content-Type" not in response.headers


async def test_a_stream_is_known_by_its_type_however_it_is_written(
    start_engine: Any, start_router: Any
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "Text/Event-Stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        return response

    router = await start_router(await start_engine(answer=answer))
    await router.complete([1], stream=True)
    assert await router.metric("ttft_seconds_count", policy="cache-aware", replica="e0") == 1


async def test_an_answer_that_breaks_off_before_its_body_is_a_502(start_router: Any) -> None:
    async def die(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)
        reset(writer)

    async with RawServer(die) as server:
        router = await start_router(f"e0={server.url}")
        response = await router.complete([1])
        assert response.status == 502
        assert response.headers["x-warmroute-replica"] == "e0"
        assert router.idle()


async def test_a_body_that_breaks_off_in_the_middle_is_not_passed_as_whole(
    start_router: Any, kit: Any
) -> None:
    async def die(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.05)
        reset(writer)

    async with RawServer(die) as server:
        router = await start_router(f"e0={server.url}")
        with pytest.raises(aiohttp.ClientError):
            await router.complete([1])
        await kit.wait_until(router.idle, "nothing is in flight")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", ["before headers", "before the first chunk", "in mid-stream"])
async def test_px05_a_client_that_leaves_takes_the_upstream_with_it(
    start_engine: Any, start_router: Any, kit: Any, leave: str, stream: bool
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream" if stream else "application/json"}
        )
        if leave != "before headers":
            await response.prepare(request)
        if leave == "in mid-stream":
            await response.write(b"data: {}\n\n")
        await asyncio.Event().wait()
        raise AssertionError

    engine = await start_engine(answer=answer)
    router = await start_router(engine)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
    body = json.dumps({**CHAT, "stream": stream}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    await kit.wait_until(lambda: engine.open == 1, "the engine works on it")
    if leave == "in mid-stream":
        await reader.readuntil(b"data: {}")
    writer.close()
    left = time.monotonic()
    await kit.wait_until(lambda: engine.cancelled == 1, "the engine's connection is closed")
    assert time.monotonic() - left < 1
    await kit.wait_until(router.idle, "nothing is in flight")
    assert (await router.get("/debug/decisions"))["decisions"][0]["outcome"]["status"] == "cancelled"
    labels = {"policy": "cache-aware", "replica": "e0", "status": "cancelled"}
    assert await router.metric("requests_total", **labels) == 1


async def test_px05_a_client_that_has_sent_more_than_is_read_ahead_and_leaves_is_noticed(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    engine = await start_engine(answer=answer)
    router = await start_router(engine)
    _, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
    head = b"POST /v1/x HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % 2 + b"{}" + head % 9_000_000 + b" " * 1_000_000)
    await kit.wait_until(lambda: engine.open == 1, "the first is at work")
    await asyncio.sleep(0.05)
    writer.transport.abort()
    await kit.wait_until(lambda: engine.cancelled == 1, "the engine is told")
    await kit.wait_until(router.idle, "nothing is in flight")


async def test_a_client_that_leaves_while_its_prompt_is_tokenised_leaves_nothing_behind(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    asked = asyncio.Event()

    async def never(_: web.Request) -> web.Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    engine = await start_engine(tokenize=never)
    router = await start_router(engine, tokenize_timeout_s=60)
    task = asyncio.create_task(router.complete("hello"))
    await asked.wait()
    task.cancel()
    labels = {"policy": "cache-aware", "replica": "", "status": "cancelled"}

    def counted() -> bool:
        return router.parts.metrics.registry.get_sample_value("warmroute_router_requests_total", labels) == 1

    await kit.wait_until(counted, "the request is counted as cancelled")
    assert router.idle()
    assert engine.generated == 0


async def test_px09_a_refused_connection_goes_to_the_next_replica_at_once(
    start_engine: Any, start_router: Any
) -> None:
    dead, alive = await start_engine(), await start_engine()
    router = await start_router(dead, alive, health_interval_s=60)
    await dead.stop()
    for _ in range(10):
        response = await router.complete([1, 2, 3])
        assert (response.status, response.headers["x-warmroute-replica"]) == (200, "e1")
    assert alive.generated == 10
    assert (await router.get("/debug/replicas"))["replicas"][0]["health"] == "down"


async def test_px09_a_failed_over_answer_says_so(start_engine: Any, start_router: Any) -> None:
    dead, alive = await start_engine(), await start_engine()
    router = await start_router(dead, alive, health_interval_s=60, policy="round-robin")
    await dead.stop()
    response = await router.complete([1])
    assert response.headers["x-warmroute-reason"].endswith("after e0 failed")
    assert await router.metric("retries_total", replica="e0", reason="unreachable") == 1


async def test_px09_a_replica_that_drops_the_request_unanswered_is_left_for_another(
    start_engine: Any, start_router: Any
) -> None:
    async def drop(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reset(writer)

    alive = await start_engine()
    async with RawServer(drop) as server:
        router = await start_router(f"bad={server.url}", alive, policy="round-robin")
        responses = [await router.complete([1]) for _ in range(4)]
        assert [response.status for response in responses] == [200] * 4
        assert {response.headers["x-warmroute-replica"] for response in responses} == {"e1"}
        assert router.idle()


async def test_px09_the_attempt_budget_bounds_the_tries(start_router: Any) -> None:
    async def drop(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reset(writer)

    async with RawServer(drop) as a, RawServer(drop) as b, RawServer(drop) as c:
        router = await start_router(
            *(f"{name}={s.url}" for name, s in zip("abc", (a, b, c), strict=True)), attempts=2
        )
        response = await router.complete([1])
        assert response.status == 503
        assert a.acted + b.acted + c.acted == 2
        assert router.idle()


async def test_px09_a_request_whose_answer_had_begun_is_not_sent_again_on_a_kept_alive_connection(
    start_router: Any,
) -> None:
    """Its engine is at work on it, and the path may leave something behind."""

    async def begin_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await read_head(reader)
        acted.append(b"")
        writer.write(b"HTTP/1.1 200 OK\r\nConten")
        await writer.drain()

    acted: list[bytes] = []
    async with RawServer(begin_and_close) as server:
        router = await start_router(f"e0={server.url}", health_interval_s=60)
        statuses = []
        for _ in range(2):
            async with router.client.post(f"{router.url}/v1/files", data=b"x") as response:
                statuses.append(response.status)
        assert statuses == [200, 502]
        assert (server.acted, len(acted)) == (1, 1)


async def test_px09_a_stale_kept_alive_connection_costs_the_client_nothing(start_router: Any) -> None:
    """The server answers one request on a connection and drops the second one unread, as on an idle
    time-out.
    """
    seen: dict[int, int] = {}

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("peername")[1]
        seen[port] = 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        await read_head(reader)
        reset(writer)

    async with RawServer(once) as server:
        router = await start_router(f"e0={server.url}", health_interval_s=60)
        for _ in range(6):
            assert (await router.complete([1])).status == 200
        assert await router.metric("retries_total", replica="e0", reason="stale") > 0
        assert router.parts.fleet.replicas["e0"].usable
        assert router.idle()


async def test_an_engine_that_stays_silent_is_a_504(start_engine: Any, start_router: Any) -> None:
    async def never(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    router = await start_router(await start_engine(answer=never), idle_timeout_s=0.1)
    response = await router.complete([1])
    assert response.status == 504
    assert router.idle()


async def test_px02_a_stream_that_takes_longer_than_any_limit_is_not_cut_as_long_as_it_says_something(
    start_engine: Any, start_router: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred chunks ten seconds apart, on a clock that is put forward: with the limits as they are, the
    longest of which is 600 s of silence.
    """
    loop, put_forward = asyncio.get_running_loop(), 0.0
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + put_forward)

    async def ten_seconds() -> None:
        nonlocal put_forward
        put_forward += 10.0
        for _ in range(3):
            await asyncio.sleep(0)

    async def answer(request: web.Request) -> web.StreamResponse:
        return await kit.stream(request, [b"data: {}\n\n"] * 100, ten_seconds)

    router = await start_router(await start_engine(answer=answer), health_interval_s=1000)
    began = loop.time()
    async with router.client.post(
        f"{router.url}/v1/completions",
        json={"prompt": [1], "stream": True},
        timeout=aiohttp.ClientTimeout(total=None),
    ) as response:
        assert (await response.content.read()).count(b"data: {}") == 100
    assert loop.time() - began >= 1000


async def test_px01_three_hundred_streams_run_at_once(start_engine: Any, start_router: Any, kit: Any) -> None:
    gate = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        return await kit.stream(request, [b"data: {}\n\n", b"data: [DONE]\n\n"], gate.wait)

    engine = await start_engine(answer=answer)
    router = await start_router(engine)
    tasks = [asyncio.create_task(router.complete([1, 2], stream=True)) for _ in range(300)]
    await kit.wait_for(lambda: engine.open, 300, "open streams")

    def load() -> dict[str, int]:
        now = router.parts.load.of(("e0", 0))
        return {"requests": now.requests, "prefill_tokens": now.prefill_tokens, "decoding": now.decoding}

    await kit.wait_for(lambda: load()["decoding"], 300, "streams with their first byte")
    shown = (await router.get("/debug/replicas"))["replicas"][0]["streams"][0]["load"]
    assert shown == load() == {"requests": 300, "prefill_tokens": 0, "decoding": 300}
    gate.set()
    assert {response.status for response in await asyncio.gather(*tasks)} == {200}
    await kit.wait_until(router.idle, "nothing is in flight")


async def test_the_first_chunk_comes_without_delay_on_a_hundred_streams(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    """Nagle's algorithm against delayed acknowledgements would cost 40 ms on each small chunk."""
    done = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        return await kit.stream(request, [b"data: {}\n\n"], done.wait)

    router = await start_router(await start_engine(answer=answer))
    times = []

    async def one() -> None:
        begun = time.monotonic()
        async with router.client.post(
            f"{router.url}/v1/completions", json={"prompt": [1], "stream": True}
        ) as response:
            await response.content.readexactly(10)
            times.append(time.monotonic() - begun)
            await done.wait()

    tasks = []
    for count in range(100):
        tasks.append(asyncio.create_task(one()))
        await kit.wait_until(lambda count=count: len(times) > count, "its first chunk came")
    done.set()
    await asyncio.gather(*tasks)
    assert sorted(times)[50] < 0.03


@pytest.mark.parametrize("size", [100_000, 1_500_000, 20_000_000])
async def test_px03_large_bodies_pass_untouched(start_engine: Any, start_router: Any, size: int) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    body = json.dumps({"model": "m", "prompt": [1], "user": "x" * size}).encode()
    async with router.client.post(
        f"{router.url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 200
    assert engine.bodies[-1] == body


@pytest.mark.parametrize("chunked", [False, True])
async def test_px03_over_the_limit_is_413_in_openais_shape(
    start_engine: Any, start_router: Any, chunked: bool
) -> None:
    engine = await start_engine()
    router = await start_router(engine, request_limit_bytes=10_000)
    body = json.dumps({"prompt": "x" * 9_987}).encode()
    assert len(body) == 10_001

    async def pieces() -> Any:
        yield body[:5000]
        yield body[5000:]

    data: Any = pieces() if chunked else body
    async with router.client.post(f"{router.url}/v1/completions", data=data) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == 413
        assert response.headers["x-warmroute-reason"] == "request too large"
    assert (await router.complete("y" * 100)).status == 200
    assert engine.generated == 1


@pytest.mark.parametrize(
    ("method", "path", "content_type", "body"),
    [
        ("POST", "/v1/responses", "application/json", b'{"model":"m","input":"x"}'),
        ("POST", "/v1/messages", "application/json", b'{"model":"unknown"}'),
        ("POST", "/v1/embeddings", "application/json", b"not even json"),
        ("POST", "/v1/rerank", "application/json", b'{"model":"m","query":"x","documents":["y"]}'),
        (
            "POST",
            "/v1/audio/transcriptions",
            "multipart/form-data; boundary=b",
            b"--b\r\n\r\n\x00\xff\r\n--b--\r\n",
        ),
        ("GET", "/v1/responses/resp_1?include=a%2Fb&x=%20", "", b""),
        ("DELETE", "/v1/responses/resp_1", "", b""),
        ("PUT", "/v1/anything/at%2Fall", "text/plain", b"x"),
    ],
)
async def test_px16_every_other_path_is_relayed_byte_for_byte_by_load(
    start_engine: Any, start_router: Any, method: str, path: str, content_type: str, body: bytes
) -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=b"\x00\xffraw", content_type="application/octet-stream", status=201)

    engine = await start_engine(answer=echo)
    router = await start_router(engine)
    headers = {"Content-Type": content_type} if content_type else {}
    url = URL(router.url + path, encoded=True)
    async with router.client.request(method, url, data=body or None, headers=headers) as response:
        assert (response.status, await response.read()) == (201, b"\x00\xffraw")
        assert response.headers["x-warmroute-policy"] == "least-loaded"
        assert "x-warmroute-prompt-tokens" not in response.headers
        assert not response.headers["x-warmroute-reason"].startswith("fallback")
    assert (engine.requests[-1].method, engine.requests[-1].raw_path) == (method, path)
    assert engine.bodies[-1] == body
    if content_type:
        assert engine.requests[-1].headers["Content-Type"] == content_type


async def test_a_head_request_is_answered_without_a_body(start_engine: Any, start_router: Any) -> None:
    async def head(_: web.Request) -> web.Response:
        return web.Response(headers={"X-Seen": "1"})

    router = await start_router(await start_engine(answer=head))
    async with router.client.head(f"{router.url}/v1/files/f") as response:
        assert (response.status, response.headers["X-Seen"]) == (200, "1")


async def test_compressed_bodies_pass_both_ways_as_they_are(start_engine: Any, start_router: Any) -> None:
    packed = gzip.compress(json.dumps({"model": "m", "prompt": "x"}).encode())

    async def answer(_: web.Request) -> web.Response:
        return web.Response(
            body=packed, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"}
        )

    engine = await start_engine(answer=answer)
    router = await start_router(engine)
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with router.client.post(f"{router.url}/v1/completions", data=packed, headers=headers) as response:
        assert await response.read() == packed
        assert response.headers["Content-Encoding"] == "gzip"
        assert response.headers["x-warmroute-reason"].startswith(
            "fallback: a body that this router cannot read"
        )
    assert engine.bodies[-1] == packed


async def test_px10_host_is_rewritten_and_the_request_id_is_echoed(
    start_engine: Any, start_router: Any
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    headers = {"X-Request-Id": "abc", "Authorization": "Bearer k", "X-Custom": "1", "Expect": "100-continue"}
    async with router.client.post(
        f"{router.url}/v1/completions", json={"prompt": [1]}, headers=headers
    ) as response:
        assert response.headers.getall("X-Request-Id") == ["abc"]
    got = engine.requests[-1].headers
    assert (got["Host"], got["X-Request-Id"]) == (engine.url.removeprefix("http://"), "abc")
    assert (got["Authorization"], got["X-Custom"]) == ("Bearer k", "1")
    assert "Expect" not in got
    assert "X-data-parallel-rank" not in got
    made = await router.complete([1])
    assert made.headers["X-Request-Id"] == engine.requests[-1].headers["X-Request-Id"] != "abc"


async def test_ev06_a_rank_is_sent_only_where_there_is_more_than_one(
    start_engine: Any, start_router: Any
) -> None:
    engine = await start_engine()
    router = await start_router(f"e0={engine.url},ranks=4", policy="round-robin")
    for _ in range(8):
        await router.complete([1])
    ranks = [request.headers.getall("X-data-parallel-rank") for request in engine.requests]
    assert ranks == [[str(number % 4)] for number in range(8)]


async def test_ev06_a_rank_that_the_client_asks_for_pins_it(start_engine: Any, start_router: Any) -> None:
    engines = [await start_engine(), await start_engine()]
    router = await start_router(
        *(f"e{n}={e.url},ranks=4" for n, e in enumerate(engines)), policy="round-robin"
    )
    for _ in range(4):
        async with router.client.post(
            f"{router.url}/v1/completions", json={"prompt": [1]}, headers={"X-Data-Parallel-Rank": "2"}
        ) as response:
            assert response.headers["x-warmroute-reason"] == "its turn; rank 2 as asked for"
    assert {d["chosen"][1] for d in (await router.get("/debug/decisions"))["decisions"]} == {2}
    for engine in engines:
        ranks = [request.headers.getall("X-data-parallel-rank") for request in engine.requests]
        assert ranks == [["2"]] * 2


@pytest.mark.parametrize("rank", ["4", "-1", "two", "", "9" * 5000])
async def test_ev06_a_rank_that_nobody_has_is_the_engines_to_refuse(
    start_engine: Any, start_router: Any, rank: str
) -> None:
    engine = await start_engine()
    router = await start_router(f"e0={engine.url},ranks=4")
    async with router.client.post(
        f"{router.url}/v1/completions", json={"prompt": [1]}, headers={"X-data-parallel-rank": rank}
    ) as response:
        assert "as asked for" not in response.headers["x-warmroute-reason"]
    assert engine.requests[-1].headers.getall("X-data-parallel-rank") == [rank]


async def test_ev06_a_rank_of_a_shared_port_is_sent_only_where_it_holds_something_of_the_request(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    """Ranks that were never heard of would else get no request, and never be heard of."""
    engine = await start_engine()
    lookup = kit.lookup(kit.matched("e0", 0), kit.matched("e0", 32, rank=2))
    router = await start_router(engine, lookup=lookup)
    (replica,) = router.parts.fleet.replicas.values()
    replica.port_ranks = (2, 3)
    await router.complete(list(range(64)))
    lookup.matches = [kit.matched("e0", 0, rank=rank) for rank in (0, 2, 3)]
    for _ in range(5):
        await router.complete(list(range(100, 164)))
    replica.port_ranks = ()
    await router.complete(list(range(64)))
    sent = [request.headers.getall("X-data-parallel-rank", []) for request in engine.requests]
    assert sent == [["2"], *[[]] * 6]


async def test_px09_a_pinned_request_does_not_go_to_a_replica_that_lacks_its_rank(
    start_engine: Any, start_router: Any
) -> None:
    dead, alive = await start_engine(), await start_engine()
    router = await start_router(f"e0={dead.url},ranks=2", f"e1={alive.url}", health_interval_s=60)
    await dead.stop()
    for reason in ("no replica reached", "no healthy replica of model m with rank 1"):
        async with router.client.post(
            f"{router.url}/v1/completions", json={"prompt": [1]}, headers={"X-data-parallel-rank": "1"}
        ) as response:
            assert (response.status, response.headers["x-warmroute-reason"]) == (503, reason)
    assert alive.generated == 0


async def test_an_answer_in_one_piece_is_not_queued_prefill_until_its_end(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    gate = asyncio.Event()
    engine, now = await start_engine(answer=kit.gated(gate)), 0.0
    router = await start_router(engine)
    router.parts.load._clock = lambda: now
    task = asyncio.create_task(router.complete(list(range(500))))
    await kit.wait_until(lambda: engine.open == 1, "the engine works on it")
    load = router.parts.load
    assert (load.of(("e0", 0)).prefill_tokens, load.of(("e0", 0)).decoding) == (500, 0)
    now = 1.0
    assert (load.of(("e0", 0)).prefill_tokens, load.of(("e0", 0)).decoding) == (0, 1)
    gate.set()
    await task
    outcome = (await router.get("/debug/decisions"))["decisions"][0]["outcome"]
    assert (outcome["status"], outcome["ttft_s"]) == ("200", None)
    assert outcome["duration_s"] > 0


async def test_streams_teach_how_fast_their_replica_prefills(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    router = await start_router(await start_engine())
    cold = router.parts.load.latency.of(("e0", 0))
    await router.complete(list(range(2000)))
    assert router.parts.load.latency.of(("e0", 0)) == cold
    await router.complete(list(range(1, 2001)), stream=True)
    ttft_s = (await router.get("/debug/decisions"))["decisions"][0]["outcome"]["ttft_s"]
    learned = router.parts.load.latency.of(("e0", 0))
    assert 2000 * learned.s_per_token == pytest.approx(max(ttft_s - cold.overhead_s, ttft_s / 2))


async def test_px08_client_errors_say_nothing_about_the_replica(start_engine: Any, start_router: Any) -> None:
    async def bad(_: web.Request) -> web.Response:
        return web.json_response({"error": {}}, status=400)

    router = await start_router(await start_engine(answer=bad))
    for _ in range(50):
        assert (await router.complete([1])).status == 400
    assert (await router.get("/debug/replicas"))["replicas"][0]["health"] == "up"


async def test_rq05_a_burst_on_one_tick_is_spread_evenly(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    gate = asyncio.Event()
    engines = [await start_engine(answer=kit.gated(gate)) for _ in range(4)]
    router = await start_router(*engines, policy="least-loaded")
    tasks = [asyncio.create_task(router.complete([1] * 500)) for _ in range(64)]
    await kit.wait_until(lambda: sum(engine.open for engine in engines) == 64, "all are sent")
    assert [engine.open for engine in engines] == [16] * 4
    gate.set()
    await asyncio.gather(*tasks)


async def test_rq11_no_ending_leaves_anything_booked(start_engine: Any, start_router: Any, kit: Any) -> None:
    """A thousand requests that end in every way at once."""
    number = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal number
        number += 1
        if number % 4 == 0:
            return web.Response(status=500)
        if number % 4 == 1:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if number % 4 == 2:
            return await kit.stream(request, [b"data: {}\n\n"] * 3)
        await asyncio.sleep(30)
        return web.Response()

    async def unhealthy(_: web.Request) -> web.Response:
        return web.Response(status=500)

    engines = [await start_engine(answer=answer, tokenize=unhealthy), await start_engine(answer=answer)]
    router = await start_router(*engines)

    async def one(index: int) -> None:
        limit = 0.05 if index % 2 else 0.2
        try:
            async with asyncio.timeout(limit):
                await router.complete(f"prompt {index}", stream=True)
        except (TimeoutError, aiohttp.ClientError):
            pass

    for batch in range(10):
        await asyncio.gather(*(one(100 * batch + index) for index in range(100)))
    await kit.wait_until(router.idle, "nothing is in flight")
    await kit.wait_until(lambda: all(engine.open == 0 for engine in engines), "no engine works on anything")
    load = router.parts.load
    assert not dict(load.items())
    assert not any(book.line or book.prefilled for book in load._books.values())


async def test_rq13_health_checks_do_not_touch_the_load(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    gate = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        return await kit.stream(request, [b"data: {}\n\n"] * 2, gate.wait)

    engine = await start_engine(answer=answer)
    router = await start_router(engine, health_interval_s=60)
    tasks = [asyncio.create_task(router.complete([number], stream=True)) for number in range(20)]
    await kit.wait_until(lambda: engine.open == 20, "all stream")
    fleet, load = router.parts.fleet, router.parts.load
    for cycle in range(30):
        # Down and up again now and then: the streams that run go on.
        engine.health_status = 500 if cycle % 3 == 0 else 200
        await fleet.watchers["e0"].check_health()
        assert load.ours(("e0", 0)).requests == 20
    gate.set()
    await asyncio.gather(*tasks)
    await kit.wait_until(router.idle, "nothing is in flight")
