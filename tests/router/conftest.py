"""Engines that do as a test tells them, and routers in front of them: all over real sockets."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from indexer.reader import Matched
from router.app import RouterApp
from router.assembly import router_app
from router.errors import LookupFailedError
from router.listening import listening
from router.settings import RouterSettings
from tests.router.whole_path import IndexerProcess

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
DEADLINE_S = 10.0


async def wait_until(true: Callable[[], bool], what: str) -> None:
    """Waits for what real sockets bring about; fails after ten seconds."""
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end, f"timed out waiting until {what}"
        await asyncio.sleep(0.005)


async def wait_for(count: Callable[[], int], goal: int, what: str) -> None:
    """Waits until many have come; fails after ten seconds in which none did, however slow the machine is."""
    reached, end = count(), time.monotonic() + DEADLINE_S
    while reached != goal:
        assert time.monotonic() < end, f"{reached} of {goal}, and no more: {what}"
        await asyncio.sleep(0.005)
        if (now := count()) != reached:
            reached, end = now, time.monotonic() + DEADLINE_S


def fake_tokens(body: dict[str, Any]) -> list[int]:
    """What the fake engine takes as the prompt's tokens: the bytes of its prompt or messages."""
    text = body["prompt"] if "prompt" in body else json.dumps(body["messages"])
    return list(text.encode())


class FakeEngine:
    """An OpenAI-like server. Tests set its attributes, and ``answer`` for the generating paths."""

    def __init__(self) -> None:
        self.url = ""
        self.tls: ssl.SSLContext | None = None
        self.models_headers: Mapping[str, str] = {}
        self.model = "m"
        self.cards: list[dict[str, Any]] = [{"id": "m", "object": "model", "max_model_len": 4096}]
        self.health_status = 200
        self.event_sources: dict[str, Any] | None = None
        self.metrics: bytes | Callable[[], bytes] | None = None
        self.tokenize: Handler | None = self._tokenize
        self.answer: Handler = self._answer
        self.requests: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.tokenized = 0
        self.open = 0
        self.most_open = 0
        self.cancelled = 0
        self.runner: web.AppRunner | None = None

    @property
    def generated(self) -> int:
        """How many requests came to be answered."""
        return len(self.requests)

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=256 * 1024 * 1024)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/kv_event_sources", self._sources)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._count_tokenize)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self.runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1, auto_decompress=False
        )
        await self.runner.setup()
        # As many may wait to be accepted as at an engine (uvicorn): the kernel drops what is beyond, and a
        # client tries again after a second, two, four and so on.
        site = web.TCPSite(
            self.runner, "127.0.0.1", port, backlog=2048, reuse_address=True, ssl_context=self.tls
        )
        await site.start()
        scheme = "http" if self.tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health_status)

    async def _models(self, request: web.Request) -> web.Response:
        self.models_headers = request.headers
        return web.json_response({"object": "list", "data": self.cards})

    async def _sources(self, _: web.Request) -> web.Response:
        if self.event_sources is None:
            raise web.HTTPNotFound
        return web.json_response(self.event_sources)

    async def _metrics(self, _: web.Request) -> web.Response:
        if self.metrics is None:
            raise web.HTTPNotFound
        return web.Response(body=self.metrics() if callable(self.metrics) else self.metrics)

    async def _count_tokenize(self, request: web.Request) -> web.StreamResponse:
        self.tokenized += 1
        if self.tokenize is None:
            raise web.HTTPNotFound
        return await self.tokenize(request)

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = fake_tokens(await request.json())
        return web.json_response({"count": len(tokens), "max_model_len": 4096, "tokens": tokens})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append(request)
        self.bodies.append(body)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(self.bodies[-1])
        if body.get("stream"):
            return await stream(request, [b"data: {}\n\n", b"data: [DONE]\n\n"])
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        return web.json_response({"choices": [{"index": 0, "text": "ok"}], "usage": usage})


