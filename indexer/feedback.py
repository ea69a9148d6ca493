"""What an engine's answer says about the map: the prompt tokens that were cached, against what is known.

By the time an answer comes, the engine has stored what it missed, and announced it. So an answer speaks of
the map as it was when its request was sent, at a generation and a sequence of the stream, and changes only
what no batch has touched since.
"""

from __future__ import annotations

import msgspec

from indexer.changes import Changes
from indexer.corrections import BELIEF_S, Corrections
from indexer.layout import StreamKey, StreamRecord
from indexer.outcome import Outcome, refused
from indexer.reader import WEIGHTS

WRONG_STEP = 0.1
WRONG_FORGOTTEN = 0.005


class Answered(msgspec.Struct, frozen=True):
    """One answer. ``keys`` are of the prompt's whole blocks, ``usable`` how many the engine could have taken.

    ``generation`` and ``sequence`` are the stream's when the request was sent, ``predicted_tokens`` what was
    expected then.
    """

    stream: StreamKey
    generation: int
    sequence: int | None
    keys: list[bytes]
    usable: int
    block_size: int
    cached_tokens: int
    predicted_tokens: int | None = None


def learn(
    changes: Changes, record: StreamRecord, corrections: Corrections, answered: Answered, now: float
) -> Outcome:
    """Corrects what is known of a stream; ``now`` is on the map's clock. Changes ``record`` if anything."""
    since = -1 if answered.sequence is None else answered.sequence
    if record.state not in WEIGHTS:
        return refused("state")
    if answered.generation != record.generation:
        return refused("generation")
    if since < corrections.touched.floor:
        return refused("too_old")
    outcome = _Lesson(changes, record, corrections, answered, since, now).outcome()
    if outcome.reason is None:
        _judge(record, answered)
    return outcome


class _Lesson:
    """One answer of a stream, held against what is known of it ``since`` its sequence."""

    def __init__(
        self,
        changes: Changes,
        record: StreamRecord,
        corrections: Corrections,
        answered: Answered,
        since: int,
        now: float,
    ) -> None:
        self._changes = changes
        self._record = record
        self._corrections = corrections
        self._answered = answered
        self._since = since
        self._now = now
        self._cached = min(answered.cached_tokens // answered.block_size, len(answered.keys))

    def outcome(self) -> Outcome:
        answered, outcome = self._answered, Outcome()
        outcome.ended += self._confirm()
        outcome.believed = self._believe()
        if self._cached < min(answered.usable, len(answered.keys)) and self._lacks():
            self._deny(answered.keys[self._cached], outcome)
        return outcome

    def _confirm(self) -> int:
        """Of what was cached, a denial ends, and a belief lasts longer.

        It is renewed in its second half: what changes is written, and read again by every reader.
        """
        there, believed = self._answered.keys[: self._cached], self._corrections.believed
        if believed:
            for block in there:
                if believed.get(block, self._now + BELIEF_S) - self._now < BELIEF_S / 2:
                    self._corrections.believe(self._changes, self._record, block, self._now)
        denied = [block for block in there if block in self._corrections.denied]
        return self._corrections.end(self._changes, self._record, denied)

    def _believe(self) -> int:
        """What was cached and is unknown, beyond what was predicted, because that was known."""
        answered, corrections = self._answered, self._corrections
        known = min(answered.predicted_tokens or 0, answered.cached_tokens) // answered.block_size
        believed = 0
        for block in answered.keys[known : self._cached]:
            if block in corrections.believed:
                believed += 1
            elif (self._record.restrictions or not self._holds(block)) and not corrections.touched.since(
                block, self._since
            ):  # what restricted the hit is of other attention groups
                corrections.believe(self._changes, self._record, block, self._now)
                believed += 1
        return believed

    def _lacks(self) -> bool:
        """Whether the engine lacks the block behind what it had.

        With several attention groups it may have it in one, and use less because of another: then only an
        answer below what was predicted tells.
        """
        predicted = self._answered.predicted_tokens or 0
        return not self._record.restrictions or predicted > self._answered.cached_tokens

    def _deny(self, block: bytes, outcome: Outcome) -> None:
        """The first block that the engine did not have; those behind it may be there, and cannot be used."""
        corrections = self._corrections
        if corrections.touched.since(block, self._since):
            outcome.reason = "touched_since"
            return
        if block in corrections.believed:
            outcome.ended += corrections.end(self._changes, self._record, [block])
        if self._holds(block):
            corrections.deny(self._changes, self._record, block, self._now)
            outcome.denied = 1

    def _holds(self, block: bytes) -> bool:
        """Whether events say that the stream holds a block, in any tier."""
        gpu, cpu, disk = self._changes.holders(block)
        return bool((gpu | cpu | disk) >> self._record.slot & 1)


def _judge(record: StreamRecord, answered: Answered) -> None:
    """How wrong the stream's predictions are, averaged over answers that could be judged."""
    predicted = answered.predicted_tokens
    if not predicted:
        return
    over = max(0, predicted - answered.cached_tokens) / predicted
    wrong = record.wrong + WRONG_STEP * (over - record.wrong)
    record.wrong = 0.0 if wrong < WRONG_FORGOTTEN else wrong
