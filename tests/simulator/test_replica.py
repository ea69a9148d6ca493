from __future__ import annotations

from collections import Counter, OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from simulator.replica import Cache, Job, Replica
from simulator.trace import Traced


@given(
    st.integers(3, 8),
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 12), max_size=3, unique=True)), max_size=40),
)
def test_the_cache_holds_what_requests_hold_and_evicts_the_least_recently_used(
    capacity: int, steps: list[tuple[bool, list[int]]]
) -> None:
    cache = Cache(capacity)
    held: list[list[int]] = []
    free: OrderedDict[int, None] = OrderedDict()
    for takes, blocks in steps:
        now_held = Counter(block for request in held for block in request)
        if takes:
            assert cache.fits(blocks) == (len({*now_held, *blocks}) <= capacity)
            if not cache.fits(blocks):
                continue
            change = cache.hold(blocks)
            assert change.stored == [b for b in blocks if b not in now_held and b not in free]
            held.append(blocks)
            for block in blocks:
                free.pop(block, None)
            for block in change.removed:
                assert block == next(iter(free))
                del free[block]
            assert len(free) + len({*now_held, *blocks}) <= capacity
        elif held:
            given_back = held.pop(0)
            cache.release(given_back)
            still = {block for request in held for block in request}
            for block in reversed(given_back):
                if block not in still:
                    free[block] = None
        there = {block for request in held for block in request} | set(free)
        assert all((cache.leading([block]) == 1) == (block in there) for block in range(13))


def request(prompt_tokens: int, *blocks: int, answer_tokens: int = 10) -> Traced:
    return Traced(0.0, prompt_tokens, answer_tokens, blocks)


def test_prompts_are_computed_one_after_the_other_and_never_wholly_from_the_cache() -> None:
    replica = Replica("r", Cache(10), 1000.0, decodes=False)
    first, second = Job(request(1024, 1, 2)), Job(request(1024, 1, 2))
    replica.waiting.extend((first, second))
    begun = replica.begin()
    assert begun is not None
    assert (begun[0], begun[2]) == (first, 1.024)
    assert replica.begin() is None
    replica.prefilled()
    replica.end(first)
    begun = replica.begin()
    assert begun is not None
    assert (second.cached_tokens, begun[2]) == (512, 0.512)


def test_with_decoding_requests_keep_their_blocks_and_answers_take_some() -> None:
    replica = Replica("r", Cache(4), 1000.0, decodes=True)
    first, second = Job(request(1000, 1, 2, answer_tokens=600)), Job(request(512, 3))
    replica.waiting.extend((first, second))
    assert replica.begin() is not None
    assert len(first.blocks) == 4
    replica.prefilled()
    assert replica.begin() is None
    replica.end(first)
    begun = replica.begin()
    assert begun is not None
    assert begun[0] is second
    assert len(begun[1].removed) == 2


def test_a_replica_that_goes_down_loses_everything() -> None:
    replica = Replica("r", Cache(10), 1000.0, decodes=True)
    jobs = [Job(request(512, number)) for number in range(3)]
    replica.waiting.extend(jobs)
    replica.begin()
    replica.prefilled()
    replica.begin()
    assert set(replica.go_down()) == set(jobs)
    assert all(job.lost for job in jobs)
    assert (replica.up, replica.cache.leading([0]), replica.begin()) == (False, 0, None)
