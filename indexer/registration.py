"""Which streams to follow: the body of ``POST /register``, kept in the map."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from indexer.errors import RegistrationError

BIND_PREFIX = "bind:"

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Registration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stream: a data-parallel rank of a replica, and where it publishes.

    ``endpoint`` is a ZeroMQ address to connect to, or ``bind:ADDRESS`` where the engine connects to us; then
    ``topic`` says which messages are this stream's (None: all of them). ``block_size`` is in tokens; None
    means that the first stored block tells. ``url`` is the replica's HTTP address, whose metrics tell when
    its process started. Shape: Mooncake RFC #1403, with ``aliases``, ``topic`` and ``url`` added.
    """

    instance_id: _Name | Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    endpoint: _Name
    model_name: _Name
    replay_endpoint: str | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=4095)] = 0
    additional_salt: str | None = None
    aliases: tuple[str, ...] = ()
    topic: str | None = None
    url: Annotated[str, msgspec.Meta(max_length=2048)] | None = None

    @property
    def instance(self) -> str:
        """The id as text: 1 and "1" are one instance."""
        return str(self.instance_id)

    @property
    def binds(self) -> bool:
        """Whether the engine connects to us."""
        return self.endpoint.startswith(BIND_PREFIX)

    @property
    def address(self) -> str:
        """The ZeroMQ address, without the bind mark."""
        return self.endpoint.removeprefix(BIND_PREFIX)

    def checked(self) -> Registration:
        """Itself. Raises RegistrationError for an address that ZeroMQ would refuse."""
        _check_address(f"endpoint {self.endpoint!r} of {self.instance_id!r}", self.address, self.binds)
        if self.replay_endpoint is not None:
            what = f"replay_endpoint {self.replay_endpoint!r} of {self.instance_id!r}"
            _check_address(what, self.replay_endpoint, may_be_wildcard=False)
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise RegistrationError(
                f"url {self.url!r} of {self.instance_id!r} is none; write http://HOST:PORT"
            )
        return self


def _check_address(what: str, address: str, may_be_wildcard: bool) -> None:
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        _check_socket_file(what, rest)
        return
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise RegistrationError(f"{what} is no ZeroMQ address; write tcp://HOST:PORT")
    if "*" in host and not may_be_wildcard:
        raise RegistrationError(f"{what} names no host; write the replica's own in place of *")


def _check_socket_file(what: str, path: str) -> None:
    """ZeroMQ deletes what it finds where it binds."""
    if not path.startswith("@") and Path(path).exists() and not Path(path).is_socket():
        raise RegistrationError(f"{what} is a file and no socket; give another path")
