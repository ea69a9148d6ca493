from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import aiohttp

from indexer.errors import IndexerAnswerError, IndexerUnreachableError
from indexer.registration import Registration
from router.fleet import Fleet
from router.registrar import Registrar, registrations, streams_of
from router.replicas import Health, Models, parse_replica


class Indexer:
    """An indexer as far as the registrar sees it."""

    def __init__(self) -> None:
        self.streams: dict[tuple[str, int], Registration] = {}
        self.calls = 0
        self.unregistered: list[tuple[str, str]] = []
        self.reachable = True
        self.refuses: str | None = None
        self.more: list[dict[str, Any]] = []

    async def register(self, registration: Registration) -> None:
        self.calls += 1
        if registration.instance_id == self.refuses:
            raise IndexerAnswerError("400 no", 400)
        self.streams[str(registration.instance_id), registration.dp_rank] = registration

    async def unregister(self, instance_id: str, model_name: str) -> None:
        if instance_id == self.refuses:
            raise IndexerAnswerError("400 no", 400)
        self.unregistered.append((instance_id, model_name))
        self.streams = {stream: said for stream, said in self.streams.items() if stream[0] != instance_id}

    async def workers(self) -> list[dict[str, Any]]:
        if not self.reachable:
            raise IndexerUnreachableError("no answer")
        return [
            {"instance_id": name, "endpoints": {str(rank): said.endpoint}}
            for (name, rank), said in self.streams.items()
        ] + self.more


def fleet_of(session: aiohttp.ClientSession, *lines: str) -> Fleet:
    fleet = Fleet([parse_replica(line) for line in lines], session)
    for replica in fleet.replicas.values():
        replica.models = Models("m", ("alias",))
    return fleet


def registrar_of(
    fleet: Fleet, indexer: Indexer, url: str | None = "http://i", clock: Callable[[], float] = time.monotonic
) -> Registrar:
    async def address() -> str | None:
        return url

    return Registrar(fleet, address, lambda _: indexer, interval_s=0.01, clock=clock)


LINES = ("a=http://h:1,events=tcp://h:5557,replay=tcp://h:5657,ranks=2", "b=http://h:2")


async def test_every_rank_with_events_is_registered_once(session: aiohttp.ClientSession) -> None:
    indexer = Indexer()
    registrar = registrar_of(fleet_of(session, *LINES), indexer)
    await registrar.reconcile()
    await registrar.reconcile()
    assert indexer.calls == 2
    assert indexer.streams["a", 1] == Registration(
        instance_id="a",
        endpoint="tcp://h:5558",
        replay_endpoint="tcp://h:5658",
        model_name="m",
        aliases=("alias",),
        dp_rank=1,
        url="http://h:1",
    )
    assert [registrar.registered(stream) for stream in (("a", 0), ("a", 1), ("b", 0))] == [True, True, False]


async def test_what_an_indexer_forgot_is_registered_again(session: aiohttp.ClientSession) -> None:
    indexer = Indexer()
    registrar = registrar_of(fleet_of(session, *LINES), indexer)
    await registrar.reconcile()
    indexer.streams.clear()
    await registrar.reconcile()
    assert set(indexer.streams) == {("a", 0), ("a", 1)}


async def test_a_changed_replica_is_registered_anew(session: aiohttp.ClientSession) -> None:
    indexer, fleet = Indexer(), fleet_of(session, *LINES)
    registrar = registrar_of(fleet, indexer)
    await registrar.reconcile()
    fleet.replicas["a"].models = Models("m2")
    await registrar.reconcile()
    assert {said.model_name for said in indexer.streams.values()} == {"m2"}


async def test_one_refused_registration_does_not_keep_the_others_out(session: aiohttp.ClientSession) -> None:
    indexer = Indexer()
    indexer.refuses = "a"
    registrar = registrar_of(fleet_of(session, LINES[0], "c=http://h:3,events=tcp://h:9"), indexer)
    await registrar.reconcile()
    assert set(indexer.streams) == {("c", 0)}
    assert registrar.last_error is not None
    assert "a rank 0" in registrar.last_error


async def test_it_goes_on_when_the_indexer_was_away(session: aiohttp.ClientSession, until: Any) -> None:
    indexer = Indexer()
    indexer.reachable = False
    registrar = registrar_of(fleet_of(session, *LINES), indexer)
    registrar.start()
    await until(lambda: registrar.last_error is not None, "the failure is noted")
    indexer.reachable = True
    await until(lambda: len(indexer.streams) == 2, "both ranks are registered")
    await registrar.close()


async def test_nothing_is_called_registered_while_the_indexer_cannot_be_asked(
    session: aiohttp.ClientSession,
) -> None:
    now = 100.0
    indexer = Indexer()
    registrar = registrar_of(fleet_of(session, *LINES), indexer, clock=lambda: now)
    assert (registrar.registered(("a", 0)), registrar.indexer()["answers"]) == (None, False)
    await registrar.reconcile()
    indexer.reachable = False
    now += 7
    await registrar.reconcile()
    assert registrar.registered(("a", 0)) is None
    said = registrar.indexer()
    assert (said["url"], said["answers"], said["last_answer_s"]) == ("http://i", False, 7.0)
    indexer.reachable = True
    await registrar.reconcile()
    assert registrar.registered(("a", 0)) is True
    assert indexer.calls == 2


