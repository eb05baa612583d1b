"""For what the host waits in a step, after the first ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim_gpu.waits import COUNTED_STEPS, count, ways
from tests.sim_gpu.workers import run_on_gpus

pytestmark = pytest.mark.sim_gpu

ON_ONE_GPU = dict.fromkeys(
    ("float16", "bitwise", "bitwise, batch norm of shards"), ("train/nonfinite.py allows_update",)
)
"""Ways with waits; in all others there is none. In bitwise parity SGD takes the kernels that shards have, none of which
leaves an update out by itself."""
ON_TWO_GPUS = {
    "powersgd": ("comm/compressor.py is_finite",) * 2,
    "fsdp": ("parallel/mesh.py _sum_what_is_known",),
    "tp": ("parallel/mesh.py _sum_what_is_known",),
    "pp": ("parallel/mesh.py _sum_what_is_known",),
}
"""Beside the one for the non-finite check, which NCCL's workers all have: no update stands behind a sum that may be
aborted."""


def test_one_gpu_is_waited_for_only_where_its_kernels_cannot_skip_an_update(simulated_gpu: Path) -> None:
    (found,) = run_on_gpus(simulated_gpu, count, 1, 1, num_gpus=2)
    for way in ways(1):
        assert sum(found[way.name].values()) == COUNTED_STEPS * len(ON_ONE_GPU.get(way.name, ())), found[way.name]


@pytest.mark.slow
def test_workers_wait_for_what_must_be_known_before_an_update(simulated_gpu: Path) -> None:
    for found in run_on_gpus(simulated_gpu, count, 2, 2):
        for way in ways(2):
            if way.name not in ("local_sgd", "diloco"):  # their first outer steps are compared across workers
                expected = 1 + len(ON_TWO_GPUS.get(way.name, ()))
                assert sum(found[way.name].values()) == COUNTED_STEPS * expected, (way.name, found[way.name])
