"""Requests wait for room: bounded in number and time, the important ones first."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from multidict import CIMultiDict

from router.errors import SaturatedError
from router.prompt import MOST_PRIORITY, priority_of
from router.waitlist import Waitlist


class Room:
    """So many places at a replica."""

    def __init__(self, places: int = 0) -> None:
        self.places = places
        self.taken: list[str] = []

    def take(self, who: str) -> Any:
        def choose() -> str:
            if self.places < 1:
                raise SaturatedError("saturated", "no room")
            self.places -= 1
            self.taken.append(who)
            return who

        return choose

    def give(self, waitlist: Waitlist, places: int = 1) -> None:
        self.places += places
        waitlist.room()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_without_places_to_wait_it_is_refused_at_once() -> None:
    with pytest.raises(SaturatedError, match="no room"):
        await Waitlist(0, 30.0).take("m", 0, Room().take("a"))


async def test_waiters_go_by_priority_and_then_as_they_came_and_nobody_overtakes() -> None:
    waitlist, room = Waitlist(10, 30.0), Room()
    tasks = []
    for who, priority in (("late", 5), ("first", 0), ("second", 0), ("early", -3)):
        tasks.append(asyncio.create_task(waitlist.take("m", priority, room.take(who))))
        await settle()
    assert len(waitlist) == 4
    room.places = 1
    newcomer = asyncio.create_task(waitlist.take("m", 0, room.take("newcomer")))
    await settle()
    # The newcomer found a place free, and others before it.
    assert room.taken == []
    room.give(waitlist, 0)
    await settle()
    assert room.taken == ["early"]
    room.give(waitlist, 4)
    await asyncio.gather(*tasks, newcomer)
    assert room.taken == ["early", "first", "second", "newcomer", "late"]
    assert len(waitlist) == 0


async def test_a_newcomer_that_is_better_than_all_that_wait_takes_its_chance_at_once() -> None:
    waitlist, room = Waitlist(10, 30.0), Room()
    waiting = asyncio.create_task(waitlist.take("m", 5, room.take("late")))
    await settle()
    room.places = 1
    assert await waitlist.take("m", 0, room.take("early")) == "early"
    room.give(waitlist)
    assert await waiting == "late"


async def test_a_line_that_is_stuck_holds_up_no_other() -> None:
    waitlist, full, free = Waitlist(10, 30.0), Room(), Room(1)
    stuck = asyncio.create_task(waitlist.take("m", 0, full.take("a")))
    await settle()
    assert await waitlist.take("other", 9, free.take("b")) == "b"
    stuck.cancel()
    await asyncio.gather(stuck, return_exceptions=True)
    assert len(waitlist) == 0


async def test_when_all_places_are_taken_the_least_important_gives_way() -> None:
    waitlist, room = Waitlist(2, 30.0), Room()
    tasks = [asyncio.create_task(waitlist.take(n, n, room.take(str(n)))) for n in (1, 2)]
    await settle()
    with pytest.raises(SaturatedError, match="2 requests wait") as caught:
        await waitlist.take("m", 2, room.take("no better"))
    assert (caught.value.code, caught.value.status, caught.value.retry_after) == ("queue full", 503, 2)
    better = asyncio.create_task(waitlist.take("m", 0, room.take("better")))
    with pytest.raises(SaturatedError, match="2 requests wait"):
        await tasks[1]
    room.give(waitlist, 2)
    assert await asyncio.gather(tasks[0], better) == ["1", "better"]


async def test_who_waits_too_long_is_refused_and_leaves_nothing_behind() -> None:
    waits: list[float] = []
    waitlist, room = Waitlist(10, 0.02), Room()
    waitlist.waited = waits.append
    with pytest.raises(SaturatedError) as caught:
        await waitlist.take("m", 0, room.take("a"))
    assert caught.value.code == "queue timeout"
    assert len(waitlist) == 0
    assert len(waits) == 1


async def test_room_that_nobody_tells_of_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.waitlist.LOOK_S", 0.01)
    waitlist, room = Waitlist(10, 30.0), Room()
    waiting = asyncio.create_task(waitlist.take("m", 0, room.take("a")))
    await settle()
    room.places = 1
    assert await waiting == "a"


async def test_of_all_that_wait_in_a_line_only_the_first_looks_for_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, looked_often = Counter[Any](), asyncio.Event()
    timeout = asyncio.timeout

    def counted(seconds: float | None) -> asyncio.Timeout:
        waits[seconds] += 1
        if waits[0.001] == 20:
            looked_often.set()
        return timeout(seconds)

    monkeypatch.setattr("router.waitlist.LOOK_S", 0.001)
    monkeypatch.setattr("asyncio.timeout", counted)
    waitlist, room = Waitlist(10, 30.0), Room()
    tasks = [asyncio.create_task(waitlist.take("m", 0, room.take(who))) for who in "abc"]
    await looked_often.wait()
    assert waits[None] == 2
    room.give(waitlist, 3)
    await asyncio.gather(*tasks)
    assert room.taken == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("header", "body", "priority"),
    [
        (None, None, 0),
        (None, 3, 3),
        ("-2", 3, -2),
        ("x", 3, 3),
        (None, True, 0),
        (None, "4", 4),
        (None, [1], 0),
        (None, float("inf"), 0),
        (None, 10**30, MOST_PRIORITY),
    ],
)
def test_the_priority_is_read_as_vllm_reads_it(header: str | None, body: Any, priority: int) -> None:
    headers = CIMultiDict({} if header is None else {"x-vllm-priority": header})
    assert priority_of(headers, body) == priority


# in a router


async def test_rq17_only_the_replica_below_its_limit_is_used_and_when_all_are_over_it_is_said_at_once(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    gate = asyncio.Event()
    engines = [await start_engine(answer=kit.gated(gate)) for _ in range(4)]
    lookup = kit.lookup(
        kit.matched("e0", 96), kit.matched("e1", 96), kit.matched("e2", 96), kit.matched("e3", 0)
    )
    router = await start_router(*engines, lookup=lookup, max_inflight=3)
    tasks = [asyncio.create_task(router.complete(list(range(100)))) for _ in range(9)]
    await kit.wait_until(lambda: sum(engine.open for engine in engines) == 9, "nine are sent")
    tasks += [asyncio.create_task(router.complete(list(range(100)))) for _ in range(3)]
    await kit.wait_until(lambda: [engine.open for engine in engines] == [3] * 4, "all are full")
    for _ in range(2):
        response = await router.complete(list(range(100)))
        assert (response.status, response.headers["Retry-After"]) == (503, "2")
        assert response.headers["x-warmroute-reason"] == "saturated"
    for lasts_s, expected in ((90.0, "8"), (100_000.0, "30"), (0.001, "1")):
        for name in ("e0", "e1", "e2", "e3"):
            router.parts.load.pace.forget((name, 0))
            router.parts.load.pace.ended((name, 0), lasts_s)
        # Twelve at once, of which one ends in a twelfth of what each of them lasts.
        assert (await router.complete(list(range(100)))).headers["Retry-After"] == expected
    assert await router.metric("saturated_total", reason="saturated") == 5
    assert [engine.most_open for engine in engines] == [3] * 4
    gate.set()
    await asyncio.gather(*tasks)


async def test_requests_wait_for_room_the_important_ones_first(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    gate = asyncio.Event()
    engine = await start_engine(answer=kit.gated(gate))
    router = await start_router(engine, max_inflight=1, queue_limit=3)
    first = asyncio.create_task(router.complete("first"))
    await kit.wait_until(lambda: engine.open == 1, "it is full")
    waiting = []
    for number, priority in enumerate((7, 0, -1)):
        waiting.append(asyncio.create_task(router.complete(f"p{priority}", priority=priority)))

        await kit.wait_until(lambda n=number: queued(router) == n + 1, "it waits")
    full = await router.complete("x", priority=9)
    assert (full.status, full.headers["x-warmroute-reason"]) == (503, "queue full")
    assert await router.metric("saturated_total", reason="queue full") == 1
    gate.set()
    assert [response.status for response in await asyncio.gather(first, *waiting)] == [200] * 4
    order = [body.split(b'"prompt": "')[1].split(b'"')[0] for body in engine.bodies]
    assert order == [b"first", b"p-1", b"p0", b"p7"]
    assert engine.most_open == 1
    await kit.wait_until(router.idle, "nothing is in flight")


async def test_rq11_a_client_that_leaves_the_queue_leaves_nothing_behind(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    gate = asyncio.Event()
    engine = await start_engine(answer=kit.gated(gate))
    router = await start_router(engine, max_inflight=1, queue_limit=3, queue_timeout_s=0.3)
    first = asyncio.create_task(router.complete("first"))
    await kit.wait_until(lambda: engine.open == 1, "it is full")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await router.complete("leaves")
    late = await router.complete("late")
    assert (late.status, late.headers["x-warmroute-reason"]) == (503, "queue timeout")
    assert queued(router) == 0
    gate.set()
    assert (await first).status == 200
    await kit.wait_until(router.idle, "nothing is in flight")
    assert engine.generated == 1


def queued(router: Any) -> float:
    value: float = router.parts.metrics.registry.get_sample_value("warmroute_router_queued")
    return value
