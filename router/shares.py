"""What the workers of one router have at each stream, on the board that they share."""

from __future__ import annotations

from router.board import Row
from router.mutex import Mutex
from router.replicas import StreamId, stream_name
from router.stream_load import IDLE, NEVER, NO_SHARE, Share, StreamLoad

SHAPE = "qqqqqdqd"
"""Requests, tokens to prefill, requests being decoded, requests and tokens ever sent; when the first that
waits came, its tokens; when one that was first was done.
"""
MOST_STREAMS = 4096


class BoardShares:
    """The shares of one worker. Sums are kept until somebody writes."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self._sums: dict[StreamId, Share] = {}
        self._version = b""

    def tell(self, stream: StreamId, share: Share) -> None:
        """Writes what this worker has at the stream; a stream without room is logged and left out."""
        load = share.load
        self._row.put(
            stream_name(stream),
            load.requests,
            load.prefill_tokens,
            load.decoding,
            share.sent,
            share.sent_tokens,
            share.joined,
            share.first_tokens,
            share.left,
        )

    def of(self, stream: StreamId) -> Share:
        """What all others have at the stream."""
        version = self._row.version()
        if version != self._version:
            self._sums.clear()
            self._version = version
        share = self._sums.get(stream)
        if share is None:
            share = self._sums[stream] = self._sum(stream)
        return share

    def alone(self) -> Mutex:
        """While this is held, no other worker books what has a limit."""
        return self._row.alone()

    def forget(self, stream: StreamId) -> None:
        """Frees the stream's place in this worker's row."""
        self._row.drop(stream_name(stream))

    def _sum(self, stream: StreamId) -> Share:
        found = self._row.others(stream_name(stream))
        if not found:
            return NO_SHARE
        requests = tokens = decoding = sent = sent_tokens = first_tokens = 0
        joined, left = NEVER, 0.0
        for fields in found:
            requests += fields[0]
            tokens += fields[1]
            decoding += fields[2]
            sent += fields[3]
            sent_tokens += fields[4]
            left = max(left, fields[7])
            if fields[5] < joined:
                joined, first_tokens = fields[5], fields[6]
        load = StreamLoad(requests, tokens, decoding) if requests else IDLE
        return Share(load, sent, sent_tokens, joined, first_tokens, left)
