"""The HTTP client against the real application, and against what is none."""

import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from indexer.client import IndexerClient
from indexer.errors import IndexerAnswerError, IndexerClientError, IndexerUnreachableError
from indexer.registration import Registration

PROMPT = list(range(28))


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def every_call(client: IndexerClient) -> list[Any]:
    return [
        client.register(Registration(instance_id="A", endpoint="tcp://127.0.0.1:9", model_name="m")),
        client.unregister("A", "m"),
        client.workers(),
        client.query("m", PROMPT),
    ]


async def test_a_round_trip_gives_what_the_map_gives(
    indexers: Any, publishers: Any, engine: Any, prompt: Any, until: Any, session: aiohttp.ClientSession
) -> None:
    indexer, publisher = indexers(), publishers()
    salted = prompt(tuple(PROMPT), "adapter", ((0, ("salt",)),))
    publisher.publish([engine().stored(PROMPT, 0, 4), engine().stored(salted)], 1.0)
    async with TestServer(indexer.application()) as server:
        client = IndexerClient(str(server.make_url("/")), session)
        registration = Registration(
            instance_id="A",
            endpoint=publisher.endpoint,
            model_name="m",
            replay_endpoint=publisher.replay_endpoint,
            aliases=("alias",),
        )
        await client.register(registration)
        await client.register(registration)
        until(lambda: indexer.reader.streams()[0].state == "live")
        for model in ("m", "alias"):
            answer = await client.query(model, PROMPT)
            assert answer == indexer.reader.query(model, PROMPT)
            assert [one.gpu for one in answer] == [16]
        (one,) = await client.query("m", tuple(PROMPT), lora_name="adapter", cache_salt="salt")
        assert (one.gpu, one.state, one.weight, one.sequence) == (28, "live", 1.0, 0)
        (worker,) = await client.workers()
        assert (worker["instance_id"], worker["status"]) == ("A", "active")
        await client.unregister("A", "m")
        assert await client.workers() == []


async def test_a_model_that_nobody_serves_matches_nothing(
    indexers: Any, session: aiohttp.ClientSession
) -> None:
    async with TestServer(indexers().application()) as server:
        assert await IndexerClient(str(server.make_url("/")), session).query("m", PROMPT) == []


@pytest.mark.parametrize(
    "answer",
    [
        {"text": "404: Not Found"},
        {"text": "<html>", "content_type": "text/html"},
        {"text": '{"error": "Not Found: POST /query"}'},
        {"text": '{"error": {"message": "Not Found", "code": 404}}'},
        {"text": '{"detail": "Not Found"}'},
        {"body": b"\xff"},
    ],
)
async def test_a_404_of_a_server_that_is_no_indexer_is_an_error_and_no_unknown_model(
    session: aiohttp.ClientSession, answer: dict[str, Any]
) -> None:
    async def not_found(_: web.Request) -> web.Response:
        return web.Response(status=404, **answer)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", not_found)
    async with TestServer(app) as server:
        with pytest.raises(IndexerAnswerError, match="404"):
            await IndexerClient(str(server.make_url("/")), session).query("m", PROMPT)


async def test_errors_carry_the_status_and_what_the_indexer_said(
    indexers: Any, session: aiohttp.ClientSession
) -> None:
    async with TestServer(indexers().application()) as server:
        client = IndexerClient(str(server.make_url("/")), session)
        with pytest.raises(IndexerAnswerError, match="no instance 'A'") as unknown:
            await client.unregister("A", "m")
        assert unknown.value.status == 404
        with pytest.raises(IndexerAnswerError, match="tcp://HOST:PORT") as refused:
            await client.register(Registration(instance_id="A", endpoint="nonsense", model_name="m"))
        assert refused.value.status == 400
        with pytest.raises(IndexerAnswerError) as bad:
            await client.query("m", [-1])
        assert bad.value.status == 400


async def test_nobody_there_is_unreachable(session: aiohttp.ClientSession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for call in every_call(IndexerClient(f"http://127.0.0.1:{port}", session)):
        with pytest.raises(IndexerUnreachableError, match=f"http://127.0.0.1:{port}"):
            await call
    for url in ("http://", "nonsense"):
        for call in every_call(IndexerClient(url, session)):
            with pytest.raises(IndexerUnreachableError):
                await call


async def test_one_that_accepts_and_says_nothing_is_unreachable_in_time(
    session: aiohttp.ClientSession,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = IndexerClient(f"http://127.0.0.1:{server.getsockname()[1]}", session, timeout_s=0.05)
        for call in every_call(client):
            with pytest.raises(IndexerUnreachableError):
                await call


async def test_one_that_hangs_up_is_unreachable(session: aiohttp.ClientSession) -> None:
    async def hang_up(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with application(hang_up) as server:
        for call in every_call(IndexerClient(str(server.make_url("/")), session)):
            with pytest.raises(IndexerUnreachableError):
                await call


def application(handler: Any) -> TestServer:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    return TestServer(app)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"\xff\xfe",
        b"null",
        b"{}",
        b'"text"',
        b"[1]",
        b'{"streams": [{"instance": "A"}]}',
        b'["\xff"]',
    ],
)
async def test_nonsense_is_an_answer_error(session: aiohttp.ClientSession, body: bytes) -> None:
    async def nonsense(_: web.Request) -> web.Response:
        return web.Response(body=body)

    async with application(nonsense) as server:
        client = IndexerClient(str(server.make_url("/")), session)
        for call in (client.query("m", PROMPT), client.workers()):
            with pytest.raises(IndexerAnswerError, match="what no indexer answers"):
                await call


@pytest.mark.parametrize("status", [400, 401, 500, 503])
async def test_an_error_status_is_an_answer_error(session: aiohttp.ClientSession, status: int) -> None:
    async def fail(_: web.Request) -> web.Response:
        return web.Response(status=status, body=b"\xff" * 10_000)

    async with application(fail) as server:
        for call in every_call(IndexerClient(str(server.make_url("/")), session)):
            with pytest.raises(IndexerAnswerError) as error:
                await call
            assert error.value.status == status
            assert len(str(error.value)) < 1_000


def test_both_errors_are_client_errors() -> None:
    assert issubclass(IndexerAnswerError, IndexerClientError)
    assert issubclass(IndexerUnreachableError, IndexerClientError)
