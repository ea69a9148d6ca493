"""What the Kubernetes API says of pods: its lists, the events of its watches, and its refusals.

Of a pod only what counts is decoded: the models of the client library take a millisecond or more for each.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from router.errors import RouterError


class ApiRefusedError(RouterError):
    """The API said no: ``code`` is the HTTP status, or 410 for a watch from a state that is forgotten."""

    def __init__(self, code: int, body: bytes) -> None:
        try:
            failure = _read_failure(body)
        except msgspec.DecodeError:
            # A proxy's page, or a line of text, as of an API server that is too busy (429).
            failure = _Failure(body[:200].decode(errors="replace").strip())
        self.code = failure.code or code
        super().__init__(f"{self.code}: {failure.message}")


def listed(body: bytes) -> tuple[dict[str, str], str]:
    """The addresses of the pods that may serve, by name, and the state of the cluster that they are of.

    Raises msgspec.DecodeError for what is no list of pods.
    """
    pods = _read_list(body)
    found = {pod.metadata.name: pod.address for pod in pods.items or ()}
    return _known(found), pods.metadata.resource_version


def heard(line: bytes) -> tuple[str, str | None] | None:
    """The pod that an event of a watch is of, and where it may serve now: None for nowhere.

    None for an event that is of no pod. Raises ApiRefusedError for one that ends the watch, and
    msgspec.DecodeError for what is no event.
    """
    event = _read_event(line)
    if event.type == "ERROR":
        raise ApiRefusedError(0, bytes(event.object))
    if event.type not in ("ADDED", "MODIFIED", "DELETED"):
        return None
    pod = _read_pod(event.object)
    return pod.metadata.name, None if event.type == "DELETED" else pod.address


def _known(addresses: Mapping[str, str | None]) -> dict[str, str]:
    return {name: address for name, address in addresses.items() if address is not None}


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None


class _Status(msgspec.Struct):
    phase: str = ""
    ip: str | None = msgspec.field(default=None, name="podIP")


class _Pod(msgspec.Struct):
    metadata: _Metadata
    status: _Status = msgspec.field(default_factory=_Status)

    @property
    def address(self) -> str | None:
        serves = self.status.phase == "Running" and self.metadata.deletion_timestamp is None
        return (self.status.ip or None) if serves else None


class _List(msgspec.Struct):
    metadata: _Metadata
    items: list[_Pod] | None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Failure(msgspec.Struct):
    """The API's ``Status``."""

    message: str
    code: int = 0


_read_list = msgspec.json.Decoder(_List).decode
_read_pod = msgspec.json.Decoder(_Pod).decode
_read_event = msgspec.json.Decoder(_Event).decode
_read_failure = msgspec.json.Decoder(_Failure).decode
