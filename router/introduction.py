"""What a replica says of itself: which models it serves, and where it publishes events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from router.errors import RouterError
from router.replicas import EventSource, Models, Replica, at_host


class _ModelCard(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _KVEventsConfig(msgspec.Struct):
    endpoint: str
    enable_kv_cache_events: bool = True
    replay_endpoint: str | None = None
    topic: str | None = None


class DiscoveryError(RouterError):
    """A replica's answer about itself that makes no sense."""


def read_models(payload: bytes, configured: str | None = None) -> Models:
    """The models in an answer of ``GET /v1/models``. ``configured`` wins over the first id.

    Raises DiscoveryError.
    """
    try:
        raw = msgspec.json.decode(payload)["data"]
        cards = msgspec.convert(raw, list[_ModelCard])
    except (msgspec.MsgspecError, TypeError, KeyError) as error:
        raise DiscoveryError(f"/v1/models makes no sense: {error}") from error
    bases = [card for card in cards if card.parent is None]
    if not bases:
        raise DiscoveryError("/v1/models names no base model")
    model = configured or bases[0].id
    return Models(
        model=model,
        aliases=tuple(card.id for card in bases if card.id != model),
        adapters=frozenset(card.id for card in cards if card.parent is not None),
        max_model_len=bases[0].max_model_len,
        cards=tuple(raw),
    )


def read_event_sources(payload: bytes, host: str) -> tuple[EventSource, ...]:
    """The sources in an answer of ``GET /kv_event_sources`` (vLLM 0.32), ``*`` replaced by ``host``.

    Endpoints there are of each rank already. vLLM binds a wildcard; other hosts it connects to, but for the
    one that it writes in place of ``tcp://*:0``, so those are taken at their word. Raises DiscoveryError.
    """
    try:
        configs = msgspec.json.decode(payload, type=dict[str, _KVEventsConfig])
        ranks = sorted(
            (int(rank), config) for rank, config in configs.items() if config.enable_kv_cache_events
        )
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise DiscoveryError(f"/kv_event_sources makes no sense: {error}") from error
    sources = []
    for rank, config in ranks:
        if config.endpoint.startswith("tcp://0.0.0.0:"):
            raise DiscoveryError(
                f"the engine connects its events to {config.endpoint} instead of binding;"
                " publish on tcp://*:PORT there, or configure events=bind:tcp://0.0.0.0:PORT here"
            )
        replay = config.replay_endpoint and at_host(config.replay_endpoint, host)
        sources.append(
            EventSource(rank, at_host(config.endpoint, host), replay or None, config.topic or None)
        )
    return tuple(sources)


def model_cards(replicas: Iterable[Replica]) -> list[dict[str, Any]]:
    """The union of what the replicas answer at ``/v1/models``, first seen first, every field kept."""
    cards: dict[str, dict[str, Any]] = {}
    for replica in replicas:
        if replica.models is None:
            continue
        for card in replica.models.cards or (
            {"id": replica.models.model, "object": "model", "owned_by": "warmroute"},
        ):
            cards.setdefault(card["id"], dict(card))
    return list(cards.values())
