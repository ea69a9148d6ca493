"""The block pool: what is hit, what is evicted, and in which order it is said."""

from hypothesis import given
from hypothesis import strategies as st

from events.schema import AllBlocksCleared, BlockRemoved, BlockStored
from simulator.pool import Block, BlockPool, Prefix

SIZE = 2


def prefix(tokens: list[int], salt: str | None = None) -> Prefix:
    return Prefix(tokens, SIZE, b"seed", salt)


def cache(pool: BlockPool, tokens: list[int]) -> Prefix:
    """A request that came and went: its full blocks are cached and free."""
    held, blocks = hold(pool, tokens)
    pool.free(blocks)
    return held


def hold(pool: BlockPool, tokens: list[int]) -> tuple[Prefix, list[Block]]:
    held = prefix(tokens)
    hits = pool.match(held.hashes, len(held.hashes))
    pool.touch(hits)
    blocks = hits + pool.allocate(-(-len(tokens) // SIZE) - len(hits))
    pool.store(held, blocks, len(hits), len(held.hashes))
    return held, blocks


def removed(pool: BlockPool) -> list[bytes]:
    return [one for event in pool.take_events() if isinstance(event, BlockRemoved) for one in event.hashes]


def test_the_null_block_never_holds_tokens() -> None:
    pool = BlockPool(5, SIZE)
    assert pool.capacity == 4
    assert 0 not in {block.id for block in pool.allocate(4)}
    assert pool.usage == 1.0


def test_a_prefix_is_hit_up_to_its_first_missing_block_and_to_the_limit() -> None:
    pool = BlockPool(9, SIZE)
    cache(pool, [1, 2, 3, 4, 5, 6])
    other = prefix([1, 2, 3, 4, 9, 9])
    assert len(pool.match(other.hashes, 3)) == 2
    assert len(pool.match(other.hashes, 1)) == 1
    assert pool.match(prefix([3, 4]).hashes, 1) == []


def test_the_tail_is_evicted_before_the_head_with_one_event_for_each_block() -> None:
    pool = BlockPool(4, SIZE)
    cached = cache(pool, [1, 2, 3, 4, 5, 6])
    pool.take_events()
    pool.allocate(2)
    assert removed(pool) == [cached.hashes[2], cached.hashes[1]]


def test_removals_come_before_the_store_that_needed_the_room() -> None:
    pool = BlockPool(3, SIZE)
    cache(pool, [1, 2, 3, 4])
    pool.take_events()
    cache(pool, [5, 6, 7, 8])
    kinds = [type(event) for event in pool.take_events()]
    assert kinds == [BlockRemoved, BlockRemoved, BlockStored]


def test_blocks_that_cannot_be_hit_are_used_again_before_anything_is_evicted() -> None:
    pool = BlockPool(4, SIZE)
    cached = cache(pool, [1, 2, 3])
    unhashed = pool.allocate(1)
    pool.free(unhashed)
    pool.take_events()
    assert pool.allocate(1) == unhashed
    assert len(pool.allocate(1)) == 1
    assert removed(pool) == []
    pool.allocate(1)
    assert removed(pool) == cached.hashes


def test_a_hit_takes_the_block_out_of_the_eviction_order() -> None:
    pool = BlockPool(4, SIZE)
    old = cache(pool, [1, 2])
    cache(pool, [3, 4])
    cache(pool, [1, 2])
    pool.take_events()
    pool.allocate(2)
    assert old.hashes[0] not in removed(pool)


def test_one_hash_can_be_in_two_blocks_and_each_is_removed_on_its_own() -> None:
    pool = BlockPool(4, SIZE)
    tokens = prefix([1, 2])
    for _ in range(2):
        blocks = pool.allocate(1)
        pool.store(tokens, blocks, 0, 1)
        pool.free(blocks)
    assert pool.cached_count == 2
    pool.take_events()
    pool.allocate(2)
    assert removed(pool) == tokens.hashes
    assert len(pool.match(tokens.hashes, 1)) == 1
    pool.touch(pool.match(tokens.hashes, 1))
    assert pool.free_count == 0


def test_reset_is_refused_while_a_request_holds_blocks_and_is_announced_once() -> None:
    pool = BlockPool(4, SIZE)
    held, blocks = hold(pool, [1, 2])
    pool.take_events()
    assert not pool.reset()
    pool.free(blocks)
    assert pool.reset()
    assert pool.match(held.hashes, 1) == []
    assert pool.take_events() == [AllBlocksCleared()]
    pool.allocate(3)
    assert pool.take_events() == []


def test_a_salt_keeps_prompts_apart_and_is_announced_for_block_0_only() -> None:
    pool = BlockPool(9, SIZE)
    salted = prefix([1, 2, 3, 4], "tenant")
    blocks = pool.allocate(2)
    pool.store(salted, blocks, 0, 2)
    (event,) = pool.take_events()
    assert isinstance(event, BlockStored)
    assert event.extra_keys == [["tenant"], None]
    plain = prefix([1, 2, 3, 4])
    assert not set(salted.hashes) & set(plain.hashes)
    assert salted.hashes == prefix([1, 2, 3, 4], "tenant").hashes


def test_hashes_differ_with_the_seed_and_with_everything_before_a_block() -> None:
    one, two = Prefix([1, 2, 7, 8], SIZE, b"a"), Prefix([1, 2, 7, 8], SIZE, b"b")
    assert not set(one.hashes) & set(two.hashes)
    assert prefix([1, 2, 7, 8]).hashes[1] != prefix([1, 3, 7, 8]).hashes[1]


def test_a_prefix_that_grows_has_the_hashes_of_one_made_whole() -> None:
    grown = prefix([1])
    for token in [2, 3, 4, 5]:
        grown.append(token)
    assert grown.hashes == prefix([1, 2, 3, 4, 5]).hashes


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.booleans()), max_size=40))
def test_events_alone_tell_how_many_copies_of_what_the_pool_holds(work: list[tuple[list[int], bool]]) -> None:
    pool = BlockPool(8, SIZE)
    held: list[list[Block]] = []
    copies: dict[bytes, int] = {}
    for tokens, keep in work:
        while held and pool.free_count < -(-len(tokens) // SIZE):
            pool.free(held.pop(0))
        _, blocks = hold(pool, tokens)
        if keep:
            held.append(blocks)
        else:
            pool.free(blocks)
        for event in pool.take_events():
            for block_hash in event.hashes if isinstance(event, (BlockStored, BlockRemoved)) else []:
                copies[block_hash] = copies.get(block_hash, 0) + (1 if isinstance(event, BlockStored) else -1)
        assert min(copies.values(), default=0) >= 0
        assert sum(copies.values()) == pool.cached_count
        for block_hash, count in copies.items():
            assert bool(count) == bool(pool.match([block_hash], 1))


def test_of_two_copies_the_one_stored_first_is_hit() -> None:
    pool = BlockPool(4, SIZE)
    tokens = prefix([1, 2])
    first, second = pool.allocate(1), pool.allocate(1)
    pool.store(tokens, first, 0, 1)
    pool.store(tokens, second, 0, 1)
    assert pool.match(tokens.hashes, 1) == first


def test_of_blocks_without_a_hash_the_tail_is_used_again_first() -> None:
    pool = BlockPool(6, SIZE)
    blocks = pool.allocate(3)
    pool.free(blocks)
    assert pool.allocate(3) == blocks[::-1]
