"""Evaluation that counts every sample exactly once, on any number of devices, to the last bit.

A worker measures a chunk at once; every sample is in one chunk that counts. Chunks are cut and numbered alike on any
number of workers. Those of a stream come from its substreams, batch by batch, as they would be trained on; nobody knows
how many there are: in each step all workers tell each other how many samples every substream gave, and the evaluation
ends when none gave any.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.fixed_tree import TreeSum
from paceline.data import Loading, Purpose, SampleRequest, set_size
from paceline.data.loading import is_stream
from paceline.data.randomness import key
from paceline.data.streams import StreamPosition, check_stream, is_split, placeholder_content
from paceline.errors import DataError, ModelError, shown
from paceline.object_collectives import broadcast_object, gather_objects
from paceline.parallel import Companions
from paceline.parallel.losses import Mean
from paceline.parallel.pass_state import preserved, seed_generators
from paceline.parallel.step_input import shards_of_rank
from paceline.tensors import map_tensors
from paceline.train.batches import check_read_alike, exchange_sizes

if TYPE_CHECKING:
    from paceline.train.run import Run

Measure = Callable[[nn.Module, Any], Mapping[str, Any]]
"""measure(model, batch): for every metric one value per sample, of shape (samples in batch,), or a `Mean`; for one that
is given to `evaluate` what its `update` takes."""


@dataclass(frozen=True)
class Chunk:
    """Samples that are measured together."""

    number: int
    """Seeds what measuring it draws."""
    place: tuple[int, int]
    """Its substream (0 for a map-style set) and its index there: the order in which chunks are added up."""
    size: int
    content: Any
    counts: bool = True
    """Whether this worker gives its results: others compute it too where they hold other parts of the model, or where
    all workers have to compute equally many, because each has collectives."""


def evaluate_between_steps(
    run: Run,
    loading: Loading,
    measure: Measure,
    metrics: Mapping[str, Any] | None,
    model: nn.Module,
    prepared: Companions,
) -> dict[str, float]:
    """What `Run.evaluate` returns. A collective. `measure` may call all models of the run that are prepared.

    Training goes on as if nothing had happened: the modes of modules, their buffers and the generators are put back,
    and where weights differ between workers, a model has its own again. Raises `DataError` where the set cannot be
    evaluated, or workers would read other samples, `ModelError` for what is not as `Measure` says.
    """
    session = run.stepper.session
    session.enter_together("run.evaluate")
    chunks = _chunks_of_stream(run, loading) if is_stream(loading.dataset) else _chunks_of_set(run, loading)
    states = MetricStates(metrics or {})
    try:
        with (
            evaluation_mode(model, *(one.model for one in prepared)),
            run.consensus(),
            preserved(*prepared),
            torch.no_grad(),
            run.precision.autocast(),
        ):
            for chunk in chunks:
                seed_generators(key(run.job.seed, Purpose.EVALUATION, run.steps, chunk.number), run.device)
                for one in prepared:
                    one.begin_pass()
                found = states.of_chunk(measure(model, chunk.content), chunk.size)
                if chunk.counts:
                    states.add(chunk.place, found)
            return states.computed(run.world.group)
    finally:
        session.seed_between_steps()


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


# --- the chunks of this worker ---


def _chunks_of_set(run: Run, loading: Loading) -> Iterator[Chunk]:
    job, mesh, group = run.job, run.mesh, run.world.group
    num_samples = set_size(loading.dataset, "The evaluation set", ", or a torch DataLoader over one")
    order = loading.evaluation_order(num_samples, job.eval_batch_size, job.seed)
    rank = mesh.assignment_index(run.rank)
    first, last = (-(-one * order.num_batches // mesh.num_assignments) for one in (rank, rank + 1))
    # Where all have to compute equally many, a worker with fewer repeats chunks of the next one.
    end = last if run.engine.holds_all else first - (-order.num_batches // mesh.num_assignments)
    computed = [number % order.num_batches for number in range(first, end)]
    compared = [] if group is None else [SampleRequest((order.batch(0)[: job.shard_size],))]
    requests = [*compared, *(SampleRequest((order.batch(number),), number) for number in computed)]
    contents = (shards[0] for shards in run.reader.contents(loading, 0, requests, train=False))
    check_read_alike(order.digest(), next(contents) if compared else (), None, group)
    for place, (number, content) in enumerate(zip(computed, contents, strict=True), first):
        counts = place < last and mesh.leads_assignment(run.rank)
        yield Chunk(number, (0, number), len(order.batch(number)), content, counts)


def _chunks_of_stream(run: Run, loading: Loading) -> Iterator[Chunk]:
    check_stream(loading.dataset)
    loading.check_whole()
    stream = copy.deepcopy(loading.dataset)  # it may be trained on at the same time
    loading = dataclasses.replace(loading, dataset=stream)
    mesh, num = run.mesh, run.job.virtual_shards
    shares = [range(*shards_of_rank(rank, mesh.num_assignments, num)) for rank in range(mesh.num_assignments)]
    own, leads = shares[mesh.assignment_index(run.rank)], mesh.leads_assignment(run.rank)
    size = loading.batch_size or run.job.eval_batch_size
    batch_size = size * num if is_split(stream, num) else max(size, num)
    instead: Chunk | None = None
    index, fingerprint = 0, 0
    for step in run.reader.read_stream(loading, 0, own, StreamPosition(0, (0,) * num), batch_size):
        fingerprint = step.fingerprint
        sizes = exchange_sizes(step.sizes, num, run.world.group)()
        if not any(sizes):
            break
        mine = [substream for substream in own if sizes[substream]]
        for substream, content in zip(mine, step.contents, strict=True):
            chunk = Chunk(index * num + substream, (substream, index), sizes[substream], content, leads)
            instead = dataclasses.replace(chunk, counts=False)
            yield chunk
        most = max(sum(sizes[substream] > 0 for substream in share) for share in shares)
        for _ in range(0 if run.engine.holds_all else most - len(mine)):
            instead = instead or Chunk(-1, (0, 0), 1, run.reader.on_device(placeholder_content(loading)), counts=False)
            yield instead
        index += 1
    check_read_alike(str(fingerprint), (), None, run.world.group)
    if not index:
        raise DataError("The evaluation stream is empty.")


# --- metrics: means of what `measure` returns, those of torchmetrics (F1, perplexity, BLEU), or three functions ---


_HOST = torch.device("cpu")


@dataclass(frozen=True)
class MetricFunctions:
    """How a metric that is no mean is computed: from states of chunks, merged in one fixed tree over the chunks."""

    update: Callable[..., Any]
    """update(*values) -> state of one chunk, from what `measure` returned under the metric's name."""
    merge: Callable[[Any, Any], Any]
    """merge(state, state) -> state of both; associative."""
    compute: Callable[[Any], Any]
    """compute(state) -> number, or a dict of numbers."""


