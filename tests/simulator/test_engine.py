"""The engine over real sockets: what clients, routers and indexers see of it."""

import asyncio
import contextlib
import json
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from events.schema import AllBlocksCleared, BlockRemoved, BlockStored, Event, decode
from simulator import tokenizer
from simulator.engine import Engine
from simulator.errors import ListenError, SettingsError
from simulator.settings import EngineSettings

QUICK: dict[str, Any] = {"listen": "127.0.0.1:0", "prefill_rate": 1e6, "decode_rate": 1e4}
DEADLINE_S = 10.0
PROMPT = list(range(40))


def settings(**changes: Any) -> EngineSettings:
    return EngineSettings(**(QUICK | changes))


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
        yield session


class Client:
    def __init__(self, engine: Engine, http: aiohttp.ClientSession) -> None:
        self.engine = engine
        self.http = http

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.engine.url + path) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(self.engine.url + path, data=raw, headers=sent) as response:
            return response.status, json.loads(await response.read())

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The chunks of a streamed answer, the end mark as text."""
        async with self.http.post(self.engine.url + path, json=body | {"stream": True}) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            lines = (await response.text()).split("\n\n")
        assert lines.pop() == ""
        assert all(line.startswith("data: ") for line in lines)
        return [json.loads(line[6:]) if line[6] == "{" else line[6:] for line in lines]

    async def metrics(self) -> dict[tuple[str, str], float]:
        """Values by name and engine."""
        _, text = await self.get("/metrics")
        return {
            (sample.name, sample.labels.get("engine", "")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


class Subscriber:
    """Hears the batches of one rank."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.subscribe(b"")
        self.socket.connect(endpoint)

    async def batch(self) -> list[Event]:
        frames = await asyncio.wait_for(self.socket.recv_multipart(), DEADLINE_S)
        return decode(frames[2]).events


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def all_batches(context: zmq.asyncio.Context, replay: str) -> list[list[Event]]:
    dealer = context.socket(zmq.DEALER)
    dealer.connect(replay)
    await dealer.send_multipart([b"", bytes(8)])
    batches: list[list[Event]] = []
    while True:
        frames = await asyncio.wait_for(dealer.recv_multipart(), DEADLINE_S)
        if frames[-2] == b"\xff" * 8:
            return batches
        batches.append(decode(frames[-1]).events)


def stored_tokens(batch: list[Event]) -> set[int]:
    return {token for event in batch if isinstance(event, BlockStored) for token in event.tokens}


async def until(condition: Any) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


async def test_completions_take_text_texts_ids_and_lists_of_ids(http: aiohttp.ClientSession) -> None:
    async with Engine(settings()) as engine:
        client = Client(engine, http)
        for prompt, choices, tokens in [
            ("hello", 1, 5),
            (["hello", "you"], 2, 8),
            ([1, 2, 3], 1, 3),
            ([[1, 2], [3]], 2, 3),
        ]:
            status, answer = await client.post("/v1/completions", {"model": "model", "prompt": prompt})
            assert status == 200
            assert [choice["index"] for choice in answer["choices"]] == list(range(choices))
            assert answer["usage"]["prompt_tokens"] == tokens
            assert answer["usage"]["completion_tokens"] == 16 * choices
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
            assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


