"""`run.prepare` keeps which modules a script has put into evaluation mode, and says why a spread model has no copy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import ModelError
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import run_ranks


def _modes(*, is_loaded: bool) -> list[bool]:
    with paceline.init(Job(global_batch_size=8, virtual_shards=4), progress=False) as run:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model[1].eval()
        if is_loaded:
            model.eval()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return [module.training for module in model.modules()]


def test_frozen_norms_stay_frozen() -> None:
    assert _modes(is_loaded=False) == [True, True, False, True, True]
    assert _modes(is_loaded=True) == [True] * 5


def _copy(strategy: str) -> str:
    plan = Plan(world_size=2, algorithm="all_reduce", timeout_s=60, mesh=parse_mesh(strategy, 2))
    with paceline.init(Job(global_batch_size=8, virtual_shards=4), plan=plan, progress=False) as run:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            copy.deepcopy(model)
        except ModelError as refusal:
            return str(refusal)
    return ""


@pytest.mark.parametrize("strategy", ["fsdp"])
def test_a_spread_model_has_no_copy(strategy: str) -> None:
    assert all("cannot be copied" in sentence for sentence in run_ranks(_copy, 2, strategy))
