"""The connections of one SUB socket, as the events of its ZeroMQ monitor tell of them."""

from __future__ import annotations

import zmq

from events.signals import Connected, Disconnected, Signal

REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)
LINK_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)
"""What a monitor has to tell."""


class Link:
    """Which engines are there. ``binds``: engines connect to the socket, which may have several.

    ``peers`` is how many shook hands and have not left. ``cut_at`` is when a socket that connects lost its
    connection (seconds, any monotonic clock), None once ZeroMQ tries again by itself.
    """

    def __init__(self, *, binds: bool) -> None:
        self.peers = 0
        self.cut_at: float | None = None
        self._binds = binds
        self._open: set[int] = set()
        self._refused = False

    def on_event(self, event: int, descriptor: int, now: float) -> list[Signal]:
        """What a monitor event at ``now`` means for streams; ``descriptor`` is the connection's file.

        A connection that never shook hands (a port scan, a health check) is no engine that leaves. Of several
        engines on one bound address nobody says which one left: all prove themselves.
        """
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.peers += 1
            return [Connected()]
        if event in (zmq.EVENT_CONNECTED, zmq.EVENT_ACCEPTED):
            self._open.add(descriptor)
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self.cut_at = None
        elif event != zmq.EVENT_DISCONNECTED:
            self._refused = True
        else:
            self._open.discard(descriptor)
            self.cut_at = None if self._binds else now
            refused, self._refused = self._refused, False
            before, self.peers = self.peers, min(self.peers, len(self._open))
            if before and not (refused and self.peers == before):
                return [Disconnected(), Connected()] if self.peers else [Disconnected()]
        return []
