"""The loss function is called once for each virtual shard, and once more where workers compare the loss of the same
samples: in the first two steps, before a checkpoint and at the end of an epoch. That call leaves no trace."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import ModelError
from tests.kit.train import StreamOf
from tests.kit.workers import run_ranks

NUM_SHARDS, NUM_STEPS = 4, 6


def _calls(
    folder: Path, job: dict[str, Any], every_steps: int | None, *, is_stream: bool = False
) -> tuple[list[int], dict[str, list[float]]]:
    """The calls of the loss function in each step, and what gradients and buffers are at the end of a step."""
    calls = 0
    seen: dict[str, list[float]] = {}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        loss: Tensor = (model(batch[0]) - batch[1]).square().mean()
        return loss

    checkpoint = {"dir": str(folder), "every_steps": every_steps, "every_minutes": None, "every_epoch": False}
    data = TensorDataset(torch.arange(96.0).view(48, 2).double(), torch.arange(48.0).view(48, 1).double())
    with paceline.init(
        global_batch_size=8,
        virtual_shards=NUM_SHARDS,
        precision="float64",
        **job,
        checkpoint=checkpoint if every_steps else {},
        progress=False,
    ) as run:
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        found = []
        for batch in run.batches(StreamOf(data) if is_stream else data):
            calls = 0
            run.step(batch, loss_fn)
            found.append(calls)
        seen = {name: value.flatten().tolist() for name, value in run.whole_state().items()}
    return found, seen


BITWISE, AVERAGED = {"parity": "bitwise"}, {"aggregation": {"method": "local_sgd", "sync_every": 2}}


@pytest.mark.parametrize("job", [{}, BITWISE, AVERAGED])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_shard_is_a_call_and_the_audit_is_one_more(num_workers: int, job: dict[str, Any], tmp_path: Path) -> None:
    own = NUM_SHARDS // num_workers
    for found, _ in run_ranks(_calls, num_workers, tmp_path, job, None):
        assert found == [own + 1, own + 1, *[own] * (NUM_STEPS - 3), own + 1]


def test_a_stream_whose_end_is_not_known_is_audited_in_its_first_steps_alone(tmp_path: Path) -> None:
    (found, _), _ = run_ranks(functools.partial(_calls, is_stream=True), 2, tmp_path, {}, None)
    assert found == [3, 3, *[2] * (NUM_STEPS - 2)]


def test_the_audit_before_a_checkpoint_changes_nothing(tmp_path: Path) -> None:
    with_saves = run_ranks(_calls, 2, tmp_path / "saves", BITWISE, 4)
    without = run_ranks(_calls, 2, tmp_path / "none", BITWISE, None)
    assert [found for found, _ in with_saves] == [[3, 3, 2, 3, 2, 3]] * 2
    assert [seen for _, seen in with_saves] == [seen for _, seen in without]


class _Switched(nn.Module):
    """Counts its calls in a buffer, once it is told to."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.counts = False

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.counts
        return self.scale * inputs


def test_a_buffer_that_begins_to_move_late_is_noticed_before_the_next_checkpoint() -> None:
    with paceline.init(global_batch_size=4, virtual_shards=2, progress=False) as run:
        run.prepare(model := _Switched(), torch.optim.SGD(model.parameters(), lr=0.01))
        batches = enumerate(run.batches(list(torch.ones(24, 1))), start=1)
        with pytest.raises(ModelError, match="'calls' did not change in the first 2 steps and does now"):
            for number, batch in batches:
                model.counts = number >= 4
                run.step(batch, lambda model, shard: model(shard).mean())
        assert number == NUM_STEPS


def _with_a_counter_under_pp() -> str:
    """What a run says of a loss that grows from call to call, which the workers of a pipeline cannot know of others."""
    calls = itertools.count()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2), nn.Linear(2, 1))
    try:
        with paceline.init(global_batch_size=8, virtual_shards=4, strategy="pp", progress=False) as run:
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), example=torch.ones(2, 2))
            for number, batch in enumerate(run.batches(list(torch.ones(24, 2)))):

                def loss_fn(model: nn.Module, shard: Any, first: int = int(number > 0)) -> Any:
                    return model(shard).mean() + first * next(calls)

                run.step(batch, loss_fn)
    except ModelError as problem:
        return f"step {number + 1}: {problem}"
    return "nothing"


def test_a_pipeline_compares_the_loss_too() -> None:
    for said in run_ranks(_with_a_counter_under_pp, 2):
        assert said.startswith("step 2: ") and "differs from call to call on rank" in said
