"""One replica: how it is written in the settings, and what is known of it while we run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any

import msgspec
from yarl import URL

from events.address import AddressError, offset_port
from router.credential import credential
from router.errors import SettingsError

StreamId = tuple[str, int]
"""A replica's name and a data-parallel rank of it: what is chosen, loaded and matched."""

BIND = "bind:"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}")
_FIELDS = ("events", "replay", "ranks", "topic", "model", "block-size", "key")
_MAX_RANKS = 1024
_SHAPE = "write NAME=URL[,events=tcp://HOST:PORT][,replay=tcp://HOST:PORT][,ranks=N][,topic=T][,model=M][,block-size=N][,key=env:NAME|file:PATH]"


@lru_cache(1 << 13)
def stream_name(stream: StreamId) -> bytes:
    """What a stream is called in memory that workers share."""
    return f"{stream[0]}\0{stream[1]}".encode("utf-8", "surrogatepass")


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as configured. ``events`` and ``replay`` are of rank 0; None means that the engine is asked.

    ``url`` has no slash at its end; ``block_size`` is in tokens; ``key`` says where its API key is.
    """

    name: str
    url: str
    events: str | None = None
    replay: str | None = None
    ranks: int | None = None
    topic: str | None = None
    model: str | None = None
    block_size: int | None = None
    key: str | None = None

    @property
    def host(self) -> str:
        """The host that the replica is reached at."""
        return URL(self.url).host or ""


def parse_replica(line: str) -> ReplicaSpec:
    """``vllm-0=http://vllm-0:8000,events=tcp://vllm-0:5557,ranks=2`` as a spec. Raises SettingsError."""
    head, *rest = (part.strip() for part in line.split(","))
    name, equals, url = head.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise SettingsError(f"--replica {line!r} has no usable name; {_SHAPE}")
    fields: dict[str, str] = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if key not in _FIELDS or not equals or not value or key in fields:
            shown = "key=..." if key == "key" else part
            raise SettingsError(f"--replica {name}: {shown!r} is unknown, empty or given twice; {_SHAPE}")
        fields[key] = value
    for key in ("events", "replay"):
        if key in fields:
            _check_endpoint(name, key, fields[key])
    if not fields.get("key", "env:").startswith(("env:", "file:")):
        # Not quoted: it may be the key itself.
        raise SettingsError(f"--replica {name}: key= is no place; write key=env:NAME or key=file:PATH")
    if "replay" in fields and "events" not in fields:
        raise SettingsError(f"--replica {name}: replay= without events=; give both or neither")
    return ReplicaSpec(
        name=name,
        url=checked_url(f"--replica {name}", url),
        events=fields.get("events"),
        replay=fields.get("replay"),
        ranks=_number(name, "ranks", fields.get("ranks"), _MAX_RANKS),
        topic=fields.get("topic"),
        model=fields.get("model"),
        block_size=_number(name, "block-size", fields.get("block-size"), 1 << 20),
        key=fields.get("key"),
    )


def placed_at(spec: ReplicaSpec, address: str, name: str) -> ReplicaSpec:
    """The replica of ``spec`` at an address: in its URL, and where its events had the URL's host."""
    named = f"[{address}]" if ":" in address else address

    def placed(endpoint: str | None) -> str | None:
        return endpoint and endpoint.replace(f"://{spec.host}:", f"://{named}:")

    return msgspec.structs.replace(
        spec,
        name=name,
        url=str(URL(spec.url).with_host(address)).rstrip("/"),
        events=placed(spec.events),
        replay=placed(spec.replay),
    )


def parse_replicas(lines: Iterable[str]) -> list[ReplicaSpec]:
    """All replicas of the settings. Raises SettingsError, also for a name that is given twice and for ranks
    without ports.
    """
    specs = [parse_replica(line) for line in lines]
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise SettingsError(
                f"--replica {spec.name} is given twice; every replica needs a name of its own"
            )
        seen.add(spec.name)
        configured_sources(spec)
    return specs


def checked_url(what: str, text: str) -> str:
    """The URL of a server, without a slash at its end. Raises SettingsError, which names ``what``."""
    try:
        url = URL(text)
        usable = url.scheme in ("http", "https") and bool(url.host) and url.port is not None
    except ValueError:
        usable = False
    if not usable or url.query_string or url.fragment or url.user:
        raise SettingsError(
            f"{what}: {text!r} is no URL of a server; write http://HOST:PORT, with a port up to 65535"
        )
    bare = text.rstrip("/")
    if bare.endswith("/v1"):
        raise SettingsError(f"{what}: {text!r}: paths begin with /v1 already; write {bare[:-3]}")
    return bare


def _check_endpoint(name: str, key: str, text: str) -> None:
    address = text.removeprefix(BIND) if key == "events" else text
    scheme, _, rest = address.partition("://")
    port = rest.rpartition(":")[2]
    if scheme == "ipc" and rest:
        return
    if scheme != "tcp" or not rest.rpartition(":")[0] or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(f"--replica {name}: {key}={text} is no ZeroMQ address; write tcp://HOST:PORT")


def _number(name: str, key: str, text: str | None, most: int) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise SettingsError(f"--replica {name}: {key}={text} is no number from 1 to {most}")
    return int(text)


