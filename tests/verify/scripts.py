"""A small correct training script, which the cases of the tables change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from inspect import isfunction
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

Kind = TypeVar("Kind")
_DRAW = torch.Generator().manual_seed(0)
INPUTS = torch.randn(22, 4, generator=_DRAW, dtype=torch.float64)
TARGETS = INPUTS.sum(1, keepdim=True).sin()
JOB: Mapping[str, Any] = {"global_batch_size": 8, "virtual_shards": 4, "epochs": 2, "precision": "float64"}
"""Two epochs of three steps, the last of 6 samples, whose shards have two sizes."""


class Cause(StrEnum):
    """Why N workers learn something else than one, or two equal runs differ."""

    STATE = "the loss follows from what earlier calls left behind"
    OWN = "the loss follows from what the script has set on this worker, and otherwise on others"
    RANDOM = "random numbers, or a clock, that the run does not seed"
    SAMPLES = "workers read other samples"
    GRADIENTS = "the gradient is not that of the mean over the samples of the global batch"
    RATE = "learning rates, or other options of the optimizer, differ"
    UPDATE = "weights are changed otherwise than by the optimizer and the gradient of all samples"
    BUFFERS = "buffers differ"
    WEIGHTS = "the model differs before the first step"
    STEPS = "workers make other steps"


class Script:
    """A script of a run that has begun. As it is made it is right; each public method of a subclass is a case, and
    changes it."""

    cause: ClassVar[Cause]
    """Of the mistakes in a subclass."""
    job: ClassVar[Mapping[str, Any]] = {}
    """Other values than those of `JOB`, or functions of the number of workers."""

    def __init__(self, run: paceline.Run) -> None:
        self.run = run
        self._use(Net())
        self.data: Any = TensorDataset(INPUTS.clone(), TARGETS.clone(), torch.arange(len(INPUTS)))
        """(inputs, target, index) of each sample."""
        self.loss: Callable[[Any, Any], Any] = square
        self.collate: Callable[[Any], Any] = stack
        self.sampler: Any = None
        self.scheduler: Any = None
        self.prepared: Callable[[], object] = lambda: None
        """Called after `run.prepare`."""
        self.before_step: Callable[[Any], Any] = lambda batch: batch
        """The batch to make the step with; None: no step."""
        self.after_step: Callable[[Any], object] = lambda _: None

    def _use(self, model: nn.Module, **options: Any) -> None:
        self.model: Any = model
        self.optimizer: Any = torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


class Read(TensorDataset):
    """Samples whose inputs are changed as they are read."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(INPUTS.clone(), TARGETS.clone(), torch.arange(len(INPUTS)))
        self._change = change

    def __getitem__(self, index: Any) -> Any:
        inputs, *rest = (column[index] for column in self.tensors)
        return self._change(inputs), *rest


def cases_of(*kinds: type[Kind]) -> dict[str, type[Kind]]:
    """The class of each case, by the name of its method."""
    return {name: kind for kind in kinds for name, one in vars(kind).items() if name[0] != "_" and isfunction(one)}


def train(kind: type[Script], case: str, run: paceline.Run) -> dict[str, Any]:
    """The weights at the end, as NumPy arrays."""
    script = kind(run)
    getattr(script, case)()
    run.prepare(script.model, script.optimizer, scheduler=script.scheduler)
    script.prepared()
    for batch in run.batches(script.data, collate_fn=script.collate, sampler=script.sampler):
        changed = script.before_step(batch)
        if changed is not None:
            run.step(changed, script.loss)
            script.after_step(batch)
    return {name: tensor.detach().clone().numpy() for name, tensor in run.whole_state().items()}


class Net(nn.Sequential):
    """Layers that a case may do something beside."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs


def square(model: nn.Module, shard: Any) -> Tensor:
    loss: Tensor = (model(shard[0]) - shard[1]).square().mean()
    return loss


def stack(rows: list[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def times(shard: Any, factor: Any) -> list[Any]:
    """The shard with other inputs."""
    return [shard[0] * factor, *shard[1:]]


def inputs_of(batch: Any) -> Tensor:
    """The inputs of this worker's samples, which other workers do not have."""
    found: list[Tensor] = []
    batch.map(lambda shard: found.append(shard[0]))
    return torch.cat(found)


def mean_of(batch: Any) -> float:
    """A number that differs between workers."""
    return float(inputs_of(batch).mean())
