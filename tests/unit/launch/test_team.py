"""Workers of this node, seen from the process that started them: what is left to do beside them and after them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from paceline.launch import team
from paceline.launch.forking import ForkServer
from paceline.launch.hang import WorkerState
from paceline.launch.team import LaunchOptions, LocalTeam


class CountedForkServer:
    num_prepared = 0
    pid = None
    mark = b"PACELINE_FORKED_BY=nobody"

    def prepare(self, _variables: object) -> None:
        self.num_prepared += 1


@pytest.mark.parametrize("is_elastic", [False, True])
def test_only_a_run_that_restarts_prepares_its_next_start(
    is_elastic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = CountedForkServer()
    options = LaunchOptions(tmp_path, preload=("torch",), is_elastic=is_elastic)
    workers = LocalTeam(options, lambda _event: None, cast(ForkServer, server))
    workers._variables.append({})
    monkeypatch.setattr(workers, "_running", {0: None})
    monkeypatch.setattr(workers, "states", lambda: [WorkerState(rank=0, pid=100, trained_s=1.0)])
    workers.prepare_standby()
    monkeypatch.undo()
    workers.close()
    assert server.num_prepared == int(is_elastic)


def test_a_killed_process_that_does_not_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "REAP_WAIT_S", 0.05)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        team._reap([sleeper.pid])  # which nobody has killed
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
    monkeypatch.undo()
    team._reap([sleeper.pid])
    assert sleeper.poll() is not None