class EventSource(msgspec.Struct, frozen=True):
    """Where one rank publishes its KV events, ready to be registered."""

    rank: int
    endpoint: str
    replay_endpoint: str | None = None
    topic: str | None = None


def at_host(endpoint: str, host: str) -> str:
    """``endpoint`` with a wildcard host (``*``, ``0.0.0.0``, ``[::]``) replaced; bind endpoints stay as they
    are.
    """
    if endpoint.startswith(BIND):
        return endpoint
    named = f"[{host}]" if ":" in host else host
    return re.sub(r"^tcp://(\*|0\.0\.0\.0|\[?::\]?)(?=:)", lambda _: f"tcp://{named}", endpoint)


def configured_sources(spec: ReplicaSpec) -> tuple[EventSource, ...]:
    """The sources that the settings give, one for each rank; empty where they give none.

    Raises SettingsError where a rank has no port.
    """
    if spec.events is None:
        return ()
    events, replay = at_host(spec.events, spec.host), spec.replay and at_host(spec.replay, spec.host)
    ranks = range(spec.ranks or 1)
    try:
        endpoints = [offset_port(events, rank) for rank in ranks]
        replays = [replay and offset_port(replay, rank) for rank in ranks]
    except AddressError as error:
        raise SettingsError(f"--replica {spec.name}: {error}") from error
    if set(endpoints) & set(replays):
        raise SettingsError(
            f"--replica {spec.name}: the event and replay ports of {len(ranks)} ranks overlap; "
            f"leave at least {len(ranks)} between events= and replay="
        )
    return tuple(
        EventSource(rank, endpoint, replayed, spec.topic)
        for rank, endpoint, replayed in zip(ranks, endpoints, replays, strict=True)
    )


class Health(StrEnum):
    """``UNKNOWN`` is a replica that was not heard of yet: it gets requests, as the fleet must serve
    meanwhile.
    """

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"


class Models(msgspec.Struct, frozen=True):
    """What ``/v1/models`` says.

    The first id without a parent is the model; ids with a parent are LoRA adapters.
    """

    model: str
    aliases: tuple[str, ...] = ()
    adapters: frozenset[str] = frozenset()
    max_model_len: int | None = None
    cards: tuple[Mapping[str, Any], ...] = ()


_STANDING = frozenset({"draining", "health", "models", "port_ranks", "ranks"})
_UNSET = object()


class Replica:
    """A replica and what is known of it now. Written by the fleet's tasks, read by everything else.

    ``sources_asked``: the engine has said where its events are, or that there are none.
    ``ranks`` are configured, or told by the engine; ``port_ranks`` are those that only the events of a shared
    port name, as the indexer lists them. There may be more of the latter than were heard of so far.

    Raises SettingsError when it is made with a key that is not where it should be.
    """

    changes = 0
    """Of all replicas: goes up when one is made, and when one changes in what requests are sent by."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec = spec
        self.health = Health.UNKNOWN
        self.draining = False
        self.last_error: str | None = None
        self.models: Models | None = Models(spec.model) if spec.model else None
        self.sources: tuple[EventSource, ...] = configured_sources(spec)
        self.sources_asked = False
        self.ranks: tuple[int, ...] = tuple(range(spec.ranks or 1))
        self.process_started: float | None = None
        self.port_ranks: tuple[int, ...] = ()
        self.key = credential(f"--replica {spec.name}", spec.key)
        self.tokenize_missing_until = 0.0
        self.tokenize_slow_until = 0.0

    def __setattr__(self, name: str, value: object) -> None:
        if name in _STANDING and self.__dict__.get(name, _UNSET) != value:
            Replica.changes += 1
        super().__setattr__(name, value)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def usable(self) -> bool:
        """Whether requests may be sent to it."""
        return self.health is not Health.DOWN and not self.draining

    def headers(self) -> dict[str, str]:
        """What our own calls to it carry."""
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    def streams(self) -> list[StreamId]:
        """One stream for each rank."""
        name = self.spec.name
        return [(name, rank) for rank in self.all_ranks]

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """The ranks that are known."""
        if not self.port_ranks:
            return self.ranks
        return tuple(dict.fromkeys((*self.ranks, *self.port_ranks)))

    def pins(self, matched_tokens: int | None) -> bool:
        """Whether a request has to say which rank it is for, to be served by the one that was chosen.

        Where ranks are only heard of, those never heard of would get no request: it says so only for a rank
        that holds something of it, and leaves the others to the engine's round robin.
        """
        return len(self.ranks) > 1 or bool(self.port_ranks and matched_tokens)

    def may_serve(self, model: str | None) -> bool:
        """Whether it serves ``model``, or has not said its models yet."""
        return self.models is None or self.resolve(model) is not None

    def resolve(self, model: str | None) -> tuple[str, str | None] | None:
        """The base model and the LoRA name that ``model`` means here, or None when it is not served.

        No model is the base model (vLLM 0.32: ``entrypoints/serve/engine/serving.py``).
        """
        if self.models is None:
            return None
        if not model or model == self.models.model or model in self.models.aliases:
            return self.models.model, None
        if model in self.models.adapters:
            return self.models.model, model
        return None
