"""Doors on the loopback interface: opened, reached, closed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from paceline.errors import LaunchError
from paceline.launch import doors as network
from paceline.launch.doors import Door, open_doors, try_doors
from paceline.network_addresses import addresses

Opened = list[tuple[socket.socket, Door]]


@pytest.fixture
def opened() -> Iterator[Opened]:
    doors = open_doors("lo")
    yield doors
    for listening, _ in doors:
        listening.close()


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is taken, but where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_a_door_of_loopback_is_open_and_says_where_it_is(opened: Opened) -> None:
    (listening, door), *others = opened
    assert not others
    assert (door.address, door.interface) == ("127.0.0.1", "lo")
    assert listening.getsockname() == (door.address, door.port)
    assert door.bits_per_s >= 0
    assert try_doors([door], "lo") == [("lo", "")]


def test_a_closed_port_gives_the_reason_and_the_open_one_beside_it_is_found(opened: Opened, closed_port: int) -> None:
    door = opened[0][1]
    closed, found = try_doors([replace(door, port=closed_port), door], "lo")
    assert closed == (None, "Connection refused")
    assert found == ("lo", "")


def test_each_door_has_a_port_of_its_own(opened: Opened) -> None:
    again = open_doors("lo")
    try:
        assert again[0][1].port != opened[0][1].port
    finally:
        again[0][0].close()


def test_one_that_never_answers_does_not_hold_up_the_others(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "REACH_TIMEOUT_S", 0.2)
    full = socket.socket()
    waiting = [socket.socket() for _ in range(3)]
    try:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # its queue is soon full, and the kernel drops who comes next
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        silent = Door("127.0.0.1", full.getsockname()[1], "lo", 0.0)
        (name, problem), found = try_doors([silent, opened[0][1]], "lo")
        assert name is None and "timed out" in problem
        assert found == ("lo", "")
    finally:
        for one in (full, *waiting):
            one.close()


def test_no_door_to_try() -> None:
    assert try_doors([], "lo") == []


def test_loopback_counts_only_if_it_is_named() -> None:
    assert addresses("lo") == [("lo", "127.0.0.1")]
    assert not any(name == "lo" or address.startswith(("127.", "::1", "fe80")) for name, address in addresses())


def test_an_unknown_interface_is_named_with_those_there_are() -> None:
    with pytest.raises(LaunchError, match=r"no interface nowhere0 with an address .*\blo\b") as caught:
        open_doors("nowhere0")
    assert "\n" not in str(caught.value)


def test_a_way_from_no_interface_of_ours_is_told_in_words(opened: Opened) -> None:
    # Loopback was not named, so it does not count; there is no interface to speak of either.
    ((name, problem),) = try_doors([opened[0][1]])
    assert name is None
    assert problem and "None" not in problem
