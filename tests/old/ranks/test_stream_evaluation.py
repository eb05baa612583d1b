"""Evaluations of streams count every sample once, on any number of workers, and as a map-style set of the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import paceline
from paceline.env import worker_facts
from paceline.errors import DataError
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import run_ranks

SIZES = (0, 11, 1, 6)
"""Samples in each of the files of a stream: the first is empty, and the second lasts much longer than the others."""

Sample = tuple[Tensor, int]


def _sample(number: int) -> Sample:
    return torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(number)), number


class _Set(Dataset[Sample]):
    def __len__(self) -> int:
        return sum(SIZES)

    def __getitem__(self, number: int) -> Sample:
        return _sample(number)


class _Stream(IterableDataset[Sample]):
    def __iter__(self) -> Iterator[Sample]:
        return map(_sample, range(sum(SIZES)))


class _Files(IterableDataset[Sample]):
    """Splits by its files."""

    def __init__(self, files: tuple[int, ...] = tuple(range(len(SIZES)))) -> None:
        self._files = files

    @property
    def num_shards(self) -> int:
        return len(self._files)

    def shard(self, num_shards: int, index: int) -> _Files:
        return _Files(self._files[index::num_shards])

    def __iter__(self) -> Iterator[Sample]:
        for file in self._files:
            yield from map(_sample, range(sum(SIZES[:file]), sum(SIZES[: file + 1])))


class _Empty(IterableDataset[Sample]):
    def __iter__(self) -> Iterator[Sample]:
        return iter(())


def _collate(samples: list[Sample]) -> dict[str, Tensor]:
    return {"x": torch.stack([x for x, _ in samples]), "number": torch.tensor([number for _, number in samples])}


def _measure(model: nn.Module, batch: Any) -> dict[str, Any]:
    x, numbers = (batch["x"], batch["number"]) if isinstance(batch, dict) else batch
    outputs = model(x).sum(1)
    weight = (numbers % 3).sum()
    weighted = (outputs * (numbers % 3)).sum() / weight.clamp(min=1)
    return {"mean": outputs, "weighted": paceline.Mean(weighted, weight), "numbers": numbers.tolist()}


def _as_one_number(numbers: list[int]) -> float:
    """A different number where any sample is missing or comes twice."""
    return float(sum(100 ** numbers.count(number) * (number + 1) for number in range(sum(SIZES))))


NUMBERS = (
    lambda *numbers: [list(numbers)],
    lambda one, other: one + other,
    lambda all_of_them: _as_one_number(list(itertools.chain(*all_of_them))),
)


def _evaluate_all() -> list[dict[str, float]]:
    facts = worker_facts()
    results = []
    for strategy in ("dp", "fsdp"):
        mesh = parse_mesh(strategy, facts.world_size, 1) if facts.world_size > 1 else None
        plan = Plan(world_size=facts.world_size, algorithm="all_reduce", timeout_s=60, mesh=mesh)
        job = Job.from_mapping(
            {"global_batch_size": 8, "virtual_shards": 4, "eval_batch_size": 3, "precision": "float64"}
        )
        with paceline.init(job, plan=plan) as run:
            model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            loaders = [DataLoader(_Files(), batch_size=2, num_workers=2), DataLoader(_Stream(), batch_size=2)]
            for data in (_Set(), _Stream(), _Files(), *loaders):
                results.append(run.evaluate(data, _measure, {"numbers": NUMBERS}))
            results.append(run.evaluate(_Files(), _measure, {"numbers": NUMBERS}, collate_fn=_collate))
            with pytest.raises(DataError, match="The evaluation stream is empty"):
                run.evaluate(_Empty(), _measure)
            with pytest.raises(DataError, match="drop_last=False"):
                run.evaluate(DataLoader(_Stream(), batch_size=2, drop_last=True), _measure)
    return results


def test_every_sample_counts_once_on_any_number_of_workers() -> None:
    by_set, *others = alone = run_ranks(_evaluate_all, 1, timeout_s=120)[0]
    assert by_set["numbers"] == sum(100 * (number + 1) for number in range(sum(SIZES)))
    for result in others:
        assert result == pytest.approx(by_set, rel=1e-12)
    for world_size in (2, 3):
        for results in run_ranks(_evaluate_all, world_size, timeout_s=120):
            assert results == [pytest.approx(one, rel=1e-14) for one in alone]
            half = len(alone) // 2
            assert results[:half] == alone[:half]  # each worker holds the whole model
