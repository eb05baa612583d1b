"""A worker of this machine holds up the others, or runs out of memory: named in time, with where it is."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import WorkerFailed
from paceline.launch.run_workers import run_workers
from paceline.launch.team import LaunchOptions
from paceline.spec import Plan
from tests.old.ranks.launching import HEARTBEAT, PATIENCE_S, Stage, open_stage

BOUND_S = 1.0
"""Nothing here has to happen within it: it is how long a hang has to last."""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with open_stage(tmp_path) as stage:
        yield stage


def _fails(stage: Stage, body: str, world_size: int, bound_s: float = BOUND_S) -> tuple[WorkerFailed, dict[str, Any]]:
    error = stage.failure(body, world_size=world_size, hang_timeout_s=bound_s)
    report: dict[str, Any] = json.loads((stage.run_dir / "failure.json").read_text())
    assert report["sentence"] == str(error)
    assert error.report == stage.run_dir / "failure.txt"
    return error, report


STUCK = (
    HEARTBEAT
    + """
def stuck():
    tell("gone")
    {loop}
if RANK == 1:
    stuck()
await_mark("gone")
all_reduce()
"""
)


@pytest.mark.parametrize(
    "loop",
    ["while True: pass", "lock = threading.Lock(); lock.acquire(); lock.acquire()"],
    ids=["busy", "lock"],
)
def test_a_worker_that_hangs_in_python_is_named_with_its_line(stage: Stage, loop: str) -> None:
    error, report = _fails(stage, STUCK.format(loop=loop), 2)
    assert (report["cause"], report["ranks"]) == ("hung", [1])
    assert "rank 0 has waited for it" in str(error)
    assert "in stuck" in report["evidence"] and "program.py" in report["evidence"]
    (waiting,) = (line for line in report["workers"] if "rank 1" not in line)
    assert "in all_reduce number 4" in waiting
    assert (stage.run_dir / "failure.txt").stat().st_mode & 0o777 == 0o600


def test_a_stopped_worker_is_named_though_it_can_say_nothing(stage: Stage) -> None:
    error, report = _fails(stage, STUCK.format(loop="os.kill(os.getpid(), signal.SIGSTOP)"), 2)
    assert (report["cause"], report["ranks"]) == ("stopped", [1])
    assert "SIGSTOP" in str(error) and "kill -CONT" in report["next"]


TRAINING = """
import torch
import torch.distributed as dist
import paceline

run = paceline.init(global_batch_size=8, virtual_shards=8)
values = torch.ones(5)
for _ in range(3):
    dist.all_reduce(values)
"""


@pytest.mark.slow
def test_workers_that_wait_for_each_other_in_different_collectives(stage: Stage) -> None:
    """The one test here with torch, whose own records say which collectives these are."""
    error, report = _fails(
        stage,
        TRAINING
        + """
groups = [dist.new_group(), dist.new_group()]
dist.all_reduce(values, group=groups[RANK])
""",
        2,
        bound_s=4.0,
    )
    assert (report["cause"], report["ranks"]) == ("mismatch", [0, 1])
    assert "waited for each other" in str(error) and "debug_comm" in report["next"]
    first, second = report["workers"]
    assert "in all_reduce number" in first and "in all_reduce number" in second
    assert first.partition(" in ")[2] != second.partition(" in ")[2]


ALONE = """
import torch
import paceline

with paceline.init(global_batch_size=8, virtual_shards=8, strategy="{strategy}", progress=False) as run:
    model = torch.nn.Linear(4, 2)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.ones(64, 4))
    for batch in run.batches(data):
        run.step(batch, lambda model, batch: model(batch[0]).square().mean())
        if run.rank == 0 and run.steps == 2:
            {call}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "call"),
    [
        ("dp", "run.evaluate(data, lambda model, batch: {'loss': model(batch[0])[:, 0]})"),
        ("fsdp", "run.whole_state()"),
    ],
)
def test_what_one_worker_alone_calls_is_named(stage: Stage, strategy: str, call: str) -> None:
    """Other collectives of the others, of another size, ended the process."""
    _, report = _fails(stage, ALONE.format(strategy=strategy, call=call), 2, bound_s=4.0)
    assert (report["cause"], report["ranks"]) == ("mismatch", [0, 1])
    assert f"in {call.partition('(')[0]}, which all workers have to call" in report["workers"][0]


