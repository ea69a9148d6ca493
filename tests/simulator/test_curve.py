"""An engine with its proxy in one: events and replay by CURVE, over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from events.curve import CurveError, read_curve, write_pair
from events.signals import Replayed, ReplayEnded
from events.source import Source
from events.subscriber import Subscriber
from simulator.engine import Engine
from simulator.settings import EngineSettings


async def test_the_events_of_an_engine_with_keys_are_for_who_knows_its_public_one(tmp_path: Path) -> None:
    (public, held), (_, ours) = (write_pair(tmp_path / name) for name in ("engine", "indexer"))
    settings = EngineSettings(
        listen="127.0.0.1:0", events="tcp://*:0", replay="tcp://*:0", curve_key=str(held), prefill_rate=1e6
    )
    subscriber = Subscriber(curve=read_curve(str(ours), (f"e0={public}",), ()))
    try:
        async with Engine(settings) as engine, aiohttp.ClientSession() as client:
            body = {"model": "model", "prompt": list(range(40)), "max_tokens": 1}
            async with client.post(f"{engine.url}/v1/completions", json=body) as answer:
                assert answer.status == 200
            async with client.get(f"{engine.url}/kv_event_sources") as answer:
                said = (await answer.json())["0"]
            events, replay = (
                said[each].replace("*", "127.0.0.1") for each in ("endpoint", "replay_endpoint")
            )
            for peer in ("e0", "plain"):
                subscriber.add(peer, Source(events, replay=replay, peer=peer))
                subscriber.ask_replay(peer, 1, 0)
            heard: list[object] = []
            async with asyncio.timeout(20):
                while ("e0", ReplayEnded(1)) not in heard or not subscriber.faults.of("plain"):
                    heard += await asyncio.to_thread(subscriber.inbox.take, 100, 0.02)
            replayed = {stream for stream, signal in heard if isinstance(signal, Replayed)}
            assert replayed == {"e0"}
    finally:
        await asyncio.to_thread(subscriber.close)
    held.chmod(0o644)
    with pytest.raises(CurveError, match="others may read it"):
        await Engine(settings).start()
