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
from paceline.launch import run_workers
from paceline.spec import Plan
from tests.ranks.launching import Stage, open_stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

BOUND_S = 4.0

TRAINING = """
import torch
import torch.distributed as dist
import paceline

run = paceline.init(global_batch_size=8, virtual_shards=8)
values = torch.ones(5)
for _ in range(3):
    dist.all_reduce(values)
"""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with open_stage(tmp_path) as stage:
        yield stage


def _fails(stage: Stage, body: str, world_size: int) -> tuple[WorkerFailed, dict[str, Any]]:
    with pytest.raises(WorkerFailed) as caught:
        run_workers(Plan(world_size=world_size), (stage.script(body),), run_dir=stage.run_dir, hang_timeout_s=BOUND_S)
    report: dict[str, Any] = json.loads((stage.run_dir / "failure.json").read_text())
    assert report["sentence"] == str(caught.value)
    assert caught.value.report == stage.run_dir / "failure.txt"
    return caught.value, report


def _late_s(stage: Stage, report: dict[str, Any]) -> float:
    """From the moment the culprit told to the moment it was noticed."""
    return float(report["noticed_at"]) - float((stage.folder / "gone").read_text())


@pytest.mark.parametrize(
    "loop",
    ["while True: pass", "time.sleep(100)", "lock = threading.Lock(); lock.acquire(); lock.acquire()"],
    ids=["busy", "asleep", "lock"],
)
def test_a_worker_that_hangs_in_python_is_named_with_its_line(stage: Stage, loop: str) -> None:
    error, report = _fails(
        stage,
        TRAINING
        + f"""
def stuck():
    tell("gone", repr(time.time()))
    {loop}
if RANK == 1:
    stuck()
dist.all_reduce(values)
""",
        3,
    )
    assert (report["cause"], report["ranks"]) == ("hung", [1])
    assert "ranks 0, 2 have waited for it" in str(error)
    assert _late_s(stage, report) <= BOUND_S
    assert "in stuck" in report["evidence"] and "program.py" in report["evidence"]
    waiting = [line for line in report["workers"] if "rank 1" not in line]
    assert len(waiting) == 2 and all("in all_reduce number" in line for line in waiting), waiting
    assert (stage.run_dir / "failure.txt").stat().st_mode & 0o777 == 0o600


def test_a_stopped_worker_is_named_though_it_can_say_nothing(stage: Stage) -> None:
    error, report = _fails(
        stage,
        TRAINING
        + """
if RANK == 2:
    tell("gone", repr(time.time()))
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(values)
""",
        3,
    )
    assert (report["cause"], report["ranks"]) == ("stopped", [2])
    assert "SIGSTOP" in str(error) and "kill -CONT" in report["next"]
    assert _late_s(stage, report) <= BOUND_S


def test_workers_that_wait_for_each_other_in_different_collectives(stage: Stage) -> None:
    error, report = _fails(
        stage,
        TRAINING
        + """
groups = [dist.new_group(), dist.new_group()]
tell("gone", repr(time.time()))
dist.all_reduce(values, group=groups[RANK])
""",
        2,
    )
    assert (report["cause"], report["ranks"]) == ("mismatch", [0, 1])
    assert "waited for each other" in str(error) and "--debug-comm" in report["next"]
    first, second = report["workers"]
    assert first.partition(" in ")[2] != second.partition(" in ")[2]
    assert _late_s(stage, report) <= BOUND_S


def test_a_long_computation_that_nobody_waits_for_is_no_hang(stage: Stage) -> None:
    began = time.monotonic()
    run_workers(
        Plan(world_size=2),
        (stage.script(TRAINING + "time.sleep(6)\ndist.all_reduce(values)"),),
        run_dir=stage.run_dir,
        hang_timeout_s=5.0,
    )
    assert time.monotonic() - began > 6
    assert not (stage.run_dir / "failure.json").exists()


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
    tell("gone", repr(time.time()))
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
