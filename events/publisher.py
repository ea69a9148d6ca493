"""A publisher of KV events that behaves as vLLM's does on the wire.

PUB frames ``[topic, sequence, payload]`` and a ROUTER that replays the last batches
(``vllm/distributed/kv_events.py``, 0.8.5 to 0.32.0). The one difference is for the better: a replay is
answered at once, where vLLM's thread looks for requests only between batches or every 100 ms.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import zmq

from events.curve import KeyPair, speak_as_client, speak_as_server
from events.schema import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventError

END_SEQUENCE = b"\xff" * 8
CLOSE_TIMEOUT_S = 2.0

Style = Literal["map", "array"]


class PublisherError(EventError):
    """An endpoint that cannot be used, or a publisher that is closed."""


class _StoredMap(msgspec.Struct, tag_field="type", tag="BlockStored", omit_defaults=True, gc=False):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _RemovedMap(msgspec.Struct, tag_field="type", tag="BlockRemoved", omit_defaults=True, gc=False):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class _ClearedMap(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


def encode(events: Sequence[Event], timestamp: float, rank: int | None, style: Style = "map") -> bytes:
    """The msgpack payload of a batch, ``[timestamp, events, rank]``.

    ``timestamp`` is in unix seconds. ``map`` writes events as vLLM 0.32 does, ``array`` as 0.23.
    """
    shape = _as_map if style == "map" else _as_array
    return msgspec.msgpack.encode([timestamp, [shape(event) for event in events], rank])


def wire_hash(canonical: bytes) -> int | bytes:
    """The hash as engines send it; the inverse of :func:`events.schema.canonical_hash`."""
    return int.from_bytes(canonical, "big") if len(canonical) == 8 else canonical[1:]


def _stored_fields(event: BlockStored) -> tuple[Any, ...]:
    """The fields of a store, in the order of the array form."""
    return (
        [wire_hash(value) for value in event.hashes],
        None if event.parent is None else wire_hash(event.parent),
        event.tokens.tolist(),
        event.block_size,
        event.lora_id,
        event.medium,
        event.lora_name,
        # Engines write one entry per block, also when no block has a key.
        event.extra_keys or [None] * len(event.hashes),
        event.group,
        event.group_kind,
        event.sliding_window,
    )


def _as_map(event: Event) -> msgspec.Struct:
    if isinstance(event, BlockStored):
        return _StoredMap(*_stored_fields(event))
    if isinstance(event, BlockRemoved):
        return _RemovedMap([wire_hash(value) for value in event.hashes], event.medium, event.group)
    return _ClearedMap()


def _as_array(event: Event) -> list[Any]:
    if isinstance(event, BlockStored):
        return ["BlockStored", *_stored_fields(event)]
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", [wire_hash(value) for value in event.hashes], event.medium, event.group]
    assert isinstance(event, AllBlocksCleared)
    return ["AllBlocksCleared"]


def binds(endpoint: str) -> bool:
    """Whether vLLM's PUB binds this endpoint; all others it connects to."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


