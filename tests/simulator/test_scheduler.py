"""The scheduler in virtual time: what runs together, for how long, and what that stores."""

import pytest

from events.schema import BlockRemoved, BlockStored, Event
from simulator.pool import BlockPool
from simulator.scheduler import Limits, Rates, Request, Scheduler

SIZE = 4


def scheduler(blocks: int = 64, batched_tokens: int = 100, requests: int = 8) -> Scheduler:
    pool = BlockPool(blocks, SIZE)
    return Scheduler(pool, Rates(prefill=100.0, decode=10.0), Limits(batched_tokens, requests), b"seed")


def request(
    tokens: list[int], max_tokens: int = 1, *, salt: str | None = None, reads: bool = True
) -> Request:
    return Request(tokens, max_tokens, lambda position: 100 + position, salt=salt, reads_cache=reads)


def step(engine: Scheduler) -> tuple[float, list[Event], list[tuple[Request, int]]]:
    taken = engine.schedule()
    assert taken is not None
    outcome = engine.complete()
    return taken.duration, outcome.events, outcome.sampled


def run(engine: Scheduler, *requests: Request) -> list[Event]:
    for one in requests:
        engine.add(one)
    events = []
    while engine.schedule() is not None:
        events += engine.complete().events
    return events


def stored_tokens(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, BlockStored) for token in event.tokens]


def test_a_prefill_takes_its_uncached_tokens_at_the_prefill_rate() -> None:
    engine = scheduler()
    engine.add(request(list(range(50))))
    assert step(engine)[0] == pytest.approx(0.5)
    engine.add(request(list(range(50))))
    assert step(engine)[0] == pytest.approx(0.02)


def test_a_step_that_decodes_takes_at_least_one_tokens_time() -> None:
    engine = scheduler()
    engine.add(request([1] * 5, max_tokens=3))
    step(engine)
    engine.add(request([2] * 5))
    duration, _, sampled = step(engine)
    assert duration == pytest.approx(0.1)
    assert len(sampled) == 2


def test_prompts_share_the_token_budget_in_chunks_and_decodes_go_first() -> None:
    engine = scheduler(batched_tokens=10)
    engine.add(request([1] * 5, max_tokens=9))
    step(engine)
    engine.add(request([2] * 15))
    taken = engine.schedule()
    assert taken is not None
    assert [tokens for _, tokens in taken.scheduled] == [1, 9]
    assert len(engine.complete().sampled) == 1
    assert len(step(engine)[2]) == 2


def test_no_more_requests_run_than_the_limit_and_the_others_wait_in_order() -> None:
    engine = scheduler(requests=2)
    for number in range(3):
        engine.add(request([number] * 5, max_tokens=2))
    step(engine)
    assert (len(engine.running), len(engine.waiting)) == (2, 1)
    step(engine)
    assert (len(engine.running), len(engine.waiting)) == (0, 1)


def test_the_last_prompt_token_is_never_a_hit_and_its_block_is_stored_twice() -> None:
    engine = scheduler()
    first, second = request(list(range(8))), request(list(range(8)))
    run(engine, first)
    events = run(engine, second)
    assert second.cached_tokens == 4
    assert stored_tokens(events) == [4, 5, 6, 7]


def test_the_last_sampled_token_is_never_stored() -> None:
    engine = scheduler()
    events = run(engine, request(list(range(6)), max_tokens=3))
    assert stored_tokens(events) == [0, 1, 2, 3, 4, 5, 100, 101]
    assert len(events) == 2
    assert stored_tokens(run(scheduler(), request(list(range(6)), max_tokens=2))) == [0, 1, 2, 3]


def test_requests_of_one_step_hit_what_an_earlier_one_of_the_step_stores() -> None:
    engine = scheduler()
    first, second = request(list(range(9))), request(list(range(9)))
    engine.add(first)
    engine.add(second)
    taken = engine.schedule()
    assert taken is not None
    assert [tokens for _, tokens in taken.scheduled] == [9, 1]
    assert second.cached_tokens == 8


def test_a_request_that_may_not_read_the_cache_hits_nothing_and_is_no_query() -> None:
    engine = scheduler()
    run(engine, request(list(range(9))))
    blind = request(list(range(9)), reads=False)
    run(engine, blind)
    assert blind.cached_tokens == 0
    assert (engine.counts.queried, engine.counts.hit) == (9, 0)


