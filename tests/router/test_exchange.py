from __future__ import annotations

import gc
from typing import Any


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
