"""ZeroMQ contexts, so that a name that is slow to look up holds up nobody else.

libzmq looks a host name up on the I/O thread of its context, at each connect and reconnect, and that thread
does nothing else meanwhile: with a name server that does not answer, for many seconds. So each host that goes
by a name has a context, with a thread, of its own; all numeric addresses and socket files share one.
"""

from __future__ import annotations

import ipaddress
import threading

import msgspec
import zmq

MAX_SOCKETS = 65_535

Context = zmq.Context[zmq.Socket[bytes]]


class _Named(msgspec.Struct):
    context: Context
    users: int = 0


class Contexts:
    """Contexts by address. From one thread; ``shared`` is the one of all that need no lookup."""

    def __init__(self) -> None:
        self.shared: Context = zmq.Context()
        self.shared.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._named: dict[str, _Named] = {}

    def acquire(self, address: str) -> Context:
        """The context for a socket that connects to ``address``, until :meth:`release`."""
        host = _name(address)
        if host is None:
            return self.shared
        named = self._named.setdefault(host, _Named(zmq.Context()))
        named.users += 1
        return named.context

    def release(self, address: str) -> None:
        """A socket of ``address`` is closed. Its host's context ends with the last of them."""
        host = _name(address)
        if host is None:
            return
        named = self._named[host]
        named.users -= 1
        if not named.users:
            del self._named[host]
            _end(named.context)

    def end(self) -> None:
        """Ends all contexts; no socket may be used any more."""
        for named in self._named.values():
            _end(named.context)
        self._named.clear()
        self.shared.destroy(linger=0)


def _end(context: Context) -> None:
    """Its thread may be in a lookup, and whoever ends a context waits for that."""
    threading.Thread(target=context.term, name="end of a context", daemon=True).start()


def _name(address: str) -> str | None:
    """The host of an address, if it has to be looked up."""
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme != "tcp" or host == "*":
        return None
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return None
