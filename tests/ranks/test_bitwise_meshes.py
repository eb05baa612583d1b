"""`parity = "bitwise"` on meshes gives the bits of one worker, and checkpoints move between all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import models
from paceline.env import worker_facts
from paceline.spec import Job, ModelSpec, Plan, parse_mesh
from paceline.train.optim import build_optimizer
from tests.ranks.harness import run_ranks

STEPS, HALF = 4, 2
"""Two epochs of 21 samples in batches of 12: the second is ragged, and has a shard that is smaller than others."""

MESHES = {1: ("dp",), 2: ("dp2", "fsdp2", "zero1:2", "zero2:2"), 4: ("dp4", "fsdp4", "hsdp")}


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    model: ModelSpec
    shape: tuple[int, ...]
    """Of a sample; of one number: tokens."""
    optimizer: str = "sgd"

    @property
    def facts(self) -> dict[str, int]:
        """What the model is told of the data."""
        if self.is_text:
            return {}
        channels, size, _ = self.shape
        known = {"in_channels": channels, "image_size": size, "in_features": channels * size * size}
        return {"num_classes": 10, **known}

    @property
    def is_text(self) -> bool:
        return len(self.shape) == 1


def unaligned_mlp(num_classes: int, in_features: int) -> nn.Module:
    """With parameters that do not begin where torch's own do, as those of a file may."""
    model = models.build(ModelSpec("mlp", {"dropout": 0.0}), num_classes=num_classes, in_features=in_features)
    for parameter in model.parameters():
        place = torch.empty(parameter.numel() + 1)[1:].view(parameter.shape)
        parameter.data = place.copy_(parameter.data)
    return model


_GPT = {"vocab_size": 31, "context": 6, "num_layers": 2, "num_heads": 2, "width": 12, "dropout": 0.1}
CASES = {
    "lenet": Case(ModelSpec("lenet"), (1, 16, 16)),
    "lenet-adamw": Case(ModelSpec("lenet"), (1, 16, 16), "adamw"),
    "resnet20": Case(ModelSpec("resnet20"), (3, 8, 8)),
    "dropout": Case(ModelSpec("mlp", {"dropout": 0.5}), (3, 5, 5), "adamw"),
    "unaligned": Case(ModelSpec(f"{__name__}:unaligned_mlp"), (3, 5, 5)),
    "gpt": Case(ModelSpec("gpt", _GPT), (6,), "adamw"),
}
RESUMED = CASES["dropout"]


@dataclass(frozen=True)
class Outcome:
    """What must not depend on how a run is spread."""

    sha: str
    losses: tuple[float, ...]
    metrics: Mapping[str, float]


def _data(case: Case) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    if case.is_text:
        tokens = torch.randint(0, 31, (21, *case.shape), generator=draw)
        return TensorDataset(tokens, tokens.roll(1, 1))
    return TensorDataset(torch.randn(21, *case.shape, generator=draw), torch.randint(0, 10, (21,), generator=draw))


def _losses(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    losses = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(len(inputs), -1).mean(1)


def _train(case: Case, strategy: str, folder: Path | None = None, stop: int = STEPS) -> Outcome:
    facts = worker_facts()
    job = Job().with_values(
        parity="bitwise",
        global_batch_size=12,
        virtual_shards=6,
        epochs=2,
        optim={"name": case.optimizer, "lr": 0.01, "momentum": 0.9, "weight_decay": 0.01, "clip_norm": 0.5},
        checkpoint={"every_epoch": False},
    )
    plan = Plan(
        world_size=facts.world_size,
        algorithm="tree_exact",
        timeout_s=60,
        mesh=parse_mesh(strategy, facts.world_size) if facts.world_size > 1 else None,
    )
    with paceline.init(job, plan=plan, max_steps=stop, checkpoint_dir=folder) as run:
        run.say = lambda _sentence: None
        torch.manual_seed(0)
        model = models.build(case.model, **case.facts)
        run.prepare(model, build_optimizer(job.optim, model))
        data = _data(case)
        losses = tuple(float(run.step(batch, lambda *given: _losses(*given).mean())) for batch in run.batches(data))
        metrics = run.evaluate(data, lambda *given: {"loss": _losses(*given)})
        return Outcome(run.weights_sha256(), losses, metrics)


def _table(strategies: Sequence[str], folder: Path, others: Sequence[str]) -> dict[tuple[str, str], Outcome]:
    """Every case by every strategy of this world size; a run that each of the `others` has half trained, to its end;
    and a run half trained for each of the others, which are of other launches."""
    torch.set_num_threads(1)
    found = {(name, strategy): _train(case, strategy) for strategy in strategies for name, case in CASES.items()}
    for strategy in strategies:
        for other in others:
            if (folder / f"{other} to {strategy}").exists():
                found[f"from {other}", strategy] = _train(RESUMED, strategy, folder / f"{other} to {strategy}")
            else:
                _train(RESUMED, strategy, folder / f"{strategy} to {other}", HALF)
    return found


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Outcome]:
    """What rank 0 says of every case and strategy; all ranks say the same."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found: dict[tuple[str, str], Outcome] = {}
    for world_size, strategies in MESHES.items():
        others = [one for size, several in MESHES.items() if size != world_size for one in several]
        first, *rest = run_ranks(_table, world_size, strategies, folder, others, timeout_s=500)
        assert all(one == first for one in rest)
        found |= first
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_every_mesh_gives_the_bits_of_one_worker(table: dict[tuple[str, str], Outcome], name: str) -> None:
    alone = table[name, "dp"]
    assert len(set(alone.losses)) == STEPS
    for strategies in MESHES.values():
        for strategy in strategies:
            assert table[name, strategy] == alone, strategy


@pytest.mark.slow
def test_a_run_goes_on_under_any_mesh_without_a_bit_changed(table: dict[tuple[str, str], Outcome]) -> None:
    alone = next(table[name, "dp"] for name, case in CASES.items() if case is RESUMED)
    resumed = {key: outcome for key, outcome in table.items() if key[0].startswith("from ")}
    assert len(resumed) == len(MESHES[1]) * len(MESHES[2]) + len(MESHES[2]) * len(MESHES[4]) + len(MESHES[4])
    for key, outcome in resumed.items():
        assert outcome == replace(alone, losses=alone.losses[HALF:]), key
