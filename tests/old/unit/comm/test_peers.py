"""Calls between workers: answered for those who know the secret, and for nobody else."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from paceline import env
from paceline.comm.parameter_server_async import peers as module
from paceline.comm.parameter_server_async.peers import Call, Peers
from paceline.errors import PeerLost

TIMEOUT_S = 60.0


def fails() -> None:
    raise ValueError("no such shard")


HANDLERS = {"double": lambda values: 2 * values, "fails": fails, "rank": lambda: threading.current_thread().name}


@contextlib.contextmanager
def two_workers(timeout_s: float = TIMEOUT_S, handlers: dict[str, Any] = HANDLERS) -> Iterator[tuple[Peers, Peers]]:
    store = HashStore()
    store.set_timeout(timedelta(seconds=TIMEOUT_S))
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda rank: Peers(store, rank, [0, 1], timeout_s, handlers, []), range(2)))
    try:
        yield both[0], both[1]
    finally:
        for one in both:
            one.close()


@pytest.fixture(params=["one node", "two nodes"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "two nodes":
        names = iter(["a", "b"])
        monkeypatch.setattr(module, "node_identity", lambda: next(names))
        monkeypatch.setattr("paceline.env.own_interface", lambda: "lo")
    return str(request.param)


def address(worker: Peers) -> Any:
    return worker._listening.getsockname()


def stranger(worker: Peers) -> socket.socket:
    connection = socket.socket(worker._listening.family, socket.SOCK_STREAM)
    connection.settimeout(TIMEOUT_S)
    connection.connect(address(worker))
    return connection


@pytest.mark.usefixtures("place")
def test_a_call_runs_there_and_its_answer_arrives() -> None:
    with two_workers() as (first, second):
        for caller, rank in ((first, 1), (second, 0), (first, 0)):
            answer = caller.call(rank, "double", torch.arange(5.0)).result("which doubles")
            assert torch.equal(answer, 2 * torch.arange(5.0))


@pytest.mark.usefixtures("place")
def test_who_does_not_know_the_secret_is_cut_off_before_anything_is_read() -> None:
    called: list[Any] = []
    with two_workers(handlers={"double": called.append}) as (_, second), stranger(second) as connection:
        assert len(connection.recv(32)) == 32  # the challenge
        connection.sendall(b"x" * 32 + (2**40).to_bytes(8, "big"))
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert not called


def test_sockets_of_one_node_are_in_a_folder_of_their_owner_alone() -> None:
    with two_workers() as (first, _):
        folder = Path(address(first)).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_between_nodes_only_the_named_interface_listens(place: str) -> None:
    with two_workers() as (first, _):
        assert place == "one node" or address(first)[0] == "127.0.0.1"


@pytest.mark.usefixtures("place")
def test_a_worker_that_is_gone_is_named_with_its_role() -> None:
    with two_workers() as (first, second):
        assert first.call(1, "double", 2).result("which doubles") == 4
        second.close()
        with pytest.raises(PeerLost, match="Worker 1, which doubles, cannot be reached any more") as caught:
            first.call(1, "double", 2).result("which doubles")
        assert caught.value.rank == 1


def test_a_worker_that_does_not_answer_in_time_is_lost() -> None:
    silent = threading.Event()
    with two_workers(timeout_s=0.2, handlers={"wait": lambda: silent.wait(TIMEOUT_S)}) as (first, _):
        call = first.call(1, "wait")
        with pytest.raises(PeerLost, match="timed out"):
            call.result("which waits")
        silent.set()


def test_a_late_answer_does_not_meet_the_next_call() -> None:
    may_end = threading.Event()

    def slow() -> str:
        may_end.wait(TIMEOUT_S)
        return "late"

    with two_workers(timeout_s=0.5, handlers={"slow": slow, "quick": lambda: "quick"}) as (first, _):
        with pytest.raises(PeerLost):
            first.call(1, "slow").result("which is slow")
        may_end.set()
        assert first.call(1, "quick").result("which is quick") == "quick"


def test_an_answer_that_cannot_be_sent_is_an_error_of_the_handler_and_the_connection_stays() -> None:
    with two_workers(handlers={"object": object, "one": lambda: 1}) as (first, _):
        with pytest.raises(RuntimeError, match="cannot hold a object"):
            first.call(1, "object").result("which answers")
        assert first.call(1, "one").result("which answers") == 1


def test_a_folder_for_temporary_files_with_a_space_or_a_long_name_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("my folder" + "x" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with two_workers() as (first, _):
        assert first.call(1, "double", 2).result("which doubles") == 4


def test_more_open_files_than_select_can_count() -> None:
    with two_workers() as (first, _):
        call = first.call(1, "double", 2)
        assert call.connection is not None
        high = fcntl.fcntl(call.connection.fileno(), fcntl.F_DUPFD, 1500)
        with socket.socket(fileno=high) as duplicate:
            assert Call(1, duplicate, time.monotonic() + TIMEOUT_S).is_done in (True, False)
        assert call.result("which doubles") == 4


def test_without_a_named_interface_it_is_the_address_on_the_way_to_the_rendezvous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.env.own_interface", lambda: "^docker0,lo")
    facts = env.WorkerFacts(0, 2, 0, 1, "tcp://127.0.0.1:1", "test")
    monkeypatch.setattr("paceline.env.worker_facts", lambda: facts)
    monkeypatch.setattr(module, "addresses", lambda *_: [])
    assert module._own_address() == "127.0.0.1"


def test_an_exception_of_a_handler_keeps_its_traceback() -> None:
    with two_workers() as (first, _):
        with pytest.raises(RuntimeError, match=r"(?s)On worker 1:.*def fails|On worker 1:.*no such shard"):
            first.call(1, "fails").result("which fails")
        with pytest.raises(RuntimeError, match="KeyError"):
            first.call(1, "no_such_handler").result("which fails")
