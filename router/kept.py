"""An error answer put aside while another replica is asked."""

from __future__ import annotations

import asyncio

from router.errors import BrokenAnswerError
from router.upstream import Taker, UpstreamAnswer

MAX_BYTES = 1024 * 1024
"""More than this is no error message."""
READ_TIMEOUT_S = 5.0


class KeptAnswer:
    """An answer that was read to its end: an ``UpstreamAnswer`` that needs no connection."""

    def __init__(self, answer: UpstreamAnswer, body: bytes) -> None:
        self.status, self.reason = answer.status, answer.reason
        self.headers = answer.headers
        self.trailers = answer.trailers
        self._body = body

    async def pour(self, taker: Taker) -> bool:
        if self._body:
            taker(self._body)
        return True

    def close(self) -> None:
        """There is nothing to let go."""


async def keep(answer: UpstreamAnswer) -> KeptAnswer | None:
    """Reads the answer to its end; None, and nothing read, where it says that it is longer than a megabyte.

    Raises UpstreamError for one that breaks off, turns out to be longer, or is not there within five seconds.
    """
    length = answer.headers.get("Content-Length", "")
    if length.isdecimal() and int(length) > MAX_BYTES:
        return None
    body = bytearray()

    def take(piece: bytes) -> bool:
        body.extend(piece)
        if len(body) > MAX_BYTES:
            raise BrokenAnswerError(f"the body of its {answer.status} does not end")
        return True

    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            await answer.pour(take)
    except TimeoutError as error:
        raise BrokenAnswerError(f"the body of its {answer.status} did not come") from error
    return KeptAnswer(answer, bytes(body))