class MetricStates:
    """The states of several metrics, by name, over the chunks that this worker counts."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        """`metrics` are those that are no means, by name. Raises `ModelError` for something that is no metric."""
        self._functions = {name: metric_functions(name, metric) for name, metric in metrics.items()}
        self._trees: dict[str, dict[int, TreeSum[Any]]] = {}
        """A tree over the chunks of each substream, by metric: the same for any number of workers."""

    def _functions_of(self, name: str) -> MetricFunctions:
        return self._functions.get(name) or MetricFunctions(_sums, torch.add, lambda sums: _mean(name, sums))

    def of_chunk(self, values: Any, size: int) -> dict[str, Any]:
        """The state of each metric in a chunk of `size` samples. Raises `ModelError` for what is not measured so."""
        if not isinstance(values, Mapping):
            raise ModelError(
                f"measure returned {type(values).__name__}; it should return a dict of metrics, such as "
                "{'loss': losses} with a value for each sample."
            )
        for name in self._functions.keys() - values.keys():
            raise ModelError(f"measure returned nothing for the metric '{name}', but only {sorted(values)}.")
        found = {}
        for name, value in values.items():
            if name in self._functions:
                given = value if isinstance(value, Sequence) else (value,)
                found[name] = self._functions[name].update(*given)
            elif isinstance(value, Mean) or (isinstance(value, Tensor) and value.shape == (size,)):
                found[name] = _sums(value)
            else:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ModelError(
                    f"The metric '{name}' should be one value per sample, shape ({size},), or, for a mean over them, "
                    f"paceline.Mean(mean, weight={size}), but is {got}."
                )
        return found

    def add(self, place: tuple[int, int], states: Mapping[str, Any]) -> None:
        """Count a chunk, by its substream and its index there. Raises `ModelError` for other metrics than before."""
        if self._trees and self._trees.keys() != states.keys():
            raise _other_names(self._trees, states)
        substream, index = place
        for name, state in states.items():
            trees = self._trees.setdefault(name, {})
            tree = trees.setdefault(substream, TreeSum(add=self._functions_of(name).merge))
            tree.push_block((index, 1), state)

    def computed(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """The value of every metric, on every worker; a collective. Rank 0 merges and computes. Raises `ModelError`
        where workers have measured other metrics, or one cannot be computed."""
        # A worker's own states are where it computes, those of the others in host memory.
        own = {
            name: {substream: map_tensors(tree.sums, Tensor.cpu) for substream, tree in trees.items()}
            for name, trees in self._trees.items()
        }
        of_workers = gather_objects(own, group)
        results: dict[str, float] | None = None
        problem: Exception | None = None
        if of_workers is not None:
            try:
                results = self._results([one for one in of_workers if one])
            except Exception as error:
                problem = error
        answer: dict[str, float] | None = broadcast_object(results, group)
        if problem is not None:
            raise problem
        if answer is None:
            raise ModelError("A metric could not be computed on worker 0, which says why.")
        return answer

    def _results(self, of_workers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The value of every metric, from the blocks of those workers that have some, by substream."""
        results: dict[str, float] = {}
        for one in of_workers:
            if one.keys() != of_workers[0].keys():
                raise _other_names(of_workers[0], one)
        for name in of_workers[0] if of_workers else ():
            functions = self._functions_of(name)
            whole = TreeSum[Any](add=functions.merge)
            for substream in sorted({substream for one in of_workers for substream in one[name]}):
                tree = TreeSum[Any](add=functions.merge)
                for one in of_workers:
                    for block, state in one[name].get(substream, ()):
                        tree.push_block(block, state)
                whole.push_block((substream, 1), tree.root())
            results |= _named_numbers(name, functions.compute(whole.root()))
        return results


