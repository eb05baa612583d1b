from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from paceline.comm.store_answers import exchange_answers


class OtherWorkerMeanwhile:
    """A store for one thread: worker 1 of 2, who has answered, goes on to read while worker 0 waits."""

    def __init__(self) -> None:
        self._store = HashStore()
        self._store.set_timeout(timedelta(seconds=1))
        self._store.set("color1", "=blue")
        self.read_there: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def wait(self, keys: Sequence[str]) -> None:
        self.read_there = exchange_answers(self._store, "color", "blue", rank=1, world_size=2)
        self._store.wait(list(keys))


def test_worker_0_who_may_hold_the_store_returns_when_all_have_read() -> None:
    store: Any = OtherWorkerMeanwhile()
    assert exchange_answers(store, "color", "", rank=0, world_size=2) == ["", "blue"]
    assert store.read_there == ["", "blue"]


def test_a_worker_that_does_not_come_is_waited_for_as_long_as_the_store_says() -> None:
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=10))
    with pytest.raises(RuntimeError):
        exchange_answers(store, "color", "red", rank=1, world_size=2)
