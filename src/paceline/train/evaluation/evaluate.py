"""Evaluation that counts every sample exactly once, on any number of devices, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.data import Loading
from paceline.errors import ModelError
from paceline.object_collectives import all_gather_objects
from paceline.parallel import Companions
from paceline.parallel.losses import Mean
from paceline.train.evaluation.chunks import Chunk, EvaluationReader
from paceline.train.evaluation.metric_states import MetricStates
from paceline.train.process.process_group import World
from paceline.train.process.seeding import seed_between_steps, seed_evaluation

if TYPE_CHECKING:
    from paceline.train.run import Run

Measure = Callable[[nn.Module, Any], Mapping[str, Any]]
"""measure(model, batch): for every metric one value per sample, of shape (samples in batch,), or a `Mean`; for one that
is given to `evaluate` what its `update` takes."""


def evaluate_between_steps(
    run: Run,
    loading: Loading,
    measure: Measure,
    metrics: Mapping[str, Any] | None,
    model: nn.Module,
    prepared: Companions,
) -> dict[str, float]:
    """Every metric over a data set, each sample counted exactly once on any number of workers. A collective.

    Training goes on as if nothing had happened: the modes of modules, their buffers and the generators are put back,
    and where weights differ between workers, a model has its own again.

    Args:
        loading: how the data set is read.
        measure, metrics: as `Run.evaluate` takes them.
        model: what `measure` is called with.
        prepared: all models of the run, which `measure` may call; they all are spread alike.
    """
    run.stepper.session.enter_together("run.evaluate")
    seed, step, device = run.job.seed, run.steps, run.device
    reader = EvaluationReader(run.reader, run.job, run.mesh, run.world, in_step=not run.engine.holds_all)

    def measured(chunk: Chunk) -> Mapping[str, Any]:
        seed_evaluation(seed, step, chunk.number, device)
        prepared.begin_pass()
        return measure(model, chunk.content)

    try:
        with (
            evaluation_mode(model, *(one.model for one in prepared.models)),
            run.consensus(),
            prepared.untouched(),
            torch.no_grad(),
            run.precision.autocast(),
        ):
            return evaluate(reader.chunks(loading), measured, run.world, metrics or {})
    finally:
        seed_between_steps(seed, step, device)


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """A context in which models are in evaluation mode; restores each module's mode, as some may be frozen."""
    was_training = [module for model in models for module in model.modules() if module.training]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True


def evaluate(
    chunks: Iterator[Chunk], measured: Callable[[Chunk], Mapping[str, Any]], world: World, metrics: Mapping[str, Any]
) -> dict[str, float]:
    """Every metric over all samples: means, and whatever else `metrics` computes.

    Each chunk is summed in float64 by one worker, and the sums of all chunks are added in the chunks' order, so the
    result does not depend on who has computed which.

    Args:
        measured: returns what was measured of a chunk.
        metrics: by name, as `metric_states` takes them.

    Raises:
        ModelError: no dict was measured, or a metric that is neither one value per sample nor a `Mean`.
    """
    states = MetricStates(metrics)
    sizes: dict[tuple[int, int], int] = {}
    sums: list[dict[str, list[Tensor]]] = []
    for chunk in chunks:
        values = measured(chunk)
        if not isinstance(values, Mapping):
            raise ModelError(
                f"measure returned {type(values).__name__}; it should return a dict of metrics, such as "
                "{'loss': losses} with a value for each sample."
            )
        found = {name: _chunk_sums(name, one, chunk.size) for name, one in values.items() if name not in metrics}
        if chunk.counts:
            states.add(chunk.place, values)
            sizes[chunk.place] = chunk.size
            sums.append(found)
    own = zip(map(list, sizes), sizes.values(), _numbers(sums, world.device), strict=True)
    rows = sorted(row for of_worker in all_gather_objects([list(row) for row in own], world.group) for row in of_worker)
    return _means(rows) | states.computed(world)


def _chunk_sums(name: str, value: Any, num_samples: int) -> list[Tensor]:
    """[sum over samples], or [value times weight, weight] of a `Mean`: float64 scalars, where the value is."""
    if isinstance(value, Mean):
        mean, weight = (torch.as_tensor(one, dtype=torch.float64).detach() for one in (value.value, value.weight))
        device = weight.device if weight.is_cuda else mean.device
        mean, weight = mean.to(device).reshape(()), weight.to(device).reshape(())
        return [torch.where(weight == 0, 0.0, mean * weight), weight]
    if not isinstance(value, Tensor) or value.shape != (num_samples,):
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ModelError(
            f"The metric '{name}' should be one value per sample, shape ({num_samples},), or a paceline.Mean, but is "
            f"{got}."
        )
    return [value.detach().to(torch.float64).sum()]


def _numbers(sums: list[dict[str, list[Tensor]]], device: torch.device) -> list[dict[str, list[float]]]:
    """The sums of all chunks as numbers; the host waits for the device once, not for every chunk."""
    flat = [one.to(device) for of_chunk in sums for values in of_chunk.values() for one in values]
    numbers = iter(torch.stack(flat).tolist() if flat else [])
    return [{name: [next(numbers) for _ in values] for name, values in of_chunk.items()} for of_chunk in sums]


def _means(rows: list[Any]) -> dict[str, float]:
    """The mean of each metric, from (place, size, sums by name) of all chunks in order."""
    kinds = {name: len(numbers) for name, numbers in rows[0][2].items()} if rows else {}
    results = {}
    for name, length in kinds.items():
        columns = [sums.get(name, []) for _, _, sums in rows]
        if any(len(one) != length for one in columns):
            raise ModelError(
                f"measure returned the metric '{name}' in different forms for different batches; it should be "
                "a value for each sample of every batch, or a paceline.Mean of every batch."
            )
        weights = [one[1] for one in columns] if length == 2 else [size for _, size, _ in rows]
        wrong = next((weight for weight in weights if not weight >= 0), None)
        if wrong is not None:
            raise ModelError(f"The weight of the metric '{name}' is {wrong:g}; it should be 0 or more.")
        weight = sum(weights)
        results[name] = sum(one[0] for one in columns) / weight if weight else math.nan
    return results