@pytest.mark.slow
def test_collectives_can_be_compared_while_a_model_is_trained(stage: Stage) -> None:
    plan = Plan(world_size=2, debug_comm=True)
    script = stage.script(ALONE.format(strategy="dp", call="tell('alone')"))
    run_workers(plan, (script,), LaunchOptions(stage.run_dir))
    assert (stage.folder / "alone").exists()


def test_a_long_computation_that_nobody_waits_for_is_no_hang(stage: Stage) -> None:
    stage.run(HEARTBEAT + "time.sleep(1.5)", world_size=2, hang_timeout_s=0.5)
    assert not (stage.run_dir / "failure.json").exists()


def test_a_run_that_was_stopped_as_a_whole_goes_on(stage: Stage) -> None:
    """As by a paused container: the launcher and all its workers, for longer than a worker may hang."""
    body = HEARTBEAT + "tell(f'{RANK}.ready')\nall_reduce('go') if RANK == 0 else await_mark('go')"
    launcher = stage.launch(body, world_size=2, hang_timeout_s=3.0)
    stage.await_marks("0.ready", "1.ready")
    everybody = [launcher.pid, *stage.pids()]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3.2)
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    time.sleep(0.7)  # for several looks
    (stage.folder / "go").touch()
    assert launcher.wait(PATIENCE_S) == 0, launcher.communicate()


@pytest.mark.parametrize("output", ["rank0", "all"])
def test_a_worker_whose_output_nobody_reads_does_not_hang(stage: Stage, output: str) -> None:
    """Rank 0 writes to the launcher's standard output, rank 1 through the launcher where it shows all."""
    writer = 0 if output == "rank0" else 1
    body = (
        HEARTBEAT
        + f"""
if RANK == {writer}:
    tell("writes")
    sys.stdout.write("x" * 1_000_000)
    tell("written")
else:
    await_mark("writes")
    all_reduce(until="written")
"""
    )
    launcher = stage.launch(body, world_size=2, hang_timeout_s=2.0, output=output)
    stage.await_marks("writes")
    time.sleep(2.5)
    assert launcher.poll() is None and not (stage.folder / "written").exists()
    out, err = launcher.communicate(timeout=PATIENCE_S)
    assert (launcher.returncode, out.count("x"), err) == (0, 1_000_000, "")


def _limited_cgroup(limit_bytes: int) -> Path | None:
    """A new memory control group with a limit, or None where this machine lets nobody make one."""
    own = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), None)
    if own is not None:
        parent, limit = Path("/sys/fs/cgroup/memory") / own.split(":")[2].lstrip("/"), "memory.limit_in_bytes"
    else:
        line = Path("/proc/self/cgroup").read_text().splitlines()[-1]
        parent, limit = Path("/sys/fs/cgroup") / line.split(":")[2].lstrip("/"), "memory.max"
    group = parent / f"paceline-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_bytes))
    except OSError:
        if group.exists():
            group.rmdir()
        return None
    return group


def test_a_worker_killed_for_memory_is_told_from_one_killed_by_hand(stage: Stage) -> None:
    group = _limited_cgroup(300 << 20)
    if group is None:
        pytest.skip("this machine lets nobody make a memory control group")
    try:
        error, report = _fails(
            stage,
            f"""
if RANK == 1:
    Path({str(group)!r}, "cgroup.procs").write_text(str(os.getpid()))
    hoard = []
    while True:
        hoard.append(b"x" * (16 << 20))
park()
""",
            2,
        )
    finally:
        group.rmdir()
    assert (report["cause"], report["ranks"]) == ("out_of_memory", [1])
    assert "killed by the kernel: out of memory" in str(error)
    assert error.exit_code == 128 + signal.SIGKILL


BITWISE = """
import threading

import torch

import paceline

data = [(torch.full((4,), float(index)), torch.ones(1)) for index in range(32)]
with paceline.init(parity="bitwise", virtual_shards=4, global_batch_size=8, epochs=9) as run:
    model = torch.nn.Linear(4, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.001))
    for batch in run.batches(data):
        if run.steps == 2 and RANK == 1:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        run.step(batch, lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
"""


@pytest.mark.slow
def test_who_waits_in_a_sum_of_bitwise_parity_is_seen_to_wait(stage: Stage) -> None:
    error, report = _fails(stage, BITWISE, 2, bound_s=15.0)
    assert (report["cause"], report["ranks"]) == ("hung", [1])
    assert "rank 0 has waited for it" in str(error)
