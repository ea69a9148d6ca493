"""Settings of ``warmroute indexer``. The front door makes flags, environment and TOML keys of the fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from events.address import AddressError, host_and_port
from events.signals import MAX_MESSAGE_BYTES
from indexer.errors import SettingsError
from indexer.layout import DEFAULT_MAP_SIZE, PARTIAL_TTL_S

if TYPE_CHECKING:  # a router knows these settings too, and no ZeroMQ
    from events.curve import Curve

LEAST_SIZE = 1 << 20
LEAST_BUDGET = 1 << 18


class IndexerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the map is, and where to answer."""

    map: Annotated[str, Meta(description="Folder of the map; made if it is not there.")] = "warmroute-map"
    listen: Annotated[str, Meta(description="Address to serve on, HOST:PORT; port 0 picks a free one.")] = (
        "127.0.0.1:9400"
    )
    advertise: Annotated[
        str | None,
        Meta(description="URL of this indexer, noted in the map for routers; made of --listen unless set."),
    ] = None
    map_size: Annotated[
        int,
        Meta(
            ge=LEAST_SIZE,
            le=1 << 46,
            description="Room reserved for the map, bytes; the file grows as it fills.",
        ),
    ] = DEFAULT_MAP_SIZE
    map_budget: Annotated[
        Annotated[int, Meta(ge=LEAST_BUDGET)] | None,
        Meta(description="Bytes of entries above which the oldest go; a quarter of --map-size unless set."),
    ] = None
    shards: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Writer processes, each with its share of the replicas and of the map.",
        ),
    ] = 1
    max_blocks: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Blocks of one rank of a replica above which its oldest go."),
    ] = 4_000_000
    max_message_bytes: Annotated[
        int,
        Meta(
            ge=1 << 10,
            description="Largest batch that is taken, bytes; a larger one is lost, and costs its connection.",
        ),
    ] = MAX_MESSAGE_BYTES
    curve_key: Annotated[
        str | None,
        Meta(
            description="File of our own CURVE keys, NAME.key_secret of `warmroute keygen NAME`, mode 0600. "
            "None: events are not encrypted."
        ),
    ] = None
    curve_server: Annotated[
        tuple[str, ...],
        Meta(
            description="REPLICA=FILE, with its public key (NAME.key): what is connected to for it must have "
            "that key. *=FILE: all others too. May be repeated."
        ),
    ] = ()
    curve_client: Annotated[
        tuple[str, ...],
        Meta(
            description="File with the public key of an engine that may connect to us (bind:...); may be "
            "repeated. With one, nobody else may, and nobody in plain."
        ),
    ] = ()
    partial_ttl_s: Annotated[
        float,
        Meta(
            gt=0,
            description="How long to keep what was known of a stream that lost batches for good, seconds.",
        ),
    ] = PARTIAL_TTL_S
    ready_deadline_s: Annotated[
        float,
        Meta(ge=0, description="Longest time that /ready waits for streams to prove themselves, seconds."),
    ] = 30.0

    @property
    def budget_bytes(self) -> int:
        """Bytes of entries that the map may hold."""
        return self.map_size // 4 if self.map_budget is None else self.map_budget

    def curve(self) -> Curve | None:
        """The keys for events, read from their files. Raises SettingsError."""
        from events.curve import CurveError, read_curve  # noqa: PLC0415

        try:
            return read_curve(self.curve_key, self.curve_server, self.curve_client)
        except CurveError as error:
            raise SettingsError(str(error)) from error

    def check(self) -> None:
        """Raises SettingsError for values that no indexer could run with."""
        if not self.map:
            raise SettingsError("map '' names no folder; give one")
        if self.budget_bytes > self.map_size // 2:
            raise SettingsError(
                f"map_budget {self.budget_bytes} leaves no room to work in map_size {self.map_size}; "
                "give at most half of it"
            )
        try:
            host_and_port(self.listen)
        except AddressError as error:
            raise SettingsError(str(error)) from error
