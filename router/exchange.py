"""One request with one replica, from the booking to what was learned: everything that must happen exactly
once.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable

from aiohttp import web
from multidict import CIMultiDict

from router.answer import NOTHING, Answer
from router.decision import Decision
from router.decision_log import Entry, Outcome
from router.feedback import Feedback, Learned
from router.load import Reservation
from router.metrics import RouterMetrics
from router.outliers import Outliers
from router.plan import Plan
from router.relay import RelayedAnswer
from router.tap import SECRET_HEADERS, Done, Recorder, Sent
from router.upstream import UpstreamAnswer

log = logging.getLogger(__name__)

CANCELLED = "cancelled"
_numbers = itertools.count(1)


class Exchange:
    """Books kept for one attempt. ``finish`` closes them all, however the attempt ended, and only once.

    ``placed`` is False when the engine itself picks one of several ranks: its answer tells nothing of the one
    that was chosen.
    """

    def __init__(
        self,
        plan: Plan,
        entry: Entry,
        reservation: Reservation,
        metrics: RouterMetrics,
        outliers: Outliers,
        recorder: Recorder | None,
        feedback: Feedback | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._number = next(_numbers)
        self.plan = plan
        self.decision: Decision = entry.decision
        self._entry = entry
        self._reservation = reservation
        self._metrics = metrics
        self._outliers = outliers
        self._recorder = recorder
        self._feedback = feedback
        self._clock = clock
        self._begun = clock()
        self._ttft_s: float | None = None
        self._upstream: UpstreamAnswer | None = None
        self._relayed: RelayedAnswer | None = None
        self._recorded = False
        self._finished = False
        self.actual_cached_tokens: int | None = None
        self.placed = True
        self.status = CANCELLED
        self.replica_failed: bool | None = None
        """Whether the replica is to blame for how it ended; None as long as it ended in no way that tells."""
        outliers.chosen(self.decision.chosen[0])

    def sending(self, request: web.Request, body: bytes, headers: CIMultiDict[str]) -> None:
        """The request goes out now."""
        self._begun = self._clock()
        if self._recorder is None:
            return
        replica, rank = self.decision.chosen
        shown = {name: value for name, value in headers.items() if name.lower() not in SECRET_HEADERS}
        sent = Sent(
            exchange=self._number,
            request_id=self.decision.request_id,
            replica=replica,
            rank=rank,
            path=request.path,
            body=body,
            tokens=self.plan.ids if self.plan.whole else None,
            headers=shown,
        )
        self._recorded = True
        self._tell(lambda recorder: recorder.on_send(sent))

    def answered(self, upstream: UpstreamAnswer) -> RelayedAnswer:
        """The head of the answer is here."""
        self._upstream = upstream
        self._relayed = RelayedAnswer(
            upstream,
            self.decision.chosen[0],
            whole=self._recorder is not None,
            on_first_byte=self._first_byte,
            without_usage=self.plan.body_with_usage is not None,
        )
        return self._relayed

    def _first_byte(self) -> None:
        assert self._relayed is not None
        assert self._upstream is not None
        if self._upstream.status != 200:
            return
        if not self._relayed.is_stream:
            # An answer in one piece comes when all of it is done: its first byte tells nothing of the first
            # token.
            self._reservation.prefilled()
            return
        self._ttft_s = self._clock() - self._begun
        self._reservation.first_byte(self._ttft_s)
        labels = (self.decision.policy, self.decision.chosen[0])
        self._metrics.ttft_seconds.labels(*labels).observe(self._ttft_s)

    def finish(self, status: str) -> None:
        """Releases the load and the connection, and learns.

        ``status`` is of HTTP, or says how it ended instead. A client that leaves once it has the whole
        answer has cancelled nothing.
        """
        if self._finished:
            return
        self._finished = True
        if status == CANCELLED and self._relayed is not None and self._relayed.complete:
            assert self._upstream is not None
            status = str(self._upstream.status)
        self.status = status
        self._reservation.release()
        self._judge()
        if self._upstream is not None:
            self._upstream.close()
        said = self._said()
        self._compare(said)
        self._entry.outcome = Outcome(
            status=status,
            ttft_s=self._ttft_s,
            duration_s=self._clock() - self._begun,
            actual_cached_tokens=self.actual_cached_tokens,
        )
        if self._recorded:
            self._record_done(said)
        # The two know each other: as a cycle they would keep the prompt until garbage is looked for.
        self._relayed = None

    def _judge(self) -> None:
        replica = self.decision.chosen[0]
        if self.replica_failed is None:
            self._outliers.let_go(replica)
        elif self.replica_failed:
            self._outliers.failed(replica)
        else:
            self._outliers.succeeded(replica)

    def _said(self) -> Answer:
        """What the answer says of itself, where somebody wants to know."""
        if self._relayed is None or not (self._comparable or self._recorded):
            return NOTHING
        return self._relayed.tap.answer()

    @property
    def _comparable(self) -> bool:
        """Whether what an engine says is of the prompt that we know, at the rank that we chose."""
        return self.plan.comparable and self.placed and self.decision.prompt_tokens is not None

    def _compare(self, said: Answer) -> None:
        """Predicted against actual cached tokens, where the engine says them of the same prompt."""
        decision = self.decision
        if not self._comparable or said.prompt_tokens is None:
            return
        metrics, replica = self._metrics, decision.chosen[0]
        if said.prompt_tokens != decision.prompt_tokens:
            metrics.token_count_mismatch.labels(replica).inc()
            return
        if said.cached_tokens is None:
            return
        predicted = decision.matched_tokens or 0
        self.actual_cached_tokens = said.cached_tokens
        metrics.prompt_tokens.labels(replica).inc(said.prompt_tokens)
        metrics.matched_tokens.labels(replica).inc(predicted)
        metrics.best_available_tokens.labels(replica).inc(decision.best_available_tokens or 0)
        metrics.cached_tokens.labels(replica).inc(max(0, said.cached_tokens))
        differs = (
            "exact"
            if predicted == said.cached_tokens
            else "over"
            if predicted > said.cached_tokens
            else "under"
        )
        metrics.compared.labels(replica, differs).inc()
        self._learn(said.cached_tokens)

    def _learn(self, cached_tokens: int) -> None:
        """Tells the index how right it was. Not of a prompt whose beginning another request was just bringing
        there: whether its blocks were there in time says nothing of the index.
        """
        plan, chosen = self.plan, self.decision.ranked[0].candidate
        matched = (plan.matches or {}).get(chosen.stream)
        if self._feedback is None or plan.asked is None or plan.ids is None or matched is None:
            return
        if chosen.hinted_tokens > (chosen.matched_tokens or 0):
            return
        self._feedback.offer(
            Learned(
                stream=chosen.stream,
                model=plan.asked.model,
                lora_name=plan.asked.lora_name,
                cache_salt=plan.asked.cache_salt,
                ids=plan.ids,
                generation=matched.generation,
                sequence=matched.sequence,
                predicted_tokens=chosen.matched_tokens or 0,
                cached_tokens=max(0, cached_tokens),
                block_size=matched.block_size,
            )
        )

    def _record_done(self, said: Answer) -> None:
        replica, rank = self.decision.chosen
        done = Done(
            exchange=self._number,
            request_id=self.decision.request_id,
            replica=replica,
            rank=rank,
            status=self._upstream.status if self._upstream is not None else None,
            complete=self._relayed is not None and self._relayed.complete,
            answer=said,
        )
        self._tell(lambda recorder: recorder.on_done(done))

    def _tell(self, say: Callable[[Recorder], None]) -> None:
        assert self._recorder is not None
        try:
            say(self._recorder)
        except Exception as error:
            # A recorder is a guest: its faults must not cost a request. What it says could quote the request.
            log.warning("the recorder failed: %s", type(error).__name__)
