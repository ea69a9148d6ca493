"""Who serves a model, as things are."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

import msgspec

from router.replicas import Replica, StreamId


class Serving(msgspec.Struct, frozen=True):
    """The usable ``replicas`` that serve a model, or else those that have not said their models yet, as these
    may serve any; their ``streams``; what the model means to them, ``resolved`` to base model and LoRA name.
    ``known``: some replica serves it or might, healthy or not.
    """

    replicas: Sequence[Replica]
    streams: Sequence[StreamId]
    resolved: Set[tuple[str, str | None]]
    known: bool

    @classmethod
    def of(cls, model: str | None, replicas: Collection[Replica]) -> Serving:
        """Who of ``replicas`` serves ``model``."""
        usable = [replica for replica in replicas if replica.usable]
        serving = [replica for replica in usable if replica.resolve(model) is not None]
        serving = serving or [replica for replica in usable if replica.models is None]
        return cls(
            serving,
            [stream for replica in serving for stream in replica.streams()],
            frozenset(found for replica in serving if (found := replica.resolve(model)) is not None),
            any(replica.may_serve(model) for replica in replicas),
        )
