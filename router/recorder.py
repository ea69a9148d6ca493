"""``warmroute record``: what engines publish, and the requests that go through this router, in one recording.

A request is marked as checkable when nothing else could have changed its replica's cache meanwhile: it ran
alone there, and the replica had been quiet before it. That shows only when it is done, so lines wait until
the fate of every request before them is known.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from events.curve import Curve
from events.inbox import StreamId
from events.logs import Throttled
from events.recording import (
    Done,
    Line,
    Mark,
    Published,
    RecordingWriter,
    Sent,
    pack_history,
    pack_published,
)
from events.signals import Replayed, ReplayEnded
from events.source import Source
from events.subscriber import Subscriber
from router import tap
from router.app import RouterApp
from router.assembly import router_app
from router.errors import RecordError, RouterError
from router.fleet import Fleet
from router.headers import shown
from router.listening import listening
from router.pages import Handler
from router.settings import RouterSettings

log = logging.getLogger(__name__)

QUIET_S = 0.25
LOOK_INTERVAL_S = 0.5
MAX_LINES_WAITING = 20_000
HISTORY_ASK = 1
HISTORY_DEADLINE_S = 10.0
OK = 200


class _Open(msgspec.Struct):
    """A request whose fate is not known."""

    line: Sent
    alone: bool
    decided: bool = False


class TrafficRecorder:
    """Writes the recording. All methods are for the event loop's thread; ``clock`` is in unix seconds."""

    def __init__(self, writer: RecordingWriter, clock: Callable[[], float] = time.time) -> None:
        self._writer = writer
        self._clock = clock
        self._lines: deque[Line | _Open] = deque()
        self._open: dict[int, _Open] = {}
        self._busy_at: dict[str, float] = {}
        self._held: dict[str, list[Published]] = {}
        self._ids = 0
        self.events = 0
        self.requests = 0
        self.checkable = 0
        self.lost = 0
        self._warn = Throttled(log)

    # what happens

    def published(self, replica: str, at: float, frames: list[bytes]) -> None:
        """A live message of ``replica``, untouched."""
        self.events += 1
        self._busy_at[replica] = at
        line = pack_published(replica, at, frames)
        if replica in self._held:
            self._held[replica].append(line)
        else:
            self._add(line)

    def expect_history(self, replica: str) -> None:
        """Holds what ``replica`` publishes until :meth:`history` says what came before it."""
        self._held[replica] = []

    def history(self, replica: str, batches: list[tuple[int, bytes]] | None) -> None:
        """What ``replica`` still had to replay; None when it did not answer."""
        if batches is not None:
            self._add(pack_history(replica, self._clock(), batches))
        for line in self._held.pop(replica, []):
            self._add(line)

    def mark(self, what: str, replica: str, body: Any = None) -> None:
        """Something worth knowing besides."""
        self._add(Mark(t=self._clock(), what=what, src=replica, body=body))

    def on_send(self, sent: tap.Sent) -> None:
        """See :class:`router.tap.Recorder`."""
        replica, now = source_name(sent.replica, sent.rank), self._clock()
        others = [request for request in self._open.values() if request.line.src == replica]
        for request in others:
            request.alone = False
        quiet = now - self._busy_at.get(replica, float("-inf")) >= QUIET_S
        self._ids += 1
        line = Sent(
            id=self._ids,
            src=replica,
            t=now,
            path=shown(sent.path),
            body=_json_object(sent.body),
            tokens=None if sent.tokens is None else sent.tokens.tolist(),
            headers={
                name: shown(value) for name, value in sent.headers.items() if name.lower().startswith("x-")
            }
            or None,
        )
        request = _Open(line, alone=quiet and not others and replica not in self._held)
        self._open[sent.exchange] = request
        self._busy_at[replica] = now
        self.requests += 1
        self._add(request)

    def on_done(self, done: tap.Done) -> None:
        """See :class:`router.tap.Recorder`."""
        replica, now, answer = source_name(done.replica, done.rank), self._clock(), done.answer
        request = self._open.pop(done.exchange, None)
        if request is None:
            return
        complete = done.complete and done.status == OK and answer.cached_tokens is not None
        known = request.line.prompt is not None and answer.prompt_tokens == len(request.line.prompt)
        request.line.check = request.alone and complete and known
        request.decided = True
        self.checkable += request.line.check
        self._busy_at[replica] = now
        self._add(
            Done(
                id=request.line.id,
                src=replica,
                t=now,
                status=done.status,
                prompt_tokens=answer.prompt_tokens,
                cached_tokens=answer.cached_tokens,
                completion_tokens=answer.completion_tokens,
                text=answer.text,
                finish=answer.finish,
                out_tokens=None if answer.token_ids is None else list(answer.token_ids),
            )
        )

    async def settled(self) -> None:
        """Waits until nothing has been published, sent or answered for a while."""
        while True:
            left = max(self._busy_at.values(), default=0.0) + QUIET_S - self._clock()
            if left <= 0:
                return
            await asyncio.sleep(left)

    # the file

    def _add(self, line: Line | _Open) -> None:
        self._lines.append(line)
        while self._lines and (not self._waits(self._lines[0]) or len(self._lines) > MAX_LINES_WAITING):
            self._write(self._lines.popleft())

    def _write(self, line: Line | _Open) -> None:
        """What the disk has no room for is lost, counted and said; the requests go on."""
        try:
            self._writer.write(line.line if isinstance(line, _Open) else line)
        except OSError as error:
            self.lost += 1
            self._warn.warning("write", "a line of the recording is lost: %s", error.strerror)

    @staticmethod
    def _waits(line: Line | _Open) -> bool:
        return isinstance(line, _Open) and not line.decided

    def discard(self) -> None:
        """Takes the file away again."""
        self._writer.discard()

    def close(self) -> None:
        """Writes what still waits; requests without an end are not checkable."""
        for replica in list(self._held):
            self.history(replica, None)
        while self._lines:
            self._write(self._lines.popleft())
        try:
            self._writer.close()
        except OSError as error:
            self.lost += 1
            self._warn.warning("write", "the end of the recording is lost: %s", error.strerror)


