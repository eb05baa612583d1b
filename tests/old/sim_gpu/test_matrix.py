"""Training on simulated GPUs gives what training on CPUs gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kit.sim_gpu.workers import run_on_gpus
from tests.kit.workers import run_ranks
from tests.old.ranks.training import Outcome, largest_difference
from tests.old.sim_gpu.cells import Cell, cells, cells_of_tests, run_cells

pytestmark = pytest.mark.sim_gpu


def test_lenet_learns_on_two_gpus_what_it_learns_on_a_cpu(simulated_gpu: Path) -> None:
    reference = Cell("lenet").train("cpu")
    for outcome in run_on_gpus(simulated_gpu, _lenet, 2):
        assert largest_difference(outcome, reference) < 1e-5
        assert outcome.metrics == pytest.approx(reference.metrics, rel=1e-4)


def _lenet(native: Any) -> Outcome:
    return Cell("lenet").train("cuda")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_gpus", [1, 2, 4])
def test_every_way_to_train_gives_on_gpus_what_it_gives_on_cpus(simulated_gpu: Path, num_gpus: int) -> None:
    chosen = cells_of_tests(num_gpus)
    on_gpus = run_on_gpus(simulated_gpu, _run_on_gpus, num_gpus, chosen, num_gpus=max(2, num_gpus), timeout_s=400)[0]
    on_cpus = run_ranks(run_cells, num_gpus, "cpu", chosen, timeout_s=400)[0]
    different = {
        cell.name: largest_difference(on_gpus[cell.name], on_cpus[cell.name])
        for cell in chosen
        if largest_difference(on_gpus[cell.name], on_cpus[cell.name]) > cell.tolerance
    }
    assert not different
    for cell in chosen:
        assert on_gpus[cell.name].metrics == pytest.approx(on_cpus[cell.name].metrics, rel=0.2 + cell.tolerance)


def _run_on_gpus(native: Any, chosen: list[Cell]) -> dict[str, Outcome]:
    return run_cells("cuda", chosen)


STRATEGIES = ("dp", "fsdp", "pp", "tp")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_checkpoints_go_on_from_gpus_to_cpus_and_back(simulated_gpu: Path, tmp_path: Path) -> None:
    gpu, cpu = tmp_path / "gpu", tmp_path / "cpu"
    run_on_gpus(simulated_gpu, _train_all_on_gpus, 2, gpu, 1)
    run_ranks(_train_all, 2, "cpu", cpu, 1)
    reference = run_ranks(_train_all, 2, "cpu", None, None)[0]
    from_gpus = run_ranks(_train_all, 2, "cpu", gpu, None)[0]
    from_cpus = run_on_gpus(simulated_gpu, _train_all_on_gpus, 2, cpu, None)[0]
    for strategy in STRATEGIES:
        assert largest_difference(from_gpus[strategy], reference[strategy]) < 1e-5, strategy
        assert largest_difference(from_cpus[strategy], reference[strategy]) < 1e-5, strategy
        assert len(from_gpus[strategy].losses) == len(from_cpus[strategy].losses) == 2, strategy


def _train_all(kind: str, folder: Path | None, max_steps: int | None) -> dict[str, Outcome]:
    by_name = {cell.name: cell for cell in cells(2)}
    outcomes = {}
    for strategy in STRATEGIES:
        cell = by_name.get(strategy, Cell("dp"))
        where = None if folder is None else folder / strategy
        outcomes[strategy] = cell.train(kind, checkpoint_dir=where, max_steps=max_steps)
    return outcomes


def _train_all_on_gpus(native: Any, folder: Path | None, max_steps: int | None) -> dict[str, Outcome]:
    return _train_all("cuda", folder, max_steps)
