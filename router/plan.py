"""All that happens in front of a choice: read the request, get its tokens, ask the index.

Nothing here fails a request.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence, Set

import msgspec
from cachetools import TTLCache
from xxhash import xxh3_128_digest

from events.logs import Throttled
from indexer.reader import Matched
from router import fallback
from router.errors import LookupFailedError
from router.fallback import Fallback
from router.fleet import Fleet
from router.lookup import Lookup
from router.marks import prompt_marks
from router.metrics import RouterMetrics
from router.policies import POLICIES, Policy
from router.policies.keyed import Keyed
from router.prompt import (
    RequestBody,
    UnreadableBodyError,
    priority_of,
    read_body,
    read_model,
    read_other,
)
from router.replicas import Replica, StreamId
from router.rules import Picked, Rules
from router.serving import Serving
from router.tokens import Tokenizer, Tokens, is_plain_chat, read_tokens
from router.trust import Trust
from router.usage import asking_for_usage

log = logging.getLogger(__name__)

BYTES_PER_TOKEN = 4
"""The guess at a prompt's tokens where they are not known: what its body weighs as load."""
BY_LOAD = POLICIES["least-loaded"]
STRANGER_FOR_S = 600.0
MAX_STRANGERS, MAX_STRANGERS_NAMED = 1024, 5


class Arrived(msgspec.Struct, frozen=True):
    """A request as it came: what a plan is made of.

    ``readable`` is False for a body in a content coding, ``crowded`` is one that would take too long to read.
    ``rank`` is the data-parallel rank that it asks for.
    """

    request_id: str
    body: bytes
    path: str
    headers: Mapping[str, str]
    readable: bool = True
    crowded: bool = False
    rank: int | None = None