async def test_streamed_and_whole_answers_are_the_same_text(http: aiohttp.ClientSession) -> None:
    async with Engine(settings()) as engine:
        client = Client(engine, http)
        chat = {"model": "model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        _, whole = await client.post("/v1/chat/completions", chat)
        chunks = await client.stream(
            "/v1/chat/completions", chat | {"stream_options": {"include_usage": True}}
        )
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        pieces = [chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-2]]
        assert "".join(pieces) == whole["choices"][0]["message"]["content"]
        assert len(pieces) == 9
        assert chunks[-3]["choices"][0]["finish_reason"] == "length"
        assert chunks[-2]["choices"] == []
        assert chunks[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
        assert chunks[-1] == "[DONE]"
        text = {"model": "model", "prompt": "a", "max_tokens": 5}
        _, whole = await client.post("/v1/completions", text)
        chunks = await client.stream("/v1/completions", text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole["choices"][0]["text"]
        assert "usage" not in chunks[-2]


async def test_the_next_turn_of_a_chat_hits_the_answer_of_the_last(http: aiohttp.ClientSession) -> None:
    async with Engine(settings(block_size=4)) as engine:
        client = Client(engine, http)
        messages = [{"role": "user", "content": "a question of some length"}]
        _, first = await client.post(
            "/v1/chat/completions", {"model": "model", "messages": messages, "max_tokens": 30}
        )
        messages += [first["choices"][0]["message"], {"role": "user", "content": "more"}]
        _, second = await client.post("/v1/chat/completions", {"model": "model", "messages": messages})
        known = first["usage"]["total_tokens"] - 1
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == known // 4 * 4
        assert second["usage"]["completion_tokens"] == 128


async def test_tokenize_gives_the_ids_that_the_engine_uses(http: aiohttp.ClientSession) -> None:
    async with Engine(settings(block_size=4)) as engine:
        client = Client(engine, http)
        messages = [{"role": "user", "content": "what is a block?"}]
        status, answer = await client.post("/tokenize", {"model": "model", "messages": messages})
        assert status == 200
        assert answer["tokens"] == tokenizer.render(messages)
        assert answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == engine.settings.model_len
        await client.post("/v1/chat/completions", {"model": "model", "messages": messages, "max_tokens": 1})
        _, again = await client.post(
            "/v1/completions", {"model": "model", "prompt": answer["tokens"], "max_tokens": 1}
        )
        expected = (answer["count"] - 1) // 4 * 4
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
        _, plain = await client.post("/tokenize", {"prompt": "é"})
        assert plain["tokens"] == [195, 169]


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "kind"),
    [
        ("/v1/completions", b"{", {}, 400, "Bad Request"),
        ("/v1/completions", b"\xff", {}, 400, "Bad Request"),
        ("/v1/completions", {"model": "model"}, {}, 400, "Bad Request"),
        ("/v1/completions", {"model": "nobody", "prompt": "x"}, {}, 404, "NotFoundError"),
        ("/v1/completions", {"model": "model", "prompt": ""}, {}, 400, "BadRequestError"),
        ("/v1/completions", {"model": "model", "prompt": []}, {}, 400, "BadRequestError"),
        ("/v1/completions", {"model": "model", "prompt": ["a", 1]}, {}, 400, "BadRequestError"),
        ("/v1/completions", {"model": "model", "prompt": [-1]}, {}, 400, "BadRequestError"),
        ("/v1/completions", {"model": "model", "prompt": [1] * 5000}, {}, 400, "BadRequestError"),
        (
            "/v1/completions",
            {"model": "model", "prompt": "x", "max_tokens": 5000},
            {},
            400,
            "BadRequestError",
        ),
        ("/v1/completions", {"model": "model", "prompt": "x", "max_tokens": 0}, {}, 400, "BadRequestError"),
        ("/v1/completions", {"model": "model", "prompt": "x", "n": 0}, {}, 400, "BadRequestError"),
        ("/v1/completions", {"model": "model", "prompt": "x", "cache_salt": ""}, {}, 400, "BadRequestError"),
        (
            "/v1/completions",
            {"model": "model", "prompt": "x"},
            {"X_data_parallel_rank": "2"},
            400,
            "BadRequestError",
        ),
        ("/v1/chat/completions", {"model": "model", "messages": [{}]}, {}, 400, "BadRequestError"),
        ("/v1/chat/completions", {"model": "model", "messages": "x"}, {}, 400, "Bad Request"),
        ("/tokenize", {"model": "model", "prompt": ["a", "b"]}, {}, 400, "Bad Request"),
        ("/tokenize", {"model": "nobody", "prompt": "a"}, {}, 404, "NotFoundError"),
        ("/nothing/here", {}, {}, 404, "Not Found"),
    ],
)
async def test_bad_requests_are_refused_in_vllms_shape(
    http: aiohttp.ClientSession, path: str, body: Any, headers: dict[str, str], status: int, kind: str
) -> None:
    async with Engine(settings(blocks=257, ranks=2)) as engine:
        got, answer = await Client(engine, http).post(path, body, **headers)
        assert got == status
        assert answer["error"]["type"] == kind
        assert answer["error"]["code"] == status
        assert answer["error"]["message"]


async def test_events_come_before_the_first_token_and_can_be_replayed(
    http: aiohttp.ClientSession, context: zmq.asyncio.Context
) -> None:
    async with Engine(settings(events="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*", topic="t")) as engine:
        client = Client(engine, http)
        _, sources = await client.get("/kv_event_sources")
        await client.post("/v1/completions", {"model": "model", "prompt": PROMPT, "max_tokens": 10})
        (prefill,), (decoded,) = await all_batches(context, sources["0"]["replay_endpoint"])
        assert isinstance(prefill, BlockStored)
        assert prefill.tokens.tolist() == PROMPT[:32]
        assert prefill.group_kind == "full_attention"
        assert isinstance(decoded, BlockStored)
        assert decoded.tokens.tolist()[:8] == PROMPT[32:]
        assert decoded.parent == prefill.hashes[-1]
        assert sources["0"]["topic"] == "t"


