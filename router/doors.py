"""API keys at the router: who may send requests, how many a second and how many at once.

Only hashes of the keys are configured, and kept. The limits are of a router, with all its worker processes.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

import msgspec
from aiohttp import web

from router.board import Row
from router.errors import RefusedError, SettingsError
from router.headers import REQUEST_ID, request_id_of
from router.pages import Handler
from router.refusal import refusal

_SHAPE = (
    "write NAME=SHA256[,rate=REQUESTS_PER_SECOND][,concurrency=N]; SHA256 of a key: printf %s KEY | sha256sum"
)
_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._@-]{0,63})=([0-9a-fA-F]{64})")
BURST_S = 1.0
"""What a key may send at once, in seconds of its rate; one request at least."""
SHAPE = "qd"
"""On the workers' board, of each key: requests at once, and until when its rate is used up."""

ROUNDING_S = 1e-6
"""Sums of such times are not exact."""


class KeySpec(msgspec.Struct, frozen=True):
    """A key by its name and SHA-256. ``rate`` is in requests a second; None means no limit."""

    name: str
    digest: bytes
    rate: float | None = None
    concurrency: int | None = None


def parse_key(line: str) -> KeySpec:
    """``team-a=SHA256,rate=5,concurrency=20`` as a spec. Raises SettingsError, which quotes no more than the
    name: somebody may have written the key itself.
    """
    head, *rest = (part.strip() for part in line.split(","))
    name = head.partition("=")[0] if "=" in head else "?"
    matched = _LINE.fullmatch(head)
    limits = dict(part.partition("=")[::2] for part in rest)
    if matched is None or len(limits) < len(rest) or not limits.keys() <= {"rate", "concurrency"}:
        raise SettingsError(f"--api-key {name[:64]}: no key; {_SHAPE}")
    try:
        rate = float(limits["rate"]) if "rate" in limits else None
        concurrency = int(limits["concurrency"]) if "concurrency" in limits else None
    except ValueError:
        raise SettingsError(f"--api-key {name[:64]}: a limit that is no number; {_SHAPE}") from None
    if (rate is not None and not 0 < rate < float("inf")) or (concurrency is not None and concurrency < 1):
        raise SettingsError(f"--api-key {name[:64]}: a limit that is not above 0; {_SHAPE}")
    return KeySpec(matched[1], bytes.fromhex(matched[2]), rate, concurrency)


def parse_keys(lines: Iterable[str]) -> list[KeySpec]:
    """All keys of the settings. Raises SettingsError, also for a name or a hash that is given twice."""
    keys = [parse_key(line) for line in lines]
    for what in ({key.name for key in keys}, {key.digest for key in keys}):
        if len(what) < len(keys):
            raise SettingsError("--api-key: a name or a key is given twice; give each once")
    return keys


class Allowance:
    """What one key may still do now. ``clock`` is in seconds, and one that all workers have in common.

    The rate is kept as the time until which what was let in uses it up (GCRA, ITU-T I.371): of several
    workers, the latest of theirs is that of the key, so all of them together keep one limit.
    """

    def __init__(self, spec: KeySpec, clock: Callable[[], float], row: Row | None = None) -> None:
        self.spec = spec
        self._clock = clock
        self._row = row
        self._name = spec.name.encode()
        self._used_until = clock()
        self.running = 0

    def enter(self) -> None:
        """Takes one request in; ``leave`` must follow. Raises RefusedError (429) over a limit."""
        spec = self.spec
        if self._row is None or (spec.rate is None and spec.concurrency is None):
            self._enter(spec)
        else:
            # What is left is looked at and taken in one step.
            with self._row.alone():
                self._enter(spec)

    def _enter(self, spec: KeySpec) -> None:
        running, used_until = self._together()
        if spec.concurrency is not None and running >= spec.concurrency:
            raise _too_many(f"{spec.concurrency} requests at once", 1)
        if spec.rate is not None:
            now = self._clock()
            used_until = max(now, used_until) + 1 / spec.rate
            wait_s = used_until - now - max(BURST_S, 1 / spec.rate)
            if wait_s > ROUNDING_S:
                raise _too_many(f"{spec.rate:g} requests a second", max(1, round(wait_s)))
            self._used_until = used_until
        self.running += 1
        self._tell()

    def leave(self) -> None:
        self.running -= 1
        self._tell()

    @property
    def counts(self) -> bool:
        """Whether there is something of it that has to be remembered."""
        return self.running > 0 or self._used_until > self._clock()

    def forget(self) -> None:
        """Frees the place of the key for another one."""
        if self._row is not None:
            self._row.drop(self._name)

    def _together(self) -> tuple[int, float]:
        """Requests at once, and until when the rate is used up, over all workers."""
        running, used_until = self.running, self._used_until
        if self._row is not None:
            for others_running, others_until in self._row.others(self._name):
                running += int(others_running)
                used_until = max(used_until, others_until)
        return running, used_until

    def _tell(self) -> None:
        if self._row is not None:
            self._row.put(self._name, self.running, self._used_until)


