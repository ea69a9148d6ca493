"""Addresses: ``HOST:PORT`` to listen on, and ZeroMQ endpoints of engines."""

from __future__ import annotations

import errno

from events.schema import EventError

MAX_PORT = 65535
EVERYWHERE = ("0.0.0.0", "::", "*")


class AddressError(EventError, ValueError):
    """An address that cannot be used; the message says what to write."""


def host_and_port(listen: str) -> tuple[str, int]:
    """The parts of ``HOST:PORT`` (``[::1]:8080`` for IPv6). Raises AddressError."""
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > MAX_PORT:
        raise AddressError(f"--listen {listen!r} is no address; write HOST:PORT, such as 127.0.0.1:8080")
    return host, int(port)


def http_url(host: str, port: int) -> str:
    """The URL of a server at ``host`` and ``port``; one that listens everywhere is named by loopback."""
    if host in EVERYWHERE:
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def not_only(host: str) -> str:
    """What to say behind the URL of a server at ``host``: nothing, unless it has other addresses too."""
    return " and every other address of this host" if host in EVERYWHERE else ""


def offset_port(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank: port + rank; a port that the system chooses stays as it is.

    As ``vllm/distributed/kv_events.py`` 0.32. Raises AddressError where vLLM has no rule either (ipc with
    more than one rank), and where there is no such port.
    """
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    if "tcp://" in address and port in ("0", "*"):
        return endpoint
    if "tcp://" not in address or not port.isdecimal():
        raise AddressError(f"no endpoint for rank {rank} next to {endpoint!r}; use tcp://HOST:PORT")
    if int(port) + rank > MAX_PORT:
        raise AddressError(f"port {port} of {endpoint!r} leaves no port for rank {rank}; use a lower one")
    return f"{address}:{int(port) + rank}"


def cannot_listen(listen: str, error: OSError) -> str:
    """What to say when ``listen`` cannot be had."""
    why = "address already in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return f"cannot listen on {listen}: {why}; choose another --listen"
