"""Chooses among streams and books the request there, in one step: all that a choice needs but the fleet.

Pure but for the clock and the random source it is given, so the fleet simulation runs the very same code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import msgspec

from indexer.reader import Matched
from router.backlog import level
from router.crowding import Crowding
from router.decision import Ask, Candidate, RandomSource, Ranked
from router.demand import Demand, borne_by_others
from router.displacement import Displacement
from router.hints import Hints
from router.latency import Speed
from router.load import Load, Reservation
from router.patience import Patience
from router.policies import Policy
from router.replicas import StreamId
from router.reported import Reported
from router.stream_load import StreamLoad

CPU_CREDIT, DISK_CREDIT = 0.5, 0.25
"""What a cached token is worth that must be fetched first, against one on the GPU."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice needs to know of a request.

    ``prompt_tokens`` is None where they are not known; ``guessed_tokens`` is its load then. ``marks`` are
    digests of its beginnings, one for each ``mark_tokens`` tokens. ``streams``: the first byte of its answer
    will come as soon as its prefill is over. ``turn`` is its number among those of its model, ``key`` what a
    policy goes by that has one, and ``seat`` where the key was sent last.
    """

    prompt_tokens: int | None
    guessed_tokens: int = 0
    matches: Mapping[StreamId, Matched] | None = None
    marks: Sequence[Hashable] = ()
    streams: bool = True
    turn: int = 0
    key: bytes | None = None
    seat: StreamId | None = None


class Choice(msgspec.Struct, frozen=True):
    """The candidates, best first, and the booking of the first. ``prefill_tokens`` are what is booked."""

    ranked: list[Ranked]
    prefill_tokens: int
    reservation: Reservation


class Chooser:
    """Load, hints, displacement, crowding and demand of one router. ``clock`` is in seconds."""

    def __init__(
        self,
        load: Load,
        rng: RandomSource,
        clock: Callable[[], float],
        *,
        mark_tokens: int,
        hints: Hints | None = None,
    ) -> None:
        self.load = load
        load.told = self._note_report
        self.hints = Hints() if hints is None else hints
        self.displacement = Displacement(mark_tokens)
        self.crowding = Crowding()
        self.demand = Demand()
        self.patience = Patience()
        self._rng = rng
        self._clock = clock
        self._mark_tokens = mark_tokens

    def choose(
        self, policy: Policy, subject: Subject, streams: Sequence[StreamId], most: int | None = None
    ) -> Choice:
        """The streams, of which there is one at least, ranked by the policy; the first is booked.

        All of them have fewer requests than ``most``. Raises FullError where the first has as many by now.
        """
        now = self._clock()
        speeds, loads = self.load.latency.each(streams), self.load.waiting(streams)
        self.crowding.found(zip(streams, [load.prefill_tokens > 0 for load in loads], strict=True))
        candidates = self._candidates(subject, streams, speeds, loads, now)
        if subject.marks:
            if self.demand.wants(subject.marks[0]):
                self._share(subject.marks, candidates)
            held = max([candidate.reused_tokens for candidate in candidates])
            self.displacement.asked(subject.marks, held // self._mark_tokens)
        ask = Ask(
            subject.prompt_tokens,
            subject.turn,
            self.displacement.worth,
            subject.key,
            subject.seat,
            self.patience.seconds,
        )
        ranked = policy.rank(ask, candidates, self._rng)
        chosen = ranked[0].candidate
        return Choice(ranked, *self._book(subject, chosen, now, most))

    def forget(self, stream: StreamId) -> None:
        """The stream's engine is gone, or is another process now: its cache is empty, its speed unknown."""
        self.load.latency.forget(stream)
        self.hints.forget(stream)
        self.crowding.forget(stream)
        self.displacement.forget(stream)

    def renewed(self, replica: str) -> None:
        """The replica is another one under its name: nothing learned of it holds."""
        for part in (self.hints, self.crowding, self.displacement):
            part.gone(replica)
        self.load.renewed(replica)

    def gone(self, replica: str) -> None:
        """The replica is none of ours any more."""
        self.renewed(replica)
        self.load.forget(replica)

    def _candidates(
        self,
        subject: Subject,
        streams: Sequence[StreamId],
        speeds: Sequence[Speed],
        loads: Sequence[StreamLoad],
        now: float,
    ) -> list[Candidate]:
        """What is known of each stream, with its speed and its load."""
        prompt_tokens, matches = subject.prompt_tokens, subject.matches or {}
        soon = self.hints.soon(subject.marks, now)
        queued = self._filled(streams, loads, speeds)
        behind, rooms = self.crowding.behind(streams, self.load.echo), self.displacement.rooms(streams)
        found = []
        each = zip(streams, loads, speeds, queued, behind, rooms, strict=True)
        for stream, load, speed, prefill_tokens, behind_it, room_tokens in each:
            matched, cached, credited, hinted = matches.get(stream), None, 0, 0
            if matched is not None and prompt_tokens:
                cached, credited = _credit(matched, prompt_tokens) if matched.disk else (0, 0)
            if soon and prompt_tokens and stream in soon:
                hinted = min(soon[stream] * self._mark_tokens, prompt_tokens - 1)
            candidate = Candidate(
                replica=stream[0],
                rank=stream[1],
                matched_tokens=cached,
                credited_tokens=credited,
                hinted_tokens=hinted,
                block_size=0 if matched is None else matched.block_size,
                state=None if matched is None else matched.state,
                weight=None if matched is None else matched.weight,
                requests=load.requests,
                prefill_tokens=prefill_tokens,
                decoding=load.decoding,
                overhead_s=speed.overhead_s,
                s_per_token=speed.s_per_token,
                behind=behind_it,
                room_tokens=room_tokens,
            )
            found.append(candidate)
        return found

    def _share(self, marks: Sequence[Hashable], candidates: list[Candidate]) -> None:
        """Puts in what of the work that each would bring is for others to bear: for those who wait for the
        same where the most of it is, and of them for the part by which the wait would be shorter here, the
        time to compute it included.
        """
        most = max([candidate.reused_tokens for candidate in candidates])
        waits_s = [c.s_per_token * (c.prefill_tokens + most - c.reused_tokens) for c in candidates]
        there_s = min([s for s, c in zip(waits_s, candidates, strict=True) if c.reused_tokens == most])
        if not most or min(waits_s) >= there_s:
            return
        size, echo = self._mark_tokens, 1.0 + self.load.echo
        runs = self.demand.alike(marks, [(c.stream, c.reused_tokens // size) for c in candidates])
        for number, (wait_s, candidate) in enumerate(zip(waits_s, candidates, strict=True)):
            if wait_s < there_s:
                part = echo * (1.0 - wait_s / there_s)
                shared = size * borne_by_others(runs, candidate.reused_tokens / size, part)
                candidates[number] = msgspec.structs.replace(candidate, shared_tokens=shared)

    def _filled(
        self, streams: Sequence[StreamId], loads: Sequence[StreamLoad], speeds: Sequence[Speed]
    ) -> list[int]:
        """The tokens to prefill of ``loads``, with what other routers are likely to have sent since the
        streams were looked at: where they have sent of late, or where nobody says that, where least waits.
        So routers that cannot see each other come to send new work to different streams.
        """
        queued = [load.prefill_tokens for load in loads]
        work = self.load.unseen_tokens(streams)
        if not work:
            return queued
        habits = self.load.habits(streams)
        if any(habits):
            return [tokens + round(work * part) for tokens, part in zip(queued, habits, strict=True)]
        each = [speed.s_per_token for speed in speeds]
        seconds = level([(s * tokens, 1 / s) for s, tokens in zip(each, queued, strict=True)], work)
        least = {s: round(seconds / s) for s in set(each)}
        return [max(tokens, least[s]) for s, tokens in zip(each, queued, strict=True)]

    def _note_report(self, stream: StreamId, reported: Reported) -> None:
        self.displacement.capacity(stream, reported.capacity_tokens)

    def _book(
        self, subject: Subject, chosen: Candidate, now: float, most: int | None
    ) -> tuple[int, Reservation]:
        tokens = subject.guessed_tokens
        if subject.prompt_tokens is not None:
            tokens = subject.prompt_tokens - chosen.reused_tokens
        stream = chosen.stream
        reservation = self.load.reserve(stream, tokens, streams=subject.streams, most=most)
        ahead_s, own_s = chosen.s_per_token * chosen.prefill_tokens, chosen.s_per_token * tokens
        predicted_s = chosen.overhead_s + ahead_s + own_s
        self.crowding.sent(ahead_s, own_s)
        self.patience.sent(predicted_s)
        if subject.marks:
            hint = self.hints.add(stream, subject.marks, now, predicted_s)
            if chosen.credited_tokens < len(subject.marks) * self._mark_tokens:
                # Else the index tells everybody.
                hint = self.hints.tell(hint, stream, subject.marks, now, predicted_s)
            reservation.hint = hint
            reservation.left = self.demand.join(stream, subject.marks)
            self.displacement.placed(stream, subject.marks)
        return tokens, reservation


def _credit(matched: Matched, prompt_tokens: int) -> tuple[int, int]:
    """The match as it is told, and what it is worth: by tier and by trust. Tokens; what an engine can use, as
    it always computes the last token of a prompt itself.
    """
    size, gpu, cpu, disk = matched.block_size, matched.gpu, matched.cpu, matched.disk
    most = (prompt_tokens - 1) // size * size if size > 0 else 0
    one_tier = gpu == cpu == disk
    gpu = gpu if gpu < most else most
    if one_tier:
        return gpu, int(matched.weight * gpu)
    cpu, disk = min(cpu, most), min(disk, most)
    credited = matched.weight * (gpu + CPU_CREDIT * max(0, cpu - gpu) + DISK_CREDIT * max(0, disk - cpu))
    return max(gpu, cpu, disk), int(credited)
