"""What the events of a socket's monitor mean: who came, who left, and who never was an engine."""

import pytest
import zmq

from events.link import Link
from events.signals import Connected, Disconnected, Signal

FIRST, SECOND = 7, 8


def joins(link: Link, descriptor: int) -> list[Signal]:
    how = zmq.EVENT_ACCEPTED
    return link.on_event(how, descriptor, 1.0) + link.on_event(zmq.EVENT_HANDSHAKE_SUCCEEDED, descriptor, 1.0)


def leaves(link: Link, descriptor: int) -> list[Signal]:
    return link.on_event(zmq.EVENT_DISCONNECTED, descriptor, 2.0)


@pytest.mark.parametrize("binds", [False, True])
def test_an_engine_is_there_from_its_handshake_until_its_connection_ends(binds: bool) -> None:
    link = Link(binds=binds)
    assert link.on_event(zmq.EVENT_ACCEPTED, FIRST, 1.0) == []
    assert link.on_event(zmq.EVENT_HANDSHAKE_SUCCEEDED, FIRST, 1.0) == [Connected()]
    assert leaves(link, FIRST) == [Disconnected()]
    assert link.peers == 0


def test_who_never_shook_hands_is_no_engine_that_leaves() -> None:
    link = Link(binds=True)
    joins(link, FIRST)
    link.on_event(zmq.EVENT_ACCEPTED, SECOND, 1.0)
    link.on_event(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, SECOND, 1.0)
    assert leaves(link, SECOND) == []
    assert link.peers == 1


def test_of_several_engines_on_one_address_all_prove_themselves_when_one_left() -> None:
    link = Link(binds=True)
    joins(link, FIRST)
    joins(link, SECOND)
    assert leaves(link, FIRST) == [Disconnected(), Connected()]
    assert leaves(link, SECOND) == [Disconnected()]


def test_a_connection_of_ours_is_cut_until_zeromq_tries_again() -> None:
    link = Link(binds=False)
    link.on_event(zmq.EVENT_CONNECTED, FIRST, 1.0)
    leaves(link, FIRST)
    assert link.cut_at == 2.0
    link.on_event(zmq.EVENT_CONNECT_RETRIED, FIRST, 3.0)
    assert link.cut_at is None
    bound = Link(binds=True)
    joins(bound, FIRST)
    leaves(bound, FIRST)
    assert bound.cut_at is None, "who binds waits to be connected to"
