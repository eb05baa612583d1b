"""For what the host waits in a step, after the first ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.sim_gpu.workers import run_on_gpus
from tests.old.sim_gpu.waits import COUNTED_STEPS, count, ways

pytestmark = pytest.mark.sim_gpu

WITH_A_WAIT = ("bitwise", "bitwise, batch norm of shards")
"""Ways that wait for one GPU once in a step. In bitwise parity SGD takes the kernels that shards have, none of which
leaves an update out by itself; in all other ways there is no wait."""


def test_one_gpu_is_waited_for_only_where_its_kernels_cannot_skip_an_update(simulated_gpu: Path) -> None:
    (found,) = run_on_gpus(simulated_gpu, count, 1, 1, num_gpus=2)
    for way in ways(1):
        assert sum(found[way.name].values()) == COUNTED_STEPS * (way.name in WITH_A_WAIT), found[way.name]


@pytest.mark.slow
def test_workers_wait_once_for_what_must_be_known_before_an_update(simulated_gpu: Path) -> None:
    """For the sum of all workers' gradients. An update behind one that may be aborted, because a worker is lost, would
    spoil the last whole step; and the script goes on by one that is made, so that it cannot be unmade a step later."""
    for found in run_on_gpus(simulated_gpu, count, 2, 2):
        for way in ways(2):
            if way.name not in ("local_sgd", "diloco"):  # their first outer steps are compared across workers
                assert sum(found[way.name].values()) == COUNTED_STEPS, (way.name, found[way.name])
                assert all("train/steps/nonfinite.py" in place for place in found[way.name]), found[way.name]
