"""The tasks of `oracle` as a user's script trains them with Paceline, on whatever workers run this."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import paceline
from tests.kit.engines import Engine
from tests.kit.oracle import Learned, Task, order
from tests.kit.workers import run_ranks

PATIENCE_S = 120.0
"""How long workers may take on a machine that does much else."""


@dataclass(frozen=True)
class Outcome:
    """Of one worker."""

    learned: Learned
    """The weights on rank 0 alone, where no worker has the whole model."""
    weights_sha256: str
    samples: tuple[tuple[int, ...], ...]
    """Which samples this worker was given in each step."""
    said: tuple[str, ...]
    """Messages for the user."""


class _Numbered(Dataset[Any]):
    """The samples of a data set, each followed by its number."""

    def __init__(self, data: Dataset[Any]) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        return (*self._data[number], number)


class StreamOf(IterableDataset[Any]):
    """Samples, one after the other."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __iter__(self) -> Any:
        return iter(self._samples)


def init(engine: Engine, task: Task, **options: Any) -> paceline.Run:
    """The run of a task in float64.

    Args:
        options: of `paceline.init`, keys of the job among them, which replace those of the engine and the task.
    """
    plan: dict[str, Any] = {"world_size": engine.num_workers, "timeout_s": PATIENCE_S, **engine.plan}
    if engine.mesh:
        plan["mesh"] = dict(engine.mesh)
    keys: dict[str, Any] = {
        "global_batch_size": task.global_batch_size,
        "virtual_shards": task.virtual_shards,
        "epochs": task.epochs,
        "seed": task.seed,
        "precision": "float64",
        "eval_batch_size": 5,
        "optim": {
            "clip_norm": task.clip_norm,
            "warmup_epochs": task.warmup_epochs,
            "schedule": "cosine" if task.is_cosine else "constant",
        },
        **engine.job,
        **options,
    }
    plan["algorithm"] = "tree_exact" if keys.get("parity") == "bitwise" else "all_reduce"
    return paceline.init(plan=paceline.Plan.from_mapping(plan), progress=False, **keys)


def prepare(run: paceline.Run, engine: Engine, task: Task) -> None:
    """Make the model and the optimizer of a task, and give them to the run."""
    dtype = torch.float64 if run.job.precision == "float64" else torch.float32
    model = task.model().to(dtype)
    optimizer = task.optimizer(parameter for parameter in model.parameters() if parameter.requires_grad)
    options: dict[str, Any] = {"find_unused_parameters": True} if hasattr(model, "unused") else {}
    if engine.has_stages:
        example = torch.stack([task.data[number][0] for number in range(2)])
        options["example"] = example.to(dtype) if example.is_floating_point() else example
    run.prepare(model, optimizer, **options)


def train(engine: Engine, task: Task, *, in_own_order: bool = False, **options: Any) -> Outcome:
    """Train `task`.

    Args:
        in_own_order: whether samples come in the job's own order, and not in that of `oracle.order`.
        options: as for `init`.
    """
    said: list[str] = []
    samples: list[tuple[int, ...]] = []
    losses: list[float] = []
    with init(engine, task, **options) as run:
        run.say = said.append
        prepare(run, engine, task)
        data = _Numbered(task.data)
        sampler = None if in_own_order else functools.partial(order, num_samples=len(data))
        for batch in run.batches(data, sampler=sampler):
            samples.append(tuple(number for shard in batch for number in shard[-1].tolist()))
            loss = run.step(batch, functools.partial(_loss, task))
            assert not loss.requires_grad  # a script that keeps it keeps no graph
            losses.append(float(loss))
        metrics: dict[str, float] = {}
        if task.measure is not None:
            metrics = run.evaluate(task.test_data, functools.partial(_measure, task), task.metrics)
        weights = {name: value.detach().clone() for name, value in run.whole_state().items()}
        return Outcome(Learned(tuple(losses), weights, metrics), run.weights_sha256(), tuple(samples), tuple(said))


def trained(engine: Engine, task: Task, **options: Any) -> list[Outcome]:
    """What each worker of a new team makes of the task; `options` as for `train`."""
    train_it = functools.partial(train, **options)
    return run_ranks(train_it, engine.num_workers, engine, task, timeout_s=PATIENCE_S)


def _loss(task: Task, model: nn.Module, batch: Any) -> Tensor | paceline.Mean:
    found = task.loss(model, batch[:-1])
    return paceline.Mean(found[0], weight=found[1]) if isinstance(found, tuple) else found


def _measure(task: Task, model: nn.Module, batch: Any) -> dict[str, Any]:
    assert task.measure is not None
    found = dict(task.measure(model, batch))
    for name, value in found.items():
        if isinstance(value, tuple) and name not in task.metrics:
            found[name] = paceline.Mean(value[0], weight=value[1])
    return found
