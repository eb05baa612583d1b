"""Launched workers form a process group of torch's, and its errors do not hide the one that matters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.old.ranks.launching import Stage, open_stage

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


@pytest.mark.slow
def test_the_one_that_raised_is_the_cause(stage: Stage) -> None:
    error = stage.failure(
        JOIN + "if RANK == 1:\n    raise LookupError('label 11')\ndist.all_reduce(value)\npark()\n",
        world_size=3,
    )
    assert str(error).endswith("failed with LookupError: label 11")
    assert error.rank == 1
    stage.assert_nobody_left()


@pytest.mark.slow
def test_a_worker_that_left_early_is_named(stage: Stage) -> None:
    error = stage.failure(
        JOIN + "dist.all_reduce(value)\nif RANK == 1:\n    sys.exit()\ndist.all_reduce(value)\n", world_size=2
    )
    assert error.rank == 0
    assert "lost touch with the other workers (rank 1 had ended without an error)" in str(error)
