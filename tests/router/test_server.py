"""What aiohttp would answer by itself, and what clients send that is no HTTP."""

from __future__ import annotations

import asyncio
import asyncio.selector_events
import errno
import json
from contextlib import AsyncExitStack
from typing import Any
from unittest.mock import Mock

import pytest

from router.answer import AnswerTap
from router.assembly import router_app
from router.listening import listening
from router.pool import PooledUpstream
from router.settings import RouterSettings

BODY = b'{"model":"m","prompt":[1,2,3]}'


async def answer_to(router: Any, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of what a router answers to raw bytes; it has to close the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
    writer.write(request)
    async with asyncio.timeout(5):
        content = await reader.read()
    writer.close()
    head, _, body = content.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(status.split()[1]), headers, body


def post(*headers: bytes, line: bytes = b"POST /v1/completions HTTP/1.1", body: bytes = BODY) -> bytes:
    head = (line, b"Host: r", b"Connection: close", b"Content-Length: %d" % len(body), *headers)
    return b"\r\n".join(head) + b"\r\n\r\n" + body


MALFORMED = [
    post(b"Authorization: Bearer sk-LEAK\x01"),
    b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\nsk-LEAK",
    b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: sk-LEAK\r\n\r\n",
    b"sk-LEAK\r\n\r\n",
    b"GET /v1/sk-LEAK\xe9 HTTP/1.1\r\nHost: r\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: " + b"sk-LEAK" * 20_000 + b"\r\n\r\n",
    b"GET /" + b"sk-LEAK" * 20_000 + b" HTTP/1.1\r\n\r\n",
]
STATUSES = [400] * 5 + [431, 414]


async def test_op08_op10_malformed_http_is_told_in_our_shape_and_logged_once_without_its_bytes(
    start_engine: Any, start_router: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    with caplog.at_level("DEBUG"):
        for request, expected in list(zip(MALFORMED, STATUSES, strict=True)) * 3:
            status, headers, body = await answer_to(router, request)
            assert (status, headers["content-type"]) == (expected, "application/json")
            assert json.loads(body)["error"]["code"] == expected
            assert headers["x-warmroute-policy"] == "cache-aware"
            assert headers["x-warmroute-reason"]
            assert headers["x-request-id"]
            assert b"LEAK" not in body
    assert "LEAK" not in caplog.text
    assert "Traceback" not in caplog.text
    lines = [
        record.getMessage() for record in caplog.records if record.name.startswith(("router", "aiohttp"))
    ]
    assert len(lines) == len(set(lines)) <= len(MALFORMED)
    assert engine.generated == 0
    assert router.idle()


async def test_op08_a_client_that_resets_its_connection_behind_what_is_no_http_is_no_failure(
    start_engine: Any, start_router: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Between the answer and this step, as it happens now and then.
    reset = Mock(side_effect=OSError(errno.ENOTCONN, "not connected"))
    monkeypatch.setattr(asyncio.selector_events._SelectorSocketTransport, "write_eof", reset)
    router = await start_router(await start_engine())
    status, _, _ = await answer_to(router, b"NONSENSE\r\n\r\n")
    assert (status, reset.called) == (400, True)
    assert "a connection failed" not in caplog.text


@pytest.mark.parametrize(
    ("line", "status", "allow"),
    [
        (b"GET /nowhere HTTP/1.1", 404, None),
        (b"GET //v1/models HTTP/1.1", 404, None),
        (b"CONNECT r:443 HTTP/1.1", 404, None),
        (b"DELETE /health HTTP/1.1", 405, "GET,HEAD"),
    ],
)
async def test_paths_and_methods_that_nobody_serves_are_told_in_openais_shape(
    start_router: Any, line: bytes, status: int, allow: str | None
) -> None:
    router = await start_router()
    answered, headers, body = await answer_to(router, post(b"X-Request-Id: abc", line=line))
    error = json.loads(body)["error"]
    assert (answered, error["code"], headers["content-type"]) == (status, status, "application/json")
    assert (headers["x-request-id"], headers.get("allow")) == ("abc", allow)
    assert headers["x-warmroute-policy"] == "cache-aware"
    assert headers["x-warmroute-reason"] == error["type"].lower()


async def test_an_expectation_that_nobody_can_meet_is_told_in_openais_shape(
    start_engine: Any, start_router: Any
) -> None:
    router = await start_router(await start_engine())
    status, headers, body = await answer_to(router, post(b"Expect: miracles"))
    assert (status, json.loads(body)["error"]["type"]) == (417, "Expectation Failed")
    assert headers["x-warmroute-reason"] == "expectation failed"


@pytest.mark.parametrize(
    "target", [b"/v1/x?", b"/v1//x/../y?a=b?c", b"/v1/%7euser;a=1?&&", b"/v1/files/a..b?../.."]
)
async def test_px16_a_target_arrives_as_it_was_asked_for(
    start_engine: Any, start_router: Any, target: bytes
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    status, _, _ = await answer_to(router, post(line=b"POST %s HTTP/1.1" % target))
    assert (status, engine.requests[-1].raw_path) == (200, target.decode())


@pytest.mark.parametrize(
    "below",
    [
        *(b"../metrics", b"x/../../metrics", b"./../metrics", b"/../metrics", b".."),
        *(b"%2e%2e/metrics", b".%2E/metrics", b"..%2fmetrics", b"x%2f..%2F../metrics", b"..;a=1/metrics"),
        b"..\\metrics",
    ],
)
async def test_px16_no_path_leads_out_of_v1_at_an_engine(
    start_engine: Any, start_router: Any, below: bytes
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    status, _, _ = await answer_to(router, post(line=b"POST /v1/%s HTTP/1.1" % below))
    assert (status, engine.generated) == (404, 0)


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/responses/a%2Fb?x=%20&y"])
async def test_a_target_in_absolute_form_is_served_like_its_path(
    start_engine: Any, start_router: Any, path: bytes
) -> None:
    engine = await start_engine()
    router = await start_router(engine)
    for target in (path, b"http://api.local" + path):
        status, headers, _ = await answer_to(router, post(line=b"POST %s HTTP/1.1" % target))
        assert (status, headers["x-warmroute-replica"]) == (200, "e0")
    assert [request.raw_path for request in engine.requests] == [path.decode()] * 2


async def test_px14_an_unforeseen_error_is_a_500_in_openais_shape_and_logged_once_without_the_request(
    start_engine: Any, start_router: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def surprise(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("sk-LEAK")

    monkeypatch.setattr(PooledUpstream, "send", surprise)
    router = await start_router(await start_engine())
    for _ in range(3):
        status, headers, body = await answer_to(router, post(b"X-Request-Id: abc"))
        assert (status, json.loads(body)["error"]["type"]) == (500, "InternalServerError")
        assert (headers["x-warmroute-replica"], headers["x-request-id"]) == ("e0", "abc")
    assert "LEAK" not in caplog.text
    assert [
        record.getMessage().split(":")[1] for record in caplog.records if record.name == "router.route"
    ] == [" ZeroDivisionError in surprise, test_server.py"]
    assert await router.metric("requests_total", policy="cache-aware", replica="e0", status="500") == 3
    assert (await router.get("/debug/decisions"))["decisions"][0]["outcome"]["status"] == "500"
    assert router.idle()


async def test_px14_an_unforeseen_error_in_mid_answer_does_not_pass_for_its_end(
    start_engine: Any, start_router: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def surprise(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(AnswerTap, "feed", surprise)
    router = await start_router(await start_engine())
    _, headers, body = await answer_to(router, post(body=b'{"prompt":[1],"stream":true}'))
    assert headers["transfer-encoding"] == "chunked"
    assert not body.endswith(b"0\r\n\r\n")
    await kit.wait_until(router.idle, "nothing is in flight")


async def test_px10_header_bytes_that_are_no_utf8_arrive_unchanged_both_ways(
    start_engine: Any, start_router: Any
) -> None:
    async def answer(request: Any) -> Any:
        response = await engine._answer(request)
        response.headers["X-Their"] = request.headers["X-User"]
        return response

    engine = await start_engine()
    engine.answer = answer
    router = await start_router(engine)
    for name in (b"Jos\xe9 \xff!", "José".encode()):
        status, headers, _ = await answer_to(router, post(b"X-User: " + name, b"X-Request-Id: \xe9"))
        assert status == 200
        assert engine.requests[-1].headers["X-User"].encode("utf-8", "surrogateescape") == name
        assert headers["x-their"].encode("latin-1") == name
        assert headers["x-request-id"] == engine.requests[-1].headers["X-Request-Id"]
        assert len(headers["x-request-id"]) == 32
    assert len((await router.get("/debug/decisions"))["decisions"]) == 2


@pytest.mark.parametrize("large", [False, True], ids=["short", "longer than what is read ahead"])
async def test_px17_a_body_that_is_still_coming_when_the_router_goes_down_comes_whole(
    start_engine: Any, kit: Any, large: bool
) -> None:
    engine = await start_engine()
    rest = b" " * (4_000_000 if large else 1000)
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(kit.running_router(engine, grace_s=10.0))
        reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
        writer.write(post(b"Expect: 100-continue", body=BODY + rest).removesuffix(rest))
        await reader.readuntil(b"100 Continue\r\n\r\n")
        down = asyncio.create_task(stack.pop_all().aclose())
        await kit.wait_until(lambda: router.parts.draining, "it goes down")
        await asyncio.sleep(0.05)
        assert not down.done()
        writer.write(rest)
        async with asyncio.timeout(5):
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        await down
    assert engine.bodies == [BODY + rest]


async def takes_in(port: int) -> bool:
    """Whether a connection to the port is made."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return False
    writer.close()
    return True


@pytest.mark.parametrize("brings", [True, False])
async def test_px17_a_connection_that_has_brought_no_request_when_the_router_goes_down_may_still_bring_one(
    start_engine: Any, kit: Any, monkeypatch: pytest.MonkeyPatch, brings: bool
) -> None:
    monkeypatch.setattr("router.server.FIRST_REQUEST_S", 30.0 if brings else 0.01)
    engine = await start_engine()
    settings = RouterSettings(listen="127.0.0.1:0", admin_listen="same", replica=(f"e0={engine.url}",))
    async with router_app(settings) as router:
        door = listening(router)
        port = int((await door.__aenter__()).rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if brings:
            writer.write(post()[:10])
        leaving = asyncio.create_task(door.__aexit__(None, None, None))
        async with asyncio.timeout(10):
            while await takes_in(port):
                pass
            if brings:
                writer.write(post()[10:])
            answer = await reader.read()
            await leaving
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ") if brings else answer == b""
