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
from itertools import count
from queue import SimpleQueue

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from events.contexts import Context, Contexts
from events.curve import Curve, Gate, refusal, speak_as_client, speak_as_server
from events.inbox import Inbox, StreamId
from events.logs import Throttled
from events.signals import Connected, Disconnected, Frame, Replayed, ReplayEnded, Signal

log = logging.getLogger(__name__)

END_OF_REPLAY = b"\xff" * 8
MAX_SEQUENCE = (1 << 63) - 1  # engines count from 0; more is a fault, and cannot be counted on from
MAX_MESSAGE_BYTES = 32 << 20
LIVE_HIGH_WATER = 100_000
READS_PER_TURN = 256
WAKE_MS = 500
RESUME_MS = 20
RECONNECT_PATIENCE_S = 1.0
ADDRESS_RETRY_S = 2.0

_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)
_LINK_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)

Tap = Callable[[StreamId, list[bytes]], None]


class Source(msgspec.Struct, frozen=True):
    """Where a stream comes from.

    ``address`` is connected to, or bound when ``binds``; then only messages with ``topic`` are this stream's
    (None: all). ``replay`` is the address of the engine's replay endpoint, if it has one. ``peer`` is the
    name under which CURVE keys are kept for it.
    """

    address: str
    binds: bool = False
    topic: str | None = None
    replay: str | None = None
    peer: str = ""


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


