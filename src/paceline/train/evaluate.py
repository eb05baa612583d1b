"""Evaluation that counts every sample exactly once, on any number of devices, to the last bit.

A worker measures a chunk at once; every sample is in one chunk that counts. Chunks are cut and numbered alike on any
number of workers. Those of a stream come from its substreams, batch by batch, as they would be trained on; nobody knows
how many there are: in each step all workers tell each other how many samples every substream gave, and the evaluation
ends when none gave any.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.data import Loading, SampleRequest, random_streams, set_size
from paceline.data.counter_random import key
from paceline.data.loading import is_stream
from paceline.data.streams import StreamPosition, check_stream, is_split, stand_in
from paceline.errors import DataError
from paceline.parallel import Companions
from paceline.parallel.assignment import shards_of_rank
from paceline.parallel.generators import seed_generators
from paceline.train.batches import check_read_alike, exchange_sizes
from paceline.train.metric_states import MetricStates

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
    """Every metric over a data set, each sample counted exactly once on any number of workers. A collective.

    Training goes on as if nothing had happened: the modes of modules, their buffers and the generators are put back,
    and where weights differ between workers, a model has its own again.

    Args:
        loading: how the data set is read.
        measure, metrics: as `Run.evaluate` takes them.
        model: what `measure` is called with.
        prepared: all models of the run, which `measure` may call; they all are spread alike.

    Raises:
        DataError: the set cannot be evaluated, or workers would read other samples.
        ModelError: what was measured is not what `Measure` says.
    """
    session = run.stepper.session
    session.enter_together("run.evaluate")
    chunks = _chunks_of_stream(run, loading) if is_stream(loading.dataset) else _chunks_of_set(run, loading)
    states = MetricStates(metrics or {})
    try:
        with (
            evaluation_mode(model, *(one.model for one in prepared.models)),
            run.consensus(),
            prepared.untouched(),
            torch.no_grad(),
            run.precision.autocast(),
        ):
            for chunk in chunks:
                seed_generators(key(run.job.seed, random_streams.EVALUATION, run.steps, chunk.number), run.device)
                prepared.begin_pass()
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
    rank = mesh.share(run.rank)
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
    own, leads = shares[mesh.share(run.rank)], mesh.leads_assignment(run.rank)
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
            instead = instead or Chunk(-1, (0, 0), 1, run.reader.on_device(stand_in(loading)), counts=False)
            yield instead
        index += 1
    check_read_alike(str(fingerprint), (), None, run.world.group)
    if not index:
        raise DataError("The evaluation stream is empty.")
