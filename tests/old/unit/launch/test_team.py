"""Workers of this node, seen from the process that started them: what is left to do beside them and after them."""

from __future__ import annotations

import errno
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from paceline.errors import LaunchError
from paceline.launch import team
from paceline.launch.commands import WorkerCommand
from paceline.launch.forking import ForkServer
from paceline.launch.hang import WorkerState
from paceline.launch.output import check_open_files
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


def _commands(count: int) -> list[WorkerCommand]:
    return [WorkerCommand(rank, 0, ("-c", "import time; time.sleep(60)"), {}) for rank in range(count)]


def test_more_workers_than_open_files_are_refused_before_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (100, 4096))
    sentence = r"23 workers on one node need 101 open files, and a process may have 100 here: ask for 22 workers"
    with pytest.raises(LaunchError, match=sentence):
        check_open_files(23)
    check_open_files(22)
    workers = LocalTeam(LaunchOptions(tmp_path, output="all"), lambda _event: None)
    monkeypatch.setattr(workers, "_popen", lambda *_, **__: pytest.fail("a worker is started"))
    with pytest.raises(LaunchError, match="23 workers on one node"):
        workers.start(_commands(23))
    workers.close()


def test_workers_that_were_started_end_at_once_where_another_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def popen(*_: object, **__: object) -> subprocess.Popen[bytes]:
        if len(started) == 3:
            raise OSError(errno.EMFILE, "Too many open files")
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True))
        return started[-1]

    workers = LocalTeam(LaunchOptions(tmp_path, output="all"), lambda _event: None)
    monkeypatch.setattr(workers, "_popen", popen)
    monkeypatch.setattr(team, "kernel_log_names", lambda _pid: pytest.fail("the kernel's log is read"))
    with pytest.raises(LaunchError, match="Worker 3 cannot be started on this machine: Too many open files"):
        workers.start(_commands(5))
    workers.close()
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 3
