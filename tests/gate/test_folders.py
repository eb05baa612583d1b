"""What a run leaves in its folder, and whom it lets in: one run at a time, its owner alone, and only states that are
whole; steps without an update are counted over interruptions."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from tests.kit.workers import run_ranks

NUM_STEPS = 24


def _loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    loss: Tensor = (model(inputs) - targets).square().mean()
    return loss


def _infinite(model: nn.Module, batch: Any) -> Tensor:
    return _loss(model, batch) * torch.inf


class _FailsInThirdStep(torch.optim.SGD):
    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        if self.num_steps == 3:
            for parameter in self.param_groups[0]["params"]:
                parameter.data.mul_(2)
            raise RuntimeError("in the middle of an update")
        return super().step(closure)


def _nothing(_step: int) -> None: ...


def _train(
    folder: Path,
    loss_fn: Callable[..., Tensor] = _loss,
    optimizer_of: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    after_step: Callable[[int], None] = _nothing,
    max_steps: int | None = None,
) -> tuple[list[int], str]:
    """The numbers of the steps made, and a fingerprint of the weights or the error that ended the run."""
    inputs = torch.linspace(0, 1, 4 * NUM_STEPS).view(-1, 1)
    job: dict[str, Any] = {"global_batch_size": 4, "virtual_shards": 2, "epochs": 1}
    made: list[int] = []
    try:
        with paceline.init(checkpoint_dir=folder, progress=False, max_steps=max_steps, **job) as run:
            run.prepare(model := nn.Linear(1, 1), optimizer_of(model.parameters(), lr=0.1))
            for batch in run.batches(TensorDataset(inputs, inputs.square())):
                run.step(batch, loss_fn)
                made.append(run.steps)
                after_step(run.steps)
            return made, run.weights_sha256()
    except (Exception, SystemExit) as end:
        return made, f"{type(end).__name__}: {end}"


def _end_at_four(step: int) -> None:
    if step == 4:
        os.kill(os.getpid(), signal.SIGTERM)


def _two_at_a_time(folder: Path) -> str:
    with paceline.init(checkpoint_dir=folder, progress=False) as run:
        run.prepare(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
        return _train(folder)[1]


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    (said,) = run_ranks(_two_at_a_time, 1, tmp_path)
    assert str(tmp_path) in said and "in use" in said, said


def test_what_a_run_writes_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        run_ranks(_train, 1, tmp_path / "run")
    finally:
        os.umask(before)
    written = list((tmp_path / "run").rglob("*"))
    assert written and not [path for path in written if stat.S_IMODE(path.stat().st_mode) & 0o077]


def _ended_and_gone_on(folder: Path) -> list[Any]:
    return [_train(folder, after_step=_end_at_four), _train(folder), _train(folder / "whole")]


def test_a_run_that_is_asked_to_end_is_saved_and_goes_on(tmp_path: Path) -> None:
    ((ended, gone_on, whole),) = run_ranks(_ended_and_gone_on, 1, tmp_path)
    assert ended[1] == f"SystemExit: {128 + signal.SIGTERM}" and len(ended[0]) < NUM_STEPS
    assert ended[0] + gone_on[0] == whole[0] == list(range(1, NUM_STEPS + 1))
    assert gone_on[1] == whole[1]


def _failed_and_gone_on(folder: Path) -> list[Any]:
    return [_train(folder, optimizer_of=_FailsInThirdStep), _train(folder), _train(folder / "whole")]


def test_a_state_from_the_middle_of_an_update_is_not_saved(tmp_path: Path) -> None:
    ((failed, gone_on, whole),) = run_ranks(_failed_and_gone_on, 1, tmp_path)
    assert failed == ([1, 2], "RuntimeError: in the middle of an update")
    assert gone_on[1] == whole[1]


def _without_manifests(folder: Path) -> str:
    _train(folder, max_steps=4)
    for file in folder.rglob("manifest.json"):
        file.unlink()
    return _train(folder)[1]


def test_a_run_whose_checkpoints_have_lost_their_manifests_does_not_begin_anew(tmp_path: Path) -> None:
    (said,) = run_ranks(_without_manifests, 1, tmp_path)
    assert "CheckpointError" in said and "manifest.json" in said, said


def _never_finite(folder: Path) -> list[Any]:
    return [_train(folder, _infinite, max_steps=6), _train(folder, _infinite)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_steps_without_an_update_end_a_run_after_ten_in_a_row_over_a_resume_too(
    num_workers: int, tmp_path: Path
) -> None:
    for first, second in run_ranks(_never_finite, num_workers, tmp_path):
        assert len(first[0]) == 6
        assert second[0] == [7, 8, 9] and "ModelError" in second[1], second
