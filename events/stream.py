"""One ordered stream of event batches, as a state machine without I/O and without a clock.

Signals come in (frames, replayed frames, connects, disconnects, time); actions come out (apply this batch,
ask the replay endpoint from n, forget what the stream held). Gaps, duplicates, restarts, and replays that are
late, truncated or silent are handled here and nowhere else.

**Restart.** A replay asked from ``last + 1`` is answered by the end marker alone both by an idle engine and
by one that restarted and is silent. So after every connect the replay is asked from ``last`` *inclusive*: the
same payload proves that the engine went on; another payload, or none, that it restarted. On the live socket
a sequence that steps back is the other witness. Where the start time of the engine's process is known, it is
a third one: another start time is a restart, the same one means that at worst some batches were missed.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from xxhash import xxh3_64_digest

from events.held import Held
from events.signals import Connected, Disconnected, Frame, Overflowed, Replayed, ReplayEnded, Signal

State = Literal["connecting", "replaying", "live", "partial", "unverified", "offline"]


class Apply(msgspec.Struct, frozen=True, gc=False):
    """The next batch in order."""

    sequence: int
    payload: bytes


class AskReplay(msgspec.Struct, frozen=True, gc=False):
    """Ask for all kept batches with a sequence of at least ``start``; replaces any earlier request."""

    ask: int
    start: int


class Reset(msgspec.Struct, frozen=True, gc=False):
    """All that the stream held is gone: with its process, unless that is the same."""

    reason: str
    same_process: bool = False


Action = Apply | AskReplay | Reset


class Limits(msgspec.Struct, frozen=True):
    """Bounds of a stream: times in seconds, held live frames in number and bytes.

    ``replay_holes``: how often a replay that has holes, or breaks off, is asked again. ``away``: how long
    what is known is kept without a connection. ``confirm_after``: how long after a gap was filled it is
    asked whether the batch before it is still the same.
    """

    replay_silence: float = 5.0
    cool_down: float = 5.0
    cool_down_max: float = 300.0
    verify_deadline: float = 30.0
    held_frames: int = 10_000
    held_bytes: int = 64 << 20
    replay_holes: int = 3
    away: float = 1800.0
    confirm_after: float = 5.0


DEFAULT_LIMITS = Limits()
SAME_START_S = 1.0


class _Ask(msgspec.Struct):
    """An outstanding replay request."""

    number: int
    start: int
    verifies: bool
    rebuilds: bool
    deadline: float
    kept: Held[Replayed]
    answered: bool = False


class _Anchor(msgspec.Struct, frozen=True):
    """The batch before a gap. If another one has its sequence by now, the gap was none but a restart.

    ``due`` is when that is asked (None: once the gap is filled), ``ask`` the number of the request.
    """

    sequence: int
    digest: bytes
    due: float | None = None
    ask: int | None = None


def digest_of(payload: bytes) -> bytes:
    """What is kept of the last applied payload, to recognise it: 8 bytes."""
    return xxh3_64_digest(payload)


class Stream:
    """The state of one stream.

    ``last`` and ``digest`` are the sequence and :func:`digest_of` the batch applied last, None before any.
    ``lost`` says that history is missing for good, ``losses`` how often that happened; ``reason`` explains
    the state in words. ``started_at`` is when the process started that said what was applied (unix seconds,
    by its own word), None where that is not known. ``connected_at`` is None without a connection.
    """

    def __init__(
        self,
        *,
        has_replay: bool,
        last: int | None = None,
        digest: bytes | None = None,
        lost: bool = False,
        started_at: float | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.has_replay = has_replay
        self.last = last
        self.digest = digest
        self.lost = lost
        self.started_at = started_at
        self.connected_at: float | None = None
        self.losses = 0
        self.state: State = "connecting" if last is None else "unverified"
        self.reason = "not connected yet"
        self.duplicates = 0
        self.gaps = 0
        self.restarts = 0
        self.replays_failed = 0
        self._limits = limits
        self._asks = 0
        self._ask: _Ask | None = None
        self._retry_at: float | None = None
        self._failures = 0
        self._holes = 0
        self._broken_off = 0
        self._verify_by: float | None = None
        self._away_since: float | None = None
        self._anchor: _Anchor | None = None
        self._live: tuple[int, bytes] | None = None
        self._held: Held[Frame] = Held(limits.held_frames, limits.held_bytes)
        self._missed = False
        self._hole: int | None = None
        self._same_process = False  # since the last connect, by its start time
        self._awaits_start = False  # a restart unless the start time says otherwise
        self._maybe_whole = False  # partial only because nobody knows whether a batch was missed
        self._start_counts_from = 0.0
        self._starts_contradict = False

    @property
    def held(self) -> int:
        """Live frames that wait for a replay to end."""
        return len(self._held)

    def copy(self) -> Stream:
        """The state as it is now, to go back to if what follows from a signal cannot be carried out."""
        same = object.__new__(Stream)
        same.__dict__.update(self.__dict__)
        same._held = self._held.copy()
        if self._ask is not None:
            same._ask = msgspec.structs.replace(self._ask, kept=self._ask.kept.copy())
        return same

    def on(self, signal: Signal, now: float) -> list[Action]:
        """What follows from ``signal`` at ``now`` (seconds on any monotonic clock)."""
        match signal:
            case Frame():
                return self._on_frame(signal, now)
            case Replayed():
                return self._on_replayed(signal, now)
            case ReplayEnded():
                return self._on_replay_ended(signal, now)
            case Connected():
                return self._on_connected(now)
            case Disconnected():
                return self._on_disconnected()
            case Overflowed():
                return self._on_overflow(now)

    def is_due(self, now: float) -> bool:
        """Whether anything follows from time alone."""
        if self.connected_at is None and self.last is not None:
            return self._away_since is None or now - self._away_since >= self._limits.away
        if self._ask is not None and now >= self._ask.deadline:
            return True
        if self._anchor is not None and self._anchor.due is not None and now >= self._anchor.due:
            return True
        if self._retry_at is not None and now >= self._retry_at and self._ask is None:
            return True
        return self.state == "unverified" and self._verify_by is not None and now >= self._verify_by

    def tick(self, now: float) -> list[Action]:
        """What follows from time alone."""
        if self.connected_at is None and self.last is not None:
            return self._stay_away(self.last, now)
        if self._ask is not None and now >= self._ask.deadline:
            return self._on_silence(now)
        if self._anchor is not None and self._anchor.due is not None and now >= self._anchor.due:
            return self._confirm(self._anchor, now)
        return self._retry_or_give_up(now)

    def _retry_or_give_up(self, now: float) -> list[Action]:
        if self._retry_at is not None and now >= self._retry_at and self._ask is None:
            self._retry_at = None
            return self._retry(now)
        if self.state == "unverified" and self._verify_by is not None and now >= self._verify_by:
            self._ask = None
            if self._same_process:
                return self._go_on_partial("the replay endpoint never answered", now)
            return self._restart("it could not be proven that the engine went on", now)
        return []

    def process_started(self, at: float, now: float, asked: float | None = None) -> list[Action]:
        """What follows from the engine's word that its process started ``at`` (unix seconds).

        ``asked`` is when it was asked, on the clock of ``now``: an answer to a question from before the last
        connect or restart may be of another process, and says nothing.
        """
        asked = now if asked is None else asked
        if self.connected_at is None or asked < self._start_counts_from or self._starts_contradict:
            return []
        if self.started_at is None:
            if self.state != "unverified":
                self.started_at = at
        elif at < self.started_at - SAME_START_S:  # several processes answer at one address
            self.started_at, self._starts_contradict = None, True
        elif at > self.started_at + SAME_START_S:
            actions = self._restart("another process answers: its start time changed", now)
            self.started_at = at
            return actions
        else:
            return self._on_same_process(now)
        return []

    def _on_same_process(self, now: float) -> list[Action]:
        self._same_process = True
        if self.state != "unverified" or self.last is None:
            return []
        if not self.has_replay:
            return self._go_on_partial("what the same process said meanwhile is not known", now)
        if not self._awaits_start:
            return []
        self._awaits_start = False
        self._verify_by = None
        return [self._request(self.last + 1, now)]

    def _go_on_partial(self, reason: str, now: float) -> list[Action]:
        """The engine is the same, and what it said since ``last`` may be lost."""
        assert self.last is not None
        assert self.digest is not None
        was_whole = (not self.lost or self._maybe_whole) and not self._missed
        self._verify_by = None
        self._live = self._live or (self.last, self.digest)
        if self.has_replay and self._retry_at is None:
            self._retry_at = now + self._limits.cool_down
        self._forfeit(reason)
        self._maybe_whole = was_whole
        return self._drain(now)

    def cleared(self, sequence: int | None = None) -> None:
        """The engine dropped its whole cache in batch ``sequence`` (None: the one applied last).

        Nothing before it is missed any more; what was lost after it still is.
        """
        if sequence is not None and self._hole is not None and sequence <= self._hole:
            return
        self.lost = False
        if self.state == "partial":
            self._settle()

    def damaged(self, reason: str) -> None:
        """A batch was applied in order, but what it said is not known."""
        self.lost = True
        self.losses += 1
        self._maybe_whole = False
        self.reason = reason
        if self.state == "live":
            self.state = "partial"

    # connection

    def _stay_away(self, last: int, now: float) -> list[Action]:
        """Without a connection nothing can be proven; in the end nothing is worth its room."""
        if self._away_since is None:
            self._away_since = now
        if now - self._away_since < self._limits.away:
            return []
        self.last = self.digest = self.started_at = None
        self.lost = False
        self.state = "offline"
        self.reason = f"not connected for {self._limits.away:.0f} s: sequence {last} could not be proven"
        return [Reset(self.reason)]

    def _on_connected(self, now: float) -> list[Action]:
        self._away_since = self._anchor = None
        self.connected_at = self._start_counts_from = now
        self._same_process = self._awaits_start = self._starts_contradict = False
        self._live = None
        self._drop_held()
        self._retry_at = None
        self._failures = 0
        self._holes = 0
        self._broken_off = 0
        self._verify_by = None
        if self.last is None:
            self.lost = False
            self.started_at = None
            if self.has_replay:
                return [self._request(0, now)]
            self._forfeit("no replay endpoint: what was stored before is not known")
            return []
        self.state = "unverified"
        self._verify_by = now + self._limits.verify_deadline
        self.reason = f"asking whether the engine went on from sequence {self.last}"
        if self.has_replay:
            return [self._request(self.last, now, verifies=True)]
        self.reason = "no replay endpoint: waiting for the next batch to prove that the engine went on"
        return []

    def _on_disconnected(self) -> list[Action]:
        self._ask = None
        self._retry_at = None
        self._verify_by = self._anchor = None
        self.connected_at = None
        self._drop_held()
        self.state = "offline"
        self.reason = "the connection was lost"
        return []

    # live frames

    def _on_frame(self, frame: Frame, now: float) -> list[Action]:
        if self.state == "offline":
            return []  # what the old connection still held; the next one proves and replays it
        if self._live is not None and frame.sequence <= self._live[0]:
            if (frame.sequence, digest_of(frame.payload)) == self._live:
                self.duplicates += 1
                return []
            reason = f"the sequence went back from {self._live[0]} to {frame.sequence}"
            self._live = (frame.sequence, digest_of(frame.payload))
            return self._restart(reason, now, frame)
        self._live = (frame.sequence, digest_of(frame.payload))
        if self._ask is not None or (self.state == "unverified" and self.has_replay):
            self._hold(frame)
            return []
        if self.state == "unverified":
            return self._prove_by_frame(frame, now)
        return self._advance(frame, now)

    def _prove_by_frame(self, frame: Frame, now: float) -> list[Action]:
        """Without a replay endpoint, only the very next sequence, come first, is taken as proof."""
        assert self.last is not None
        if frame.sequence == self.last + 1 and not self._missed:
            self._verify_by = None
            self._settle()
            return self._advance(frame, now)
        if frame.sequence > self.last and self.started_at is not None:
            self._hold(frame)  # its start time tells whether a gap or a restart
            return []
        reason = f"sequence {frame.sequence} follows {self.last} after a reconnect, without a replay endpoint"
        return self._restart(reason, now, frame)

    def _advance(self, frame: Frame, now: float) -> list[Action]:
        expected = 0 if self.last is None else self.last + 1
        if frame.sequence < expected:
            self.duplicates += 1
            return []
        if frame.sequence > expected:
            return self._on_gap(frame, expected, now)
        taken = self._take(frame)
        if self._maybe_whole:
            self._maybe_whole = self.lost = False
            self._settle()
        if frame.sequence == 0:
            self._settle()
        return [taken]

    def _on_gap(self, frame: Frame, expected: int, now: float) -> list[Action]:
        self.gaps += 1
        if self.has_replay and self._retry_at is None:
            if self.last is not None and self.digest is not None and self._anchor is None:
                self._anchor = _Anchor(self.last, self.digest)
            self._hold(frame)
            return [self._request(expected, now)]
        self._forfeit(f"sequences {expected} to {frame.sequence - 1} were lost")
        return [self._take(frame)]

    def _take(self, frame: Frame | Replayed) -> Apply:
        if frame.sequence == 0:
            self.lost, self._hole = False, None
        self.last = frame.sequence
        self.digest = digest_of(frame.payload)
        return Apply(frame.sequence, frame.payload)

    def _on_overflow(self, now: float) -> list[Action]:
        if self._ask is not None or self.state in ("offline", "unverified", "connecting"):
            self._missed = True
            return []
        return self._catch_up(now)

    def _catch_up(self, now: float) -> list[Action]:
        """Frames after ``last`` were dropped, it is not known how many."""
        if self.has_replay and self._retry_at is None:
            return [self._request(0 if self.last is None else self.last + 1, now)]
        self._forfeit("frames were dropped, and there is no replay to have them again")
        return []

    def _hold(self, frame: Frame) -> None:
        if not self._held.add(frame):
            self._missed = True

    def _drop_held(self) -> None:
        self._held.clear()
        self._missed = False

    # replay

    def _request(
        self, start: int, now: float, *, verifies: bool = False, rebuilds: bool = False
    ) -> AskReplay:
        self._asks += 1
        deadline = now + self._limits.replay_silence
        if self._anchor is not None:
            self._anchor = _Anchor(self._anchor.sequence, self._anchor.digest)
        kept: Held[Replayed] = Held(self._limits.held_frames, self._limits.held_bytes)
        self._ask = _Ask(self._asks, start, verifies, rebuilds, deadline, kept)
        if not verifies and not rebuilds:
            self.state = "replaying"
            self.reason = f"asked for a replay from sequence {start}"
        return AskReplay(self._asks, start)

    def _on_replayed(self, frame: Replayed, now: float) -> list[Action]:
        ask = self._ask
        if self._anchor is not None and frame.ask == self._anchor.ask:
            return self._on_confirmed(self._anchor, frame, now)
        if ask is None or frame.ask != ask.number:
            return []
        before = (self.last, ask.verifies, len(ask.kept))
        if ask.verifies:
            actions = self._verify(ask, frame, now)
        elif ask.rebuilds:
            actions = self._rebuild(ask, frame, now)
        else:
            actions = self._continue(ask, frame, now)
        if before != (self.last, ask.verifies, len(ask.kept)):  # Only what is new is an answer.
            ask.deadline = now + self._limits.replay_silence
        return actions

    def _verify(self, ask: _Ask, frame: Replayed, now: float) -> list[Action]:
        assert self.last is not None
        if frame.sequence < self.last:
            return []
        if frame.sequence > self.last and self._same_process:
            return self._go_on_truncated(ask, frame)
        if frame.sequence > self.last and self.started_at is not None:
            self._ask = None
            self._awaits_start = True
            self.reason = f"the replay begins after {self.last}: asking when the process started"
            return []
        if frame.sequence > self.last:
            return self._restart(f"the replay begins at sequence {frame.sequence}, after {self.last}", now)
        if digest_of(frame.payload) != self.digest:
            return self._restart(f"another batch has sequence {frame.sequence} now", now)
        ask.verifies = False
        ask.answered = True
        self._verify_by = None
        self.state = "replaying"
        self.reason = f"the engine went on from sequence {self.last}"
        return []

    def _go_on_truncated(self, ask: _Ask, frame: Replayed) -> list[Action]:
        """The same process, but its buffer does not reach back to ``last``."""
        self._lose()
        ask.verifies, ask.answered = False, True
        self._verify_by = None
        self.state = "replaying"
        self.reason = f"the replay begins at sequence {frame.sequence}, after {self.last}"
        return [self._take(frame)]

    def _rebuild(self, ask: _Ask, frame: Replayed, now: float) -> list[Action]:
        """A replay of everything: kept until it is whole, and worth it only if it reaches back to 0."""
        if frame.sequence < len(ask.kept):
            return []
        if frame.sequence > len(ask.kept) or not ask.kept.add(frame):
            self._ask = None
            return self._drain(now)
        return []

    def _rebuilt(self, ask: _Ask) -> list[Action]:
        """What a whole replay brings; nothing when it ends before what is known already."""
        if not ask.kept or (self.last is not None and len(ask.kept) <= self.last):
            return []
        self._anchor = None
        return [
            Reset("rebuilt from a full replay", same_process=True),
            *(self._take(frame) for frame in ask.kept),
        ]

    def _continue(self, ask: _Ask, frame: Replayed, now: float) -> list[Action]:
        expected = 0 if self.last is None else self.last + 1
        if frame.sequence < expected:
            self.duplicates += 1
            return []
        if frame.sequence > expected and ask.answered and self._holes < self._limits.replay_holes:
            self._holes += 1
            return [self._request(expected, now)]
        if frame.sequence > expected:
            self._lose()
            self.reason = f"the replay holds nothing of sequences {expected} to {frame.sequence - 1}"
        ask.answered = True
        return [self._take(frame)]

    def _on_replay_ended(self, signal: ReplayEnded, now: float) -> list[Action]:
        ask = self._ask
        if self._anchor is not None and signal.ask == self._anchor.ask:
            return self._restart(f"the engine knows no sequence {self._anchor.sequence}", now)
        if ask is None or signal.ask != ask.number:
            return []
        if ask.verifies:
            return self._restart(f"the engine knows no sequence {self.last}", now)
        self._ask = None
        self._failures = 0
        actions = self._rebuilt(ask) if ask.rebuilds else []
        self._settle()
        actions += self._drain(now)
        if self._ask is None:
            self._holes = 0
            self._confirm_later(now)
        return actions

    # was the gap a restart?

    def _confirm_later(self, now: float) -> None:
        """A restart that nobody saw, and that went past the old sequence, looks like a gap."""
        if self._anchor is not None:
            due = now + self._limits.confirm_after
            self._anchor = _Anchor(self._anchor.sequence, self._anchor.digest, due)

    def _confirm(self, anchor: _Anchor, now: float) -> list[Action]:
        """Asks for the batch before the gap; without an answer in time, nothing follows."""
        if anchor.ask is not None:
            self._anchor = None
            return []
        self._asks += 1
        due = now + self._limits.replay_silence
        self._anchor = _Anchor(anchor.sequence, anchor.digest, due, self._asks)
        return [AskReplay(self._asks, anchor.sequence)]

    def _on_confirmed(self, anchor: _Anchor, frame: Replayed, now: float) -> list[Action]:
        """The first reply tells, unless the engine's buffer begins after it."""
        if frame.sequence < anchor.sequence:
            return []
        self._anchor = None
        if frame.sequence == anchor.sequence and digest_of(frame.payload) != anchor.digest:
            return self._restart(f"another batch has sequence {anchor.sequence} now", now)
        return []

    def _drain(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while self._held and self._ask is None:
            actions += self._advance_held(self._held.take(), now)
        if self._missed and self._ask is None:
            self._missed = False
            actions += self._catch_up(now)
        return actions

    def _advance_held(self, frame: Frame, now: float) -> list[Action]:
        """As :meth:`_advance`; a frame that finds another gap goes back to the front."""
        expected = 0 if self.last is None else self.last + 1
        if frame.sequence > expected and self.has_replay and self._retry_at is None:
            self.gaps += 1
            self._held.put_back(frame)
            return self._ask_again(expected, frame, now)
        return self._advance(frame, now)

    def _ask_again(self, expected: int, frame: Frame, now: float) -> list[Action]:
        """A gap right behind a replay that ended well: asked again a few times, then given up."""
        self._holes += 1
        if self._holes <= self._limits.replay_holes:
            return [self._request(expected, now)]
        self._holes = 0
        self._held.take()
        self._forfeit(f"the replay never gave sequences {expected} to {frame.sequence - 1}")
        return [self._take(frame)]

    def _on_silence(self, now: float) -> list[Action]:
        assert self._ask is not None
        ask, self._ask = self._ask, None
        self._failures += 1
        self._broken_off += ask.answered or bool(ask.kept)
        self.replays_failed += 1
        wait = min(self._limits.cool_down * 2 ** min(self._failures - 1, 16), self._limits.cool_down_max)
        self._retry_at = now + wait
        if ask.verifies:
            self.reason = f"the replay endpoint is silent; next try in {wait:.0f} s"
            return []
        self._forfeit(f"the replay endpoint is silent; everything is asked again in {wait:.0f} s")
        return self._drain(now)

    def _retry(self, now: float) -> list[Action]:
        if not self.has_replay:
            return []
        if self.state == "unverified" and self.last is not None:
            return [self._request(self.last, now, verifies=True)]
        if self.last is None:
            return [self._request(0, now)]
        if not self.lost or self._broken_off >= self._limits.replay_holes:
            return []
        return [self._request(0, now, rebuilds=True)]

    # endings

    def _restart(self, reason: str, now: float, frame: Frame | None = None) -> list[Action]:
        self.restarts += 1
        if frame is not None:
            self._drop_held()
            self._hold(frame)
        self._ask = None
        self._retry_at = None
        self._verify_by = self._anchor = None
        self.last = None
        self.digest = None
        self.lost = False
        self.started_at = None
        self._start_counts_from = now
        self._same_process = self._awaits_start = self._maybe_whole = False
        self.reason = reason
        actions: list[Action] = [Reset(reason)]
        if next((held.sequence for held in self._held), None) == 0:
            return actions + self._drain(now)
        if self.has_replay:
            return [*actions, self._request(0, now)]
        self._forfeit(f"restarted ({reason}), and no replay endpoint tells what came first")
        return actions + self._drain(now)

    def _lose(self) -> None:
        """Batches after ``last`` are gone for good."""
        self.lost = True
        self.losses += 1
        self._maybe_whole = False
        self._hole = self.last

    def _forfeit(self, reason: str) -> None:
        self._lose()
        self.state = "partial"
        self.reason = reason

    def _settle(self) -> None:
        self.state = "partial" if self.lost else "live"
        if not self.lost:
            self.reason = "in order"
