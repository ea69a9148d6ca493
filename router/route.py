"""The way of one request: read -> plan -> decide and reserve -> relay -> learn."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Mapping
from pathlib import PurePath

from aiohttp import web
from multidict import CIMultiDict
from opentelemetry.trace import Span

from events.logs import Throttled
from router.body import BodyPace, read_body, trailers_of
from router.census import LONG_BYTES, holds_too_much
from router.decider import Decider
from router.decision_log import DecisionLog
from router.errors import (
    ConnectTimeoutError,
    DisconnectedError,
    RefusedError,
    SaturatedError,
    UnreachableError,
    UpstreamError,
    UpstreamTimeoutError,
)
from router.exchange import CANCELLED, Exchange
from router.feedback import Feedback
from router.fleet import Fleet
from router.headers import HOST, RANK, REQUEST_ID, Via, request_id_of, to_replica, trailers_to_replica
from router.journey import (
    BROKEN,
    CONNECT_TIMEOUT,
    DISCONNECTED,
    NONSENSE,
    STALE,
    UNREACHABLE,
    AttemptFailedError,
    Journey,
)
from router.kept import KeptAnswer, keep
from router.metrics import RouterMetrics
from router.plan import Arrived, Plan, Planner
from router.prompt import CHAT_PATH, COMPLETIONS_PATH
from router.refusal import refusal
from router.relay import ClientGoneError, RelayedAnswer, refused
from router.replicas import Replica
from router.retries import RetryBudget
from router.tap import Recorder
from router.tracing import Tracing, describe_decision, describe_request
from router.upstream import Upstream, UpstreamAnswer, check_head
from router.waitlist import Waitlist

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
SERVER_ERRORS = frozenset(range(500, 600)) - {501, 505}
"""Those that another replica may not give; 501 and 505 are about the request."""
PROMPT_PATHS = frozenset({CHAT_PATH, COMPLETIONS_PATH})
REPEATABLE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
"""Doing it twice is doing it once (RFC 9110, section 9.2.2)."""
REPEATABLE_PATHS = (
    *PROMPT_PATHS,
    *("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify", "/v1/pooling", "/v1/moderations"),
    *("/v1/messages", "/v1/audio/transcriptions", "/v1/audio/translations"),
)
"""What only computes. A POST to any other path may leave something behind and is not done twice."""


class Route:
    """Handles every request that goes to a replica."""

    def __init__(
        self,
        fleet: Fleet,
        planner: Planner,
        decider: Decider,
        upstream: Upstream,
        metrics: RouterMetrics,
        tracing: Tracing,
        decisions: DecisionLog,
        *,
        retries: RetryBudget,
        retry_server_errors: bool = True,
        body_pace: BodyPace,
        client_idle_s: float = 600.0,
        forwarded: bool = True,
        own_keys: Callable[[], bool] = bool,
        waitlist: Waitlist | None = None,
        recorder: Recorder | None = None,
        feedback: Feedback | None = None,
    ) -> None:
        self._fleet = fleet
        self._planner = planner
        self._decider = decider
        self._upstream = upstream
        self._metrics = metrics
        self._tracing = tracing
        self._decisions = decisions
        self._budget = retries
        self._retry_server_errors = retry_server_errors
        self._body_pace = body_pace
        self._client_idle_s = client_idle_s
        self._forwarded = forwarded
        self._own_keys = own_keys
        self._waitlist = Waitlist(0, 0.0) if waitlist is None else waitlist
        self._recorder = recorder
        self._feedback = feedback
        self._throttled = Throttled(log)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The answer to any request under ``/v1/``."""
        request_id = request_id_of(request.headers)
        with self._tracing.request(request.headers, request.path, request_id) as span:
            journey = Journey(request_id, self._decider.policy.name)
            self._budget.begin()
            try:
                response = await self._serve(request, journey, span)
                journey.status = journey.last.status if journey.last else None
            except RefusedError as error:
                response = refusal(error, journey.policy, journey.headers())
                journey.status = str(error.status)
            except ClientGoneError:
                # Nobody reads this answer; the handler just has to return one.
                journey.status = CANCELLED
                if journey.last is not None:
                    journey.status = journey.last.status
                return web.Response(status=CLIENT_CLOSED_REQUEST)
            except asyncio.CancelledError:
                journey.status = journey.last.status if journey.last else CANCELLED
                raise
            except Exception as error:
                journey.status = "500"
                response = self._give_up(request, journey, error)
            finally:
                self._budget.end()
                if journey.at_failing:
                    self._retries_at_failing(journey, False)
                self._account(journey, span)
            return response

    async def _serve(self, request: web.Request, journey: Journey, span: Span) -> web.StreamResponse:
        body = await read_body(request, request.client_max_size, self._body_pace)
        with self._tracing.decide() as decide_span:
            plan = await self._plan(request, body, journey.request_id)
            journey.policy = plan.policy.name if plan.policy else journey.policy
            exchange = await self._find_room(plan, journey, decide_span)
        while True:
            try:
                return await self._attempt(request, body, exchange, journey)
            except AttemptFailedError as failure:
                self._note_failure(journey, failure)
            try:
                self._check_retry(journey)
                with self._tracing.decide() as decide_span:
                    if journey.answer is None:
                        exchange = await self._find_room(plan, journey, decide_span)
                    else:
                        exchange = self._choose(plan, journey, decide_span)
            except RefusedError:
                if journey.answer is None:
                    raise
                return await self._give_kept(request, journey, journey.answer)

    def _check_retry(self, journey: Journey) -> None:
        """Raises RefusedError for a request that was tried often enough."""
        self._retries_at_failing(journey, False)
        rules = self._budget.rules
        if len(journey.failed) >= rules.attempts:
            raise journey.out_of_attempts()
        if len(journey.killed) >= rules.deaths:
            self._metrics.retries_refused.labels("deaths").inc()
            raise journey.deadly()

    def _retries_at_failing(self, journey: Journey, now: bool) -> None:
        """Books whether the request is being tried again at a replica that fails."""
        if now != journey.at_failing:
            self._budget.retry(now)
        journey.at_failing = now

    async def _plan(self, request: web.Request, body: bytes, request_id: str) -> Plan:
        readable = request.headers.get("Content-Encoding", "identity").lower() == "identity"
        is_prompt = request.method == "POST" and request.path in PROMPT_PATHS
        is_json = is_prompt or "json" in request.headers.get("Content-Type", "").lower()
        is_long = is_json and readable and len(body) > LONG_BYTES
        crowded = is_long and await asyncio.to_thread(holds_too_much, body)
        rank = pinned_rank(request.headers)
        arrived = Arrived(request_id, body, request.path, request.headers, readable, crowded, rank)
        return await self._planner.plan(arrived) if is_prompt else self._planner.other(arrived)

    async def _find_room(self, plan: Plan, journey: Journey, span: Span) -> Exchange:
        """The choice, when it is the request's turn."""
        line = self._decider.line(plan)
        try:
            return await self._waitlist.take(line, plan.priority, lambda: self._choose(plan, journey, span))
        except SaturatedError as error:
            self._metrics.saturated.labels(error.code).inc()
            error.retry_after = self._decider.retry_after_s(plan, self._waitlist.together)
            raise

    def _choose(self, plan: Plan, journey: Journey, span: Span) -> Exchange:
        """Decides and books. Nothing is awaited between the booking and the exchange that will release it."""
        attempt = len(journey.exchanges) + 1
        failing = self._fleet.outliers.failing(self._fleet.replicas) if journey.failed else frozenset()
        barred = failing - journey.failed if failing and not self._budget.has_room else frozenset()
        out = journey.failed | barred if barred else journey.failed
        try:
            decision, reservation = self._decider.decide(plan, out, attempt)
        except SaturatedError:
            raise
        except RefusedError as error:
            if not barred:
                raise
            self._metrics.retries_refused.labels("budget").inc()
            raise journey.over_budget() from error
        if failing:
            self._retries_at_failing(journey, decision.chosen[0] in failing)
        entry, outliers = self._decisions.add(decision), self._fleet.outliers
        exchange = Exchange(plan, entry, reservation, self._metrics, outliers, self._recorder, self._feedback)
        journey.exchanges.append(exchange)
        journey.last = exchange
        self._metrics.decisions.labels(decision.policy, decision.mode).inc()
        if attempt == 1 and decision.rule is not None:
            self._metrics.rules.labels(decision.rule).inc()
        if attempt == 1 and decision.fallback is not None:
            self._metrics.fallbacks.labels(decision.fallback).inc()
        describe_decision(span, decision)
        return exchange

    async def _attempt(
        self, request: web.Request, body: bytes, exchange: Exchange, journey: Journey
    ) -> web.StreamResponse:
        """Sends the request to the chosen replica and relays the answer.

        Raises AttemptFailedError for what may be tried elsewhere: no byte of an answer has been seen then.
        """
        status = "500"
        try:
            answer = await self._send(request, body, exchange, journey)
            relayed = exchange.answered(answer)
            decision = exchange.decision
            exchange.replica_failed = answer.status in SERVER_ERRORS or None
            if exchange.replica_failed and self._may_go_on(request, exchange, journey):
                await self._keep(answer, exchange)
            try:
                response = await relayed.relay(request, _ours(exchange), client_idle_s=self._client_idle_s)
            finally:
                if relayed.failure is not None:
                    exchange.replica_failed = True
                    self._metrics.broken.labels(decision.chosen[0]).inc()
                    self._fleet.failed(decision.chosen[0], str(relayed.failure), unreachable=False)
            status = "broken" if relayed.failure is not None else str(answer.status)
            exchange.replica_failed = bool(exchange.replica_failed)
            return response
        except AttemptFailedError as failure:
            status = failure.code
            exchange.replica_failed = None if failure.code == STALE else True
            raise
        except RefusedError as error:
            status, exchange.replica_failed = str(error.status), True
            raise
        except (ClientGoneError, asyncio.CancelledError):
            status = CANCELLED
            raise
        finally:
            exchange.finish(status)

    def _may_repeat(self, request: web.Request) -> bool:
        """Whether a request that has come to a replica may be sent to another one."""
        repeatable = request.method in REPEATABLE_METHODS or request.path in REPEATABLE_PATHS
        return repeatable and self._retry_server_errors

    def _may_go_on(self, request: web.Request, exchange: Exchange, journey: Journey) -> bool:
        """Whether there is somebody else to try after this one."""
        tried = journey.failed | {exchange.decision.chosen[0]}
        left = len(tried) < self._budget.rules.attempts
        return left and self._may_repeat(request) and self._decider.has_another(exchange.plan, tried)

    async def _keep(self, answer: UpstreamAnswer, exchange: Exchange) -> None:
        """Puts a server error aside, for the case that nobody else can do better: raises AttemptFailedError.
        Returns for one that is too long to be kept.
        """
        replica = exchange.decision.chosen[0]
        try:
            kept = await keep(answer)
        except UpstreamError as error:
            raise AttemptFailedError(replica, BROKEN, str(error), refused(error, replica)) from error
        if kept is not None:
            raise AttemptFailedError(replica, str(answer.status), f"answered {answer.status}", kept)

    async def _give_kept(
        self, request: web.Request, journey: Journey, kept: tuple[Exchange, KeptAnswer | RefusedError]
    ) -> web.StreamResponse:
        """Nobody could do better: the client gets what the last replica said that said something."""
        journey.last, said = kept
        if isinstance(said, RefusedError):
            raise said
        relayed = RelayedAnswer(said, journey.last.decision.chosen[0], whole=False, on_first_byte=_nothing)
        return await relayed.relay(request, _ours(journey.last), client_idle_s=self._client_idle_s)

    async def _send(
        self, request: web.Request, body: bytes, exchange: Exchange, journey: Journey
    ) -> UpstreamAnswer:
        name, rank = exchange.decision.chosen
        replica = self._fleet.replicas[name]
        ours = rank if replica.pins(exchange.decision.matched_tokens) else None
        exchange.placed = not replica.port_ranks or ours is not None or exchange.plan.rank == rank
        via = Via(request.remote or "unknown", request.scheme, request.headers.get(HOST, ""))
        headers = to_replica(
            request.headers, exchange.decision.request_id, ours, via if self._forwarded else None
        )
        self._show_keys(headers, replica)
        self._tracing.inject(headers)
        exchange.sending(request, body, headers)
        sent = exchange.plan.body_with_usage or body
        if exchange.plan.body_with_usage is not None and "Accept-Encoding" in headers:
            # The usage chunk that the client did not ask for is found in plain text only.
            headers["Accept-Encoding"] = "identity"
        url = replica.url + _target(request)
        try:
            trailers = trailers_to_replica(trailers_of(request), headers)
            answer = await self._upstream.send(
                request.method, url, headers, sent, trailers=trailers, fresh=journey.stale
            )
            try:
                check_head(answer)
            except UpstreamError:
                answer.close()
                raise
            return answer
        except ConnectTimeoutError as error:
            raise AttemptFailedError(name, CONNECT_TIMEOUT, str(error)) from error
        except UnreachableError as error:
            raise AttemptFailedError(name, UNREACHABLE, str(error)) from error
        except DisconnectedError as error:
            if error.stale:
                raise AttemptFailedError(name, STALE, str(error)) from error
            raise self._unanswered(request, name, DISCONNECTED, error) from error
        except UpstreamTimeoutError as error:
            # It may be at work on it: nobody else is asked to do the same.
            self._fleet.failed(name, str(error), unreachable=False)
            raise refused(error, name) from error
        except UpstreamError as error:
            raise self._unanswered(request, name, NONSENSE, error) from error

    def _show_keys(self, headers: CIMultiDict[str], replica: Replica) -> None:
        """The replica gets its own key; the client's goes on to it only where that is not ours."""
        if self._own_keys() or replica.key is not None:
            for name in ("Authorization", "X-Api-Key"):
                headers.popall(name, None)
        headers.update(replica.headers())

    def _unanswered(self, request: web.Request, name: str, code: str, error: UpstreamError) -> Exception:
        """What becomes of a request that came to the replica and got no answer."""
        told = refused(error, name)
        if self._may_repeat(request):
            return AttemptFailedError(name, code, str(error), told if code == NONSENSE else None)
        self._fleet.failed(name, str(error), unreachable=False)
        return told

    def _note_failure(self, journey: Journey, failure: AttemptFailedError) -> None:
        """Tells the fleet; a kept-alive connection that had gone stale says nothing about the replica."""
        self._metrics.retries.labels(failure.replica, failure.code).inc()
        journey.note(failure)
        if failure.code != STALE:
            self._fleet.failed(failure.replica, str(failure), unreachable=failure.code == UNREACHABLE)

    def _give_up(self, request: web.Request, journey: Journey, error: Exception) -> web.StreamResponse:
        """The last resort for what nobody foresaw. An error's own words could quote the request."""
        kind, place = type(error).__name__, _place(error)
        self._throttled.warning(f"{kind} {place}", "a request failed unexpectedly: %s in %s", kind, place)
        if request.writer.output_size and request.transport is not None:
            request.transport.abort()
        sorry = RefusedError(500, "InternalServerError", "the router failed; its log says where")
        return refusal(sorry, journey.policy, journey.headers())

    def _account(self, journey: Journey, span: Span) -> None:
        last = journey.last
        decision = last.decision if last else None
        policy = decision.policy if decision else journey.policy
        status = journey.status or "error"
        # One that is gone by now has no series any more, and gets no new one.
        replica = decision.chosen[0] if decision and decision.chosen[0] in self._fleet.replicas else ""
        self._metrics.requests.labels(policy, replica, status).inc()
        describe_request(span, decision, status, last.actual_cached_tokens if last else None)


def _ours(exchange: Exchange) -> dict[str, str]:
    """The headers that we add to an answer."""
    said = exchange.decision.headers()
    said[REQUEST_ID] = exchange.decision.request_id
    return said


def _target(request: web.Request) -> str:
    """What is asked for, as it was asked for."""
    given = request.raw_path
    # Of a target in absolute form, as clients send it to proxies, the host is us. A fragment is the client's.
    return given if given.startswith("/") and "#" not in given else request.rel_url.raw_path_qs


def _nothing() -> None:
    pass


def pinned_rank(headers: Mapping[str, str]) -> int | None:
    """The data-parallel rank that the caller asks for; None for what is no number: it passes as it came."""
    text = headers.get(RANK, "").strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _place(error: Exception) -> str:
    """Where it was raised, for a log that must not hold what it was raised about."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.name}, {PurePath(frame.filename).name}:{frame.lineno}"
