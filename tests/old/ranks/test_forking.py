"""A worker that is forked from a process which has loaded torch differs in nothing from one that was started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from paceline import env
from paceline.launch.commands import WORKER
from paceline.launch.forking import Adopted, ForkServer
from paceline.launch.run_workers import run_workers
from paceline.launch.team import LaunchOptions
from paceline.spec import Plan
from paceline.workflows.allocation import PRELOAD
from tests.old.ranks.launching import is_alive, wait_until

pytestmark = pytest.mark.timeout(240)

VARIABLES = {"OMP_NUM_THREADS": "1", "RANK": "1", "WORLD_SIZE": "2"}
LOOK_AROUND = """
import json, os, signal, socket, sys
print("to stderr", file=sys.stderr)
store = os.environ.pop("PACELINE_STORE_FD", None)

def is_open(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:  # the listing's own
        return False

facts = {
    "argv": sys.argv,
    "path": sys.path[0],
    "name": __name__,
    "main": sys.modules["__main__"].__file__,
    "environ": {name: value for name, value in sorted(os.environ.items()) if name != "_"},
    "priorities": sorted({os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")}),
    "session": os.getsid(0) == os.getpid(),
    "parent": os.getppid(),
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGCHLD)],
    "input": sys.stdin.read(),
    "cwd": os.getcwd(),
    "files": [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd != int(store or -1) and is_open(fd)],
    "endpoint": store and socket.socket(fileno=int(store)).getsockname(),
}
print(json.dumps(facts))
sys.exit(7)
"""


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer(["decimal", "no_such_module"])
    yield server
    server.close()


def load(server: ForkServer, variables: Mapping[str, str] = VARIABLES) -> None:
    server.prepare(variables)
    wait_until(lambda: server.has_loaded, 60.0)


def fork(server: ForkServer, script: Path) -> Adopted | None:
    return server.fork([str(script)], VARIABLES, (0, 1, 2), {})


def _looks_around(server: ForkServer | None, script: Path, store: socket.socket) -> str:
    """What the script says in a forked process, or in a new one."""
    lifeline, ours = os.pipe()
    out, err = script.with_suffix(".out"), script.with_suffix(".err")
    program, fd = (str(script), "--flag"), store.fileno()
    variables = {**VARIABLES, "PACELINE_LAUNCHED_AT": "1.5", "PACELINE_STORE_FD": str(fd)}
    process: Adopted | subprocess.Popen[bytes] | None
    try:
        with out.open("wb") as stdout, err.open("wb") as stderr:
            if server is not None:
                process = server.fork(
                    program, variables, (lifeline, stdout.fileno(), stderr.fileno()), {env.STORE_FD: fd}
                )
            else:
                process = subprocess.Popen(
                    [*WORKER, *program],
                    env={**os.environ, **variables},
                    stdin=lifeline,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=(fd,),
                    start_new_session=True,
                )
        assert process is not None
        assert process.wait() == 7, err.read_text()
    finally:
        os.close(lifeline)
        os.close(ours)
    assert err.read_text() == "to stderr\n"
    return out.read_text()


def test_it_sees_what_a_new_process_would_see(server: ForkServer, tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(LOOK_AROUND)
    load(server)
    with socket.create_server(("127.0.0.1", 0)) as store:
        new = _looks_around(None, script, store)
        for _ in range(3):  # one server is enough for many
            assert _looks_around(server, script, store) == new


def test_it_is_as_nice_as_a_new_process(tmp_path: Path) -> None:
    script = tmp_path / "nice.py"
    script.write_text(f"import os; open({str(tmp_path / 'niceness')!r}, 'w').write(str(os.nice(0)))")
    asker = (
        "from tests.old.ranks.test_forking import *\n"
        "with contextlib.closing(ForkServer(['decimal'])) as server:\n"
        f"    load(server)\n    assert fork(server, Path({str(script)!r})).wait() == 0"
    )
    subprocess.run(["nice", "-n", "3", sys.executable, "-c", asker], check=True, timeout=200)
    assert int((tmp_path / "niceness").read_text()) == os.nice(0) + 3


TRAINS = """
import torch, paceline
from torch import nn
with paceline.init(global_batch_size=8, epochs=2, progress=False) as run:
    model, _ = run.prepare(model := nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3)),
                           torch.optim.Adam(model.parameters()))
    samples = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.arange(40) % 3)
    for batch in run.batches(samples):
        run.step(batch, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
    print(run.weights_sha256(), torch.cuda._is_in_bad_fork())
"""


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_it_trains_like_a_new_process(tmp_path: Path) -> None:
    """What is loaded in advance may begin no thread that a worker needs, nor wake CUDA."""
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    variables = {**VARIABLES, "RANK": "0", "WORLD_SIZE": "1"}
    program = [str(script)]
    new = subprocess.run(
        [*WORKER, *program], env={**os.environ, **variables}, capture_output=True, text=True, timeout=100
    )
    assert new.stdout.endswith(" False\n"), new.stderr
    with contextlib.closing(ForkServer(PRELOAD)) as server, (tmp_path / "out").open("w+") as out:
        load(server, variables)
        with open(os.devnull) as nothing:
            forked = server.fork(program, variables, (nothing.fileno(), out.fileno(), out.fileno()), {})
        assert forked is not None and forked.wait() == 0
        out.seek(0)
        assert out.read() == new.stdout


def test_nobody_waits_for_a_server_that_loads(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("")
    server = ForkServer(["time", "no_such_module"])
    assert fork(server, tmp_path / "x.py") is None  # there is none yet
    server.prepare(VARIABLES)
    server.close()
    assert fork(server, tmp_path / "x.py") is None


def test_what_was_read_early_cannot_be_changed(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("")
    load(server)
    other = {**VARIABLES, "OMP_NUM_THREADS": "2"}
    assert server.fork([str(tmp_path / "x.py")], other, (0, 1, 2), {}) is None
    before = server.pid
    load(server, other)
    assert before is not None and server.pid != before and not is_alive(before)


def test_a_server_that_died_is_replaced(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("")
    load(server)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: server.pid is None or not is_alive(server.pid))
    assert fork(server, tmp_path / "x.py") is None
    load(server)
    forked = fork(server, tmp_path / "x.py")
    assert forked is not None and forked.wait() == 0


def test_a_forked_worker_outlives_the_server(server: ForkServer, tmp_path: Path) -> None:
    there = tmp_path / "there"
    (tmp_path / "x.py").write_text(f"import signal; open({str(there)!r}, 'w').close(); signal.pause()")
    load(server)
    forked = fork(server, tmp_path / "x.py")
    assert forked is not None
    wait_until(there.exists)
    server.close()
    assert is_alive(forked.pid)
    os.kill(forked.pid, signal.SIGKILL)
    assert forked.wait() == -signal.SIGKILL


def test_nobody_outlives_who_asked(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(f"import signal; open({str(tmp_path / 'there')!r}, 'w').close(); signal.pause()")
    asker = (
        "import sys, time\n"
        "from paceline.launch.forking import ForkServer\n"
        "server = ForkServer(['decimal']); server.prepare({'RANK': '0', 'WORLD_SIZE': '1'})\n"
        "while not server.has_loaded: time.sleep(0.01)\n"
        f"program = [{str(tmp_path / 'x.py')!r}]\n"
        "forked = server.fork(program, {'RANK': '0', 'WORLD_SIZE': '1'}, (0, 1, 2), {})\n"
        "print(server.pid, forked.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", asker], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        wait_until((tmp_path / "there").exists)
        process.kill()
    wait_until(lambda: not any(map(is_alive, pids)))


STRAY = """
import os, signal, sys
if os.fork() == 0:
    os.setsid()
    with open({mark!r} + ".draft", "w") as mark:
        mark.write(str(os.getpid()))
    os.rename({mark!r} + ".draft", {mark!r})
    signal.pause()
while not os.path.exists({mark!r}):
    pass
print([name for name in ("decimal", "this_is_new") if name in sys.modules], file=open({mark!r} + ".modules", "w"))
"""


def test_a_run_waits_for_the_server_and_leaves_nothing_behind(server: ForkServer, tmp_path: Path) -> None:
    mark, script = tmp_path / "stray", tmp_path / "x.py"
    script.write_text(STRAY.format(mark=str(mark)))
    run_workers(Plan(world_size=1), [str(script)], LaunchOptions(tmp_path / "run"), fork_server=server)
    assert (tmp_path / "stray.modules").read_text() == "['decimal']\n"
    wait_until(lambda: not is_alive(int(mark.read_text())))
    assert server.pid is not None and is_alive(server.pid)  # for the next run