def _other_names(some: Mapping[str, Any], others: Mapping[str, Any]) -> ModelError:
    return ModelError(
        f"measure returned the metrics {sorted(some)} for some batches and {sorted(others)} for others; it should "
        "return the same for every batch, as paceline.Mean(value, weight=0) where nothing counts."
    )


def _sums(value: Any) -> Tensor:
    """[sum over samples, number of samples], or [value times weight, weight] of a `Mean`, in float64."""
    if not isinstance(value, Mean):
        sums = value.detach().to(torch.float64).sum()
        return torch.stack([sums, torch.full_like(sums, len(value))])
    mean, weight = (torch.as_tensor(one, dtype=torch.float64).detach() for one in (value.value, value.weight))
    device = weight.device if weight.is_cuda else mean.device
    mean, weight = mean.to(device).reshape(()), weight.to(device).reshape(())
    weight = torch.where(weight < 0, torch.nan, weight)
    return torch.stack([torch.where(weight == 0, 0.0, mean * weight), weight])


def _mean(name: str, sums: Tensor) -> float:
    total, weight = sums.tolist()
    if math.isnan(weight):
        raise ModelError(f"A weight of the metric '{name}' is below 0 or no number; it should be 0 or more.")
    return total / weight if weight else math.nan


def _named_numbers(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {f"{name}_{key}": number for key, one in value.items() for number in _named_numbers(name, one).values()}
    try:
        return {name: float(value)}
    except (TypeError, ValueError, RuntimeError):
        raise ModelError(f"The metric '{name}' computes {shown(value)}, not a number or a dict of numbers.") from None


def metric_functions(name: str, metric: Any) -> MetricFunctions:
    """The functions of a torchmetrics metric, or the three that were given. Raises `ModelError` where it is neither."""
    if isinstance(metric, tuple) and len(metric) == 3 and all(map(callable, metric)):
        return MetricFunctions(*metric)
    if not all(hasattr(metric, needed) for needed in ("update", "compute", "reset", "metric_state", "named_modules")):
        raise ModelError(
            f"The metric '{name}' is a {type(metric).__name__}; give a torchmetrics metric or (update, merge, compute)."
        )
    return _of_torchmetrics(name, metric)


def _of_torchmetrics(name: str, metric: Any) -> MetricFunctions:
    """A state is, for each metric that this one consists of (a sum of two has three), by its path, (number of updates,
    values by name), in host memory."""
    parts = {path: part for path, part in metric.named_modules() if hasattr(part, "metric_state")}

    def update(*values: Any) -> Any:
        metric.to(next((value.device for value in values if isinstance(value, Tensor)), _HOST))
        metric.reset()
        metric.update(*values)
        return {
            path: [part.update_count, map_tensors(part.metric_state, lambda state: state.detach().cpu().clone())]
            for path, part in parts.items()
        }

    def merge(first: Any, second: Any) -> Any:
        merged = {}
        for path, part in parts.items():
            (num_first, one), (num_second, other) = first[path], second[path]
            fraction = num_first / max(1, num_first + num_second)  # what only consists of others may count no updates
            rules = {state: getattr(rule, "__name__", None) for state, rule in part._reductions.items()}
            values = {state: _merged(name, rules[state], mine, other[state], fraction) for state, mine in one.items()}
            merged[path] = [num_first + num_second, values]
        return merged

    def compute(state: Any) -> Any:
        metric.to(_HOST)
        metric.reset()
        syncs = {path: part.distributed_available_fn for path, part in parts.items()}
        try:
            for path, part in parts.items():
                part.distributed_available_fn = lambda: False  # the other workers have given all they know
                part._update_count, values = state[path]
                for one, value in values.items():
                    setattr(part, one, value)
            return metric.compute()
        finally:
            for path, part in parts.items():
                part.distributed_available_fn = syncs[path]
            metric.reset()

    return MetricFunctions(update, merge, compute)


def _merged(name: str, rule: str | None, first: Any, second: Any, fraction: float) -> Any:
    """Two values of a state of torchmetrics, of which the first counts for `fraction`, by the state's own rule."""
    if isinstance(first, list) and rule in ("dim_zero_cat", None):
        return first + second
    if rule == "dim_zero_cat":
        return torch.cat([first.reshape(-1, *first.shape[1:]), second.reshape(-1, *second.shape[1:])])
    if rule == "dim_zero_sum":
        return first + second
    if rule == "dim_zero_mean":
        return first * fraction + second * (1 - fraction)
    if rule in ("dim_zero_max", "dim_zero_min"):
        return (torch.maximum if rule == "dim_zero_max" else torch.minimum)(first, second)
    raise ModelError(
        f"The metric '{name}' has a state with the rule {rule}, which cannot be merged part by part; give three "
        "functions (update, merge, compute)."
    )