async def test_a_subscriber_hears_evictions_and_a_reset_with_the_next_step(
    http: aiohttp.ClientSession, context: zmq.asyncio.Context
) -> None:
    async with Engine(settings(events="tcp://127.0.0.1:*", blocks=5)) as engine:
        client = Client(engine, http)
        _, sources = await client.get("/kv_event_sources")
        subscriber = Subscriber(context, sources["0"]["endpoint"])
        heard: list[list[Event]] = []
        number = 0

        async def listen() -> None:
            while True:
                heard.append(await subscriber.batch())

        async def heard_with(token: int) -> list[Event]:
            """Sends a prompt of three blocks and gives the batch that stored them."""
            body = {"model": "model", "prompt": [token] * 48, "max_tokens": 1}
            assert (await client.post("/v1/completions", body))[0] == 200
            await until(lambda: any(token in stored_tokens(batch) for batch in heard))
            return next(batch for batch in heard if token in stored_tokens(batch))

        listening = asyncio.create_task(listen())
        while not heard:  # A subscription takes a moment to reach the publisher.
            body = {"model": "model", "prompt": [number := number + 1] * 48, "max_tokens": 1}
            await client.post("/v1/completions", body)
        batch = await heard_with(1000)
        *removals, store = batch
        assert {type(event) for event in removals} == {BlockRemoved}
        assert isinstance(store, BlockStored)
        assert await client.post("/reset_prefix_cache", {}) == (200, {"success": True})
        batch = await heard_with(2000)
        assert [type(event) for event in batch] == [AllBlocksCleared, BlockStored]
        listening.cancel()


async def test_ranks_have_their_own_caches_and_requests_can_be_pinned(http: aiohttp.ClientSession) -> None:
    async with Engine(settings(ranks=2)) as engine:
        client = Client(engine, http)
        body = {"model": "model", "prompt": PROMPT, "max_tokens": 1}

        async def cached(**headers: str) -> int:
            _, answer = await client.post("/v1/completions", body, **headers)
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert await cached(X_data_parallel_rank="1") == 0
        assert await cached(X_data_parallel_rank="1") == 32
        assert await cached(X_data_parallel_rank="0") == 0
        assert await cached(X_data_parallel_rank="x") == 32
        before = await client.metrics()
        await cached()
        await cached()
        after = await client.metrics()
        for rank in ("0", "1"):
            name = ("vllm:prompt_tokens_total", rank)
            assert after[name] - before[name] == 40


async def test_ranks_publish_on_port_plus_rank(http: aiohttp.ClientSession) -> None:
    async with Engine(settings(events="tcp://*:0", replay="tcp://*:0", ranks=2)) as engine:
        _, sources = await Client(engine, http).get("/kv_event_sources")
        assert set(sources) == {"0", "1"}
        endpoints = {source[name] for source in sources.values() for name in ("endpoint", "replay_endpoint")}
        assert len(endpoints) == 4
        assert all(endpoint.startswith("tcp://*:") for endpoint in endpoints)
    port = two_free_ports()
    async with Engine(settings(events=f"tcp://*:{port}", ranks=2)) as engine:
        _, sources = await Client(engine, http).get("/kv_event_sources")
        assert sources["1"]["endpoint"] == f"tcp://*:{port + 1}"


