"""Which policy a request is routed by: the first rule that fits it, what it asks for itself, or the
default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from router.decision import HEADER_PREFIX
from router.errors import RefusedError, SettingsError
from router.policies import POLICIES, Policy, policy_named
from router.replicas import StreamId

POLICY_HEADER, REPLICA_HEADER = HEADER_PREFIX + "policy", HEADER_PREFIX + "replica"


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request must look like, and the policy with its parameters that it is then routed by.

    All that is given must fit; ``*`` and ``?`` stand for any characters. ``model`` is as the request names
    it, ``headers`` are by name in any case, ``tenant`` is the value of the tenant header.
    """

    policy: str
    parameters: dict[str, Any] = {}
    name: Annotated[str, Meta(max_length=100)] | None = None
    model: str | None = None
    path: str | None = None
    headers: dict[str, str] = {}
    tenant: str | None = None

    def fits(self, model: str | None, path: str, headers: Mapping[str, str], tenant: str | None) -> bool:
        """Whether a request is meant."""
        return (
            _fits(self.model, model)
            and _fits(self.path, path)
            and _fits(self.tenant, tenant)
            and all(_fits(pattern, headers.get(name)) for name, pattern in self.headers.items())
        )


def _fits(pattern: str | None, value: str | None) -> bool:
    return pattern is None or (value is not None and fnmatchcase(value, pattern))


class Picked(msgspec.Struct, frozen=True):
    """The policy of a request; the ``rule`` that it is from; the ``pin``: a replica, or one rank of it, that
    the request asked for. ``asked``: the request named the policy itself.
    """

    policy: Policy
    rule: str | None = None
    pin: str | StreamId | None = None
    asked: bool = False


class Rules:
    """The rules in their order, with the policy of requests that none fits.

    Raises SettingsError, which names the rule and the key, for a policy or parameters that do not exist.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        default: Policy,
        *,
        tenant_header: str = "x-tenant-id",
        allow_override: bool = False,
    ) -> None:
        self.default = default
        self.tenant_header = tenant_header
        self._allow_override = allow_override
        self._rules = [
            (name_of(number, rule), rule, checked(number, rule)) for number, rule in enumerate(rules)
        ]
        names = [name for name, _, _ in self._rules]
        for name in names:
            if names.count(name) > 1:
                raise SettingsError(f"rule {name!r} is given twice; every rule needs a name of its own")
        self._taken: Counter[str | None] = Counter()  # by rule; None: the default

    def pick(
        self, model: str | None, path: str, headers: Mapping[str, str], replicas: Sequence[str]
    ) -> Picked:
        """The policy for a request. ``replicas`` are those that it may pin.

        Raises RefusedError (400) for an override that names nothing.
        """
        picked = self._by_rule(model, path, headers)
        if self._allow_override:
            picked = self._overridden(picked, headers, replicas)
        if not picked.asked:
            self._taken[picked.rule] += 1
        return picked

    def _overridden(self, picked: Picked, headers: Mapping[str, str], replicas: Sequence[str]) -> Picked:
        name, pin = headers.get(POLICY_HEADER), headers.get(REPLICA_HEADER)
        if name is not None:
            if name not in POLICIES:
                raise _unusable(POLICY_HEADER, name, POLICIES)
            picked = Picked(picked.policy if picked.policy.name == name else POLICIES[name], asked=True)
        if pin is not None:
            picked = msgspec.structs.replace(picked, pin=_pinned(pin, replicas))
        return picked

    def _by_rule(self, model: str | None, path: str, headers: Mapping[str, str]) -> Picked:
        tenant = headers.get(self.tenant_header)
        for name, rule, policy in self._rules:
            if rule.fits(model, path, headers, tenant):
                return Picked(policy, name)
        return Picked(self.default)

    def shown(self) -> dict[str, Any]:
        """The rules, in order, and the default policy, with how many requests took each. Those that named
        their policy themselves took none.
        """
        rules = [
            {**msgspec.to_builtins(rule), "name": name, "requests": self._taken[name]}
            for name, rule, _ in self._rules
        ]
        return {"rules": rules, "default": self.default.name, "default_requests": self._taken[None]}


def name_of(number: int, rule: Rule) -> str:
    """The rule's name, or its number in the settings."""
    return rule.name or f"rule[{number}]"


def checked(number: int, rule: Rule) -> Policy:
    """The rule's policy. Raises SettingsError with the rule's place in the settings."""
    called = f" ({rule.name})" if rule.name else ""
    return policy_named(rule.policy, rule.parameters, where=f"rule[{number}]{called} policy")


def _pinned(text: str, replicas: Sequence[str]) -> str | StreamId:
    """``NAME``, or ``NAME/RANK``; names may hold slashes themselves."""
    if text in replicas:
        return text
    name, _, rank = text.rpartition("/")
    if name in replicas and rank.isascii() and rank.isdecimal() and len(rank) < 10:
        return name, int(rank)
    raise _unusable(REPLICA_HEADER, text, replicas)


def _unusable(header: str, value: str, known: Sequence[str] | Mapping[str, Any]) -> RefusedError:
    return RefusedError(
        400,
        "BadRequestError",
        f"{header}: {value[:100]!r} is unknown here; known are {', '.join(known)}",
        param=header,
        reason=f"unknown {header}",
    )
