"""``warmroute`` in a process of its own, as people run it."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0


async def started(*arguments: str, **environment: str) -> tuple[Process, str]:
    """The process of ``warmroute ARGUMENTS``, and the URL at which it listens first."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "warmroute", *arguments),
        stderr=PIPE,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(START_S):
            while b"listening on " not in (line := await process.stderr.readline()):
                assert line, "it ended"
    except TimeoutError:
        process.kill()
        raise
    return process, line.decode().rpartition("listening on ")[2].strip()
