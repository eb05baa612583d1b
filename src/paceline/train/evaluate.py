"""Evaluation that counts every sample exactly once, on any number of devices, to the last bit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data import Loading
from paceline.data.order import EpochOrder
from paceline.errors import ModelError
from paceline.object_collectives import broadcast_object
from paceline.parallel import Companions, Engine
from paceline.parallel.losses import Mean
from paceline.spec import Job, Mesh
from paceline.train.agreement import check_same_order
from paceline.train.metric_states import MergeTree, compute_metrics, metric_functions, update_trees
from paceline.train.numerics import Precision
from paceline.train.process_group import World
from paceline.train.reading import DatasetReader, num_samples
from paceline.train.seeding import seed_between_steps, seed_evaluation

Measure = Callable[[nn.Module, Any], Mapping[str, Any]]
"""measure(model, batch): for every metric one value per sample, of shape (samples in batch,), or a `Mean`; for one that
is given to `evaluate` what its `update` takes."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates models between the steps of a run.

    Training goes on as if nothing had happened: the modes of modules, their buffers and the generators are put back,
    and where weights differ between workers, a model has its own again.
    """

    job: Job
    mesh: Mesh
    world: World
    reader: DatasetReader
    precision: Precision

    def evaluate(
        self,
        loading: Loading,
        measure: Measure,
        metrics: Mapping[str, Any] | None,
        model: nn.Module,
        prepared: Companions,
        engine: Engine,
        step: int,
    ) -> dict[str, float]:
        """Every metric over a data set, each sample counted exactly once on any number of workers. A collective.

        Args:
            loading: how the data set is read.
            measure, metrics: as `Run.evaluate` takes them.
            model: what `measure` is called with.
            prepared: all models of the run, which `measure` may call.
            engine: trains one of them; they all are spread alike.
            step: the number of updates made; what the model draws in evaluation depends on it.
        """
        job, rank, num_assignments = self.job, self.world.rank, self.mesh.num_assignments
        set_size = num_samples(loading.dataset, "evaluation")
        chunks = loading.evaluation_order(set_size, job.eval_batch_size, job.seed)
        check_same_order(chunks.digest(), None, self.world.group)
        own = functools.partial(own_chunks, chunks.num_batches, self.mesh.share(rank), num_assignments)
        computed = own(in_step=not engine.holds_all)
        # Workers that compute other parts of the model have the same chunks: the first of them gives the results.
        given = own(in_step=False) if self.mesh.leads_assignment(rank) else []
        contents = self.reader.read_chunks(loading, chunks, computed)

        def batches() -> Iterator[tuple[int, Any]]:
            for number, content in zip(computed, contents, strict=True):
                seed_evaluation(job.seed, step, number, self.world.device)
                prepared.begin_pass()
                yield number, content

        try:
            with (
                evaluation_mode(model, *(one.model for one in prepared.models)),
                engine.consensus(),
                prepared.untouched(),
                torch.no_grad(),
                self.precision.autocast(),
            ):
                return evaluate(batches(), chunks, given, model, measure, self.world, metrics)
        finally:
            seed_between_steps(job.seed, step, self.world.device)


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


def own_chunks(num_chunks: int, rank: int, num_assignments: int, *, in_step: bool) -> list[int]:
    """Numbers of the chunks that worker `rank` of `num_assignments` evaluates; rank 0 has one if any rank has.

    Args:
        in_step: whether all ranks must compute equally many because each chunk has collectives: a rank with fewer
            repeats chunks of the next rank.
    """
    first, last = (-(-one * num_chunks // num_assignments) for one in (rank, rank + 1))
    most = -(-num_chunks // num_assignments)
    return [number % num_chunks for number in range(first, first + most if in_step else last)]


def evaluate(
    batches: Iterable[tuple[int, Any]],
    chunks: EpochOrder,
    given: Collection[int],
    model: nn.Module,
    measure: Measure,
    world: World,
    metrics: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Every metric over all samples: means, and whatever else `metrics` computes.

    Each chunk is summed in float64 by its worker. The sums are all-reduced as a table with a row for each chunk, which
    one worker fills (adding zeros is exact), and the rows are added in order, so the result does not depend on the
    assignment.

    Args:
        batches: the chunks that this worker computes, with their numbers.
        chunks: the samples of every chunk.
        given: the numbers of the chunks whose rows this worker fills, in order; each belongs to one worker.
        metrics: by name, as `metric_states` takes them.

    Raises:
        ModelError: a metric that is neither one value per sample nor a `Mean`.
    """
    others = {name: metric_functions(name, metric) for name, metric in (metrics or {}).items()}
    trees = {name: MergeTree(functions.merge) for name, functions in others.items()}
    sums: dict[int, dict[str, list[float]]] = {}
    for number, batch in batches:
        values = measure(model, batch)
        if number in given and number not in sums:
            update_trees(others, trees, number, values)
        size = len(chunks.batch(number))
        sums[number] = {name: _chunk_sums(name, one, size) for name, one in values.items() if name not in others}
    kinds = _agreed_kinds({name: len(numbers) for name, numbers in next(iter(sums.values()), {}).items()}, world)
    table = torch.zeros(chunks.num_batches, sum(kinds.values()), dtype=torch.float64, device=world.device)
    for number in given:
        row = [_checked(name, sums[number].get(name, []), length) for name, length in kinds.items()]
        table[number] = torch.tensor([one for numbers in row for one in numbers], dtype=torch.float64)
    if world.group is not None:
        dist.all_reduce(table, group=world.group)
    totals = iter([sum(column) for column in table.t().tolist()])
    results = {}
    for name, length in kinds.items():
        total, weight = next(totals), next(totals) if length == 2 else chunks.num_samples
        results[name] = total / weight if weight else math.nan
    return results | (compute_metrics(others, trees, world) if others else {})


def _chunk_sums(name: str, value: Any, num_samples: int) -> list[float]:
    """The sum over samples; of a `Mean` [value times weight, weight]."""
    if isinstance(value, Mean):
        weight = float(value.weight)
        if not weight >= 0:
            raise ModelError(f"The weight of the metric '{name}' is {weight:g}; it should be 0 or more.")
        return [float(value.value) * weight if weight else 0.0, weight]
    if not isinstance(value, Tensor) or value.shape != (num_samples,):
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ModelError(
            f"The metric '{name}' should be one value per sample, shape ({num_samples},), or a paceline.Mean, but is "
            f"{got}."
        )
    return [float(value.detach().to("cpu", torch.float64).sum())]


def _checked(name: str, sums: list[float], length: int) -> list[float]:
    if len(sums) != length:
        raise ModelError(
            f"measure returned the metric '{name}' in different forms for different batches; it should be a value for "
            "each sample of every batch, or a paceline.Mean of every batch."
        )
    return sums


def _agreed_kinds(kinds: dict[str, int], world: World) -> dict[str, int]:
    """Rank 0's metrics, and how many sums each has; it always has a chunk, others may not."""
    agreed: dict[str, int] = broadcast_object(kinds, world.group)
    return agreed
