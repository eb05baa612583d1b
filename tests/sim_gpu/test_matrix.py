"""Training on simulated GPUs gives what training on CPUs gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.spec import Job
from tests.ranks.training import Outcome, images, largest_difference, train
from tests.sim_gpu.workers import run_on_gpus

pytestmark = pytest.mark.sim_gpu


def test_lenet_learns_on_two_gpus_what_it_learns_on_a_cpu(simulated_gpu: Path) -> None:
    reference = _lenet()
    for outcome in run_on_gpus(simulated_gpu, _lenet_on_gpu, 2):
        assert largest_difference(outcome, reference) < 1e-5
        assert outcome.metrics == pytest.approx(reference.metrics, rel=1e-4)


def _lenet(**plan: Any) -> Outcome:
    job = Job.from_mapping({"global_batch_size": 16, "virtual_shards": 4, "model": {"name": "lenet"}})
    return train(job, images(64, (1, 28, 28)), images(31, (1, 28, 28)), **plan)


def _lenet_on_gpu(native: Any) -> Outcome:
    return _lenet(device_kind="cuda")
