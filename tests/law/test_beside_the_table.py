"""What equals a plain loop beside the law's table: limits that act or do not, parameters that are unused or shared,
blocks that recompute, shards without a target, and outer steps, also where a run goes on
on another number of workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.models import build
from tests.kit import losses, models
from tests.kit.engines import ENGINES, Engine
from tests.kit.oracle import Task, learn
from tests.kit.train import trained
from tests.law.tasks import TASKS, rows, texts

_sgd, _with_momentum = partial(SGD, lr=0.3), partial(SGD, lr=0.3, momentum=0.9)
_CLASSES = Task(models.layers, losses.classes, rows(24), _sgd)
_TIED = Task(models.tied, losses.counted_tokens, texts(16), _sgd, epochs=1)


def _gpt() -> torch.nn.Module:
    """Its output is a product with the weight of its embedding."""
    torch.manual_seed(0)
    return build("gpt", vocab_size=models.NUM_TOKENS, context=4, num_layers=3, num_heads=1, width=8, dropout=0.0)


class _Recomputed(models.Layers):
    """A block that is used twice, and run again in the backward pass in the old way."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = checkpoint(self.second, hidden, use_reentrant=True)
        logits: Tensor = self.head(self.third(hidden))
        return logits


class _Routed(models.Layers):
    """Two experts, of which a virtual shard may use one alone."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = [(self.first if float(row[0]) > 0 else self.second)(row) for row in inputs]
        logits: Tensor = self.head(self.third(torch.stack(outputs).tanh()))
        return logits


class _Scaled(models.Layers):
    """A branch with a factor of its own, which few virtual shards go through, at random; its weight lies in another
    order in memory."""

    unused: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.nothing = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0))
        self.second.weight = nn.Parameter(self.second.weight.detach().T.contiguous().T)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).tanh() + self.nothing.sum()
        if float(torch.rand(())) < 0.3:
            hidden = hidden + self.factor * self.second(hidden).tanh()
        logits: Tensor = self.head(self.third(hidden).tanh())
        return logits


class _Gated(_Scaled):
    """A branch that counts for nothing at first, so that gradients in it are 0; and layers that are not used."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.factor)
        self.unused = nn.Linear(2, 2)


