"""Endpoints on the loopback interface: opened, reached, closed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from paceline.errors import LaunchError
from paceline.launch import endpoints as network
from paceline.launch.endpoints import Endpoint, OpenEndpoint, open_endpoints, try_endpoints
from paceline.network_addresses import addresses

Opened = list[OpenEndpoint]


@pytest.fixture
def opened() -> Iterator[Opened]:
    endpoints = open_endpoints("lo")
    yield endpoints
    for each in endpoints:
        each.close()


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is taken, but where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_an_endpoint_of_loopback_is_open_and_says_where_it_is(opened: Opened) -> None:
    (each,) = opened
    endpoint = each.endpoint
    assert (endpoint.address, endpoint.interface) == ("127.0.0.1", "lo")
    assert each.store.getsockname() == (endpoint.address, endpoint.port)
    assert each.torch_store.getsockname() == (endpoint.address, endpoint.torch_port)
    assert endpoint.bits_per_s >= 0
    assert try_endpoints([endpoint], "lo") == [("lo", "")]


def test_a_closed_port_gives_the_reason_and_the_open_one_beside_it_is_found(opened: Opened, closed_port: int) -> None:
    endpoint = opened[0].endpoint
    closed, found = try_endpoints([replace(endpoint, port=closed_port), endpoint], "lo")
    assert closed == (None, "Connection refused")
    assert found == ("lo", "")


def test_each_endpoint_has_ports_of_its_own(opened: Opened) -> None:
    again = open_endpoints("lo")
    try:
        assert len({port for one in (*again, *opened) for port in (one.endpoint.port, one.endpoint.torch_port)}) == 4
    finally:
        again[0].close()


def test_one_that_never_answers_does_not_hold_up_the_others(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "TRY_TIMEOUT_S", 0.2)
    full = socket.socket()
    waiting = [socket.socket() for _ in range(3)]
    try:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # its queue is soon full, and the kernel drops who comes next
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        silent = Endpoint("127.0.0.1", full.getsockname()[1], 1, "lo", 0.0)
        (name, problem), found = try_endpoints([silent, opened[0].endpoint], "lo")
        assert name is None and "timed out" in problem
        assert found == ("lo", "")
    finally:
        for one in (full, *waiting):
            one.close()


def test_no_endpoint_to_try() -> None:
    assert try_endpoints([], "lo") == []


def test_loopback_counts_only_if_it_is_named() -> None:
    assert addresses("lo") == [("lo", "127.0.0.1")]
    assert not any(name == "lo" or address.startswith(("127.", "::1", "fe80")) for name, address in addresses())


def test_an_unknown_interface_is_named_with_those_there_are() -> None:
    with pytest.raises(LaunchError, match=r"no interface nowhere0 with an address .*\blo\b") as caught:
        open_endpoints("nowhere0")
    assert "\n" not in str(caught.value)


def test_a_way_from_no_interface_of_ours_is_told_in_words(opened: Opened) -> None:
    # Loopback was not named, so it does not count; there is no interface to speak of either.
    ((name, problem),) = try_endpoints([opened[0].endpoint])
    assert name is None
    assert problem and "None" not in problem