def two_free_ports() -> int:
    """A port that is free together with the one above it."""
    while True:
        with socket.socket() as low, socket.socket() as high:
            low.bind(("", 0))
            port = int(low.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                high.bind(("", port + 1))
                return port


async def test_a_client_that_leaves_frees_its_blocks(http: aiohttp.ClientSession) -> None:
    async with Engine(settings(decode_rate=50.0, blocks=1001)) as engine:
        client = Client(engine, http)
        body = {"model": "model", "prompt": PROMPT, "max_tokens": 9000}
        pool = engine.cores[0].scheduler.pool
        for stream in (True, False):
            request = asyncio.create_task(
                http.post(engine.url + "/v1/completions", json=body | {"stream": stream})
            )
            await until(lambda: pool.usage > 0)
            if stream:
                (await request).close()
            else:
                request.cancel()
            await until(lambda: pool.usage == 0)
        assert (await client.metrics())["vllm:num_requests_running", "0"] == 0
        assert engine.cores[0].scheduler.counts.aborted_requests == 2


async def test_metrics_tell_hits_queries_and_when_the_process_began(http: aiohttp.ClientSession) -> None:
    async with Engine(settings(model="m")) as engine:
        client = Client(engine, http)
        for _ in range(2):
            await client.post("/v1/completions", {"model": "m", "prompt": PROMPT, "max_tokens": 3})
        values = await client.metrics()
        assert values["vllm:prefix_cache_queries_total", "0"] == 80
        assert values["vllm:prefix_cache_hits_total", "0"] == 32
        assert values["vllm:generation_tokens_total", "0"] == 6
        assert values["vllm:time_to_first_token_seconds_count", "0"] == 2
        assert values["process_start_time_seconds", ""] == pytest.approx(engine.started)
        assert values["vllm:kv_cache_usage_perc", "0"] == 0
        _, text = await client.get("/metrics")
        assert 'model_name="m"' in text
        assert 'block_size="16"' in text
        assert 'num_gpu_blocks="4096"' in text


async def test_time_to_first_token_is_the_queue_and_the_prefill(http: aiohttp.ClientSession) -> None:
    async with Engine(settings(prefill_rate=1000.0, decode_rate=1000.0, max_batched_tokens=300)) as engine:
        client = Client(engine, http)

        async def ttft(first: int) -> float:
            prompt = [first] * 300
            started = time.monotonic()
            body = {"model": "model", "prompt": prompt, "max_tokens": 2, "stream": True}
            async with http.post(engine.url + "/v1/completions", json=body) as response:
                await response.content.readany()
                return time.monotonic() - started

        await client.post("/v1/completions", {"model": "model", "prompt": "warm", "max_tokens": 1})
        alone, behind = await asyncio.gather(ttft(1), ttft(2))
        first, second = sorted((alone, behind))
        assert 0.29 < first < 0.55
        assert 0.59 < second < 0.95


async def test_a_prompt_does_not_wait_for_the_pace_of_those_that_decode(http: aiohttp.ClientSession) -> None:
    async with Engine(settings(decode_rate=1.0)) as engine:
        client = Client(engine, http)
        slow = {"model": "model", "prompt": "slow", "max_tokens": 500}
        decoding = asyncio.create_task(client.post("/v1/completions", slow))
        await until(lambda: engine.cores[0].scheduler.counts.generated > 0)
        started = time.monotonic()
        await client.post("/v1/completions", {"model": "model", "prompt": "quick", "max_tokens": 1})
        assert time.monotonic() - started < 1.6  # Its own step takes as long as one token, 1 s.
        decoding.cancel()


async def test_the_response_id_is_the_clients(http: aiohttp.ClientSession) -> None:
    async with Engine(settings()) as engine:
        body = {"model": "model", "prompt": "x", "max_tokens": 1}
        _, answer = await Client(engine, http).post("/v1/completions", body, X_Request_Id="mine")
        assert answer["id"] == "cmpl-mine"


async def test_an_address_in_use_is_one_line_that_says_what_to_do() -> None:
    async with Engine(settings(events="tcp://*:0")) as engine:
        listen = engine.url.removeprefix("http://")
        with pytest.raises(ListenError, match=rf"^cannot listen on {listen}: address already in use; choose"):
            await Engine(settings(listen=listen)).start()
        assert engine.cores[0].publisher is not None
        port = engine.cores[0].publisher.endpoint.rpartition(":")[2]
        with pytest.raises(ListenError, match=f"cannot bind tcp://\\*:{port}: Address already in use"):
            await Engine(settings(events=f"tcp://*:{port}")).start()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_size": 0}, "block_size 0"),
        ({"blocks": 1}, "blocks 1"),
        ({"prefill_rate": 0.0}, "prefill_rate"),
        ({"max_model_len": 10**9}, "max_model_len"),
        ({"replay": "tcp://*:1"}, "replay"),
        ({"max_seqs": 5000}, "max_seqs"),
        ({"listen": "nowhere"}, "'nowhere'"),
    ],
)
async def test_settings_no_engine_could_run_with_are_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(SettingsError, match=named):
        await Engine(settings(**changes)).start()


async def test_a_served_engine_logs_its_address_and_ends_on_sigterm() -> None:
    program = (
        "import asyncio, logging\n"
        "from simulator.engine import serve\n"
        "from simulator.settings import EngineSettings\n"
        "logging.basicConfig(level='INFO', format='%(message)s')\n"
        "asyncio.run(serve(EngineSettings(listen='127.0.0.1:0', events='tcp://*:0')))\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        cwd=Path(__file__).parents[2],
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    line = await asyncio.wait_for(process.stderr.readline(), DEADLINE_S)
    assert line.startswith(b"listening on http://127.0.0.1:")
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
