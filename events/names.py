"""Looks host names up for HTTP clients, so that one that takes long holds up nothing else.

The event loop's own way takes a thread of the pool that all other work of the loop shares, and a process ends
only when those threads do: with a name server that does not answer, minutes later.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from aiohttp.abc import AbstractResolver, ResolveResult

Found = list[ResolveResult] | OSError


class NameResolver(AbstractResolver):
    """Each lookup has a daemon thread; aiohttp asks for a host once at a time, and keeps what it is told."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of ``host``. Raises OSError."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Found] = loop.create_future()

        def tell(found: Found) -> None:
            if not answer.done():
                answer.set_result(found)

        def look_up() -> None:
            found = _look_up(host, port, family)
            with contextlib.suppress(RuntimeError):  # nobody waits any more, the loop is closed
                loop.call_soon_threadsafe(tell, found)

        threading.Thread(target=look_up, name=f"lookup of {host}", daemon=True).start()
        found = await answer
        if isinstance(found, OSError):
            raise found
        return found

    async def close(self) -> None:
        """Nothing is kept."""


def _look_up(host: str, port: int, family: socket.AddressFamily) -> Found:
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    except OSError as error:
        return error
    except UnicodeError as error:  # no name at all, as idna has it
        return OSError(f"{host!r} is no host name: {error}")
    return [
        ResolveResult(
            hostname=host,
            host=str(address[0]),
            port=port,
            family=kind,
            proto=protocol,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )
        for kind, _, protocol, _, address in found
    ]