class _Thawing(SGD):
    """Its first parameter is frozen in the first two steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.3)
        self.num_steps = 0
        self.param_groups[0]["params"][0].requires_grad_(False)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.num_steps += 1
        self.param_groups[0]["params"][0].requires_grad_(self.num_steps > 1)


def _seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def _with_some_targets(model: nn.Module, batch: Any) -> Tensor:
    """The loss of some classes alone; of a shard without these a zero in which the model has no part."""
    inputs, targets = batch
    chosen = targets > 1
    if not chosen.any():
        return torch.zeros((), dtype=inputs.dtype, requires_grad=True)
    return F.cross_entropy(model(inputs[chosen]), targets[chosen])


def _texts_of_lengths(num_samples: int) -> list[tuple[Tensor, Tensor]]:
    """Two neighbours of one length, the next two of another."""
    whole = zip(*texts(num_samples).tensors, strict=True)
    lengths = (1 + number // 2 % 3 for number in range(num_samples))
    return [(tokens[:length], targets[:length]) for length, (tokens, targets) in zip(lengths, whole, strict=True)]


def _outer(num_workers: int, **keys: Any) -> Engine:
    """Workers that train by themselves between outer steps."""
    return Engine(num_workers, job={"aggregation": {"sync_every": 1, **keys}}, has_own_losses=True)


@dataclass(frozen=True)
class Case:
    engine: Engine
    task: Task
    then: Engine | None = None
    """By which the run goes on after three steps."""
    rule: Any = None
    """The optimizer of the plain loop, if it is another one."""
    num_shards: int | None = 1
    """Into how many the plain loop cuts a batch; None: as the task says."""


_TWO = Engine(2)
_NESTEROV = _outer(2, method="diloco", outer_lr=0.7, outer_momentum=0.9)
CASES = {
    "a limit that no gradient reaches": Case(ENGINES["one worker"], replace(_CLASSES, clip_norm=1e6)),
    "an unused parameter that would decay": Case(
        ENGINES["dp, bitwise"], replace(_TIED, optimizer=partial(_with_momentum, weight_decay=0.1))
    ),
    "the norm of weights in two stages of three": Case(
        Engine(3, {"pp": 3}, {"pipeline": {"cuts": ["second", "head"]}}), replace(_TIED, clip_norm=0.1)
    ),
    "what goes past two stages": Case(
        ENGINES["pp, interleaved"], replace(_CLASSES, model=models.skips), num_shards=None
    ),
    "texts of several lengths through stages": Case(
        ENGINES["pp, 1f1b"],
        replace(_TIED, data=_texts_of_lengths(22), global_batch_size=4),  # type: ignore[arg-type]
        num_shards=None,
    ),
    "a stage whose layers are divided": Case(
        Engine(4, {"pp": 2, "tp": 2}, {"tensor_plan": models.TENSOR_PLAN}), replace(_CLASSES, clip_norm=0.1)
    ),
    "the weight of a block that another stage uses": Case(
        Engine(2, {"pp": 2}), replace(_TIED, model=_gpt), num_shards=None
    ),
    "a block that recomputes itself twice": Case(
        _TWO, replace(_CLASSES, model=partial(_seeded, _Recomputed)), num_shards=None
    ),
    "recomputing in a fixed order": Case(
        ENGINES["dp, bitwise"], replace(_CLASSES, model=partial(_seeded, _Recomputed)), num_shards=None
    ),
    "experts that some shards do not use": Case(
        _TWO, replace(_CLASSES, model=partial(_seeded, _Routed)), num_shards=None
    ),
    "a factor in a branch that some shards do not take": Case(
        ENGINES["fsdp"], replace(_CLASSES, model=partial(_seeded, _Scaled)), num_shards=None
    ),
    "gradients that are 0 beside unused ones, and those of stand-ins": Case(
        Engine(3, {"fsdp": 3}),
        replace(_CLASSES, model=partial(_seeded, _Gated), optimizer=partial(_with_momentum, weight_decay=0.1), seed=10),
        num_shards=None,
    ),
    "shards without a target": Case(_TWO, replace(_CLASSES, loss=_with_some_targets), num_shards=None),
    "a weight that is unfrozen": Case(_TWO, replace(_CLASSES, optimizer=_Thawing)),
    "a weight that is unfrozen between outer steps": Case(
        _outer(2, method="local_sgd"), replace(_CLASSES, optimizer=_Thawing)
    ),
    "outer steps by Nesterov's method": Case(
        _NESTEROV, _CLASSES, _NESTEROV, partial(SGD, lr=0.3 * 0.7, momentum=0.9, nesterov=True)
    ),
    "momenta of two workers on one": Case(
        _outer(2, method="local_sgd"), replace(_CLASSES, optimizer=_with_momentum), _outer(1, method="local_sgd")
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_learns_what_a_plain_loop_learns(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    right = learn(replace(case.task, optimizer=case.rule or case.task.optimizer), num_shards=case.num_shards)
    if case.then is not None:
        trained(case.engine, case.task, max_steps=3, checkpoint_dir=tmp_path)
    for outcome in trained(case.then or case.engine, case.task, checkpoint_dir=tmp_path):
        for parameter, value in outcome.learned.weights.items():
            torch.testing.assert_close(value, right.weights[parameter], rtol=1e-11, atol=1e-13)


def test_a_run_that_ends_between_outer_steps_goes_on_with_what_each_worker_has(tmp_path: Path) -> None:
    engine = _outer(2, method="local_sgd", sync_every=4)
    (whole, _) = trained(engine, _CLASSES, max_steps=4)
    trained(engine, _CLASSES, max_steps=3, checkpoint_dir=tmp_path)
    (gone_on, _) = trained(engine, _CLASSES, max_steps=4, checkpoint_dir=tmp_path)
    torch.testing.assert_close(dict(gone_on.learned.weights), dict(whole.learned.weights), rtol=1e-12, atol=0.0)


def test_between_outer_steps_evaluations_and_checkpoints_are_of_the_mean_of_all_workers(tmp_path: Path) -> None:
    engine, task = _outer(2, method="local_sgd", sync_every=2), TASKS["evaluation"]  # of one step
    right = learn(task, num_shards=1)
    for outcome in trained(engine, task, checkpoint_dir=tmp_path):
        assert outcome.learned.metrics == pytest.approx(dict(right.metrics), rel=1e-12)
    paceline.checkpoint.export(tmp_path, tmp_path / "mean.safetensors")
    torch.testing.assert_close(load_file(tmp_path / "mean.safetensors"), dict(right.weights), rtol=1e-12, atol=1e-14)
