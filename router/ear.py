"""Listening for a while to what the event ports of a replica send, live and as replays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from events.curve import Curve
from events.inbox import StreamId
from events.schema import BlockStored, PayloadError, decode
from events.signals import Frame, Replayed, ReplayEnded
from events.source import Source
from events.subscriber import Subscriber
from router.replicas import EventSource

REPLAY_TIMEOUT_S = 5.0
LISTEN_STEP_S = 0.1


class Heard(msgspec.Struct):
    """What came of one rank's port: batches now, batches in its replay (None: it did not answer).

    ``refused`` says why there was no handshake at all.
    """

    batches: int = 0
    refused: str | None = None
    replayed: int | None = None
    block_sizes: set[int] = msgspec.field(default_factory=set)
    unreadable: int = 0

    def take(self, payload: bytes) -> None:
        try:
            events = decode(payload).events
        except PayloadError:
            self.unreadable += 1
            return
        self.block_sizes |= {each.block_size for each in events if isinstance(each, BlockStored)}


class Ear:
    """Listens to some ranks of a replica, live and to their replays."""

    def __init__(
        self,
        replica: str,
        sources: Sequence[EventSource],
        wait_s: float,
        curve: Curve | None,
        clock: Callable[[], float],
    ) -> None:
        self._replica = replica
        self._sources = sources
        self._curve = curve
        self._wait_s = wait_s
        self._clock = clock
        self._heard = {source.rank: Heard() for source in sources}
        self._counts: dict[StreamId, int] = {}

    async def listen(self) -> dict[int, Heard]:
        """What was heard, by rank, in the time to wait; a replay that is under way may take longer."""
        subscriber = Subscriber(curve=self._curve)
        try:
            for source in self._sources:
                address = Source(source.endpoint, replay=source.replay_endpoint, peer=self._replica)
                subscriber.add(source.rank, address)
                subscriber.ask_replay(source.rank, 1, 0)
            begun = self._clock()
            while self._clock() < begun + self._wait_s or (
                self._clock() < begun + REPLAY_TIMEOUT_S and self._awaits_replay(subscriber)
            ):
                await asyncio.to_thread(self._take, subscriber)
            for rank, heard in self._heard.items():
                heard.refused = subscriber.faults.broken.get(rank)
        finally:
            await asyncio.to_thread(subscriber.close)
        return self._heard

    def _awaits_replay(self, subscriber: Subscriber) -> bool:
        """Of a rank that refuses its events no replay is looked at."""
        refused = subscriber.faults.broken
        asked = [source.rank for source in self._sources if source.replay_endpoint]
        return any(self._heard[rank].replayed is None for rank in asked if rank not in refused)

    def _take(self, subscriber: Subscriber) -> None:
        for rank, signal in subscriber.inbox.take(1_000, LISTEN_STEP_S):
            assert isinstance(rank, int)
            heard = self._heard[rank]
            if isinstance(signal, Frame):
                heard.batches += 1
                heard.take(signal.payload)
            elif isinstance(signal, Replayed):
                self._counts[rank] = self._counts.get(rank, 0) + 1
                heard.take(signal.payload)
            elif isinstance(signal, ReplayEnded):
                heard.replayed = self._counts.get(rank, 0)
