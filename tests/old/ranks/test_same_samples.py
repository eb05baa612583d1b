"""Workers whose data sets differ are refused: each would train on samples of its own, or on those of others' tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.errors import DataError
from paceline.spec import Job, Plan
from tests.kit.workers import run_ranks

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SAMPLES = TensorDataset(INPUTS, INPUTS.sum(1))


class _Noisy(Dataset[Any]):
    """Draws by the global generators, which are seeded for each sample, and names a file of this worker's."""

    def __init__(self, rank: int) -> None:
        self._path = f"/local/{rank}"

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> Any:
        inputs = INPUTS[index] * np.random.uniform(0.9, 1.1)
        return inputs, inputs.sum(), torch.tensor(float("nan")), f"{self._path}/{index}.png"


def _rows(samples: list[Any]) -> tuple[Tensor, ...]:
    """A list of another length for every shard."""
    return torch.stack([one[0] for one in samples]), torch.stack([one[1] for one in samples])


def _loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = (model(batch[0]).squeeze(1) - batch[1]).square().mean()
    return loss


def _measure(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"error": (model(batch[0]).squeeze(1) - batch[1]).square()}


def _data(kind: str, rank: int) -> Any:
    if kind == "same":
        return SAMPLES
    if kind == "split":  # without a seed, before the run begins
        return Subset(SAMPLES, np.random.default_rng(rank).permutation(60).tolist())
    if kind == "values":
        return TensorDataset(INPUTS, INPUTS.sum(1) + rank)
    return _Noisy(rank)


def _train(train_set: str, test_set: str, num_workers: int, collates: bool) -> str | float:
    facts = worker_facts()
    collate_fn = _rows if collates else None
    job = Job(global_batch_size=16, virtual_shards=4, epochs=1, precision="float64")
    with paceline.Run(job, Plan(world_size=facts.world_size, timeout_s=60), facts) as run:
        model = nn.Linear(4, 1, dtype=torch.float64)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            data = _data(train_set, facts.rank)
            for batch in run.batches(data, num_workers=num_workers, collate_fn=collate_fn):
                run.step(batch, _loss)
            data = _data(test_set, facts.rank)
            return run.evaluate(data, _measure, num_workers=num_workers, collate_fn=collate_fn)["error"]
        except DataError as refusal:
            return str(refusal)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["split", "values"])
def test_other_data_on_some_workers_are_refused(kind: str, num_workers: int) -> None:
    told = "rank 1 read other values than rank 0 in samples of the same numbers; build and split the data set after"
    for sentence in run_ranks(_train, 2, kind, "same", num_workers, num_workers == 1):
        assert f"In epoch 0 {told}" in str(sentence)
    for sentence in run_ranks(_train, 2, "same", kind, num_workers, num_workers == 1):
        assert f"In the evaluation {told}" in str(sentence)


@pytest.mark.parametrize("collates", [False, True])
def test_random_transforms_and_texts_of_workers_are_no_difference(collates: bool) -> None:
    (alone,) = run_ranks(_train, 1, "noisy", "noisy", 0, collates)
    assert run_ranks(_train, 2, "noisy", "noisy", 0, collates) == pytest.approx([alone] * 2, rel=1e-12)
