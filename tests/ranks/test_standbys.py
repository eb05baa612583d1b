"""A process that has loaded what workers load becomes one, and differs in nothing from one that was started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from paceline.launch.commands import WORKER
from paceline.launch.standbys import Standbys
from tests.ranks.launching import is_alive, wait_until

pytestmark = pytest.mark.timeout(60)

VARIABLES = {"OMP_NUM_THREADS": "1", "RANK": "1", "WORLD_SIZE": "2"}
LOOK_AROUND = """
import json, os, socket, sys
print("to stderr", file=sys.stderr)
store = os.environ.pop("PACELINE_STORE_FD", None)
facts = {
    "argv": sys.argv,
    "path": sys.path[0],
    "name": __name__,
    "main": sys.modules["__main__"].__file__,
    "environ": {name: value for name, value in sorted(os.environ.items()) if name != "_"},
    "priorities": sorted({os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")}),
    "session": os.getsid(0) == os.getpid(),
    "input": sys.stdin.read(),
    "cwd": os.getcwd(),
    "door": store and socket.socket(fileno=int(store)).getsockname(),
}
print(json.dumps(facts))
sys.exit(7)
"""


@pytest.fixture
def standbys() -> Iterator[Standbys]:
    standbys = Standbys(["decimal", "no_such_module"])
    yield standbys
    standbys.close()


def keep_loaded(standbys: Standbys, number: int, variables: Mapping[str, str] = VARIABLES) -> None:
    def are_there() -> bool:
        standbys.keep(number, variables)
        return standbys.num_loaded == number

    wait_until(are_there, 20.0)


def _looks_around(standbys: Standbys | None, script: Path, store: socket.socket) -> str:
    """What the script says as a standby, or as a new process."""
    lifeline, ours = os.pipe()
    out, err = script.with_suffix(".out"), script.with_suffix(".err")
    argv, fd = (*WORKER, str(script), "--flag"), store.fileno()
    variables = {**VARIABLES, "PACELINE_LAUNCHED_AT": "1.5", "PACELINE_STORE_FD": str(fd)}
    try:
        with out.open("wb") as stdout, err.open("wb") as stderr:
            if standbys is not None:
                process = standbys.take(argv, variables, (lifeline, stdout.fileno(), stderr.fileno()), fd)
                assert process is not None
            else:
                process = subprocess.Popen(
                    argv,
                    env={**os.environ, **variables},
                    stdin=lifeline,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=(fd,),
                    start_new_session=True,
                )
        assert process.wait(20) == 7, err.read_text()
    finally:
        os.close(lifeline)
        os.close(ours)
    assert err.read_text() == "to stderr\n"
    return out.read_text()


def test_it_sees_what_a_new_process_would_see(standbys: Standbys, tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(LOOK_AROUND)
    keep_loaded(standbys, 1)
    with socket.create_server(("127.0.0.1", 0)) as store:
        assert _looks_around(standbys, script, store) == _looks_around(None, script, store)


def test_one_is_taken_before_it_has_loaded(standbys: Standbys, tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(LOOK_AROUND)
    standbys.keep(1, VARIABLES)
    with socket.create_server(("127.0.0.1", 0)) as store:
        assert _looks_around(standbys, script, store)


def test_what_was_read_early_cannot_be_changed(standbys: Standbys) -> None:
    keep_loaded(standbys, 1)
    assert standbys.take([*WORKER, "x"], {**VARIABLES, "OMP_NUM_THREADS": "2"}, (0, 1, 2), None) is None
    assert standbys.num_loaded == 0


def test_another_program_gets_none(standbys: Standbys) -> None:
    keep_loaded(standbys, 1)
    assert standbys.take([sys.executable, "x.py"], VARIABLES, (0, 1, 2), None) is None
    assert standbys.num_loaded == 1


def test_there_are_as_many_as_wanted_and_none_that_died(standbys: Standbys, tmp_path: Path) -> None:
    keep_loaded(standbys, 2)
    first, second = standbys.pids
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not is_alive(first))
    (tmp_path / "x.py").write_text("")
    taken = standbys.take([*WORKER, str(tmp_path / "x.py")], VARIABLES, (0, 1, 2), None)
    assert taken is not None and taken.pid == second
    assert taken.wait(20) == 0
    assert standbys.pids == []
    keep_loaded(standbys, 1, {**VARIABLES, "OMP_NUM_THREADS": "2"})
    (old,) = standbys.pids
    keep_loaded(standbys, 1)  # made for other variables, it could not be used
    assert standbys.pids != [old] and not is_alive(old)


def test_none_outlives_who_keeps_it() -> None:
    keeper = (
        "import sys, time; from paceline.launch.standbys import Standbys\n"
        "standbys = Standbys(['decimal']); standbys.keep(1, {}); print(*standbys.pids, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", keeper], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
