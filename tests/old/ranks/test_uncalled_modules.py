"""Modules that nobody calls, such as a ModuleDict, under strategies that gather parameters where modules are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.errors import ModelError
from paceline.parallel.sharded import blocks
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import run_ranks

INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True))


class _InDictionaries(nn.Module):
    """Layers in a list of dictionaries, as many write a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(4), "mlp": nn.ModuleDict({"up": nn.Linear(4, 4)})}) for _ in range(2)
        )
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            mlp: Any = layer["mlp"]
            x = x + mlp["up"](layer["norm"](x)).relu()
        return self.head(x)


def _loss(model: nn.Module, batch: Any) -> Any:
    outputs = model["net"](batch[0]) if isinstance(model, nn.ModuleDict) else model(batch[0])
    return (outputs - batch[1]).square().mean()


def _train(strategy: str, kind: str) -> str:
    """What is refused, or the weights at the end."""
    num_workers = worker_facts().world_size
    mesh = parse_mesh(strategy, num_workers) if num_workers > 1 else None
    plan = Plan(world_size=num_workers, algorithm="all_reduce", timeout_s=60, mesh=mesh)
    job = Job(global_batch_size=8, virtual_shards=4, parity="bitwise")
    with paceline.init(job, plan=plan, max_steps=2, progress=False) as run:
        model = nn.ModuleDict({"net": nn.Linear(4, 1)}) if kind == "a dictionary" else _InDictionaries()
        try:
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except ModelError as refusal:
            return str(refusal)
        for batch in run.batches(DATA):
            run.step(batch, _loss)
        return run.weights_sha256()


def test_modules_in_a_dictionary_in_a_list_are_blocks_of_their_own() -> None:
    model = _InDictionaries()
    assert [type(one) for one in blocks(model)] == [nn.LayerNorm, nn.Linear] * 2
    assert [type(one) for one in blocks(nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 4))}))] == [nn.Linear]


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_a_list_of_dictionaries_is_sharded(strategy: str) -> None:
    (alone,) = run_ranks(_train, 1, strategy, "in dictionaries")
    assert len(alone) == 64
    assert run_ranks(_train, 2, strategy, "in dictionaries") == [alone, alone]


def test_a_model_without_forward_is_sharded_by_no_strategy_and_trained_by_dp() -> None:
    for said in run_ranks(_train, 2, "fsdp", "a dictionary"):
        assert said.startswith("ModuleDict has no forward method")
    (alone,) = run_ranks(_train, 1, "dp", "a dictionary")
    assert run_ranks(_train, 2, "dp", "a dictionary") == [alone, alone]
