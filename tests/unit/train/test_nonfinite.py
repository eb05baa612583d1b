"""A step whose loss or gradient is not a number is named with its samples, and does what the job says: it is left
out, the weights go back to the last checkpoint, or the run ends; ten in a row end it in any case, also across a
resumed run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import ModelError
from paceline.parallel.pass_state import Buffers

RATE = 0.1


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    weights: list[float]
    gradients: list[list[float]]
    """The mean of the samples of each step, which is the gradient of a linear loss."""
    said: list[str]


def train(bad_steps: Collection[int], folder: Path | None = None, max_steps: int | None = None, **job: Any) -> Outcome:
    """Steps count from 1; in the bad ones a virtual shard's loss is no number."""
    said: list[str] = []
    gradients = []
    samples = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    keys = {"epochs": 2, "virtual_shards": 2, **job}
    with paceline.init(
        global_batch_size=4, checkpoint_dir=folder, max_steps=max_steps, progress=False, precision="float64", **keys
    ) as run:
        run.say = said.append
        model = nn.Linear(3, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))

        def loss_fn(model: nn.Module, shard: list[Tensor]) -> Tensor:
            loss: Tensor = model(shard[0].double()).mean()
            return loss * (float("nan") if run.steps + 1 in bad_steps else 1.0)

        for batch in run.batches(TensorDataset(samples)):
            gradients.append(torch.cat([shard[0] for shard in batch]).double().mean(0).tolist())
            run.step(batch, loss_fn)
        return Outcome(model.weight.detach().flatten().tolist(), gradients, said)


def weights_without(outcome: Outcome, left_out: Collection[int]) -> Any:
    kept = [gradient for step, gradient in enumerate(outcome.gradients, 1) if step not in left_out]
    return pytest.approx((-RATE * torch.tensor(kept, dtype=torch.float64).sum(0)).tolist(), abs=1e-12)


def test_a_bad_step_is_left_out_and_named_with_its_samples() -> None:
    found = train([4, 5])
    assert len(found.gradients) == 10
    assert found.weights == weights_without(found, [4, 5])
    named = [sentence for sentence in found.said if "nan" in sentence]
    assert len(named) == 2
    assert "Step 4" in named[0] and "weight" in named[0] and "samples" in named[0]


def test_weights_go_back_to_the_last_checkpoint_and_no_batch_comes_twice(tmp_path: Path) -> None:
    """The run is saved after step 4; what step 5 learned is lost."""
    rollback: dict[str, Any] = {"nonfinite": "rollback", "checkpoint": {"every_epoch": False, "every_minutes": None}}
    train([], tmp_path, max_steps=4, **rollback)
    found = train([6], tmp_path, **rollback)
    before = train([], max_steps=4)
    assert len(found.gradients) == 6  # steps 5 to 10
    kept = before.gradients + found.gradients[2:]
    assert found.weights == weights_without(Outcome([], kept, []), [])
    assert any("step-00000004" in sentence for sentence in found.said)


def test_a_schedule_goes_on_where_weights_go_back(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"nonfinite": "rollback", "checkpoint": {"every_steps": 2, "every_minutes": None}}
    rates = []
    with paceline.init(global_batch_size=2, virtual_shards=2, checkpoint_dir=tmp_path, progress=False, **keys) as run:
        run.say = lambda _sentence: None
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        run.prepare(model, optimizer, scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))

        def loss_fn(model: nn.Module, shard: list[Tensor]) -> Tensor:
            loss: Tensor = model(shard[0]).mean()
            return loss * (float("nan") if run.steps == 4 else 0.1)

        for batch in run.batches(TensorDataset(torch.ones(12, 1))):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            run.step(batch, loss_fn)
    assert rates == [1, 0.5, 0.25, 0.125, 0.0625, 0.0625]  # a step that is left out moves no schedule


@pytest.mark.parametrize(
    ("bad_steps", "job", "words"),
    [
        ([4], {"nonfinite": "stop"}, ["Step 4"]),
        ([1], {"nonfinite": "rollback"}, ["Step 1", "checkpoint"]),
        (range(1, 20), {"epochs": 4}, ["Step 10", "in a row"]),
    ],
)
def test_the_run_ends_where_it_cannot_go_on(
    bad_steps: Collection[int], job: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        train(bad_steps, tmp_path, **job)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_good_step_between_begins_the_count_again() -> None:
    bad_steps = [step for step in range(1, 20) if step != 10]
    assert len(train(bad_steps, epochs=4).gradients) == 20


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    train(range(3, 20), tmp_path, max_steps=7, epochs=4)
    with pytest.raises(ModelError, match="Step 12"):
        train(range(3, 20), tmp_path, epochs=4)


def test_a_run_that_ignores_bad_steps_learns_from_them() -> None:
    assert all(value != value for value in train([4], nonfinite="ignore").weights)


def test_masks_and_large_whole_numbers_in_buffers_stay_exact() -> None:
    model = nn.Module()
    kept = {"mask": torch.tensor([True, False]), "first": torch.tensor([2**63 - 1, 2**53 + 1]), "least": torch.inf}
    for name, value in kept.items():
        model.register_buffer(name, torch.as_tensor(value).clone())
    model.register_buffer("calls", torch.tensor(2**53 + 1))
    buffers = Buffers(model)
    buffers.begin_step()
    buffers.begin_pass()
    dict(model.named_buffers())["calls"].sub_(2**40 + 1)
    changes = torch.cat(buffers.changes(0, 1.0, torch.zeros(())))
    buffers.begin_pass()
    buffers.end_step(changes)
    assert all(torch.equal(getattr(model, name), torch.as_tensor(value)) for name, value in kept.items())
    assert int(dict(model.named_buffers())["calls"]) == 2**53 - 2**40


def test_buffers_that_layers_assign_begin_every_pass_with_the_values_of_the_step() -> None:
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(2))

    def compute() -> None:
        model.mean = dict(model.named_buffers())["mean"] + 1  # not in place

    buffers = Buffers(model)
    buffers.begin_step()
    sums = torch.zeros(buffers.num_sums)
    for shard in (0, 1):
        buffers.begin_pass()
        compute()
        sums += torch.cat(buffers.changes(shard, 0.5, sums))
        compute()  # as a backward pass through a checkpointed layer does
    buffers.end_step(sums)
    buffers.begin_step()
    assert dict(model.named_buffers())["mean"].tolist() == [1, 1]


def test_a_buffer_that_changes_in_the_memory_of_another_one_is_refused() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.zeros(3, 2))
    for row in (1, 2):
        model.register_buffer(f"row_{row}", dict(model.named_buffers())["table"][row])
    buffers = Buffers(model)
    buffers.begin_step()
    buffers.begin_pass()
    dict(model.named_buffers())["row_2"].add_(1)
    with pytest.raises(ModelError, match="row_2"):
        buffers.end_step(torch.cat(buffers.changes(0, 1.0, torch.zeros(()))))
