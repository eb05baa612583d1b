"""Interfaces that are named for workers are tried before Gloo connects over them; tests/old/hosts cuts their links."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from paceline import env
from paceline.errors import LaunchError
from paceline.train.process import several_interfaces
from paceline.train.process.several_interfaces import check_interfaces


def _said(names_of_rank: list[list[str]]) -> list[str]:
    """What each worker, on a node of its own, is told; empty if all is well."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))

    def check(rank: int) -> str:
        facts = env.WorkerFacts(rank, len(names_of_rank), 0, 1, "tcp://127.0.0.1:1", "test")
        try:
            check_interfaces(names_of_rank[rank], store, facts)
        except LaunchError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(names_of_rank)) as pool:
        return list(pool.map(check, range(len(names_of_rank))))


@pytest.fixture(autouse=True)
def _a_node_for_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter("abc")
    monkeypatch.setattr(several_interfaces, "node_identity", lambda: next(names))


def test_interfaces_that_lead_to_each_other_are_accepted() -> None:
    assert _said([["lo", "lo"]] * 3) == ["", "", ""]


def test_all_workers_are_told_that_one_names_fewer() -> None:
    first, second = _said([["lo", "lo"], ["lo"]])
    assert first == second
    assert "name as many on every node" in first


def test_all_workers_are_told_of_an_interface_that_one_does_not_have() -> None:
    first, second = _said([["lo", "lo"], ["lo", "none0"]])
    assert first == second
    assert "cannot use the interface none0: There is no interface none0 with an address on this node" in first
    assert first.endswith("or leave it out of lo,none0 (interface, GLOO_SOCKET_IFNAME).")
