"""One question to a server, with bounds on how long it takes and how much is read."""

from __future__ import annotations

import aiohttp

TIMEOUT_S = 5.0
ANSWER_LIMIT_BYTES = 8 << 20
UNREACHABLE = (aiohttp.ClientError, OSError, TimeoutError)
"""What a server that cannot be asked raises."""


async def ask(session: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    """Status and body of ``GET url``. Raises one of :data:`UNREACHABLE`."""
    async with session.get(url, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as response:
        return response.status, await response.content.read(ANSWER_LIMIT_BYTES)