class _Live:
    """A SUB socket with its monitor, and the streams that come out of it."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], source: Source) -> None:
        self.socket = socket
        self.monitor = monitor
        self.source = source
        self.binds = source.binds
        self.address = source.address
        self.streams: dict[StreamId, str | None] = {}
        self.connected: set[StreamId] = set()
        self.peers = 0
        self.cut_at: float | None = None
        self._links: set[int] = set()
        self._refused = False

    def of_topic(self, topic: str) -> StreamId | None:
        """The stream of this very topic, else one that takes all topics."""
        takes_all = None
        for stream, wanted in self.streams.items():
            if self.binds and wanted == topic:
                return stream
            if wanted is None or not self.binds:
                takes_all = stream
        return takes_all

    def on_event(self, event: int, link: int) -> list[Signal]:
        """What a monitor event means for the streams; ``link`` is the connection's file descriptor.

        A link that never shook hands (a port scan, a health check) is no engine that leaves. Of several
        engines on one bound address nobody says which one left: all prove themselves.
        """
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.peers += 1
            return [Connected()]
        if event in (zmq.EVENT_CONNECTED, zmq.EVENT_ACCEPTED):
            self._links.add(link)
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self.cut_at = None
        elif event != zmq.EVENT_DISCONNECTED:
            self._refused = True
        else:
            self._links.discard(link)
            self.cut_at = None if self.binds else time.monotonic()
            refused, self._refused = self._refused, False
            before, self.peers = self.peers, min(self.peers, len(self._links))
            if before and not (refused and self.peers == before):
                return [Disconnected(), Connected()] if self.peers else [Disconnected()]
        return []


class _Replay:
    """A DEALER socket with one outstanding request."""

    def __init__(self, socket: zmq.Socket[bytes], stream: StreamId, ask: int, address: str) -> None:
        self.socket = socket
        self.stream = stream
        self.ask = ask
        self.address = address


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
        self._max_message_bytes = max_message_bytes
        self.faults = Faults()
        self._contexts = Contexts()
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._poller = zmq.Poller()
        self._live: dict[zmq.Socket[bytes], _Live] = {}
        self._replays: dict[StreamId, _Replay] = {}
        self._paused: set[StreamId] = set()
        self._sources: dict[StreamId, Source] = {}
        self._unopened: dict[StreamId, tuple[float, Source]] = {}
        self._warn = Throttled(log)
        self._names = count()
        self._wake_in, self._wake_out = self._wake_pair()
        self._wake_lock = threading.Lock()
        self._curve = curve
        self._gate: Gate | None = None
        if curve is not None and curve.clients is not None:
            self._gate = Gate(self._contexts.shared, curve.clients)
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
            self._contexts.end()

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        # A full pipe is full of wake-ups that the thread has yet to see.
        with self._wake_lock, contextlib.suppress(zmq.Again):
            self._wake_out.send(b"", zmq.DONTWAIT)

    # on the thread

    def _wake_pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        inner, outer = self._contexts.shared.socket(zmq.PULL), self._contexts.shared.socket(zmq.PUSH)
        inner.bind("inproc://wake")
        outer.connect("inproc://wake")
        self._poller.register(inner, zmq.POLLIN)
        return inner, outer

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
        if live.peers:
            self._tell(live, stream, Connected())

    def _retry_unopened(self) -> None:
        for stream, (due, source) in list(self._unopened.items()):
            if time.monotonic() >= due:
                self._add(stream, source)

    def _shared(self, source: Source) -> _Live | None:
        """Streams whose engines connect to one of our addresses share its socket."""
        if not source.binds:
            return None
        bound = (live for live in self._live.values() if live.binds)
        return next((live for live in bound if live.address == source.address), None)

    def _open_live(self, source: Source) -> _Live:
        # What binds looks up no name later on, and has to be where the gate is.
        context = self._contexts.shared if source.binds else self._contexts.acquire(source.address)
        socket = self._socket(context, zmq.SUB, LIVE_HIGH_WATER)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._protect(socket, source, binds=source.binds)
        monitor = context.socket(zmq.PAIR)
        endpoint = f"inproc://monitor-{next(self._names)}"
        try:
            socket.monitor(endpoint, _LINK_EVENTS)
            monitor.connect(endpoint)
            (socket.bind if source.binds else socket.connect)(source.address)
        except zmq.ZMQError:
            monitor.close(0)
            socket.close(0)
            self._release(source)
            raise
        live = _Live(socket, monitor, source)
        self._live[socket] = live
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        return live

    def _release(self, source: Source) -> None:
        if not source.binds:
            self._contexts.release(source.address)

    def _protect(self, socket: zmq.Socket[bytes], source: Source, *, binds: bool) -> None:
        """Has a socket demand the keys that are known of its peer."""
        if self._curve is None:
            return
        server = self._server_key(source)
        if binds:
            if self._gate is not None:
                speak_as_server(socket, self._curve.own, gated=True)
        elif server is not None:
            speak_as_client(socket, self._curve.own, server)

    def _server_key(self, source: Source) -> bytes | None:
        return None if self._curve is None else self._curve.server_of(source.peer)

    def _socket(self, context: Context, kind: int, high_water: int) -> zmq.Socket[bytes]:
        """A socket that gives up on a silent peer, and on messages that no engine sends."""
        socket = context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, high_water)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
        return socket

    def _remove(self, stream: StreamId) -> None:
        self._sources.pop(stream, None)
        self._unopened.pop(stream, None)
        self._close_replay(stream)
        for socket, live in list(self._live.items()):
            if stream in live.streams:
                del live.streams[stream]
                live.connected.discard(stream)
                if not live.streams:
                    self._close_live(socket, live)
        self.faults.by_stream.pop(stream, None)
        self.faults.broken.pop(stream, None)
        self.inbox.forget(stream)

    def _close_live(self, socket: zmq.Socket[bytes], live: _Live) -> None:
        for each in (socket, live.monitor):
            self._poller.unregister(each)
        socket.disable_monitor()
        live.monitor.close(0)
        socket.close(0)
        self._release(live.source)
        del self._live[socket]

    def _read_live(self, live: _Live) -> None:
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

    def _tell(self, live: _Live, stream: StreamId, change: Signal) -> None:
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

    def _changes(self, live: _Live) -> tuple[list[Signal], bool]:
        """What the monitor told since it was last read, and whether an engine joined."""
        changes: list[Signal] = []
        joined = False
        while live.monitor.poll(0):
            message = recv_monitor_message(live.monitor)
            self._note_handshake(live, message["event"])
            changes += live.on_event(message["event"], message["value"])
            joined = joined or message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return changes, joined

    def _note_handshake(self, live: _Live, event: int) -> None:
        """Says of a stream whose peer we connect to why the two do not get on: most often it is the keys."""
        if live.binds or event not in (*_REFUSALS, zmq.EVENT_HANDSHAKE_SUCCEEDED):
            return
        for stream in live.streams:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.faults.broken.pop(stream, None)
                continue
            self.faults.count(stream, "handshake")
            keyed = self._server_key(live.source) is not None
            self.faults.broken[stream] = refusal(live.address, event, keyed=keyed)
            self._warn.warning(f"handshake {stream}", "%s: %s", stream, self.faults.broken[stream])

    def _reopen_cut(self) -> None:
        """After a breach of protocol, such as too large a message, ZeroMQ does not reconnect by itself."""
        before = time.monotonic() - RECONNECT_PATIENCE_S
        for live in list(self._live.values()):
            if live.cut_at is not None and live.cut_at < before:
                again = self._open_live(live.source)
                again.streams = live.streams
                again.connected = live.connected
                self._close_live(live.socket, live)

    def _dispatch_all(self, live: _Live, messages: list[list[bytes]]) -> None:
        for frames in messages:
            self._dispatch(live, frames)

    def _dispatch(self, live: _Live, frames: list[bytes]) -> None:
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
        socket = self._socket(self._contexts.acquire(source.replay), zmq.DEALER, 0)
        self._protect(socket, source, binds=False)
        try:
            socket.connect(source.replay)
        except zmq.ZMQError as error:
            socket.close(0)
            self._contexts.release(source.replay)
            self.faults.count(stream, "replay_address")
            log.error("cannot use replay %s of stream %s: %s", source.replay, stream, error)
            return
        self._replays[stream] = _Replay(socket, stream, ask, source.replay)
        self._poller.register(socket, zmq.POLLIN)
        socket.send_multipart([b"", start.to_bytes(8, "big")])

    def _close_replay(self, stream: StreamId) -> None:
        replay = self._replays.pop(stream, None)
        if replay is None:
            return
        if stream in self._paused:
            self._paused.discard(stream)
        else:
            self._poller.unregister(replay.socket)
        replay.socket.close(0)
        self._contexts.release(replay.address)

    def _read_replay(self, replay: _Replay) -> None:
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

    def _replied(self, replay: _Replay, frames: list[bytes]) -> bool:
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
