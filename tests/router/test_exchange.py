from __future__ import annotations

import asyncio
import gc
from typing import Any

from aiohttp import web


async def test_a_request_that_is_over_keeps_no_prompt_until_garbage_is_collected(
    start_engine: Any, start_router: Any
) -> None:
    router = await start_router(await start_engine())
    await router.complete([1, 2, 3])
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for stream in (False, True):
            assert (await router.complete([1, 2, 3], stream=stream)).status == 200
        gc.collect()
        left = {type(thing).__name__ for thing in gc.garbage if type(thing).__module__.startswith("router.")}
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.garbage.clear()
    assert not left


async def test_nor_does_one_whose_client_left_in_the_middle(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await kit.stream(request, [b"data: {}\n\n"] * 2, lambda: asyncio.sleep(60))

    engine = await start_engine(answer=answer)
    router = await start_router(engine)
    for _ in range(2):  # what is made once goes with the first of them
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            body = {"model": "m", "prompt": [1, 2, 3], "stream": True}
            async with router.client.post(f"{router.url}/v1/completions", json=body) as response:
                await response.content.readany()
                response.close()
            await kit.wait_until(lambda: engine.open == 0 and router.idle(), "it is over")
            await asyncio.sleep(0)
            gc.collect()
            kinds = {type(thing) for thing in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.enable()
            gc.garbage.clear()
    # A connection that has ended knows itself, and nothing of what was asked through it.
    ours = {kind.__name__ for kind in kinds if kind.__module__.startswith("router.")}
    assert ours <= {"_Connection", "RequestReader"}
