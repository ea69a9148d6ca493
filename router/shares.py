"""What the workers of one router have at each stream, on the board that they share."""

from __future__ import annotations

from router.board import Row
from router.load import NO_SHARE, Share, StreamLoad
from router.replicas import StreamId

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
            _name(stream),
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

    def forget(self, stream: StreamId) -> None:
        """Frees the stream's place in this worker's row."""
        self._row.drop(_name(stream))

    def _sum(self, stream: StreamId) -> Share:
        share = NO_SHARE
        for fields in self._row.others(_name(stream)):
            requests, tokens, decoding, sent, sent_tokens, joined, first_tokens, left = fields
            load = StreamLoad(int(requests), int(tokens), int(decoding))
            earlier = joined < share.joined
            share = Share(
                share.load + load if share is not NO_SHARE else load,
                share.sent + int(sent),
                share.sent_tokens + int(sent_tokens),
                joined if earlier else share.joined,
                int(first_tokens) if earlier else share.first_tokens,
                max(share.left, left),
            )
        return share


def _name(stream: StreamId) -> bytes:
    return f"{stream[0]}\0{stream[1]}".encode("utf-8", "surrogatepass")
