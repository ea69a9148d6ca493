"""The ZeroMQ sockets of streams: opened with bounds and keys, in the context of their address, and closed."""

from __future__ import annotations

from itertools import count

import zmq

from events.contexts import Context, Contexts
from events.curve import Curve, Gate, speak_as_client, speak_as_server
from events.inbox import StreamId
from events.link import LINK_EVENTS, Link
from events.source import Source

LIVE_HIGH_WATER = 100_000


class LiveSocket:
    """A SUB socket with its monitor, and the streams that come out of it, with the topics that they take."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], source: Source) -> None:
        self.socket = socket
        self.monitor = monitor
        self.source = source
        self.link = Link(binds=source.binds)
        self.streams: dict[StreamId, str | None] = {}
        self.connected: set[StreamId] = set()

    def of_topic(self, topic: str) -> StreamId | None:
        """The stream of this very topic, else one that takes all topics."""
        takes_all = None
        for stream, wanted in self.streams.items():
            if self.source.binds and wanted == topic:
                return stream
            if wanted is None or not self.source.binds:
                takes_all = stream
        return takes_all


class ReplaySocket:
    """A DEALER socket with one outstanding request."""

    def __init__(self, socket: zmq.Socket[bytes], stream: StreamId, ask: int, address: str) -> None:
        self.socket = socket
        self.stream = stream
        self.ask = ask
        self.address = address


class Sockets:
    """Opens and closes sockets, from one thread. ``gate``, if there is one, has to be read there."""

    def __init__(self, curve: Curve | None, max_message_bytes: int) -> None:
        self._curve = curve
        self._max_message_bytes = max_message_bytes
        self._contexts = Contexts()
        self._names = count()
        self.gate: Gate | None = None
        if curve is not None and curve.clients is not None:
            self.gate = Gate(self._contexts.shared, curve.clients)

    def pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Two ends of a pipe in this process: what is sent to the second comes out of the first."""
        inner, outer = self._contexts.shared.socket(zmq.PULL), self._contexts.shared.socket(zmq.PUSH)
        inner.bind("inproc://wake")
        outer.connect("inproc://wake")
        return inner, outer

    def open_live(self, source: Source) -> LiveSocket:
        """Connects to a source, or binds its address. Raises zmq.ZMQError."""
        # What binds looks up no name later on, and has to be where the gate is.
        context = self._contexts.shared if source.binds else self._contexts.acquire(source.address)
        socket = self._socket(context, zmq.SUB, LIVE_HIGH_WATER)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._protect(socket, source, binds=source.binds)
        monitor = context.socket(zmq.PAIR)
        endpoint = f"inproc://monitor-{next(self._names)}"
        try:
            socket.monitor(endpoint, LINK_EVENTS)
            monitor.connect(endpoint)
            (socket.bind if source.binds else socket.connect)(source.address)
        except zmq.ZMQError:
            monitor.close(0)
            socket.close(0)
            self._release(source)
            raise
        return LiveSocket(socket, monitor, source)

    def close_live(self, live: LiveSocket) -> None:
        live.socket.disable_monitor()
        live.monitor.close(0)
        live.socket.close(0)
        self._release(live.source)

    def open_replay(self, source: Source, address: str, stream: StreamId, ask: int) -> ReplaySocket:
        """Connects to the replay endpoint of a source. Raises zmq.ZMQError."""
        socket = self._socket(self._contexts.acquire(address), zmq.DEALER, 0)
        self._protect(socket, source, binds=False)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close(0)
            self._contexts.release(address)
            raise
        return ReplaySocket(socket, stream, ask, address)

    def close_replay(self, replay: ReplaySocket) -> None:
        replay.socket.close(0)
        self._contexts.release(replay.address)

    def server_key(self, source: Source) -> bytes | None:
        """The public key that is demanded of the peer that a source connects to."""
        return None if self._curve is None else self._curve.server_of(source.peer)

    def end(self) -> None:
        """Ends all contexts; no socket may be used any more."""
        self._contexts.end()

    def _release(self, source: Source) -> None:
        if not source.binds:
            self._contexts.release(source.address)

    def _protect(self, socket: zmq.Socket[bytes], source: Source, *, binds: bool) -> None:
        """Has a socket demand the keys that are known of its peer."""
        if self._curve is None:
            return
        server = self.server_key(source)
        if binds:
            if self.gate is not None:
                speak_as_server(socket, self._curve.own, gated=True)
        elif server is not None:
            speak_as_client(socket, self._curve.own, server)

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
