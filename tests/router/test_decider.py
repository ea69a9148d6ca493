"""Choices while another worker of the same router chooses too."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec
import pytest

from router.board import Table
from router.chooser import Chooser
from router.decider import Decider
from router.decision import Ask, Candidate, RandomSource, Ranked
from router.errors import SaturatedError
from router.fleet import Fleet
from router.ledger import Ledger
from router.load import Load
from router.outliers import OutlierRules
from router.plan import Plan
from router.policies import POLICIES, Policy
from router.replicas import parse_replicas
from router.retries import SHAPE as RETRIES
from router.retries import RetryBudget, RetryRules
from router.shares import MOST_STREAMS, SHAPE, BoardShares
from router.standings import MOST_REPLICAS, SharedStandings
from router.standings import SHAPE as STANDINGS

LEAST_LOADED = POLICIES["least-loaded"]
SPECS = parse_replicas(["a=http://127.0.0.1:1,model=m", "b=http://127.0.0.1:2,model=m"])
RULES = OutlierRules(after=1, base_s=5.0, slow_start_s=0.0)
PLAN = Plan(request_id="r", model="m")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Interrupted:
    """A policy in the midst of which something else happens, once."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], Any] | None = None

    def rank(self, ask: Ask, candidates: Sequence[Candidate], rng: RandomSource) -> list[Ranked]:
        happens, self.meanwhile = self.meanwhile, None
        if happens is not None:
            happens()
        # Always the first by name, so that all want the same.
        ranked = LEAST_LOADED.rank(ask, candidates, rng)
        return sorted(ranked, key=lambda item: item.candidate.replica)


class Worker:
    """One of two workers of a router over replicas a and b."""

    def __init__(
        self, number: int, loads: Table, standings: Ledger, clock: Clock, session: aiohttp.ClientSession
    ) -> None:
        self.fleet = Fleet(
            SPECS,
            session,
            outlier_rules=RULES,
            clock=clock,
            standings=SharedStandings(standings, number),
        )
        self.load = Load(clock, BoardShares(loads.row(number)))
        self.policy = Interrupted()
        chooser = Chooser(self.load, random.Random(1), clock, mark_tokens=512)
        policy = Policy(name="interrupted", rank=self.policy.rank)
        self.decider = Decider(self.fleet, chooser, policy, policy, max_inflight=2)

    def decide(self) -> str:
        decision, _ = self.decider.decide(PLAN)
        self.fleet.outliers.chosen(decision.chosen[0])
        return decision.chosen[0]


@pytest.fixture
async def workers() -> Any:
    clock, loads, standings = Clock(), Table(2, MOST_STREAMS, SHAPE), Ledger(MOST_REPLICAS, STANDINGS)
    async with aiohttp.ClientSession() as session:
        yield (*(Worker(number, loads, standings, clock, session) for number in range(2)), clock)


async def test_a_place_that_another_worker_takes_in_the_midst_of_a_choice_is_chosen_elsewhere(
    workers: Any,
) -> None:
    one, two, _ = workers
    assert two.decide() == "a"
    one.policy.meanwhile = two.decide
    assert one.decide() == "b"
    assert [one.load.together((name, 0)).requests for name in "ab"] == [2, 1]


async def test_where_another_worker_takes_the_last_place_of_all_it_is_as_if_there_had_been_none(
    workers: Any,
) -> None:
    one, two, _ = workers
    assert [two.decide() for _ in range(3)] == ["a", "a", "b"]
    one.policy.meanwhile = two.decide
    with pytest.raises(SaturatedError, match="every replica has 2 requests in flight"):
        one.decide()
    assert [one.load.together((name, 0)).requests for name in "ab"] == [2, 2]


async def test_a_replica_that_another_worker_begins_to_try_in_the_midst_of_a_choice_is_left_to_it(
    workers: Any,
) -> None:
    one, two, clock = workers
    two.fleet.outliers.failed("a")
    assert one.decide() == "b"
    clock.now += 5.0
    one.policy.meanwhile = two.decide
    assert one.decide() == "b"
    assert [two.load.ours((name, 0)).requests for name in "ab"] == [1, 0]
    assert [one.load.ours((name, 0)).requests for name in "ab"] == [0, 2]
    # Where there is nobody else, it goes there all the same.
    assert one.decider.decide(PLAN, failed=["b"])[0].chosen == ("a", 0)


def test_the_retries_of_all_workers_have_one_budget() -> None:
    table, rules = Table(2, 1, RETRIES), RetryRules(share=0.5, least=1)
    one, two = (RetryBudget(rules, table.row(number)) for number in range(2))
    for budget in (one, two, two, two):
        budget.begin()
    one.retry(begins=True)
    assert two.has_room
    two.retry(begins=True)
    assert [one.has_room, two.has_room] == [False, False]
    two.end()
    one.retry(begins=False)
    assert [one.has_room, two.has_room] == [True, True]
    one.retry(begins=True)
    table.clear(1)
    assert not one.has_room
    one.retry(begins=False)
    assert one.has_room


async def test_requests_that_can_go_to_the_same_replicas_wait_in_one_line_whatever_rank_they_make_up(
    workers: Any,
) -> None:
    one, _, _ = workers
    assert one.decider.line(msgspec.structs.replace(PLAN, rank=77)) == one.decider.line(PLAN)
    assert one.decider.line(msgspec.structs.replace(PLAN, rank=0)) != one.decider.line(PLAN)
