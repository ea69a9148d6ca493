"""CURVE keys for events: who we are, whom we believe, and who may connect to us (ZeroMQ RFC 26 and 27).

Keys are in files as pyzmq writes them (``zmq.auth.create_certificates``): ``NAME.key`` with the public key,
``NAME.key_secret`` with both. They are read into memory, and go nowhere else.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import msgspec
import zmq
import zmq.auth
from zmq.utils import z85

from events.logs import Throttled
from events.schema import EventError

log = logging.getLogger(__name__)

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ALL = "*"
_DOMAIN = b"warmroute"
_KEY_CHARS = 40
_HOW = "make keys with `warmroute keygen NAME`"


class CurveError(EventError):
    """A key that cannot be used, or that others could read."""


class KeyPair(msgspec.Struct, frozen=True):
    """A public key and its secret one, in Z85 (40 characters)."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return "KeyPair(...)"


class Curve(msgspec.Struct, frozen=True):
    """``own`` is our pair; ``servers`` are the public keys of peers that we connect to, by name, ``*`` that
    of all others. ``clients`` may connect to us, with keys that are theirs; None: anybody may, in plain.
    """

    own: KeyPair
    servers: dict[str, bytes] = {}
    clients: frozenset[bytes] | None = None

    def server_of(self, peer: str) -> bytes | None:
        """The public key that ``peer`` must have; None: it is spoken to in plain."""
        return self.servers.get(peer, self.servers.get(ALL))


def read_pair(what: str, path: str) -> KeyPair:
    """Our own keys. Raises CurveError, which names ``what``, also for a file that others may read."""
    try:
        mode = stat.S_IMODE(Path(path).stat().st_mode)
    except OSError as error:
        raise CurveError(f"{what} {path}: {error.strerror}; {_HOW}") from error
    if mode & 0o077:
        raise CurveError(f"{what} {path}: others may read it (mode {mode:04o}); chmod 600 it")
    public, secret = _read(what, path)
    if secret is None:
        raise CurveError(f"{what} {path}: holds no secret key; give the file NAME.key_secret")
    return KeyPair(public, secret)


def read_public(what: str, path: str) -> bytes:
    """Somebody else's public key. Raises CurveError, which names ``what``."""
    return _read(what, path)[0]


def _read(what: str, path: str) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        # Not quoted: it may hold a line of the file.
        raise CurveError(f"{what} {path}: no keys can be read ({type(error).__name__}); {_HOW}") from error
    for key in (public, secret):
        if key is not None and (len(key) != _KEY_CHARS or not _is_z85(key)):
            raise CurveError(f"{what} {path}: a key in it is none of CURVE; {_HOW}")
    return public, secret


def _is_z85(key: bytes) -> bool:
    try:
        return len(z85.decode(key)) == 32
    except (KeyError, ValueError):
        return False


def read_curve(key: str | None, servers: Iterable[str], clients: Iterable[str]) -> Curve | None:
    """What ``--curve-key``, ``--curve-server NAME=FILE`` and ``--curve-client FILE`` say; None without a key.

    Raises CurveError.
    """
    by_name: dict[str, bytes] = {}
    for line in servers:
        name, equals, path = line.partition("=")
        if not equals or not name or not path or name in by_name:
            raise CurveError(f"--curve-server {line}: write NAME=FILE or *=FILE, each name once")
        by_name[name] = read_public(f"--curve-server {name}", path)
    allowed = frozenset(read_public("--curve-client", path) for path in clients)
    if key is None:
        if by_name or allowed:
            raise CurveError(f"--curve-server and --curve-client need --curve-key; {_HOW}")
        return None
    if not by_name and not allowed:
        raise CurveError("--curve-key alone protects nothing; give --curve-server or --curve-client too")
    if not zmq.has("curve"):
        raise CurveError("--curve-key: this build of ZeroMQ has no CURVE; install pyzmq from PyPI")
    return Curve(read_pair("--curve-key", key), by_name, allowed or None)


def write_pair(stem: Path) -> tuple[Path, Path]:
    """Makes a new pair: ``stem.key`` and ``stem.key_secret``, the latter with mode 0600. Raises CurveError
    where there is one already.
    """
    public, secret = zmq.curve_keypair()
    paths = stem.with_name(f"{stem.name}.key"), stem.with_name(f"{stem.name}.key_secret")
    known = f'curve\n    public-key = "{public.decode()}"\n'
    texts = f"metadata\n{known}", f'metadata\n{known}    secret-key = "{secret.decode()}"\n'
    try:
        for path, text, mode in zip(paths, texts, (0o644, 0o600), strict=True):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
                file.write(text)
    except OSError as error:
        fix = "; give another NAME, or take it away first" if isinstance(error, FileExistsError) else ""
        raise CurveError(f"cannot write {error.filename}: {error.strerror}{fix}") from error
    return paths


def speak_as_client(socket: zmq.Socket[bytes], own: KeyPair, server: bytes) -> None:
    """Has ``socket`` connect only to whoever has the secret key of ``server``. Before it connects."""
    socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = own.public, own.secret, server


def speak_as_server(socket: zmq.Socket[bytes], own: KeyPair, *, gated: bool) -> None:
    """Has ``socket`` take only peers that know our public key, and where it is ``gated`` only those that the
    :class:`Gate` of its context lets in. Before it binds.
    """
    socket.curve_server = True
    socket.curve_secretkey = own.secret
    if gated:
        # Without a gate in its context it would take anybody: enforced, it takes nobody then.
        socket.zap_domain = _DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def refusal(address: str, event: int, *, keyed: bool) -> str:
    """Why there was no handshake with ``address``, from the event that its socket's monitor told.

    ``keyed``: we came with keys. A peer that cannot read what is sealed for another key just hangs up, as
    does whatever is no ZeroMQ, and one in plain often; the rest ZeroMQ tells apart (tried with libzmq 4.3).
    """
    if not keyed:
        why = "it wants a CURVE key, and none is given for it (--curve-server), or it is no ZeroMQ"
    elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        why = "it does not let our CURVE key in (--curve-key)"
    elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        why = "it speaks no CURVE, and a key is given for it (--curve-server)"
    else:
        why = "it has another CURVE key than is given for it (--curve-server), or none, or is no ZeroMQ"
    return f"no handshake with {address}: {why}"


class Gate:
    """Answers ZeroMQ's question whether a key may come in, for all sockets of one context.

    Belongs to the thread that reads :attr:`socket` when it is readable.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], clients: Iterable[bytes]) -> None:
        self._allowed = frozenset(z85.decode(key) for key in clients)
        self._warn = Throttled(log)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ADDRESS)

    def answer(self) -> None:
        """Answers one question (RFC 27)."""
        version, request, _domain, address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        allowed = mechanism == b"CURVE" and bool(credentials) and credentials[0] in self._allowed
        if not allowed:
            self._warn.warning(
                "refused",
                "refused a publisher at %s: its key is none of --curve-client",
                address.decode("ascii", "replace"),
            )
        status = (b"200", b"OK") if allowed else (b"400", b"not allowed")
        self.socket.send_multipart([version, request, *status, b"", b""])