def test_salts_are_worlds_of_their_own() -> None:
    engine = scheduler()
    run(engine, request(list(range(9)), salt="a"))
    same, other = request(list(range(9)), salt="a"), request(list(range(9)), salt="b")
    run(engine, same, other)
    assert (same.cached_tokens, other.cached_tokens) == (8, 0)


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    engine = scheduler(blocks=5)
    engine.add(request([1] * 9, max_tokens=2))
    step(engine)
    engine.add(request([2] * 8))
    step(engine)
    assert len(engine.waiting) == 1
    assert len(step(engine)[2]) == 1


def test_when_blocks_run_out_the_last_request_starts_over_and_still_finishes_the_same() -> None:
    engine = scheduler(blocks=5)
    first, second = request([1] * 7, max_tokens=6), request([2] * 7, max_tokens=6)
    events = run(engine, first, second)
    assert engine.counts.preemptions >= 1
    assert second.preemptions >= 1
    assert first.preemptions == 0
    assert first.output == second.output == [100, 101, 102, 103, 104, 105]
    assert any(isinstance(event, BlockRemoved) for event in events)
    assert engine.pool.free_count == 4
    assert engine.counts.queried == 14


@pytest.mark.parametrize("mid_step", [True, False])
def test_an_abort_frees_the_blocks_without_an_event(mid_step: bool) -> None:
    engine = scheduler()
    gone, stays = request([1] * 9, max_tokens=50), request([2] * 9, max_tokens=50)
    engine.add(gone)
    engine.add(stays)
    step(engine)
    if mid_step:
        engine.schedule()
        engine.abort(gone)
        assert [one for one, _ in engine.complete().sampled] == [stays]
    else:
        engine.abort(gone)
    engine.abort(gone)
    assert engine.running == [stays]
    engine.abort(stays)
    assert engine.pool.free_count == engine.pool.capacity
    assert engine.pool.take_events() == []
    assert engine.schedule() is None


def test_an_abort_of_a_waiting_request_takes_it_out_of_the_queue() -> None:
    engine = scheduler(requests=1)
    waiting = request([2] * 9)
    engine.add(request([1] * 9, max_tokens=9))
    engine.add(waiting)
    engine.schedule()
    engine.abort(waiting)
    engine.complete()
    assert not engine.waiting
    assert engine.counts.aborted_requests == 1


def test_a_reset_is_told_with_the_next_working_step_and_before_its_stores() -> None:
    engine = scheduler()
    run(engine, request(list(range(9))))
    assert engine.reset_prefix_cache()
    assert engine.schedule() is None
    again = request(list(range(9)))
    events = run(engine, again)
    assert [type(event).__name__ for event in events] == ["AllBlocksCleared", "BlockStored"]
    assert again.cached_tokens == 0


def test_a_prompt_whose_hits_are_free_blocks_does_not_count_them_as_room() -> None:
    engine = scheduler(blocks=5)
    run(engine, request(list(range(12))))
    engine.add(request([50] * 4, max_tokens=1))
    engine.schedule()
    longer = request([*range(12), 60])
    engine.add(longer)
    engine.complete()
    step(engine)
    assert longer.cached_tokens == 12
    engine = scheduler(blocks=5)
    run(engine, request(list(range(12))))
    engine.add(request([50] * 3, max_tokens=2))
    step(engine)
    engine.add(request([*range(12), 60]))
    assert [len(taken.scheduled) for taken in [engine.schedule()] if taken] == [1]
    assert len(engine.waiting) == 1


def test_a_preempted_request_goes_before_those_that_wait_and_not_in_the_same_step() -> None:
    engine = scheduler(blocks=5)
    first, second, third = request([1] * 7, max_tokens=6), request([2] * 7, max_tokens=6), request([3] * 2)
    engine.add(first)
    engine.add(second)
    step(engine)
    engine.add(third)
    scheduled: list[Request] = []
    while not second.preemptions:
        taken = engine.schedule()
        assert taken is not None
        scheduled = [one for one, _ in taken.scheduled]
        engine.complete()
    assert scheduled == [first]
    assert list(engine.waiting) == [second, third]
