"""What a loss function makes in its first call is refused if the loss follows from it and other samples would make
something else; calls before the first step count for no metric."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.errors import ModelError
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import in_turn, run_ranks

DRAW = torch.Generator().manual_seed(5)
DATA = TensorDataset(torch.randn(32, 6, generator=DRAW, dtype=torch.float64), torch.randint(3, (32,), generator=DRAW))
BATCH_SIZE = 8


class Loss:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.made: Any = None
        self.num_calls = 0
        self.by_name: dict[str, Tensor] = {}
        self.last: Tensor | None = None
        self.count, self.total, self.seen = torch.zeros((), dtype=torch.float64), torch.zeros(()), [0.0][:0]

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        outputs = self._changed(model(inputs))
        loss = F.cross_entropy(outputs, targets)
        if self.kind in ("number", "tensor"):
            if self.made is None:
                self.made = loss.item() if self.kind == "number" else loss.detach()
            loss = loss / self.made
        elif self.kind in ("counted", "told"):
            if self.num_calls == 0:
                self.made = loss.detach()
            self.num_calls += 1
            if self.kind == "counted":
                loss = loss / self.made
        elif self.kind == "metric":
            self.last = outputs.detach()
            self.count += len(inputs)
            self.total = self.total + len(inputs)
            self.seen.append(float(len(inputs)))
        return loss

    def _changed(self, outputs: Tensor) -> Tensor:
        if self.kind == "random":
            if self.made is None:
                self.made = torch.randn(3, 3, dtype=torch.float64)
            return torch.matmul(outputs, self.made)
        if self.kind == "entry":
            if "mean" not in self.by_name:
                self.by_name["mean"] = outputs.detach().mean(0)
            return outputs - self.by_name["mean"]
        if self.kind == "new name":
            if not hasattr(self, "_mean"):
                self._mean = outputs.detach().mean(0)
            return outputs - self._mean
        if self.kind == "constant":
            if self.made is None:
                self.made = torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            return torch.matmul(outputs, self.made)
        return outputs


class InForward(nn.Linear):
    """Made by a model."""

    mean: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = inputs.mean(0)
        return super().forward(inputs - self.mean)


def _ways(num_workers: int) -> list[str]:
    """How a model may be trained: "fsdp, bitwise"."""
    strategies = ("dp", "fsdp") if num_workers > 1 else ("dp",)
    ways = [f"{strategy}, {how}" for strategy in strategies for how in ("numeric", "bitwise", "shard by shard")]
    return [*ways, "pp, numeric", "pp, bitwise"] if num_workers == 2 else ways


def _train(kind: str, way: str, virtual_shards: int) -> tuple[list[float], Any, Any] | str:
    num_workers = worker_facts().world_size
    strategy, how = way.split(", ")
    parity: Any = "bitwise" if how == "bitwise" else "numeric"
    is_alone = how == "shard by shard"
    job = Job(global_batch_size=BATCH_SIZE, virtual_shards=virtual_shards, parity=parity, shard_by_shard=is_alone)
    mesh = parse_mesh(strategy, num_workers) if num_workers > 1 else None
    algorithm: Any = "tree_exact" if parity == "bitwise" else "all_reduce"
    plan = Plan(world_size=num_workers, algorithm=algorithm, timeout_s=60, mesh=mesh)
    loss_fn = Loss(kind)
    with paceline.init(job, plan=plan, max_steps=3, progress=False) as run:
        first = (InForward if kind == "forward" else nn.Linear)(6, 4, dtype=torch.float64)
        model = nn.Sequential(first, nn.Linear(4, 3, dtype=torch.float64))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            losses = [float(run.step(batch, loss_fn)) for batch in run.batches(DATA)]
        except ModelError as refusal:
            return str(refusal)
        return losses, (float(loss_fn.count), float(loss_fn.total), sum(loss_fn.seen)), run.weights_sha256()


def _train_all(cases: list[tuple[str, str, int]]) -> list[Any]:
    return in_turn(_train, cases)


DEPENDENT = {
    "number": "made",
    "tensor": "made",
    "counted": "made",
    "random": "made",
    "entry": "mean",
    "new name": "_mean",
    "forward": "mean",
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("num_workers", "virtual_shards"), [(1, 4), (2, 4), (2, 2)])
def test_what_depends_on_who_is_first_is_refused(num_workers: int, virtual_shards: int) -> None:
    cases = [(kind, way, virtual_shards) for kind in DEPENDENT for way in _ways(num_workers)]
    for found in run_ranks(_train_all, num_workers, cases, timeout_s=150):
        for case, outcome in zip(cases, found, strict=True):
            assert isinstance(outcome, str), case
            # What the first stage has made the last one, where losses are compared, does not know.
            is_elsewhere = case[0] == "forward" and case[1].startswith("pp")
            made = (
                "it follows from what earlier calls left"
                if is_elsewhere
                else f"(the first call makes {DEPENDENT[case[0]]})"
            )
            assert made in outcome, case


@pytest.mark.timeout(200)
def test_what_is_alike_whoever_is_first_is_taken() -> None:
    cases = [(kind, way, shards) for kind in ("constant", "told") for way in _ways(2) for shards in (2, 4)]
    (alone,) = run_ranks(_train_all, 1, cases, timeout_s=100)
    for found in run_ranks(_train_all, 2, cases, timeout_s=150):
        for case, outcome, expected in zip(cases, found, alone, strict=True):
            assert outcome[0] == pytest.approx(expected[0], rel=1e-12), case
            assert "bitwise" not in case[1] or outcome[2] == expected[2]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_metric_counts_every_sample_once(num_workers: int) -> None:
    """Also where a worker has no sample, and goes through the model with one that counts for nothing."""
    cases = [("metric", way, shards) for way in _ways(num_workers) for shards in (3, 4)]
    every = run_ranks(_train_all, num_workers, cases, timeout_s=150)
    for of_workers in zip(*every, strict=True):
        counts = [sum(numbers) for numbers in zip(*(outcome[1] for outcome in of_workers), strict=True)]
        assert counts == [3 * BATCH_SIZE] * 3
