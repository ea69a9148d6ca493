"""``warmroute engine``: the HTTP server of a simulated vLLM, one core per data-parallel rank."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import signal
import time
from array import array
from collections.abc import Awaitable, Callable
from types import TracebackType

import msgspec
from aiohttp import web

from events.address import AddressError, cannot_listen, host_and_port, http_url, not_only, offset_port
from events.curve import read_pair, read_public
from events.publisher import Publisher, PublisherError
from simulator import openai, tokenizer
from simulator.core import EngineCore
from simulator.errors import ListenError, RequestError, SettingsError
from simulator.metrics import EngineMetrics
from simulator.openai import Generation
from simulator.scheduler import Request
from simulator.settings import EngineSettings

log = logging.getLogger(__name__)

VERSION = "0.32.0+warmroute"
BUFFER_STEPS = 10_000
HIGH_WATER_MARK = 100_000
REQUEST_LIMIT_BYTES = 64 << 20
SHUTDOWN_TIMEOUT_S = 1.0
BACKLOG = 2048
"""Connections that may wait to be accepted: as many as at vLLM (uvicorn's default)."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Token = tuple[int, int, bool]
"""Choice, token id, and whether it is the choice's last."""


class Engine:
    """A simulated engine process: ``start``, then requests at ``url``, then ``close``."""

    def __init__(self, settings: EngineSettings) -> None:
        """Raises SettingsError for settings that no engine could run with."""
        settings.check()
        self.settings = settings
        self.url = ""
        self.started = time.time()
        self.cores: list[EngineCore] = []
        self._metrics = EngineMetrics(settings, self.started)
        self._round_robin = itertools.count()
        self._loops: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Binds the sockets and begins to serve. Raises SettingsError, ListenError."""
        try:
            host, port = host_and_port(self.settings.listen)
        except AddressError as error:
            raise SettingsError(str(error)) from error
        try:
            self._start_cores()
            runner = web.AppRunner(
                self._application(),
                access_log=None,
                handler_cancellation=True,
                shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )
            self._runner = runner
            await runner.setup()
            await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        except OSError as error:
            await self.close()
            raise ListenError(cannot_listen(self.settings.listen, error)) from error
        except (AddressError, PublisherError) as error:
            await self.close()
            raise ListenError(f"{error} with --events or --replay") from error
        self.url = http_url(host, runner.addresses[0][1])

    async def close(self) -> None:
        """Ends running requests and frees the addresses."""
        if self._runner is not None:
            await self._runner.cleanup()
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        for core in self.cores:
            if core.publisher is not None:
                core.publisher.close()

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _start_cores(self) -> None:
        seed = self.settings.hash_seed
        start = secrets.token_bytes(8) if seed is None else (seed & (1 << 64) - 1).to_bytes(8, "big")
        for rank in range(self.settings.ranks):
            core = EngineCore(
                rank, self.settings, start, self._publisher(rank), self._metrics.first_token(rank)
            )
            self.cores.append(core)
            task = asyncio.create_task(core.run(), name=f"engine-core-{rank}")
            task.add_done_callback(_log_death)
            self._loops.append(task)
        self._metrics.watch(self.cores)

    def _publisher(self, rank: int) -> Publisher | None:
        settings = self.settings
        if settings.events is None:
            return None
        key, server = settings.curve_key, settings.curve_server
        return Publisher(
            offset_port(settings.events, rank),
            None if settings.replay is None else offset_port(settings.replay, rank),
            topic=settings.topic,
            rank=rank,
            buffer_steps=BUFFER_STEPS,
            hwm=HIGH_WATER_MARK,
            keys=None if key is None else read_pair("--curve-key", key),
            server_key=None if server is None else read_public("--curve-server", server),
        )

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[_openai_errors], client_max_size=REQUEST_LIMIT_BYTES)
        application.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat_completions),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.get("/health", self._health),
                web.get("/metrics", self._serve_metrics),
                web.get("/kv_event_sources", self._kv_event_sources),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.get("/version", self._version),
            ]
        )
        return application

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        body = openai.parse(await http.read(), openai.CompletionBody)
        self._check_model(body.model)
        return await self._generate(http, openai.completion(body, self.settings.model_len))

    async def _chat_completions(self, http: web.Request) -> web.StreamResponse:
        body = openai.parse(await http.read(), openai.ChatBody)
        self._check_model(body.model)
        return await self._generate(http, openai.chat(body, self.settings.model_len))

    async def _generate(self, http: web.Request, generation: Generation) -> web.StreamResponse:
        pinned = self._pinned_rank(http)
        given_id = http.headers.get("X-Request-Id")
        request_id = given_id or secrets.token_hex(8)
        response_id = ("chatcmpl-" if generation.chat else "cmpl-") + request_id
        tokens: asyncio.Queue[Token] = asyncio.Queue()
        running = self._submit(generation, pinned, tokens)
        headers = {"X-Request-Id": request_id}
        try:
            if generation.stream:
                return await self._stream(http, generation, response_id, headers, running, tokens)
            remaining = len(running)
            while remaining:
                _, _, last = await tokens.get()
                remaining -= last
            outputs = [request.output for _, request in running]
            cached = _cached_tokens(generation, running)
            payload = openai.answer(generation, response_id, self.settings.model, outputs, cached)
            return web.Response(body=payload, content_type="application/json", headers=headers)
        finally:
            # Also when the client is gone, which cancels this handler.
            for core, request in running:
                core.abort(request)

    def _submit(
        self, generation: Generation, pinned: int | None, tokens: asyncio.Queue[Token]
    ) -> list[tuple[EngineCore, Request]]:
        """Queues every choice with the core of its rank; their tokens come in as they are sampled."""
        running = []
        for choice in range(len(generation.prompts) * generation.n):
            prompt = generation.prompts[choice // generation.n]
            text = tokenizer.Babble(array("I", prompt).tobytes(), choice % generation.n)
            request = Request(
                prompt,
                generation.max_tokens,
                text.token,
                salt=generation.salt,
                reads_cache=generation.reads_cache,
            )
            rank = next(self._round_robin) % len(self.cores) if pinned is None else pinned
            self.cores[rank].submit(request, _sink(tokens, choice))
            running.append((self.cores[rank], request))
        return running

    async def _stream(
        self,
        http: web.Request,
        generation: Generation,
        response_id: str,
        headers: dict[str, str],
        running: list[tuple[EngineCore, Request]],
        tokens: asyncio.Queue[Token],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers)
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        await response.prepare(http)
        stream = openai.Stream(generation, response_id, self.settings.model)
        remaining = len(running)
        while remaining:
            pieces = []
            batch = [await tokens.get()]
            while not tokens.empty():
                batch.append(tokens.get_nowait())
            for choice, token, last in batch:
                pieces.append(stream.token(choice, token, last))
                remaining -= last
            if not remaining:
                completed = sum(len(request.output) for _, request in running)
                pieces.append(stream.end(_cached_tokens(generation, running), completed))
            try:
                await response.write(b"".join(pieces))
            except ConnectionResetError:  # The client left; the caller forgets its requests.
                return response
        await response.write_eof()
        return response

    def _pinned_rank(self, http: web.Request) -> int | None:
        header = http.headers.get("X-data-parallel-rank")
        try:
            rank = None if header is None else int(header)
        except ValueError:
            return None  # vLLM takes no notice either.
        if rank is not None and not 0 <= rank < len(self.cores):
            raise RequestError(f"data_parallel_rank {rank} is out of range [0, {len(self.cores)}).")
        return rank

    def _check_model(self, name: str | None) -> None:
        if name and name != self.settings.model:
            raise openai.unknown_model(name, self.settings.model)

    async def _models(self, _: web.Request) -> web.Response:
        return _json(openai.models(self.settings.model, self.settings.model_len, int(self.started)))

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = openai.parse(await http.read(), openai.TokenizeBody)
        self._check_model(body.model)
        return _json(openai.tokenized(body.tokens(), self.settings.model_len))

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if any(loop.done() for loop in self._loops) else 200)

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _kv_event_sources(self, _: web.Request) -> web.Response:
        sources = {}
        for core in self.cores:
            if core.publisher is not None:
                sources[str(core.rank)] = {
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": _announced(core.publisher.endpoint, self.settings.events),
                    "replay_endpoint": _announced(core.publisher.replay_endpoint, self.settings.replay),
                    "buffer_steps": BUFFER_STEPS,
                    "hwm": HIGH_WATER_MARK,
                    "max_queue_size": HIGH_WATER_MARK,
                    "topic": self.settings.topic,
                }
        return _json(msgspec.json.encode(sources))

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        done = [core.scheduler.reset_prefix_cache() for core in self.cores]
        return _json(msgspec.json.encode({"success": all(done)}))

    async def _version(self, _: web.Request) -> web.Response:
        return _json(msgspec.json.encode({"version": VERSION}))


async def serve(settings: EngineSettings) -> None:
    """Runs an engine until SIGTERM or SIGINT. Raises SettingsError and ListenError at the start."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Engine(settings) as engine:
        host, _ = host_and_port(settings.listen)
        log.info("listening on %s%s", engine.url, not_only(host))
        await stop.wait()


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure in the shape that OpenAI clients read."""
    try:
        return await handler(request)
    except RequestError as error:
        failure = error
    except web.HTTPException as error:
        failure = RequestError(error.reason, status=error.status, kind=error.reason)
    return web.Response(status=failure.status, body=openai.error(failure), content_type="application/json")


def _sink(tokens: asyncio.Queue[Token], choice: int) -> Callable[[int, bool], None]:
    def put(token: int, last: bool) -> None:
        tokens.put_nowait((choice, token, last))

    return put


def _cached_tokens(generation: Generation, running: list[tuple[EngineCore, Request]]) -> int:
    """Cached prompt tokens, each prompt counted once, by its first choice."""
    return sum(request.cached_tokens or 0 for _, request in running[:: generation.n])


def _announced(endpoint: str | None, configured: str | None) -> str | None:
    """vLLM announces ``*`` as it was configured: the reader puts the replica's own host there."""
    if endpoint is not None and configured is not None and configured.startswith("tcp://*:"):
        return "tcp://*:" + endpoint.rpartition(":")[2]
    return endpoint


def _json(payload: bytes) -> web.Response:
    return web.Response(body=payload, content_type="application/json")


def _log_death(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("%s died; /health answers 503", task.get_name(), exc_info=task.exception())
