"""An error ends a run: what is saved of it, and what is not waited for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.train.session.checkpoints import Checkpoints
from paceline.train.session.trained_models import TrainedModels

SAMPLES = [(torch.ones(2), 0.0)] * 8


class _Broken(torch.optim.SGD):
    """Fails in the middle of its second update."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        if self.num_steps == 2:
            raise ValueError("half an update")
        return super().step(closure)


def _loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch[0]).square().mean()
    return loss


@pytest.mark.parametrize(("is_update", "saved"), [(False, ["step-00000001"]), (True, [])])
def test_after_any_error_a_worker_gives_up_waiting_and_saves_what_is_whole(
    is_update: bool, saved: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    rescue = Checkpoints.rescue

    def noted(self: Checkpoints, *, is_whole: bool) -> None:
        calls.append(is_whole)
        rescue(self, is_whole=is_whole)

    monkeypatch.setattr(Checkpoints, "rescue", noted)
    with (
        pytest.raises(ValueError, match=r"half an update|no loss"),
        paceline.init(global_batch_size=2, virtual_shards=2, checkpoint_dir=tmp_path) as run,
    ):
        model = nn.Linear(2, 1)
        run.prepare(model, (_Broken if is_update else torch.optim.SGD)(model.parameters(), lr=0.1))

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            if run.steps == 1 and not is_update:
                raise ValueError("no loss")
            return _loss(model, batch)

        for batch in run.batches(SAMPLES):
            run.step(batch, loss_fn)
    assert calls == [not is_update]
    assert [path.name for path in tmp_path.glob("step-*")] == saved


def test_running_statistics_are_again_those_before_a_step_that_failed(tmp_path: Path) -> None:
    """The sums of a step move them before its update; a loss function may raise an error after any pass."""
    with (
        pytest.raises(ValueError, match="no loss"),
        paceline.init(global_batch_size=2, virtual_shards=1, checkpoint_dir=tmp_path) as run,
    ):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            loss = _loss(model, batch)
            if run.steps == 1:
                raise ValueError("no loss")
            return loss

        for batch in run.batches([(torch.rand(2), 0.0) for _ in range(8)]):
            before = model.state_dict()["1.running_mean"].clone()
            run.step(batch, loss_fn)
    assert torch.equal(model.state_dict()["1.running_mean"], before)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]


def test_a_roll_back_that_fails_half_way_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []
    monkeypatch.setattr(Checkpoints, "rescue", lambda _self, *, is_whole: saved.append(is_whole))
    put = TrainedModels.put

    def broken(self: TrainedModels, *state: Any, **options: Any) -> None:
        put(self, *state, **options)
        raise OSError("half a checkpoint")

    monkeypatch.setattr(TrainedModels, "put", broken)
    with (
        pytest.raises(OSError, match="half a checkpoint"),
        paceline.init(
            global_batch_size=2,
            virtual_shards=2,
            nonfinite="rollback",
            checkpoint={"dir": str(tmp_path), "every_steps": 1},
        ) as run,
    ):
        model = nn.Linear(2, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(SAMPLES):
            run.step(batch, lambda model, batch: _loss(model, batch) * (math.nan if run.steps == 2 else 1.0))
    assert saved == [False]