class Asked(msgspec.Struct, frozen=True):
    """Whose prompt the index was asked about, besides its tokens."""

    model: str
    lora_name: str | None
    cache_salt: str | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a request when it comes to the choice; the same for each attempt of it.

    ``ids`` are its tokens, or if not ``whole`` the first of them; ``guessed_tokens`` is how many it is taken
    to have where they are not known. ``matches`` is None where the index was not or could not be asked;
    ``marks`` are digests of the prompt's beginnings, none where the engine reads no cache for it.
    ``fallback`` says what failed, ``notes`` what else is worth saying.
    ``comparable``: the engine's cached tokens can be compared with the match. ``is_prompt`` is False for
    paths whose prompts are not made tokens. ``streams``: the client wants the answer as a stream. ``rank``
    is the data-parallel rank that it asks for. ``picked`` is its policy, None for the router's own;
    ``key`` what that policy goes by. ``body_with_usage`` goes out in place of the body that was
    posted, to learn from the answer. ``asked`` is what the index was asked for, to tell it the truth later.
    ``priority`` is the place in a queue that it asks for, lower is earlier.
    """

    request_id: str
    model: str | None = None
    guessed_tokens: int = 0
    ids: array[int] | None = None
    whole: bool = True
    matches: Mapping[StreamId, Matched] | None = None
    marks: tuple[bytes, ...] = ()
    fallback: Fallback | None = None
    notes: tuple[str, ...] = ()
    comparable: bool = False
    is_prompt: bool = True
    streams: bool = False
    rank: int | None = None
    picked: Picked | None = None
    key: bytes | None = None
    body_with_usage: bytes | None = None
    asked: Asked | None = None
    priority: int = 0

    @property
    def prompt_tokens(self) -> int | None:
        """How many tokens the prompt has, or is taken to have; None where not even its beginning is known."""
        if self.ids is None:
            return None
        return len(self.ids) if self.whole else self.guessed_tokens

    @property
    def policy(self) -> Policy | None:
        return self.picked.policy if self.picked else None


class _Matches(msgspec.Struct, frozen=True):
    by_stream: dict[StreamId, Matched] | None = None
    fallback: Fallback | None = None
    notes: tuple[str, ...] = ()
    asked: Asked | None = None


class Planner:
    """Makes plans. ``lookup`` is None where no index is configured. ``asks_usage``: streams are asked for
    usage where the index has something to learn from it. ``for_record``: the tokens of each prompt are
    written down, so they are had also where the policy does not go by them.
    """

    def __init__(
        self,
        fleet: Fleet,
        tokenizer: Tokenizer,
        lookup: Lookup | None,
        rules: Rules,
        metrics: RouterMetrics,
        trust: Trust,
        *,
        asks_usage: bool,
        for_record: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._lookup = lookup
        self._rules = rules
        self._metrics = metrics
        self._trust = trust
        self._asks_usage = asks_usage
        self._for_record = for_record
        self._clock = clock
        self._throttled = Throttled(log, clock)
        self._strangers: TTLCache[str, None] = TTLCache(MAX_STRANGERS, STRANGER_FOR_S, timer=clock)

    def strangers(self) -> list[str]:
        """Replicas that the index has named lately and that are none of ours: another router's, or once
        ours and never unregistered.
        """
        return sorted(self._strangers)

    def _new_strangers(self, names: set[str]) -> str:
        """Notes the strangers; those that were not noted before, for people."""
        new = ", ".join(sorted(name for name in names if name not in self._strangers)[:MAX_STRANGERS_NAMED])
        self._strangers.update(dict.fromkeys(names))
        if new:
            log.warning(
                "the index knows replicas that this router does not: %s; if no other router has them, POST "
                '{"instance_id": ..., "model_name": ...} to /unregister of the indexer',
                new,
            )
        return new

    async def plan(self, arrived: Arrived) -> Plan:
        """The plan for a chat or completion request.

        Raises RefusedError for bad JSON, as vLLM would, and for an override that names nothing.
        """
        parsed, unread = _read(arrived)
        if not self._fleet.knows(parsed.model):
            await self._fleet.refresh()
        if not parsed.model:
            parsed = msgspec.structs.replace(parsed, model=self._fleet.meant(parsed.model))
        picked = self._pick(parsed, arrived)
        plan = Plan(
            request_id=arrived.request_id,
            picked=picked,
            priority=priority_of(arrived.headers, parsed.priority),
            model=parsed.model,
            guessed_tokens=len(arrived.body) // BYTES_PER_TOKEN,
            fallback=unread,
            streams=bool(parsed.stream),
            rank=arrived.rank,
        )
        serving = self._fleet.serving(parsed.model)
        if unread or not serving.replicas:
            return plan
        try:
            return await self._with_tokens(plan, picked.policy, arrived, parsed, serving)
        except RecursionError:
            # It was nested as deeply as could be skipped, and here the stack is higher.
            return msgspec.structs.replace(plan, fallback=fallback.UNREADABLE_BODY)

    def _pick(self, parsed: RequestBody, arrived: Arrived) -> Picked:
        return self._rules.pick(parsed.model, arrived.path, arrived.headers, list(self._fleet.replicas))

    async def _with_tokens(
        self, plan: Plan, policy: Policy, arrived: Arrived, parsed: RequestBody, serving: Serving
    ) -> Plan:
        """The plan, with what the policy wants to know of the prompt."""
        wanted = self._wants_tokens(policy)
        if policy.key is None and not wanted and not self._for_record and is_plain_chat(parsed):
            return plan
        tokens = await self._tokens(policy, parsed, serving.replicas)
        matches = await self._matches(policy, parsed, tokens, serving)
        key, no_key = None, None
        if policy.key is not None:
            found = policy.key(Keyed(headers=arrived.headers, body=arrived.body, read=parsed, ids=tokens.ids))
            key, no_key = _own(policy, parsed.model, found), fallback.NO_KEY if found is None else None
        if self._for_record and not wanted:
            # What is written down is no matter of the choice: the key is made, and nothing falls back.
            tokens = msgspec.structs.replace(await self._asked(parsed, serving.replicas), why_not=None)
        comparable = tokens.whole and tokens.prompts == 1 and parsed.samples_once and parsed.reads_cache
        learns = comparable and matches.asked is not None and self._asks_usage
        return msgspec.structs.replace(
            plan,
            body_with_usage=asking_for_usage(arrived.body, parsed) if learns else None,
            asked=matches.asked,
            guessed_tokens=tokens.guessed_tokens or plan.guessed_tokens,
            ids=tokens.ids,
            whole=tokens.ids is None or tokens.whole,
            key=key,
            matches=matches.by_stream,
            marks=_marks(parsed, tokens),
            fallback=(tokens.why_not if key is None else None) or matches.fallback or no_key,
            notes=_notes(tokens) + matches.notes,
            comparable=comparable,
        )

    def other(self, arrived: Arrived) -> Plan:
        """The plan for a request to any other path: by its policy as far as that goes without tokens, else by
        load. That is a fallback only where the policy was chosen for the request, by a rule or by itself.

        Raises RefusedError for an override that names nothing.
        """
        body, headers = arrived.body, arrived.headers
        if arrived.crowded:
            parsed = read_model(body)
        else:
            parsed = read_other(body if arrived.readable else b"", headers.get("Content-Type", ""))
        parsed = msgspec.structs.replace(parsed, model=self._fleet.meant(parsed.model))
        picked = self._pick(parsed, arrived)
        policy, key = picked.policy, None
        why_not = fallback.NO_TOKENS if policy.uses_tokens and policy.name != BY_LOAD.name else None
        if policy.key is not None and why_not is None:
            try:
                found = policy.key(Keyed(headers=headers, body=body, read=parsed))
            except RecursionError:  # As in ``plan``.
                found = None
            key = _own(policy, parsed.model, found)
            why_not = fallback.NO_KEY if key is None else None
        chosen = picked.rule is not None or picked.asked
        if why_not is not None and not chosen:
            picked, why_not = msgspec.structs.replace(picked, policy=BY_LOAD), None
        return Plan(
            request_id=arrived.request_id,
            model=parsed.model,
            is_prompt=False,
            streams=bool(parsed.stream),
            picked=picked,
            key=key,
            fallback=why_not,
            rank=arrived.rank,
            priority=priority_of(headers, parsed.priority),
        )

    def _wants_tokens(self, policy: Policy) -> bool:
        """Whether an engine or a local tokenizer is asked for those that a request does not hold itself."""
        return policy.uses_tokens or (self._lookup is not None and policy.observes)

    async def _tokens(self, policy: Policy, body: RequestBody, replicas: Sequence[Replica]) -> Tokens:
        if not self._wants_tokens(policy):
            found = await read_tokens(body) or Tokens(None)
            return msgspec.structs.replace(found, why_not=None)
        return await self._asked(body, replicas)

    async def _asked(self, body: RequestBody, replicas: Sequence[Replica]) -> Tokens:
        """The tokens, from whoever has them."""
        begun = self._clock()
        try:
            tokens = await self._tokenizer.tokens(body, replicas)
            for why in {tokens.not_here, tokens.why_not}:
                if why is not None:
                    self._metrics.tokenize_fallbacks.labels(why.code).inc()
            return tokens
        except Exception as error:
            # Whatever happens here, the request can still be served by load. The message could quote the
            # prompt.
            self._throttled.warning("tokens", "tokenising failed: %s", type(error).__name__)
            return Tokens(None, fallback.TOKENS_ERROR)
        finally:
            self._metrics.tokenize_seconds.observe(self._clock() - begun)

    async def _matches(self, policy: Policy, body: RequestBody, tokens: Tokens, serving: Serving) -> _Matches:
        if self._lookup is None:
            return _Matches(fallback=fallback.NO_INDEX if policy.uses_matches else None)
        if tokens.ids is None or not (policy.uses_matches or policy.observes):
            return _Matches()
        if not body.reads_cache:
            return _Matches(notes=("the engine reads no cache for prompt_logprobs",))
        salt = body.cache_salt
        if salt is not None and not isinstance(salt, str):
            return _Matches(fallback=fallback.BAD_CACHE_SALT)
        if not serving.resolved:
            return _Matches(fallback=fallback.MODEL_UNKNOWN)
        return await self._ask(self._lookup, tokens.ids, serving.resolved, salt or None)

    async def _ask(
        self, lookup: Lookup, ids: array[int], models: Set[tuple[str, str | None]], salt: str | None
    ) -> _Matches:
        """``models`` are the pairs of base model and LoRA name that the request means: one, unless replicas
        differ.
        """
        begun = self._clock()
        try:
            answer: list[Matched] = []
            for model, lora_name in models:
                answer += await lookup.match(model, ids, lora_name, salt)
            found = self._judge(answer)
            ((model, lora_name), *others) = models
            asked = None if others else Asked(model, lora_name, salt)
            return msgspec.structs.replace(found, asked=asked)
        except LookupFailedError as error:
            self._throttled.warning(error.code, "no answer from the index: %s", error)
            return _Matches(fallback=fallback.lookup_failed(error.code))
        except Exception as error:
            self._throttled.warning("index-error", "asking the index failed: %s", type(error).__name__)
            return _Matches(fallback=fallback.INDEX_ERROR)
        finally:
            self._metrics.lookup_seconds.observe(self._clock() - begun)

    def _weighed(self, stream: StreamId, matched: Matched) -> Matched:
        weight = self._trust.weight(stream)
        return matched if weight >= matched.weight else msgspec.structs.replace(matched, weight=weight)

    def _judge(self, answer: Sequence[Matched]) -> _Matches:
        """The answer by stream, without what we do not know, and whether any of it can be used."""
        named, known = {(str(m.instance), m.rank): m for m in answer}, self._fleet.streams
        by_stream = named
        if not named.keys() <= known:
            by_stream = {stream: matched for stream, matched in named.items() if stream in known}
        for stream in self._trust.doubted() & by_stream.keys():
            by_stream[stream] = self._weighed(stream, by_stream[stream])
        strangers = ""
        if len(by_stream) < len(named):
            strangers = self._new_strangers({name for name, _ in named} - self._fleet.replicas.keys())
            self._metrics.unknown_streams.inc(len(named) - len(by_stream))
        if not by_stream:
            return _Matches(fallback=fallback.UNKNOWN_REPLICA if answer else fallback.MODEL_NOT_INDEXED)
        notes: tuple[str, ...] = (f"ignored in the index: {strangers}",) if strangers else ()
        untrusted = [matched.state for matched in by_stream.values() if matched.weight <= 0]
        doubtful, trusted = set(untrusted), len(by_stream) - len(untrusted)
        if not trusted:
            return _Matches(by_stream, fallback.untrusted(doubtful), notes)
        if doubtful:
            said = f"{len(untrusted)} of {len(by_stream)} streams not trusted now"
            notes += (f"{said} ({', '.join(sorted(doubtful))})",)
        return _Matches(by_stream, notes=notes)


def _read(arrived: Arrived) -> tuple[RequestBody, Fallback | None]:
    """What a body says, and why that is not all."""
    if not arrived.readable:
        return RequestBody(), fallback.UNREADABLE_BODY
    if arrived.crowded:
        return read_model(arrived.body), fallback.TOO_MANY_VALUES
    try:
        return read_body(arrived.body, arrived.path), None
    except UnreadableBodyError as error:
        return RequestBody(model=error.model), fallback.UNREADABLE_BODY


def _own(policy: Policy, model: str | None, key: bytes | None) -> bytes | None:
    """A key of its policy and model; hashed, as it may be long, and somebody's name."""
    if key is None:
        return None
    return xxh3_128_digest(f"{policy.name}\0{model or ''}\0".encode("utf-8", "replace") + key)


def _notes(tokens: Tokens) -> tuple[str, ...]:
    if tokens.ids is None or tokens.whole:
        return ()
    return (f"only the {len(tokens.ids)} tokens in front of the first image are known, the rest is a guess",)


def _marks(body: RequestBody, tokens: Tokens) -> tuple[bytes, ...]:
    if tokens.ids is None or not body.reads_cache:
        return ()
    salt = body.cache_salt if isinstance(body.cache_salt, str) else None
    return prompt_marks(tokens.ids, body.model, salt)
