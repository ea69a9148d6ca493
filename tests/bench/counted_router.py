"""The ``warmroute`` command, which writes its loop's tasks to the file ``COUNT_TASKS_TO`` at SIGUSR1."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import warmroute
from router import service

serve = service.serve


def write_count() -> None:
    names = sorted(task.get_name() for task in asyncio.all_tasks())
    told = Path(os.environ["COUNT_TASKS_TO"])
    half = told.with_suffix(".half")
    half.write_text("\n".join(names))
    half.rename(told)


async def counted(*arguments: Any, **more: Any) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, write_count)
    await serve(*arguments, **more)


if __name__ == "__main__":
    service.serve = counted
    warmroute.run()