def source_name(replica: str, rank: int) -> str:
    """How a stream is called in a recording: the replica's name, with the rank behind it beyond rank 0."""
    return f"{replica}/{rank}" if rank else replica


_decode_object = msgspec.json.Decoder(dict[str, Any], float_hook=float).decode


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        return _decode_object(body)
    except (msgspec.DecodeError, RecursionError):
        return {}


class _Taps:
    """Follows the event sources of the fleet, as they become known: their history first, then live."""

    def __init__(self, fleet: Fleet, recorder: TrafficRecorder, curve: Curve | None) -> None:
        self._fleet = fleet
        self._recorder = recorder
        self._loop = asyncio.get_running_loop()
        self._followed: dict[StreamId, Source] = {}
        self._histories: dict[StreamId, _History] = {}
        self._modelled: set[str] = set()
        self._subscriber = Subscriber(tap=self._tapped, curve=curve)

    def _tapped(self, stream: StreamId, frames: list[bytes]) -> None:
        self._loop.call_soon_threadsafe(self._recorder.published, str(stream), time.time(), frames)

    async def follow(self) -> None:
        """Looks for sources until it is cancelled."""
        try:
            while True:
                self._look()
                self._read_histories()
                await asyncio.sleep(LOOK_INTERVAL_S)
        finally:
            self._subscriber.close()

    def _look(self) -> None:
        for replica in self._fleet.replicas.values():
            if replica.models is not None and replica.models.cards and replica.name not in self._modelled:
                self._modelled.add(replica.name)
                cards = [{"id": card["id"], "parent": card.get("parent")} for card in replica.models.cards]
                self._recorder.mark("models", replica.name, cards)
            for found in replica.sources:
                name = source_name(replica.name, found.rank)
                address = found.endpoint.removeprefix("bind:")
                source = Source(
                    address,
                    binds=address != found.endpoint,
                    topic=found.topic,
                    replay=found.replay_endpoint,
                    peer=replica.name,
                )
                if self._followed.get(name) != source:
                    self._follow(name, source)

    def _follow(self, name: str, source: Source) -> None:
        if name in self._followed:
            self._subscriber.remove(name)
        self._followed[name] = source
        self._recorder.mark("following", name, source.address)
        if source.replay is not None:
            self._recorder.expect_history(name)
            self._histories[name] = _History(time.monotonic() + HISTORY_DEADLINE_S)
        self._subscriber.add(name, source)
        self._subscriber.ask_replay(name, HISTORY_ASK, 0)

    def _read_histories(self) -> None:
        for stream, heard in self._subscriber.inbox.take(MAX_LINES_WAITING, 0):
            history = self._histories.get(stream)
            if history is not None and isinstance(heard, Replayed):
                history.batches.append((heard.sequence, heard.payload))
            elif history is not None and isinstance(heard, ReplayEnded):
                self._recorder.history(str(stream), history.batches)
                del self._histories[stream]
        for stream, history in list(self._histories.items()):
            if time.monotonic() > history.deadline:
                log.warning("%s did not answer a replay request; what it had cached is not known", stream)
                self._recorder.history(str(stream), None)
                del self._histories[stream]


class _History(msgspec.Struct):
    """A replay from 0 under way; ``deadline`` on the monotonic clock."""

    deadline: float
    batches: list[tuple[int, bytes]] = []


def _one_at_a_time(recorder: TrafficRecorder) -> Callable[[Handler], Handler]:
    """Has each request wait until the one before it is done and its events have come."""
    turn = asyncio.Lock()

    def wrapped(handler: Handler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            if request.method != "POST":
                return await handler(request)
            async with turn:
                await recorder.settled()
                return await handler(request)

        return handle

    return wrapped


async def record(
    settings: RouterSettings, output: Path, *, one_at_a_time: bool, curve: Curve | None = None
) -> TrafficRecorder:
    """Records until SIGTERM or SIGINT. ``curve`` are the keys for events. Raises RouterError when it cannot
    start.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    recorder = TrafficRecorder(_writer(output))
    try:
        async with router_app(settings, recorder=recorder) as router:
            if one_at_a_time:
                router.pages.wrap(_one_at_a_time(recorder))
            await _record(router, recorder, curve, stop)
    except RouterError:
        recorder.discard()  # Nothing was recorded: the command can be given again.
        raise
    finally:
        recorder.close()
    return recorder


async def _record(
    router: RouterApp, recorder: TrafficRecorder, curve: Curve | None, stop: asyncio.Event
) -> None:
    taps = asyncio.create_task(_Taps(router.fleet, recorder, curve).follow())
    try:
        async with listening(router):
            await stop.wait()
    finally:
        taps.cancel()
        await asyncio.gather(taps, return_exceptions=True)


def _writer(output: Path) -> RecordingWriter:
    try:
        return RecordingWriter(output)
    except FileExistsError as error:
        raise RecordError(f"--output {output} is there already; give another file") from error
    except OSError as error:
        raise RecordError(f"cannot write --output {output}: {error.strerror}") from error
