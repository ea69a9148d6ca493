"""The process of one shard: ``python -m indexer.shard``, started by the indexer that runs them all.

It is told its settings on standard input, as one line of JSON, and says on standard output where it listens,
or why it cannot start. It ends when its standard input does: so no shard outlives the indexer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

import msgspec

from indexer.errors import IndexerError, MapBusyError
from indexer.service import run
from indexer.shard_process import LOG_FORMAT, Order, Said


def main() -> int:
    """Runs the shard; the exit code."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    logging.basicConfig(level=order.log_level, format=LOG_FORMAT.format(number=order.number))
    for number in (signal.SIGINT, signal.SIGHUP):  # What a terminal sends is for the indexer, which ends us.
        signal.signal(number, signal.SIG_IGN)
    try:
        asyncio.run(_run(order))
    except IndexerError as error:
        _say(Said(error=str(error), busy=isinstance(error, MapBusyError)))
        return 2
    return 0


async def _run(order: Order) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def ended() -> None:
        if not os.read(sys.stdin.fileno(), 1 << 10):
            loop.remove_reader(sys.stdin.fileno())
            stop.set()

    loop.add_reader(sys.stdin.fileno(), ended)
    await run(order.settings, stop, lambda url: _say(Said(url=url)))


def _say(said: Said) -> None:
    print(msgspec.json.encode(said).decode(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
