"""Looks host names up, so that one that takes long holds up nothing else.

The event loop's own way takes a thread of the pool that all other work of the loop shares, and a process ends
only when those threads do: with a name server that does not answer, minutes later.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

Address = tuple[Any, ...]
"""As ``getaddrinfo`` gives them: family, type, protocol, canonical name, address."""


async def look_up(
    host: str, port: int | None, family: int = socket.AF_UNSPEC, flags: int = 0
) -> list[Address]:
    """The stream addresses of ``host``, in a daemon thread of its own. Raises OSError."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[Address] | OSError] = loop.create_future()

    def tell(found: list[Address] | OSError) -> None:
        if not answer.done():
            answer.set_result(found)

    def ask() -> None:
        found = _ask_system(host, port, family, flags)
        with contextlib.suppress(RuntimeError):  # nobody waits any more, the loop is closed
            loop.call_soon_threadsafe(tell, found)

    threading.Thread(target=ask, name=f"lookup of {host}", daemon=True).start()
    found = await answer
    if isinstance(found, OSError):
        raise found
    return found


def _ask_system(host: str, port: int | None, family: int, flags: int) -> list[Address] | OSError:
    try:
        return socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=flags)
    except OSError as error:
        return error
    except UnicodeError as error:  # no name at all, as idna has it
        return OSError(f"{host!r} is no host name: {error}")


class NameResolver(AbstractResolver):
    """For aiohttp's client, which asks for a host once at a time, and keeps what it is told."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of ``host``. Raises OSError."""
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=port,
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, protocol, _, address in await look_up(host, port, family, socket.AI_ADDRCONFIG)
        ]

    async def close(self) -> None:
        """Nothing is kept."""
