"""The ZeroMQ side of all streams, on one thread of its own.

One SUB socket per stream (or per address where engines connect to us), and a DEALER for each outstanding
replay. The thread never waits for whoever takes the signals: what does not fit a stream's bounded queue is
dropped, and said to the stream as :class:`~events.signals.Overflowed`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from events.curve import Curve, refusal
from events.inbox import Inbox, StreamId
from events.link import REFUSALS
from events.logs import Throttled
from events.signals import (
    MAX_MESSAGE_BYTES,
    Connected,
    Disconnected,
    Frame,
    Replayed,
    ReplayEnded,
    Signal,
)
from events.sockets import LIVE_HIGH_WATER, LiveSocket, ReplaySocket, Sockets
from events.source import Source

log = logging.getLogger(__name__)

END_OF_REPLAY = b"\xff" * 8
MAX_SEQUENCE = (1 << 63) - 1  # engines count from 0; more is a fault, and cannot be counted on from
READS_PER_TURN = 256
WAKE_MS = 500
RESUME_MS = 20
RECONNECT_PATIENCE_S = 1.0
ADDRESS_RETRY_S = 2.0

Tap = Callable[[StreamId, list[bytes]], None]


class Faults(msgspec.Struct):
    """What could not be used, by reason, and the topics in bind mode that name no stream.

    ``broken`` says in words why a stream cannot be followed now.
    """

    by_stream: dict[StreamId, Counter[str]] = {}
    broken: dict[StreamId, str] = {}
    unmatched: Counter[str] = msgspec.field(default_factory=Counter)

    def count(self, stream: StreamId, reason: str) -> None:
        self.by_stream.setdefault(stream, Counter())[reason] += 1

    def of(self, stream: StreamId) -> dict[str, int]:
        """Counts of one stream by reason."""
        return dict(self.by_stream.get(stream, {}))


class Subscriber:
    """Follows any number of streams; signals come out of :attr:`inbox`.

    ``tap`` sees each live message of a stream untouched, on the subscriber's thread. A message with a part
    above ``max_message_bytes`` costs its connection before it is taken in. ``curve`` are the keys by which
    peers are known; those that it does not name are spoken to in plain.
    """

    def __init__(
        self,
        inbox: Inbox | None = None,
        tap: Tap | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        curve: Curve | None = None,
    ) -> None:
        self.inbox = inbox or Inbox()
        self._tap = tap
        self.faults = Faults()
        self._sockets = Sockets(curve, max_message_bytes)
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._poller = zmq.Poller()
        self._live: dict[zmq.Socket[bytes], LiveSocket] = {}
        self._replays: dict[StreamId, ReplaySocket] = {}
        self._paused: set[StreamId] = set()
        self._sources: dict[StreamId, Source] = {}
        self._unopened: dict[StreamId, tuple[float, Source]] = {}
        self._warn = Throttled(log)
        self._wake_in, self._wake_out = self._sockets.pair()
        self._wake_lock = threading.Lock()
        self._poller.register(self._wake_in, zmq.POLLIN)
        self._gate = self._sockets.gate
        if self._gate is not None:
            self._poller.register(self._gate.socket, zmq.POLLIN)
        self._open = True
        self._thread = threading.Thread(target=self._run, name="subscriber", daemon=True)
        self._thread.start()

    # called from any thread

    def add(self, stream: StreamId, source: Source) -> None:
        """Starts to follow a stream. An address that cannot be used is counted, and tried again."""
        self._command(lambda: self._add(stream, source))

    def remove(self, stream: StreamId) -> None:
        """Stops following a stream and drops what is queued of it."""
        done = threading.Event()

        def remove() -> None:
            self._remove(stream)
            done.set()

        self._command(remove)
        done.wait(timeout=5)

    def ask_replay(self, stream: StreamId, ask: int, start: int) -> None:
        """Asks the stream's replay endpoint for all batches from sequence ``start``."""
        self._command(lambda: self._ask_replay(stream, ask, start))

    def close(self) -> None:
        """Ends the thread and closes all sockets."""
        if self._open:
            self._command(self._stop)
            self._thread.join(timeout=5)
            self._wake_out.close(0)
            self._sockets.end()

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        # A full pipe is full of wake-ups that the thread has yet to see.
        with self._wake_lock, contextlib.suppress(zmq.Again):
            self._wake_out.send(b"", zmq.DONTWAIT)

    # on the thread

    def _stop(self) -> None:
        self._open = False

    def _run(self) -> None:
        while self._open:
            try:
                self._turn()
            except zmq.ContextTerminated:
                return
            except Exception:
                log.exception("the subscriber failed in one turn and goes on")
                time.sleep(0.1)
        for live in self._live.values():
            live.monitor.close(0)
            live.socket.close(0)
        self._wake_in.close(0)
        if self._gate is not None:
            self._gate.socket.close(0)
        for replay in self._replays.values():
            replay.socket.close(0)

    def _turn(self) -> None:
        """Commands first, then what the sockets have."""
        ready = dict(self._poller.poll(RESUME_MS if self._paused else WAKE_MS))
        if self._wake_in in ready:
            self._drain_wakes()
        if self._gate is not None and self._gate.socket in ready:
            self._gate.answer()
        while not self._commands.empty():
            self._commands.get()()
        for live in list(self._live.values()):
            if live.socket in ready or live.monitor in ready:
                self._read_live(live)
        for replay in list(self._replays.values()):
            if replay.socket in ready:
                self._read_replay(replay)
        self._resume_paused()
        self._reopen_cut()
        self._retry_unopened()

    def _drain_wakes(self) -> None:
        try:
            while True:
                self._wake_in.recv(zmq.DONTWAIT)
        except zmq.Again:
            pass

    def _add(self, stream: StreamId, source: Source) -> None:
        try:
            live = self._shared(source) or self._open_live(source)
        except zmq.ZMQError as error:
            self.faults.count(stream, "address")
            self.faults.broken[stream] = f"cannot use {source.address}: {error.strerror}"
            self._warn.warning(f"address {stream}", "%s of %s", self.faults.broken[stream], stream)
            self._unopened[stream] = (time.monotonic() + ADDRESS_RETRY_S, source)
            return
        self._unopened.pop(stream, None)
        self.faults.broken.pop(stream, None)
        live.streams[stream] = source.topic
        self._sources[stream] = source
        if live.link.peers:
            self._tell(live, stream, Connected())

    def _retry_unopened(self) -> None:
        for stream, (due, source) in list(self._unopened.items()):
            if time.monotonic() >= due:
                self._add(stream, source)

    def _shared(self, source: Source) -> LiveSocket | None:
        """Streams whose engines connect to one of our addresses share its socket."""
        if not source.binds:
            return None
        bound = (live for live in self._live.values() if live.source.binds)
        return next((live for live in bound if live.source.address == source.address), None)

    def _open_live(self, source: Source) -> LiveSocket:
        live = self._sockets.open_live(source)
        self._live[live.socket] = live
        self._poller.register(live.socket, zmq.POLLIN)
        self._poller.register(live.monitor, zmq.POLLIN)
        return live

    def _remove(self, stream: StreamId) -> None:
        self._sources.pop(stream, None)
        self._unopened.pop(stream, None)
        self._close_replay(stream)
        for live in list(self._live.values()):
            if stream in live.streams:
                del live.streams[stream]
                live.connected.discard(stream)
                if not live.streams:
                    self._close_live(live)
        self.faults.by_stream.pop(stream, None)
        self.faults.broken.pop(stream, None)
        self.inbox.forget(stream)

    def _close_live(self, live: LiveSocket) -> None:
        for each in (live.socket, live.monitor):
            self._poller.unregister(each)
        del self._live[live.socket]
        self._sockets.close_live(live)

    def _read_live(self, live: LiveSocket) -> None:
        """Hands on frames and connection changes so that no frame meets a connection it did not come by.

        The monitor is read after the frames, so it has told of every connection that a frame came by. At a
        loss all that the connection left is read, and goes before the loss; when another connection is there
        already nobody can tell their frames apart, and the proof that it asks for makes up for them.
        """
        frames = self._receive(live.socket, READS_PER_TURN)
        changes, joined = self._changes(live)
        left = Disconnected() in changes
        if left:
            frames += self._receive(live.socket, LIVE_HIGH_WATER)
            more, joined_since = self._changes(live)
            changes, joined = changes + more, joined or joined_since
        if left and not joined:
            self._dispatch_all(live, frames)
        for change in changes:
            for stream in live.streams:
                self._tell(live, stream, change)
        if not left:
            self._dispatch_all(live, frames)

    def _tell(self, live: LiveSocket, stream: StreamId, change: Signal) -> None:
        """An engine that joins a bound address is no reason to doubt those that are there."""
        if isinstance(change, Disconnected):
            live.connected.discard(stream)
        elif stream in live.connected:
            return
        else:
            live.connected.add(stream)
        self.inbox.put(stream, change)

    def _receive(self, socket: zmq.Socket[bytes], limit: int) -> list[list[bytes]]:
        messages: list[list[bytes]] = []
        with contextlib.suppress(zmq.Again):
            while len(messages) < limit:
                messages.append(socket.recv_multipart(zmq.DONTWAIT))
        return messages

    def _changes(self, live: LiveSocket) -> tuple[list[Signal], bool]:
        """What the monitor told since it was last read, and whether an engine joined."""
        changes: list[Signal] = []
        joined = False
        while live.monitor.poll(0):
            message = recv_monitor_message(live.monitor)
            self._note_handshake(live, message["event"])
            changes += live.link.on_event(message["event"], message["value"], time.monotonic())
            joined = joined or message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return changes, joined

    def _note_handshake(self, live: LiveSocket, event: int) -> None:
        """Says of a stream whose peer we connect to why the two do not get on: most often it is the keys."""
        if live.source.binds or event not in (*REFUSALS, zmq.EVENT_HANDSHAKE_SUCCEEDED):
            return
        for stream in live.streams:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.faults.broken.pop(stream, None)
                continue
            self.faults.count(stream, "handshake")
            keyed = self._sockets.server_key(live.source) is not None
            self.faults.broken[stream] = refusal(live.source.address, event, keyed=keyed)
            self._warn.warning(f"handshake {stream}", "%s: %s", stream, self.faults.broken[stream])

    def _reopen_cut(self) -> None:
        """After a breach of protocol, such as too large a message, ZeroMQ does not reconnect by itself."""
        before = time.monotonic() - RECONNECT_PATIENCE_S
        for live in list(self._live.values()):
            if live.link.cut_at is not None and live.link.cut_at < before:
                again = self._open_live(live.source)
                again.streams = live.streams
                again.connected = live.connected
                self._close_live(live)

    def _dispatch_all(self, live: LiveSocket, messages: list[list[bytes]]) -> None:
        for frames in messages:
            self._dispatch(live, frames)

    def _dispatch(self, live: LiveSocket, frames: list[bytes]) -> None:
        topic = frames[0].decode("utf-8", "replace")
        stream = live.of_topic(topic)
        if stream is None:
            known = topic in self.faults.unmatched or len(self.faults.unmatched) < 100
            self.faults.unmatched[topic[:200] if known else "(others)"] += 1
        elif len(frames) != 3:
            self.faults.count(stream, "frames")
        elif (sequence := _sequence(frames[1])) is None:
            self.faults.count(stream, "sequence")
        else:
            if self._tap is not None:
                self._tap(stream, frames)
            self.inbox.put(stream, Frame(sequence, frames[2]))

    def _ask_replay(self, stream: StreamId, ask: int, start: int) -> None:
        source = self._sources.get(stream)
        if source is None or source.replay is None:
            return
        self._close_replay(stream)
        try:
            replay = self._sockets.open_replay(source, source.replay, stream, ask)
        except zmq.ZMQError as error:
            self.faults.count(stream, "replay_address")
            log.error("cannot use replay %s of stream %s: %s", source.replay, stream, error)
            return
        self._replays[stream] = replay
        self._poller.register(replay.socket, zmq.POLLIN)
        replay.socket.send_multipart([b"", start.to_bytes(8, "big")])

    def _close_replay(self, stream: StreamId) -> None:
        replay = self._replays.pop(stream, None)
        if replay is None:
            return
        if stream in self._paused:
            self._paused.discard(stream)
        else:
            self._poller.unregister(replay.socket)
        self._sockets.close_replay(replay)

    def _read_replay(self, replay: ReplaySocket) -> None:
        for _ in range(READS_PER_TURN):
            if not self.inbox.has_room(replay.stream):
                self._poller.unregister(replay.socket)
                self._paused.add(replay.stream)
                return
            try:
                frames = replay.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if self._replied(replay, frames):
                return

    def _resume_paused(self) -> None:
        for stream in list(self._paused):
            if self.inbox.has_room(stream):
                self._paused.discard(stream)
                self._poller.register(self._replays[stream].socket, zmq.POLLIN)

    def _replied(self, replay: ReplaySocket, frames: list[bytes]) -> bool:
        """Takes one reply; True at the end marker. Parsed from the end: before 0.26 there is no topic."""
        if len(frames) >= 3 and frames[-2] == END_OF_REPLAY:
            self._close_replay(replay.stream)
            self.inbox.put(replay.stream, ReplayEnded(replay.ask))
            return True
        sequence = _sequence(frames[-2]) if len(frames) >= 3 else None
        if sequence is None:
            self.faults.count(replay.stream, "replay_frames")
            return False
        self.inbox.put(replay.stream, Replayed(replay.ask, sequence, frames[-1]))
        return False


def _sequence(frame: bytes) -> int | None:
    """The sequence in a frame of eight big-endian bytes; None for one that no engine comes to."""
    sequence = int.from_bytes(frame, "big")
    return sequence if len(frame) == 8 and sequence <= MAX_SEQUENCE else None
