"""Addresses: ``HOST:PORT`` to listen on, and ZeroMQ endpoints of engines."""

from __future__ import annotations


def host_and_port(listen: str) -> tuple[str, int]:
    """The parts of ``HOST:PORT`` (``[::1]:8080`` for IPv6). Raises ValueError that says what to write."""
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--listen {listen!r} is no address; write HOST:PORT, such as 127.0.0.1:8080")
    return host, int(port)


def http_url(host: str, port: int) -> str:
    """The URL of a server at ``host`` and ``port``; one that listens everywhere is named by loopback."""
    if host in ("0.0.0.0", "::", "*"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
