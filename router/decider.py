"""Chooses a stream for a request and books it there, in one step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from math import ceil

from router.chooser import Choice, Chooser, Subject
from router.decision import Candidate, Decision, Ranked
from router.errors import RETRY_AFTER_S, RefusedError, SaturatedError
from router.fleet import Fleet
from router.load import FullError, Reservation
from router.plan import Plan
from router.policies import Policy
from router.replicas import StreamId
from router.seats import SeatKeeper, Seats

MOST_RETRY_AFTER_S = 30
SEE = "/debug/replicas at --admin-listen says why"
"""Nobody is sent away for longer: replicas may come back, or be added."""


class Decider:
    """Finds who may take a request, has one of them chosen, and says what was decided and why."""

    def __init__(
        self,
        fleet: Fleet,
        chooser: Chooser,
        policy: Policy,
        by_load: Policy,
        *,
        max_inflight: int | None = None,
        seats: SeatKeeper | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._fleet = fleet
        self._chooser = chooser
        self.policy = policy
        self._by_load = by_load
        self._max_inflight = max_inflight
        self._wall_clock = wall_clock
        self._turns: Counter[str | None] = Counter()
        self.seats: SeatKeeper = Seats() if seats is None else seats

    def decide(
        self, plan: Plan, failed: Collection[str] = (), attempt: int = 1
    ) -> tuple[Decision, Reservation]:
        """The choice, booked. ``failed`` are replicas that this request has tried in vain.

        Raises RefusedError: 404 for a model that nobody serves, 503 where no replica can take the request.
        """
        streams = self._streams(plan, failed)
        policy = plan.policy or (self.policy if plan.is_prompt else self._by_load)
        seated = plan.key is not None and policy.keeps_seats
        prompt_tokens = plan.prompt_tokens
        choice = self._choose(
            policy,
            Subject(
                prompt_tokens=prompt_tokens,
                guessed_tokens=plan.guessed_tokens,
                matches=plan.matches,
                marks=plan.marks,
                streams=plan.streams,
                turn=self._turn(plan, attempt),
                key=plan.key,
                seat=self.seats.of(plan.key) if plan.key is not None and seated else None,
            ),
            streams,
        )
        candidates = [item.candidate for item in choice.ranked]
        chosen = candidates[0]
        if plan.key is not None and seated:
            self.seats.take(plan.key, chosen.stream)
        decision = Decision(
            request_id=plan.request_id,
            at=self._wall_clock(),
            model=plan.model,
            policy=policy.name,
            chosen=chosen.stream,
            reason=_reason(plan, choice.ranked[0], failed),
            prompt_tokens=prompt_tokens,
            matched_tokens=_told_match(plan, [chosen]),
            best_available_tokens=_told_match(plan, candidates),
            hinted_tokens=chosen.hinted_tokens,
            prefill_tokens=choice.prefill_tokens,
            ranked=choice.ranked,
            fallback=plan.fallback.code if plan.fallback else None,
            rule=plan.picked.rule if plan.picked else None,
            attempt=attempt,
        )
        return decision, choice.reservation

    def _choose(self, policy: Policy, subject: Subject, streams: Sequence[StreamId]) -> Choice:
        """The choice, booked, among streams that have room; without those of which another worker has taken
        the last place since, or tries the replica since.
        """
        while True:
            try:
                choice = self._chooser.choose(policy, subject, streams, self._max_inflight)
            except FullError as full:
                streams = [stream for stream in streams if stream != full.stream]
                if not streams:
                    raise self._saturated() from None
                continue
            chosen = choice.ranked[0].candidate.replica
            if self._fleet.outliers.chosen(chosen):
                return choice
            others = [stream for stream in streams if stream[0] != chosen]
            if not others:
                return choice
            choice.reservation.release()
            streams = others

    def has_another(self, plan: Plan, failed: Collection[str]) -> bool:
        """Whether a replica that is none of ``failed`` could take the request now."""
        try:
            return bool(self._streams(plan, failed))
        except RefusedError:
            return False

    def retry_after_s(self, plan: Plan, waiting: int) -> int:
        """In how many seconds a replica is expected to have room for one more request, with so many
        ``waiting`` before it.
        """
        load = self._chooser.load
        try:
            requests = {stream: load.of(stream).requests for stream in self._candidates(plan, ())}
        except RefusedError:
            return RETRY_AFTER_S
        expected_s = load.pace.room_in_s(requests, waiting)
        return RETRY_AFTER_S if expected_s is None else min(MOST_RETRY_AFTER_S, max(1, ceil(expected_s)))

    def _streams(self, plan: Plan, failed: Collection[str]) -> list[StreamId]:
        streams = self._candidates(plan, failed)
        if self._max_inflight is not None:
            streams = [s for s in streams if self._chooser.load.of(s).requests < self._max_inflight]
        if not streams:
            raise self._saturated()
        return self._fleet.admitted(streams)

    def _saturated(self) -> SaturatedError:
        return SaturatedError(
            "saturated", f"every replica has {self._max_inflight} requests in flight; try again soon"
        )

    def _candidates(self, plan: Plan, failed: Collection[str]) -> Sequence[StreamId]:
        """The streams that serve the request, with or without room."""
        fleet = self._fleet
        serving = fleet.serving(plan.model)
        streams: Sequence[StreamId] = serving.streams
        if not serving.known:
            if plan.is_prompt and fleet.replicas:
                raise _unknown_model(plan.model)
            streams = [stream for replica in fleet.usable() for stream in replica.streams()]
        if failed:
            streams = [stream for stream in streams if stream[0] not in failed]
        rank = self._rank(plan)
        if rank is not None:
            streams = [s for s in streams if s[1] == rank]
        if plan.picked is not None and plan.picked.pin is not None:
            streams = [s for s in streams if plan.picked.pin in (s, s[0])]
        if not streams:
            raise _no_replica(fleet, plan, failed)
        return streams

    def line(self, plan: Plan) -> tuple[str | None, int | None, StreamId | str | None]:
        """The same for requests that can go to the same replicas: so the number of lines is that of what the
        fleet has, whatever clients make up.
        """
        model = plan.model if self._fleet.knows(plan.model) else None
        return model, self._rank(plan), plan.picked.pin if plan.picked else None

    def _rank(self, plan: Plan) -> int | None:
        """The rank that is asked for. One that nobody has is for the engine to refuse, as it does without
        us.
        """
        return plan.rank if plan.rank is not None and plan.rank in self._fleet.ranks(plan.model) else None

    def _turn(self, plan: Plan, attempt: int) -> int:
        # Models that nobody serves share one count: the book must not grow with what clients make up.
        model = plan.model if self._fleet.knows(plan.model) else None
        if attempt == 1:
            self._turns[model] += 1
        return self._turns[model] - 1


def _told_match(plan: Plan, candidates: Iterable[Candidate]) -> int | None:
    """The longest match that is told: None without tokens, 0 where the index knows nothing."""
    if plan.ids is None:
        return None
    longest = 0
    for candidate in candidates:
        if (candidate.matched_tokens or 0) > longest:
            longest = max(longest, candidate.trusted_tokens or 0)
    return longest


def _reason(plan: Plan, best: Ranked, failed: Collection[str]) -> str:
    parts = [f"fallback: {plan.fallback.text}; {best.reason}" if plan.fallback else best.reason, *plan.notes]
    if plan.rank is not None and plan.rank == best.candidate.rank:
        parts.append(f"rank {plan.rank} as asked for")
    if plan.picked is not None and plan.picked.asked:
        parts.append("policy as asked for")
    if plan.picked is not None and plan.picked.pin is not None:
        parts.append("replica as asked for")
    if failed:
        parts.append(f"after {', '.join(sorted(failed))} failed")
    return "; ".join(parts)


def _unknown_model(model: str | None) -> RefusedError:
    # vLLM 0.32: entrypoints/serve/engine/serving.py, _check_model
    return RefusedError(
        404, "NotFoundError", f"The model `{model}` does not exist.", param="model", reason="unknown model"
    )


def _no_replica(fleet: Fleet, plan: Plan, failed: Collection[str]) -> RefusedError:
    if not fleet.replicas:
        message, reason = "no replica is configured; give the router --replica NAME=URL", "no replica"
    elif failed:
        message, reason = (
            f"no replica could be reached (tried {', '.join(sorted(failed))})",
            "no replica reached",
        )
    elif plan.picked is not None and plan.picked.pin is not None:
        pin = plan.picked.pin
        named = pin if isinstance(pin, str) else f"{pin[0]}/{pin[1]}"
        message, reason = (
            f"the replica {named} that the request asks for cannot take it; {SEE}",
            "the replica asked for cannot take it",
        )
    elif fleet.usable():
        wanted = f"model {plan.model}" if plan.rank is None else f"model {plan.model} with rank {plan.rank}"
        message, reason = (
            f"no replica of {wanted} is healthy; {SEE}",
            f"no healthy replica of {wanted}",
        )
    else:
        message, reason = f"no replica is healthy; {SEE}", "no healthy replica"
    return RefusedError(503, "ServiceUnavailableError", message, retry_after=RETRY_AFTER_S, reason=reason)
