"""Launched workers form a process group of torch's, and its errors do not hide the one that matters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.launching import PATIENCE_S, Stage, open_stage

JOIN = """
import datetime
import torch
import torch.distributed as dist
from paceline import env

facts = env.worker_facts()
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=facts.init_method, rank=facts.rank, world_size=facts.world_size,
    timeout=datetime.timedelta(seconds=30),
)
value = torch.full((4,), float(RANK))
"""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with open_stage(tmp_path) as stage:
        yield stage


def test_the_one_that_raised_is_the_cause(stage: Stage) -> None:
    error = stage.failure(
        JOIN + "if RANK == 1:\n    raise LookupError('label 11')\ndist.all_reduce(value)\npark()\n",
        world_size=3,
    )
    assert str(error).endswith("failed with LookupError: label 11")
    assert error.rank == 1
    stage.assert_nobody_left(timeout_s=1.0)


def test_the_one_that_was_killed_is_the_cause(stage: Stage) -> None:
    error = stage.failure(
        JOIN
        + """
dist.all_reduce(value)
if RANK == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(value)
park()
""",
        world_size=2,
    )
    assert "Rank 1 of 2" in str(error) and "SIGKILL" in str(error)


def test_a_worker_that_left_early_is_named(stage: Stage) -> None:
    error = stage.failure(
        JOIN + "dist.all_reduce(value)\nif RANK == 1:\n    sys.exit()\ndist.all_reduce(value)\n", world_size=2
    )
    assert error.rank == 0
    assert "lost touch with the other workers" in str(error)


def test_launches_of_one_instant_do_not_meet(stage: Stage) -> None:
    """Five pairs of jobs, all from one folder; each sums its own job's number over its two workers."""
    body = """
import tempfile
job = Path(os.environ["PACELINE_RUN_DIR"]).name
from paceline import env
import torch.distributed as dist
store = dist.FileStore(env.worker_facts().init_method.removeprefix("file://"), WORLD_SIZE)
store.set(f"job of {RANK}", job)
for peer in range(WORLD_SIZE):
    assert store.get(f"job of {peer}").decode() == job
assert store.add("workers", 1) <= WORLD_SIZE
tell(f"{job}.{RANK}.done")
"""
    for pair in range(5):
        jobs = [f"{pair}a", f"{pair}b"]
        launchers = [stage.launch(body, world_size=2, run_dir=stage.folder / job) for job in jobs]
        for launcher in launchers:
            assert launcher.wait(2 * PATIENCE_S) == 0, launcher.communicate()
        assert all((stage.folder / f"{job}.{rank}.done").exists() for job in jobs for rank in range(2))
