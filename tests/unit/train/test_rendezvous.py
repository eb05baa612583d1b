"""How workers find each other: no worker, and no agent that is alone, rests for as long as torch would."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace

import pytest

from paceline.env import WorkerFacts
from paceline.heartbeat import own_file, read_vitals
from paceline.launch.agent import OneNode
from paceline.train.process_group import _await_store
from paceline.train.session import StatusExchange


def test_a_worker_that_comes_before_the_store_goes_on_as_soon_as_it_is_there() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        facts = WorkerFacts(rank=1, world_size=2, init_method=f"tcp://127.0.0.1:{server.getsockname()[1]}")
        began, opened = time.monotonic(), threading.Timer(0.2, server.listen)
        opened.start()
        _await_store(facts, timeout_s=100.0)
        assert 0.2 <= time.monotonic() - began < 100.0
        opened.join()
        began = time.monotonic()
        _await_store(WorkerFacts(rank=0, world_size=2, init_method="tcp://127.0.0.1:1"), timeout_s=100.0)
        assert time.monotonic() - began < 100.0, "rank 0 serves the store itself"
    _await_store(WorkerFacts(rank=1, world_size=2, init_method="tcp://127.0.0.1:1"), timeout_s=0.1)  # torch tells of it


def test_an_agent_without_others_gives_workers_a_new_store_in_each_round_whose_port_no_other_run_is_given() -> None:
    alone = OneNode("127.0.0.1", 0, 0, 1, "run", 0)
    rounds = [alone.next_rendezvous() for _ in range(2)]
    assert [(one.rank, one.world_size) for one in rounds] == [(0, 1)] * 2
    assert not alone.use_agent_store and rounds[0].store is not rounds[1].store
    place = rounds[1].bootstrap_store_info
    assert place is not None and place.master_addr == "127.0.0.1"
    with pytest.raises(OSError, match="in use"), socket.socket() as of_another_run:
        of_another_run.bind((place.master_addr, place.master_port))
    socket.create_server((place.master_addr, place.master_port)).close()  # it shares the port, as torch's store does


def test_a_worker_that_waits_for_the_status_of_others_is_seen_to_wait_also_at_the_end_of_a_run() -> None:
    exchange, seen = StatusExchange(None), []
    exchange._in_flight = SimpleNamespace(wait=lambda: seen.append(read_vitals(own_file())))  # type: ignore[assignment]
    exchange.received()  # as `Session.finish` calls it
    assert seen[0].inside_s is not None and "exchange" in seen[0].collective
