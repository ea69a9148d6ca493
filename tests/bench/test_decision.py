"""CPU of one routing decision, tokenising aside: the request read, its keys made or found, the map asked, a
stream chosen and booked. 32 replicas and a real map: four hold the whole prompt and the others its first
twentieth, or each holds another part. Once more with the load that each engine reported.

Then its parts for 8 replicas, of which one holds the prompt: what of a request's way is not relaying.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from events.schema import BlockStored, token_array
from indexer.reader import MapReader
from indexer.registration import Registration
from indexer.writer import MapWriter
from router.chooser import Chooser
from router.decider import Decider
from router.fleet import Fleet
from router.key_cache import KeyCache
from router.load import Load
from router.lookup import MapLookup
from router.marks import MARK_TOKENS
from router.metrics import RouterMetrics
from router.plan import Arrived, Planner
from router.policies import POLICIES
from router.prompt import RequestBody
from router.replicas import Replica, parse_replica
from router.reported import Reported
from router.settings import RouterSettings
from router.tokens import Tokens
from router.trust import Trust
from tests.bench.load import MODEL

REPLICAS = 32
PROMPT_TOKENS = 32_000
TAIL_TOKENS = 200
ROUNDS = 200
BODY = b'{"model": "%s", "prompt": "x"}' % MODEL.encode()
PATH = "/v1/completions"
NAMES = [f"replica-{number}" for number in range(REPLICAS)]


class Known:
    """Stands for the tokenizer: the tokens are there already."""

    def __init__(self) -> None:
        self.ids = array("I")

    async def tokens(self, body: RequestBody, replicas: Sequence[Replica]) -> Tokens:
        return Tokens(self.ids)


def few_hold_it(number: int, chance: random.Random) -> float:
    return 1.0 if number < 4 else 0.05


def all_differ(number: int, chance: random.Random) -> float:
    return chance.random()


def fill(
    folder: Path,
    tokens: array[int],
    block_size: int,
    share: Callable[[int, random.Random], float],
    names: Sequence[str] = NAMES,
) -> MapWriter:
    """A map in which each replica holds its share of the prompt."""
    chance, writer = random.Random(1), MapWriter(folder)
    for number, name in enumerate(names):
        count = int(share(number, chance) * (len(tokens) // block_size))
        with writer.group() as group:
            record = writer.open_stream(
                group,
                Registration(
                    instance_id=name, endpoint="tcp://127.0.0.1:1", model_name=MODEL, block_size=block_size
                ),
            )
            record.state = "live"
            hashes = [chance.getrandbits(64).to_bytes(8, "big") for _ in range(count)]
            if count:
                event = BlockStored(hashes, None, tokens[: count * block_size], block_size)
                group.blocks(record).store(event)
    return writer


def make(
    writer: MapWriter,
    session: aiohttp.ClientSession,
    keys: KeyCache | None,
    *,
    reports: bool,
    names: Sequence[str] = NAMES,
) -> tuple[Any, Any, Known]:
    fleet = Fleet([parse_replica(f"{name}=http://127.0.0.1:1,model={MODEL}") for name in names], session)
    lookup = MapLookup(Path("/nowhere"), timeout_s=5, keys=keys)
    lookup._reader = MapReader(writer.env, writer.tables)
    rules, known = RouterSettings().rules(), Known()
    planner = Planner(fleet, known, lookup, rules, RouterMetrics(), Trust(), asks_usage=True)  # type: ignore[arg-type]
    chooser = Chooser(Load(), random.Random(1), time.monotonic, mark_tokens=MARK_TOKENS)
    if reports:
        for name in names:
            said = Reported(running=3, waiting=1, capacity_tokens=500_000)
            chooser.load.report((name, 0), said, 0)
    decider = Decider(fleet, chooser, rules.default, POLICIES["least-loaded"])
    return planner, decider, known


async def cpu_ms(planner: Any, decider: Any, known: Known, prompt: Callable[[], array[int]]) -> float:
    """The fastest tenth of all rounds, as others share the machine; of all threads, as one may do a part."""
    times = []
    for number in range(ROUNDS + 5):
        known.ids = prompt()
        begun = time.process_time()
        plan = await planner.plan(Arrived(f"r{number}", BODY, PATH, {}))
        _, reservation = decider.decide(plan)
        times.append(time.process_time() - begun)
        assert plan.fallback is None
        reservation.release()
    return statistics.quantiles(times[5:], n=10)[0] * 1e3


async def test_a_decision_for_32k_tokens_over_32_replicas(tmp_path: Path) -> None:
    chance = random.Random(2)
    tokens = token_array(chance.choices(range(128_000), k=PROMPT_TOKENS))

    def tail() -> array[int]:
        return tokens[:-TAIL_TOKENS] + token_array(chance.choices(range(128_000), k=TAIL_TOKENS))

    table = Table("held", "block size", "prefix known, tail of 200: ms", "nothing known: ms")
    async with aiohttp.ClientSession() as session:
        for number, (share, block_size, reports) in enumerate(
            [
                (few_hold_it, 16, False),
                (few_hold_it, 64, False),
                (all_differ, 16, False),
                (all_differ, 64, False),
                (few_hold_it, 16, True),
            ]
        ):
            writer = fill(tmp_path / str(number), tokens, block_size, share)
            with writer.group():
                pass
            warm = await cpu_ms(*make(writer, session, KeyCache(1_000_000), reports=reports), tail)
            cold = await cpu_ms(*make(writer, session, None, reports=reports), tail)
            name = share.__name__.replace("_", " ") + (", loads reported" if reports else "")
            table.add_row(name, str(block_size), f"{warm:.2f}", f"{cold:.2f}")
            writer.close()
    console = Console(width=140)
    console.print(
        f"\nCPU of a decision: {PROMPT_TOKENS:,} tokens, {REPLICAS} replicas, fastest tenth of {ROUNDS}"
    )
    console.print(table)


async def parts_us(planner: Any, decider: Any, known: Known, prompt: Callable[[], array[int]]) -> list[float]:
    """The map's answer, the rest of the plan, choice and booking: the fastest tenth of each."""
    answers, plans, choices = [], [], []
    match = planner._lookup.match

    async def timed(*asked: Any) -> Any:
        begun = time.perf_counter()
        try:
            return await match(*asked)
        finally:
            answers.append(time.perf_counter() - begun)

    planner._lookup.match = timed
    for number in range(10 * ROUNDS):
        known.ids = prompt()
        begun = time.perf_counter()
        plan = await planner.plan(Arrived(f"r{number}", BODY, PATH, {}))
        planned = time.perf_counter()
        _, reservation = decider.decide(plan)
        choices.append(time.perf_counter() - planned)
        plans.append(planned - begun - answers[-1])
        reservation.first_byte(0.01)
        reservation.release()
    return [statistics.quantiles(times, n=10)[0] * 1e6 for times in (answers, plans, choices)]


async def test_the_parts_of_a_decision_over_8_replicas(tmp_path: Path) -> None:
    chance, names = random.Random(2), NAMES[:8]
    table = Table(
        "prompt tokens", "the map's answer: us", "the rest of the plan", "choice and booking", "all"
    )
    async with aiohttp.ClientSession() as session:
        for count in (150, 2_000, PROMPT_TOKENS):
            tokens = token_array(chance.choices(range(128_000), k=count))

            def tail(tokens: array[int] = tokens) -> array[int]:
                return tokens[:-20] + token_array(chance.choices(range(128_000), k=20))

            writer = fill(tmp_path / str(count), tokens, 16, lambda number, _: float(number == 0), names)
            with writer.group():
                pass
            made = make(writer, session, KeyCache(1_000_000), reports=True, names=names)
            parts = await parts_us(*made, tail)
            table.add_row(f"{count:,}", *(f"{part:.0f}" for part in parts), f"{sum(parts):.0f}")
            writer.close()
    Console(width=140).print(table)
