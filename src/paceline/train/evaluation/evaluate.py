"""Evaluation that counts every sample exactly once, on any number of devices, to the last bit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data import Loading, SampleRequest
from paceline.data.substreams import is_stream
from paceline.errors import ModelError
from paceline.object_collectives import all_gather_objects
from paceline.parallel import Companions
from paceline.parallel.losses import Mean
from paceline.spec import Job, Mesh
from paceline.train.batches.agreement import check_same_order, check_same_samples
from paceline.train.batches.reading import DatasetReader, num_samples
from paceline.train.evaluation.metric_states import Merge, MergeTree, compute_metrics, metric_functions, update_trees
from paceline.train.evaluation.stream_evaluation import StreamChunks
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
    kind: type[SetChunks | StreamChunks] = StreamChunks if is_stream(loading.dataset) else SetChunks
    chunks = kind(loading, run.reader, run.job, run.mesh, run.world, in_step=not run.engine.holds_all)

    def before_chunk(number: int) -> None:
        seed_evaluation(seed, step, number, device)
        prepared.begin_pass()

    try:
        with (
            evaluation_mode(model, *(one.model for one in prepared.models)),
            run.consensus(),
            prepared.untouched(),
            torch.no_grad(),
            run.precision.autocast(),
        ):
            return evaluate(chunks, before_chunk, model, measure, run.world, metrics)
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


def own_chunks(num_chunks: int, rank: int, num_assignments: int, *, in_step: bool) -> list[int]:
    """Numbers of the chunks that worker `rank` of `num_assignments` evaluates; rank 0 has one if any rank has.

    Args:
        in_step: whether all ranks must compute equally many because each chunk has collectives: a rank with fewer
            repeats chunks of the next rank.
    """
    first, last = (-(-one * num_chunks // num_assignments) for one in (rank, rank + 1))
    most = -(-num_chunks // num_assignments)
    return [number % num_chunks for number in range(first, first + most if in_step else last)]


class SetChunks:
    """The chunks of a map-style set, in order."""

    def __init__(
        self, loading: Loading, reader: DatasetReader, job: Job, mesh: Mesh, world: World, *, in_step: bool
    ) -> None:
        """
        Args:
            in_step: whether all workers must compute equally many chunks, because each has collectives.
        """
        set_size = num_samples(loading.dataset, "evaluation")
        self._chunks = loading.evaluation_order(set_size, job.eval_batch_size, job.seed)
        check_same_order(self._chunks.digest(), None, world.group)
        own = functools.partial(own_chunks, self._chunks.num_batches, mesh.share(world.rank), mesh.num_assignments)
        self._computed = own(in_step=in_step)
        # Workers that compute other parts of the model have the same chunks: the first of them gives the results.
        self._given = own(in_step=False) if mesh.leads_assignment(world.rank) else []
        first = [SampleRequest((self._chunks.batch(0)[: job.shard_size],))] if world.group is not None else []
        self._contents = reader.read_chunks(loading, self._chunks, self._computed, first)
        if first:
            check_same_samples(next(self._contents), None, world.group)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """The chunks that this worker computes, with their numbers."""
        return zip(self._computed, self._contents, strict=True)

    def size(self, number: int) -> int:
        """The number of samples in a chunk."""
        return len(self._chunks.batch(number))

    @property
    def num_samples(self) -> int:
        return self._chunks.num_samples

    @property
    def numbers(self) -> Sequence[int]:
        """The chunks of all workers in the order in which they count."""
        return range(self._chunks.num_batches)

    def counts_here(self, number: int) -> bool:
        """Whether this worker is the one that gives a chunk's results."""
        return number in self._given

    def tree(self, merge: Merge) -> MergeTree:
        """Merges the states of this worker's chunks."""
        return MergeTree(merge)


def evaluate(
    chunks: SetChunks | StreamChunks,
    before_chunk: Callable[[int], None],
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
        before_chunk: called with the number of a chunk before it is computed.
        metrics: by name, as `metric_states` takes them.

    Raises:
        ModelError: `measure` returns no dict, or a metric that is neither one value per sample nor a `Mean`.
    """
    others = {name: metric_functions(name, metric) for name, metric in (metrics or {}).items()}
    trees = {name: chunks.tree(functions.merge) for name, functions in others.items()}
    pending: dict[int, dict[str, list[Any]]] = {}
    for number, batch in chunks:
        before_chunk(number)
        values = measure(model, batch)
        if not isinstance(values, Mapping):
            raise ModelError(
                f"measure returned {type(values).__name__}; it should return a dict of metrics, such as "
                "{'loss': losses} with a value for each sample."
            )
        if number not in pending and chunks.counts_here(number):
            update_trees(others, trees, number, values)
        size = chunks.size(number)
        pending[number] = {name: _chunk_sums(name, one, size) for name, one in values.items() if name not in others}
    sums = _read(pending)
    # The metrics of the first worker that has a chunk, and how many sums each has.
    own_kinds = {name: len(numbers) for name, numbers in next(iter(sums.values()), {}).items()}
    kinds: dict[str, int] = next(filter(None, all_gather_objects(own_kinds, world.group)), {})
    numbers = chunks.numbers
    table = torch.zeros(len(numbers), sum(kinds.values()), dtype=torch.float64, device=world.device)
    for place, number in enumerate(numbers):
        if chunks.counts_here(number):
            found = sums[number]
            for name, length in kinds.items():
                if len(found.get(name, [])) != length:
                    raise ModelError(
                        f"measure returned the metric '{name}' in different forms for different batches; it should be "
                        "a value for each sample of every batch, or a paceline.Mean of every batch."
                    )
            row = [one for name in kinds for one in found[name]]
            table[place] = torch.tensor(row, dtype=torch.float64)
    if world.group is not None:
        dist.all_reduce(table, group=world.group)
    totals = iter([sum(column) for column in table.t().tolist()])
    results = {}
    for name, length in kinds.items():
        total, weight = next(totals), next(totals) if length == 2 else chunks.num_samples
        results[name] = total / weight if weight else math.nan
    return results | (compute_metrics(others, trees, world) if others else {})


def _chunk_sums(name: str, value: Any, num_samples: int) -> list[Any]:
    """[sum over samples], or [value times weight, weight] of a `Mean`: float64 scalars. Values on a GPU stay there, so
    that the CPU does not wait for them."""
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


def _read(pending: Mapping[int, Mapping[str, Sequence[Tensor]]]) -> dict[int, dict[str, list[float]]]:
    """The sums of all chunks as numbers; waits once for each device."""
    tensors = [one for of_chunk in pending.values() for sums in of_chunk.values() for one in sums]
    values: dict[int, float] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        there = [tensor for tensor in tensors if tensor.device == device]
        values |= dict(zip(map(id, there), torch.stack(there).tolist(), strict=True))
    found = {
        number: {name: [values[id(one)] for one in sums] for name, sums in of_chunk.items()}
        for number, of_chunk in pending.items()
    }
    for of_chunk in found.values():
        for name, sums in of_chunk.items():
            if len(sums) == 2 and not sums[1] >= 0:
                raise ModelError(f"The weight of the metric '{name}' is {sums[1]:g}; it should be 0 or more.")
    return found
