"""Communicators are aborted whether or not torch's checks of collectives are wrapped around them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch.distributed as dist

from paceline.train.session.peer_watch import abort_communicators


class Communicator:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def name(self) -> str:
        return "nccl"

    def _group_start(self) -> None:
        self._calls.append("start")

    def abort(self) -> None:
        self._calls.append("abort")

    def _group_end(self) -> None:
        self._calls.append("end")


class Wrapper:
    """Like torch's: of the backend inside it has the name, and neither its groups of calls nor its abort."""

    def __init__(self, inside: Communicator) -> None:
        self.wrapped_pg = inside

    def name(self) -> str:
        return "nccl"


class Group:
    def __init__(self, backend: Communicator | Wrapper) -> None:
        self._backend = backend

    def _get_backend(self, _device: object) -> Communicator | Wrapper:
        return self._backend


def aborts(monkeypatch: pytest.MonkeyPatch, backends: Sequence[Communicator | Wrapper]) -> None:
    class World:
        pg_map = dict.fromkeys(map(Group, backends))

    monkeypatch.setattr(dist.distributed_c10d, "_world", World())
    abort_communicators()


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_every_communicator_is_aborted_in_one_group_of_calls(is_wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    inside = [Communicator(calls), Communicator(calls)]
    aborts(monkeypatch, [Wrapper(one) for one in inside] if is_wrapped else inside)
    assert calls == ["start", "abort", "abort", "end"]