async def test_nothing_is_asked_while_nobody_knows_the_address(session: aiohttp.ClientSession) -> None:
    indexer = Indexer()
    registrar = registrar_of(fleet_of(session, *LINES), indexer, url=None)
    await registrar.reconcile()
    assert indexer.calls == 0


async def test_a_topic_is_registered_only_in_bind_mode(session: aiohttp.ClientSession) -> None:
    fleet = fleet_of(
        session,
        "a=http://h:1,events=bind:tcp://0.0.0.0:5557,topic=kv@a@m",
        "b=http://h:2,events=tcp://h:5557,topic=kv@b@m",
    )
    topics = [registrations(replica)[0].topic for replica in fleet.replicas.values()]
    assert topics == ["kv@a@m", None]


def test_instance_ids_of_any_kind_are_one_with_their_text() -> None:
    assert streams_of([{"instance_id": 1, "endpoints": {"0": "x"}}, {"instance_id": "b"}]) == {("1", 0)}


def shared_port(name: str, *ranks: int) -> dict[str, Any]:
    listeners = {str(rank): {"status": "live", "registered": rank == 0} for rank in (0, *ranks)}
    return {
        "instance_id": name,
        "endpoints": dict.fromkeys(listeners, "tcp://h:5557"),
        "listeners": listeners,
    }


async def test_ev06_ranks_that_only_events_name_are_the_replicas_while_the_indexer_lists_them(
    session: aiohttp.ClientSession,
) -> None:
    indexer = Indexer()
    fleet = fleet_of(session, "a=http://h:1,events=tcp://h:5557", "b=http://h:2,ranks=2", "c=http://h:3")
    registrar = registrar_of(fleet, indexer)
    indexer.more = [shared_port("a", 2, 3), shared_port("b", 1, 7), {"instance_id": "c"}]
    await registrar.reconcile()
    assert [replica.streams() for replica in fleet.replicas.values()] == [
        [("a", 0), ("a", 2), ("a", 3)],
        [("b", 0), ("b", 1)],
        [("c", 0)],
    ]
    assert fleet.ranks("m") == {0, 1, 2, 3}
    indexer.more = []
    await registrar.reconcile()
    assert fleet.streams >= {("a", 0), ("b", 0), ("b", 1), ("c", 0)}
    assert not fleet.streams & {("a", 1), ("b", 2), ("d", 0)}


async def test_op01_a_replica_that_is_gone_is_unregistered_once_and_only_by_who_registered_it(
    session: aiohttp.ClientSession,
) -> None:
    indexer = Indexer()
    indexer.streams["foreign", 0] = Registration(instance_id="foreign", endpoint="tcp://h:1", model_name="m")
    fleet = fleet_of(session, *LINES, "c=http://h:3,events=tcp://h:9")
    registrar = registrar_of(fleet, indexer)
    await registrar.reconcile()
    del fleet.replicas["a"]
    indexer.refuses = "a"
    await registrar.reconcile()
    assert registrar.last_error is not None
    indexer.refuses = None
    for _ in range(3):
        await registrar.reconcile()
    assert indexer.unregistered == [("a", "m")]
    assert set(indexer.streams) == {("foreign", 0), ("c", 0)}
    assert registrar.last_error is None


async def test_op01_a_replica_that_another_worker_has_unregistered_is_gone_and_no_trouble(
    session: aiohttp.ClientSession,
    caplog: Any,
) -> None:
    class Forgot(Indexer):
        async def unregister(self, instance_id: str, model_name: str) -> None:
            self.unregistered.append((instance_id, model_name))
            raise IndexerAnswerError("404 no instance", 404, unknown=True)

    indexer, fleet = Forgot(), fleet_of(session, *LINES)
    registrar = registrar_of(fleet, indexer)
    await registrar.reconcile()
    del fleet.replicas["a"]
    await registrar.reconcile()
    await registrar.reconcile()
    assert indexer.unregistered == [("a", "m")]
    assert registrar.last_error is None
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def test_op04_a_replica_without_a_source_of_events_is_warned_of(
    session: aiohttp.ClientSession, caplog: Any
) -> None:
    fleet = fleet_of(session, *LINES, "c=http://h:3")
    fleet.replicas["a"].health = fleet.replicas["b"].health = Health.UP
    registrar = registrar_of(fleet, Indexer())
    await registrar.reconcile()
    assert "no source of KV events" not in caplog.text  # nobody has asked it yet
    fleet.replicas["b"].sources_asked = True
    for _ in range(3):
        await registrar.reconcile()
    told = [
        record.getMessage() for record in caplog.records if "no source of KV events" in record.getMessage()
    ]
    assert [message.split()[1] for message in told] == ["b"], "not a, which has one, nor c, which is not up"