class Publisher:
    """Publishes batches of one engine process and rank, and replays the last ``buffer_steps`` of them.

    ``endpoint`` and ``replay_endpoint`` hold, once made, the addresses that are really bound (port 0 or ``*``
    resolved), or the address connected to. Raises PublisherError when an address cannot be had.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        rank: int = 0,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        topic_in_replay: bool = True,
        style: Style = "map",
        keys: KeyPair | None = None,
        server_key: bytes | None = None,
    ) -> None:
        """``topic_in_replay`` False makes replies as engines before 0.26 do, ``style`` see :func:`encode`.

        ``keys`` has it speak CURVE, which vLLM cannot, but a proxy in front of it can: what it binds takes
        those who know its public key, and what it connects to must have ``server_key``.
        """
        self._topic = topic.encode()
        self._rank = rank
        self._style: Style = style
        self._topic_in_replay = topic_in_replay
        self._sequences = itertools.count()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._queue: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
        self._order = threading.Lock()
        self._closed = False
        # A context of its own, because only ending it tells that the addresses are free again; inproc
        # addresses exist within the shared one alone.
        shared = any(address.startswith("inproc://") for address in (endpoint, replay_endpoint or ""))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance() if shared else zmq.Context()
        self._shared_context = shared
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(hwm)
        self._pub.linger = 0
        self._keys, self._server_key = keys, server_key
        self._router: zmq.Socket[bytes] | None = None
        try:
            self._protect(self._pub, bind=binds(endpoint))
            self.endpoint = _open(self._pub, endpoint, bind=binds(endpoint))
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                # The default high-water mark: a slow reader loses replies, as with vLLM up to 0.32.
                self._router = self._context.socket(zmq.ROUTER)
                self._router.linger = 0
                self._protect(self._router, bind=True)
                self.replay_endpoint = _open(self._router, replay_endpoint, bind=True)
        except PublisherError:
            self._close_sockets()
            self._end_context()
            raise
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"kv-events-{rank}", daemon=True)
        self._thread.start()

    def _protect(self, zmq_socket: zmq.Socket[bytes], *, bind: bool) -> None:
        if self._keys is None:
            return
        if bind:
            speak_as_server(zmq_socket, self._keys, gated=False)
        elif self._server_key is not None:
            speak_as_client(zmq_socket, self._keys, self._server_key)
        else:
            raise PublisherError("keys, and an endpoint to connect to: give server_key, which it must have")

    def publish(self, events: Sequence[Event], timestamp: float) -> int:
        """Sends one batch made at ``timestamp`` (unix seconds) and returns its sequence."""
        return self.publish_payload(encode(events, timestamp, self._rank, self._style))

    def publish_payload(self, payload: bytes) -> int:
        """Sends a payload as it is, good or bad, and returns its sequence."""
        with self._order:
            if self._closed:
                raise PublisherError(f"the publisher on {self.endpoint} is closed")
            sequence = next(self._sequences)
            self._queue.put((sequence.to_bytes(8, "big"), payload))
            self._wake_thread()
        return sequence

    def close(self) -> None:
        """Sends what is queued and frees the addresses. As with vLLM, sockets do not linger."""
        with self._order:
            if self._closed:
                return
            self._closed = True
            self._wake_thread()
        self._thread.join(CLOSE_TIMEOUT_S)
        self._wake.close()
        if not self._thread.is_alive():
            self._end_context()

    def _wake_thread(self) -> None:
        # A full pipe is full of wake-ups that the thread has yet to see; a closed one has no thread any more.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            self._wake.send(b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while not self._closed:
            ready = dict(poller.poll())
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            self._send_queued()
            if self._router in ready:  # After sending, so that a replay has all that was published before it.
                self._replay()
        self._send_queued()
        self._close_sockets()
        self._woken.close()

    def _send_queued(self) -> None:
        while True:
            try:
                sequence, payload = self._queue.get_nowait()
            except queue.Empty:
                return
            self._pub.send_multipart((self._topic, sequence, payload))
            self._kept.append((sequence, payload))

    def _replay(self) -> None:
        """Answers one request ``["", start]`` with every kept batch from ``start`` on and the end marker."""
        assert self._router is not None
        frames = self._router.recv_multipart()
        if len(frames) != 3:
            return  # vLLM drops such a request too, without an answer.
        client, _, start = frames
        between = (b"", self._topic) if self._topic_in_replay else (b"",)
        for sequence, payload in self._kept:
            if int.from_bytes(sequence, "big") >= int.from_bytes(start, "big"):
                self._router.send_multipart((client, *between, sequence, payload))
        end = (b"", b"") if self._topic_in_replay else (b"",)
        self._router.send_multipart((client, *end, END_SEQUENCE, b""))

    def _end_context(self) -> None:
        if not self._shared_context:
            self._context.term()

    def _close_sockets(self) -> None:
        self._pub.close()
        if self._router is not None:
            self._router.close()


def _open(zmq_socket: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> str:
    """Binds or connects, and returns the address that others can use."""
    if "::" in endpoint or "[" in endpoint:
        zmq_socket.ipv6 = True
    try:
        if not bind:
            zmq_socket.connect(endpoint)
            return endpoint
        # ZeroMQ spells a port that the system chooses `*`; vLLM's users write 0.
        zmq_socket.bind(endpoint[:-1] + "*" if endpoint.endswith(":0") else endpoint)
    except zmq.ZMQError as error:
        action = "bind" if bind else "connect to"
        cause = zmq.strerror(error.errno or 0)
        raise PublisherError(f"cannot {action} {endpoint}: {cause}; choose another endpoint") from error
    resolved: str = zmq_socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return resolved or endpoint
