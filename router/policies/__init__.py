"""The policies, by name. Each is one pure function: candidates in, ranked candidates with reasons out."""

from __future__ import annotations

import msgspec

from router.decision import RankFunction
from router.errors import SettingsError
from router.policies import cache_aware, least_loaded, round_robin


class Policy(msgspec.Struct, frozen=True):
    """A policy and what it needs to know: tokens cost a call to an engine, matches one to the index."""

    name: str
    rank: RankFunction
    uses_tokens: bool
    uses_matches: bool


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("cache-aware", cache_aware.rank, uses_tokens=True, uses_matches=True),
        Policy("least-loaded", least_loaded.rank, uses_tokens=True, uses_matches=False),
        Policy("round-robin", round_robin.rank, uses_tokens=False, uses_matches=False),
    )
}


def policy_named(name: str) -> Policy:
    """The policy. Raises SettingsError for a name that is none."""
    try:
        return POLICIES[name]
    except KeyError:
        raise SettingsError(f"unknown --policy {name!r}; choose one of {', '.join(POLICIES)}") from None