async def stream(
    request: web.Request, chunks: Sequence[bytes], between: Callable[[], Awaitable[object]] | None = None
) -> web.StreamResponse:
    """An SSE answer of ``chunks``; ``between`` is awaited after each."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
        if between is not None:
            await between()
    return response


def gated(gate: asyncio.Event) -> Handler:
    """Answers in one piece as soon as ``gate`` is open."""

    async def answer(_: web.Request) -> web.Response:
        await gate.wait()
        return web.json_response({})

    return answer


class FakeLookup:
    """An index that says what a test wants: a match by stream, or a failure."""

    def __init__(self, *matches: Matched) -> None:
        self.matches = list(matches)
        self.failure: Exception | None = None
        self.asked: list[tuple[str, array[int], str | None, str | None]] = []

    async def match(
        self, model: str, tokens: array[int], lora_name: str | None, cache_salt: str | None
    ) -> list[Matched]:
        self.asked.append((model, tokens, lora_name, cache_salt))
        if self.failure is not None:
            raise self.failure
        return list(self.matches)

    async def close(self) -> None:
        pass


def matched(
    instance: str,
    tokens: int,
    *,
    rank: int = 0,
    block_size: int = 16,
    state: str = "live",
    weight: float = 1.0,
) -> Matched:
    """A stream that holds ``tokens`` leading tokens on the GPU."""
    return Matched(instance, rank, block_size, state, weight, tokens, tokens, tokens, 1, 1)


class RunningRouter:
    """A router that listens, and a client for it."""

    def __init__(self, parts: RouterApp, url: str, client: aiohttp.ClientSession) -> None:
        self.parts = parts
        self.url = url
        self.client = client

    async def complete(self, prompt: Any = "hello", **fields: Any) -> aiohttp.ClientResponse:
        """One completion, read to its end."""
        body = {"model": "m", "prompt": prompt, **fields}
        async with self.client.post(f"{self.url}/v1/completions", json=body) as response:
            await response.read()
            return response

    async def get(self, path: str) -> Any:
        async with self.client.get(self.url + path) as response:
            return await response.json()

    async def metric(self, name: str, **labels: str) -> float:
        """A sample of the router's own registry; 0 when it is not there."""
        return self.parts.metrics.registry.get_sample_value(f"warmroute_router_{name}", labels) or 0.0

    def idle(self) -> bool:
        """Whether nothing is booked as in flight."""
        return not list(self.parts.load.items())


StartEngine = Callable[..., Awaitable[FakeEngine]]
StartRouter = Callable[..., Awaitable[RunningRouter]]


@asynccontextmanager
async def running_router(
    *engines: FakeEngine | str,
    lookup: Any = None,
    recorder: Any = None,
    reread: Any = None,
    wait: bool = True,
    **settings: Any,
) -> AsyncIterator[RunningRouter]:
    lines = tuple(
        f"e{number}={engine.url}" if isinstance(engine, FakeEngine) else engine
        for number, engine in enumerate(engines)
    )
    values: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "admin_listen": "same",
        "replica": lines,
        "health_interval_s": 0.05,
        "grace_s": 0.2,
        "seed": 1,
    }
    async with (
        router_app(
            RouterSettings(**(values | settings)), lookup=lookup, recorder=recorder, reread=reread
        ) as parts,
        listening(parts) as url,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as client,
    ):
        if wait:
            replicas = parts.fleet.replicas.values()
            await wait_until(lambda: all(r.models is not None for r in replicas), "all replicas are known")
        yield RunningRouter(parts, url, client)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    started: list[FakeEngine] = []

    async def start(**attributes: Any) -> FakeEngine:
        engine = FakeEngine()
        for name, value in attributes.items():
            setattr(engine, name, value)
        await engine.start()
        started.append(engine)
        return engine

    yield start
    for engine in started:
        await engine.stop()


@pytest.fixture
def upstream_client() -> str:
    """What requests are sent with; modules about the relay run over all of them."""
    return "pool"


@pytest.fixture
async def start_router(start_engine: StartEngine, upstream_client: str) -> AsyncIterator[StartRouter]:
    async with AsyncExitStack() as stack:

        async def start(*engines: FakeEngine | str, **settings: Any) -> RunningRouter:
            settings = {"upstream_client": upstream_client} | settings
            return await stack.enter_async_context(running_router(*engines, **settings))

        yield start


@pytest.fixture
async def indexer(tmp_path: Path) -> AsyncIterator[IndexerProcess]:
    process = IndexerProcess(tmp_path / "map")
    await process.start()
    yield process
    await process.kill()


@pytest.fixture
def until() -> Callable[[Callable[[], bool], str], Awaitable[None]]:
    return wait_until


@pytest.fixture
def kit() -> Any:
    """The helpers of this file, for tests: pytest imports no conftest by name."""

    class Kit:
        lookup = FakeLookup
        matched = staticmethod(matched)
        stream = staticmethod(stream)
        gated = staticmethod(gated)
        wait_until = staticmethod(wait_until)
        wait_for = staticmethod(wait_for)
        running_router = staticmethod(running_router)
        failure = LookupFailedError

    return Kit


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ca.pem``, with ``server.pem`` and ``client.pem`` of it and their keys; ``other.pem``: another CA."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("tls")
    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    for name in ("ca", "other"):
        openssl(folder, *new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")
    for name in ("server", "client"):
        more = (
            "-subj",
            f"/CN={name}",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
        )
        openssl(folder, *new, *more, "-keyout", f"{name}.key", "-out", f"{name}.pem")
    return folder
