"""Faults x launchers: what each launcher tells of a worker that fails, how it ends, and what is left.

    python -m benchmarks.faults launch ray SIGKILL    # all launchers, or faults, where none is named

Two workers train and save every second step; before its fourth step rank 1 fails, or the launcher gets a signal. The
nodes of srun, ssh, mpirun and ray are namespaces of this machine. A table of Markdown: the cause that failure.json has,
the rank that it blames, the launcher's exit code, seconds from the fault to the launcher's end, processes left then,
and whether the newest complete checkpoint is good.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.kit.commands import user_environ
from tests.kit.nodes.cluster import Cluster, Node, NodeProcess
from tests.kit.nodes.mpirun import mpirun_argv
from tests.kit.nodes.ray_cluster import RAY_VARIABLES, ray_on
from tests.kit.nodes.slurm import slurm_on
from tests.kit.nodes.sshd import ssh_between
from tests.kit.stage import PROLOGUE, TRAINING
from tests.kit.waiting import wait_until

import paceline

PATIENCE_S = 120.0
MEMORY = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").is_dir() else Path("/sys/fs/cgroup")
FAULTS = {
    "raise": "raise ValueError('sample 17 is damaged')",
    "exit": "os._exit(3)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGSEGV": "import ctypes; ctypes.string_at(0)",
    "out of memory": "await_mark('limited'); hoard = [bytes(16 << 20).replace(b'\\0', b'x') for _ in range(1000)]",
    "hang in a collective": "park()",
    "hang in the loader": "",
    "SIGTERM": "time.sleep(1)",
    "Ctrl-C": "time.sleep(1)",
}
SCRIPT = """
RANK = int(next(os.environ[name] for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK") if name in os.environ))

def fault(run):
    if FAULT == "Ctrl-C" or FAULT == "SIGTERM":
        time.sleep(0.1)
    if RANK == 1 and run.steps == 3:
        await_mark("checkpoints/step-00000002/manifest.json")
        Path("/proc/self/comm").write_text("faulty-worker")
        tell("fault")
        {does}

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if FAULT == "hang in the loader" and RANK == 1 and (STAGE / "fault").exists():
            park()
        return data[index]

train(Samples(), num_workers=int(FAULT == "hang in the loader"))
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCH = ["-m", "paceline", "launch", "--hang-timeout", "6", "--out", "run"]
Start = Callable[[Path], NodeProcess]
"""Starts script.py of a folder."""


class Here:
    """This machine, in the place of a node."""

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, stdout: IO[bytes], stderr: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        return subprocess.Popen(
            argv, env=env, cwd=cwd, stdin=quiet, stdout=stdout, stderr=stderr, start_new_session=True
        )


def starting(argv: Sequence[str], node: Node | None = None, **extra: str) -> Start:
    def start(folder: Path) -> NodeProcess:
        environ = user_environ(OMP_NUM_THREADS="1", PACELINE_HANG_TIMEOUT="6", TMPDIR=str(folder), **extra)
        words = [*argv, str(folder / "script.py")]
        if node is None:
            return NodeProcess(Here(), words, environ, folder)  # type: ignore[arg-type]  # of which it needs no more
        return node.exec(words, env=environ | {"GLOO_SOCKET_IFNAME": ""}, cwd=folder)

    return start


@contextlib.contextmanager
def launchers(names: Sequence[str], folder: Path) -> Iterator[dict[str, Start]]:
    """How each of these launchers starts a script."""
    python = sys.executable
    found = {"launch": starting([python, *LAUNCH, "-n", "2"]), "torchrun": starting([python, *TORCHRUN])}
    with contextlib.ExitStack() as up:
        if set(names) - set(found):
            cluster = up.enter_context(Cluster(num_nodes=2))
            first = cluster.nodes[0]
            passed_on = ["PATH", "PACELINE_DEVICE", "PACELINE_HANG_TIMEOUT", "MASTER_ADDR=node0"]
            found["ssh"] = starting([python, *LAUNCH, "--hosts", "node0:1,node1:1"], first)
            found["srun"] = starting(["srun", "--nodes=2", "--ntasks-per-node=1", python], first)
            found["mpirun"] = starting(mpirun_argv("node0:1,node1:1", passed_on, []), first)
            found["ray"] = starting(
                [python, *LAUNCH, "--launcher", "ray", "--hosts", "node0:1,node1:1"], first, **RAY_VARIABLES
            )
            if {"ssh", "mpirun"} & set(names):
                up.enter_context(ssh_between(cluster.nodes, folder))
            if "srun" in names:
                up.enter_context(slurm_on(cluster.nodes, folder, cpus_per_node=1))
            if "ray" in names:
                up.enter_context(ray_on(cluster.nodes))
        yield {name: found[name] for name in names}


def processes(is_wanted: Callable[[Path], bool]) -> list[int]:
    """The processes of this machine, on all its nodes, that are wanted; those that wait to be reaped are none."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if is_wanted(place) and "State:\tZ" not in (place / "status").read_text():
                found.append(int(place.name))
    return found


def cell(start: Start, fault: str, folder: Path) -> list[str]:
    """The row of one fault under one launcher."""
    head = PROLOGUE.format(stage=str(folder), patience_s=PATIENCE_S) + f"FAULT = {fault!r}\n"
    (folder / "script.py").write_text(head + TRAINING + SCRIPT.format(does=FAULTS[fault]))
    launcher = start(folder)

    def of_the_run(place: Path) -> bool:
        return str(folder).encode() in (place / "cmdline").read_bytes()

    try:
        wait_until((folder / "fault").exists, "the fault", PATIENCE_S)
        began = time.monotonic()
        if fault == "out of memory":
            limit_memory(folder)
        if fault in ("SIGTERM", "Ctrl-C"):
            launcher.signal(signal.SIGTERM if fault == "SIGTERM" else signal.SIGINT)
        exit_code, seconds = launcher.wait(PATIENCE_S), time.monotonic() - began
        time.sleep(0.5)
        num_left = len(processes(of_the_run))
    except (TimeoutError, AssertionError) as problem:
        print(f"{problem}\n{launcher.output}", file=sys.stderr)
        return ["NO END", "", "", "", "", ""]
    finally:
        launcher.kill()
        for pid in processes(of_the_run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    (folder / "output").write_text(launcher.output)
    told: dict[str, Any] = {"cause": "", "ranks": []}
    for report in folder.glob("*/failure.json"):
        told = json.loads(report.read_text())
    states = [one.state for one in paceline.checkpoint.verify(folder / "checkpoints")]
    is_good = "good" in states and set(states) <= {"good", "unfinished"}
    ranks = ", ".join(map(str, told["ranks"]))
    return [told["cause"], ranks, str(exit_code), f"{seconds:.1f}", str(num_left), "good" if is_good else str(states)]


def limit_memory(folder: Path) -> None:
    """Put the faulty worker into a control group of 200 MB more than it has, and let it go on."""
    (pid,) = processes(lambda place: (place / "comm").read_text() == "faulty-worker\n")
    group = MEMORY / f"faults-{pid}"
    group.mkdir()
    limit = group / ("memory.max" if MEMORY.name == "cgroup" else "memory.limit_in_bytes")
    limit.write_text(str(200 << 20))
    (group / "cgroup.procs").write_text(str(pid))
    (folder / "limited").touch()


def main(words: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, as would launchers
    names = [word for word in words if word not in FAULTS] or ["launch", "torchrun", "srun", "ssh", "mpirun", "ray"]
    faults = [word for word in words if word in FAULTS] or list(FAULTS)
    print("| launcher | fault | cause | rank | exit code | s | left | checkpoint |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place, launchers(names, Path(place)) as starts:
        for name, start in starts.items():
            for fault in faults:
                folder = Path(place, name, fault.replace(" ", "-"))
                folder.mkdir(parents=True)
                print(f"| {name} | {fault} | {' | '.join(cell(start, fault, folder))} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