class Doors:
    """Lets requests in that carry one of the keys. ``policy`` is named in refusals; ``refused`` is told of
    each, with the name of the key, if it was one of them, and the status; ``row`` is this worker's
    of the board, where there are several.
    """

    def __init__(
        self,
        keys: Iterable[KeySpec],
        policy: str,
        clock: Callable[[], float] = time.monotonic,
        row: Row | None = None,
        refused: Callable[[str, int], None] = lambda name, status: None,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._row = row
        self._refused = refused
        self._by_name: dict[str, Allowance] = {}
        self._allowances: list[Allowance] = []
        self.follow(keys)

    def follow(self, keys: Iterable[KeySpec]) -> None:
        """Goes by these keys from now on. What is in flight, and what was used of a rate, stays with the name
        of its key, also of one that is taken out and comes back.
        """
        self._allowances = [self._allowance_of(key) for key in keys]
        named = {allowance.spec.name for allowance in self._allowances}
        for name in [name for name, old in self._by_name.items() if name not in named and not old.counts]:
            self._by_name.pop(name).forget()

    def _allowance_of(self, key: KeySpec) -> Allowance:
        allowance = self._by_name.get(key.name)
        if allowance is None:
            allowance = self._by_name[key.name] = Allowance(key, self._clock, self._row)
        allowance.spec = key
        return allowance

    def demand_keys(self) -> bool:
        """Whether only requests with a key come in."""
        return bool(self._allowances)

    def guarded(self, handler: Handler) -> Handler:
        """The handler behind the doors, which are open where there are no keys."""

        def handle(request: web.Request) -> Awaitable[web.StreamResponse]:
            return behind(request) if self._allowances else handler(request)

        async def behind(request: web.Request) -> web.StreamResponse:
            name = ""
            try:
                allowance = self.allowance(request.headers)
                name = allowance.spec.name
                allowance.enter()
            except RefusedError as error:
                self._refused(name, error.status)
                response = refusal(error, self._policy, {REQUEST_ID: request_id_of(request.headers)})
                if error.status == 401:
                    response.headers["WWW-Authenticate"] = "Bearer"
                return response
            try:
                return await handler(request)
            finally:
                allowance.leave()

        return handle

    def allowance(self, headers: Mapping[str, str]) -> Allowance:
        """That of the key which the request carries. Raises RefusedError (401)."""
        given = hashlib.sha256(_key_in(headers).encode("utf-8", "surrogateescape")).digest()
        found: Allowance | None = None
        # All are compared, each in constant time: how long it takes must not tell which one was near.
        for allowance in self._allowances:
            if hmac.compare_digest(given, allowance.spec.digest):
                found = allowance
        if found is None:
            raise RefusedError(
                401, "AuthenticationError", "The API key is missing or wrong", reason="api key"
            )
        return found


def _key_in(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    # Anthropic's clients (/v1/messages) send it in a header of its own.
    return key.strip() if scheme.lower() == "bearer" else headers.get("X-Api-Key", "")


def _too_many(limit: str, retry_after_s: int) -> RefusedError:
    message = f"This API key may send {limit}"
    return RefusedError(429, "RateLimitError", message, retry_after=retry_after_s, reason="rate limit")
