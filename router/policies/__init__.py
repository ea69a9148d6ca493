"""The policies, by name. Each is one pure function: candidates in, ranked candidates with reasons out.

One with parameters is a struct of them, and the function its method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from router.decision import RankFunction
from router.errors import SettingsError
from router.policies import least_loaded, random_choice, round_robin
from router.policies.cache_aware import CacheAware
from router.policies.keyed import KeyFunction
from router.policies.prefix_hash import PrefixHash
from router.policies.session import Session


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy and what it needs to know: tokens cost a call to an engine, matches one to the index.

    ``observes``: where there is an index, both are had all the same, to say what it would have found. ``key``
    gives the routing key of a policy that goes by one; ``keeps_seats``: where a key was sent is remembered.
    """

    name: str
    rank: RankFunction
    uses_tokens: bool = False
    uses_matches: bool = False
    observes: bool = True
    key: KeyFunction | None = None
    keeps_seats: bool = False


class _NoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of policies that have none."""


_KINDS: dict[str, tuple[type[msgspec.Struct], Callable[[str, Any], Policy]]] = {
    "cache-aware": (
        CacheAware,
        lambda name, aware: Policy(name=name, rank=aware.rank, uses_tokens=True, uses_matches=True),
    ),
    "lowest-ttft": (
        _NoParameters,
        lambda name, _: Policy(
            name=name, rank=CacheAware(foresight=False).rank, uses_tokens=True, uses_matches=True
        ),
    ),
    "least-loaded": (
        _NoParameters,
        lambda name, _: Policy(name=name, rank=least_loaded.rank, uses_tokens=True),
    ),
    "round-robin": (_NoParameters, lambda name, _: Policy(name=name, rank=round_robin.rank)),
    "random": (_NoParameters, lambda name, _: Policy(name=name, rank=random_choice.rank)),
    "session": (
        Session,
        lambda name, session: Policy(
            name=name, rank=session.rank, observes=False, key=session.key, keeps_seats=True
        ),
    ),
    "prefix-hash": (
        PrefixHash,
        lambda name, prefix: Policy(
            name=name,
            rank=prefix.rank,
            uses_tokens=prefix.boundary == "tokens",
            observes=False,
            key=prefix.key,
        ),
    ),
}


def policy_named(
    name: str, parameters: Mapping[str, Any] | None = None, *, where: str = "--policy"
) -> Policy:
    """The policy with its parameters. Raises SettingsError for a name that is none, and for parameters that
    it does not have; ``where`` is the place in the settings that it names.
    """
    if name not in _KINDS:
        raise SettingsError(f"unknown {where} {name!r}; choose one of {', '.join(_KINDS)}")
    kind, made = _KINDS[name]
    try:
        return made(name, msgspec.convert(dict(parameters or {}), kind))
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__) or "none"
        raise SettingsError(
            f"{where} {name}, parameters: {error} (`$` is the parameters; {name} has: {known})"
        ) from error


POLICIES = {name: policy_named(name) for name in _KINDS}
