"""Global batches: of a map-style data set in the order that the job or a sampler says, of a stream as it comes; and the
samples of this worker's shards of them, on its device.

Workers that read a stream of unknown length tell each other how many samples each has read, one step ahead: while a
batch is trained on, the next one is read and its sizes travel. So no worker waits for them, all divide a short batch by
the same number of samples, and all know together when the epoch has ended.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.data import ArrayReader, ArraySet, Loading, SampleRequest, read_samples, set_size
from paceline.data.loading import EpochOrder, collated, digest_of, is_stream
from paceline.data.streams import StreamPosition, StreamStep, check_stream, is_split, placeholder_content, read_stream
from paceline.errors import DataError, JobError
from paceline.object_collectives import all_gather_objects, device_of, open_host_group
from paceline.parallel import Assignment
from paceline.parallel.step_input import shards_of_rank
from paceline.spec import Job
from paceline.tensors import Batch, tensors, to_device
from paceline.train.optim import counts_epochs
from paceline.train.process_group import World
from paceline.words import name_ranks

T = TypeVar("T")


@dataclass
class GlobalBatches:
    """The global batches of one run with this worker's content of each."""

    job: Job
    progress: DataProgress
    reader: DatasetReader
    world: World
    timeout_s: float
    sizes_group: dist.ProcessGroup | None = None
    """For the sizes of a stream's batches, in CPU memory: they travel while others communicate. It is opened for the
    first stream."""

    def of_epoch(
        self, loading: Loading, epoch: int, samples_per_epoch: int | None, *, reads_assignment: bool
    ) -> Iterator[tuple[GlobalBatch, Batch]]:
        """The global batches that remain of an epoch, each with this worker's content. A collective.

        Without `reads_assignment` the content is one sample, always the same. Raises `DataError` where what the data
        set, the loader or the sampler says cannot be done, or workers would read other samples.
        """
        if not reads_assignment and (loading.sampler is not None or is_stream(loading.dataset)):
            raise DataError(
                "aggregation.method = 'parameter_server_async' needs a map-style data set without a sampler; "
                "give one, or aggregate in another way."
            )
        if is_stream(loading.dataset):
            return self._of_stream(loading, epoch, samples_per_epoch)
        return self._of_set(loading, epoch, reads_assignment=reads_assignment)

    def _of_set(self, loading: Loading, epoch: int, *, reads_assignment: bool) -> Iterator[tuple[GlobalBatch, Batch]]:
        job, progress = self.job, self.progress
        num_samples = set_size(loading.dataset, "The training set", ", or a torch DataLoader over one")
        orders = functools.partial(loading.order, num_samples, job.global_batch_size, job.seed)
        numbers = progress.enter(epoch, orders, num_samples)
        # Loader processes are asked ahead.
        batches, asked = itertools.tee(progress.batch(epoch, number, numbers.stop) for number in numbers)
        if not reads_assignment:
            asked = itertools.islice(asked, 1)
        requests = (
            SampleRequest(one.own_shards if reads_assignment else (one.samples[:1],), one.number, one.assignment.own[0])
            for one in asked
        )
        compared = []
        if self.world.group is not None and numbers:
            first = progress.batch(epoch, numbers.start, numbers.stop)
            compared = [SampleRequest((first.samples[: job.shard_size],), first.number)]
        # Loader processes read them too: a file that a data set opens in this process could not be shared with those.
        contents = self.reader.read_shards(loading, epoch, itertools.chain(compared, requests))
        check_read_alike(progress.digest, next(contents).shards if compared else (), epoch, self.world.group)
        return zip(batches, contents if reads_assignment else itertools.cycle(contents), strict=False)

    def _of_stream(
        self, loading: Loading, epoch: int, samples_per_epoch: int | None
    ) -> Iterator[tuple[GlobalBatch, Batch]]:
        progress, stream, job = self.progress, loading.dataset, self.job
        check_stream(stream)
        if samples_per_epoch is None and hasattr(stream, "__len__"):
            samples_per_epoch = len(stream)
        if samples_per_epoch is None and counts_epochs(job):
            raise DataError(
                "The schedule or warm-up of optim counts epochs, but the length of the training stream is not known; "
                "give run.batches samples_per_epoch=…, or leave the schedule out and end the run by max_steps."
            )
        if self.world.group is not None and self.sizes_group is None:
            self.sizes_group = open_host_group(self.world.group, "sizes of batches", self.timeout_s)
        progress.gather = lambda value: all_gather_objects(value, self.sizes_group)
        name = stream.digest() if hasattr(stream, "digest") else type(stream).__name__
        ways = f"{getattr(stream, 'num_shards', 1)} shards" if is_split(stream, job.virtual_shards) else "as it comes"
        digest = digest_of(
            f"stream {name}, {ways}, {job.virtual_shards} substreams, {job.global_batch_size} samples a batch"
        )
        position = progress.enter_stream(epoch, digest)
        steps = self.reader.read_stream(loading, epoch, progress.own_substreams, position)
        first = next(steps)
        check_read_alike(f"{digest} {first.fingerprint}", (), epoch, self.sizes_group)
        return self._stream_batches(loading, first, steps, samples_per_epoch or 1)

    def _stream_batches(
        self, loading: Loading, first: StreamStep, steps: Iterator[StreamStep], samples_per_epoch: int
    ) -> Iterator[tuple[GlobalBatch, Batch]]:
        progress, job = self.progress, self.job
        ahead, received = first, exchange_sizes(first.sizes, job.virtual_shards, self.sizes_group)
        instead = functools.cache(lambda: self.reader.on_device(placeholder_content(loading)))
        while progress.steps_left != 0:
            step, sizes = ahead, received()
            if step is first and not any(sizes) and progress.at_epoch_start:
                raise DataError(
                    f"The training stream gives no sample in epoch {progress.epoch}; what can be read only once, such "
                    "as a generator, has to be made anew in its __iter__."
                )
            if not any(sizes) or (loading.drop_last and sum(sizes) < job.global_batch_size):
                progress.has_ended = True
                return
            if progress.steps_left != 1:
                ahead = next(steps)
                received = exchange_sizes(ahead.sizes, job.virtual_shards, self.sizes_group)
            batch = progress.stream_batch(sizes, step.states, step.fingerprint, samples_per_epoch)
            own_sizes, contents = batch.assignment.sizes, step.contents
            if not own_sizes:  # this worker's substreams have ended before others'
                own_sizes, contents = (1,), [instead()]
            yield batch, Batch(tuple(contents), own_sizes)


def exchange_sizes(
    own: dict[int, int], num_substreams: int, group: dist.ProcessGroup | None
) -> Callable[[], list[int]]:
    """Tell all workers how many samples each own substream gives in one step; returns a function that waits for the
    sizes of all."""
    sizes = torch.zeros(num_substreams, dtype=torch.int64, device=None if group is None else device_of(group))
    for number, size in own.items():
        sizes[number] = size
    # The maximum: each worker writes its own substreams; workers of one pipeline or tensor group read the same.
    work = None if group is None else dist.all_reduce(sizes, dist.ReduceOp.MAX, group=group, async_op=True)

    def received() -> list[int]:
        if work is not None:
            work.wait()
        found: list[int] = sizes.tolist()
        return found

    return received


def check_read_alike(order: str | None, content: Any, epoch: int | None, group: dist.ProcessGroup | None) -> None:
    """Check that all workers read the same samples; a collective at the beginning of every epoch and evaluation.

    `order` is the fingerprint of the order of samples on this worker, `content` are samples of the same numbers on
    every worker: their sums are compared up to rounding, since nodes may have other processors. Texts are not: they may
    be paths. Raises `DataError` on all workers, if their orders or samples differ.
    """
    everyone = all_gather_objects([order, [one for tensor in tensors(content) for one in _sums(tensor)]], group)
    where = "the evaluation" if epoch is None else f"epoch {epoch}"
    (first_order, first), *_ = everyone
    if others := [rank for rank, (other, _) in enumerate(everyone) if other != first_order]:
        raise DataError(
            f"In {where} {name_ranks(others)} would read other samples than rank 0, or in another order; build the "
            "data set and the sampler alike on all workers, and draw from the global generators only."
        )
    sums = torch.tensor(first, dtype=torch.float64)
    if others := [
        rank
        for rank, (_, other) in enumerate(everyone)
        if len(other) != len(first) or not torch.allclose(sums.new_tensor(other), sums, rtol=1e-5, atol=0.0)
    ]:
        raise DataError(
            f"In {where} {name_ranks(others)} read other values than rank 0 in samples of the same numbers; build and "
            "split the data set after paceline.init, which seeds all workers alike, and write nothing into it."
        )


def _sums(tensor: Tensor) -> Iterator[float]:
    """The sum of the positive and of the negative numbers in a tensor, neither of which cancels, and of squares."""
    whole = torch.cat([one.flatten() for one in tensor.unbind()]) if tensor.is_nested else tensor.to_dense()
    numbers = (torch.view_as_real(whole) if whole.is_complex() else whole).detach().double().nan_to_num()
    yield from (float(numbers.clamp(min=0).sum()), float(numbers.clamp(max=0).sum()), float(numbers.square().sum()))


# --- the samples of a data set on this worker's device ---


class DatasetReader:
    """Reads the batches of one run."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = job
        self._device = device
        self._dtype = torch.float64 if job.precision == "float64" else torch.float32
        self._placed: dict[str, Any] = {"device": device, "dtype": self._dtype, "seed": job.seed}
        self._readers: WeakKeyDictionary[ArraySet, ArrayReader] = WeakKeyDictionary()

    def read_shards(self, loading: Loading, epoch: int, requests: Iterable[SampleRequest]) -> Iterator[Batch]:
        """Batches to train on, one for each request."""
        requests, asked = itertools.tee(requests)
        for request, contents in zip(requests, self.contents(loading, epoch, asked, train=True), strict=False):
            yield Batch(tuple(contents), tuple(len(samples) for samples in request.shards))

    def read_stream(
        self, loading: Loading, epoch: int, own: Sequence[int], position: StreamPosition, batch_size: int | None = None
    ) -> Iterator[StreamStep]:
        """The substreams `own`, step by step from `position` on, of all of which a step has `batch_size` samples (None:
        a global batch); steps after the end are empty."""
        size = batch_size or self._job.global_batch_size
        return prefetched(read_stream(loading, own, size, position, epoch=epoch, **self._placed), self._device)

    def on_device(self, content: Any) -> Any:
        """`content` with its tensors on this worker's device."""
        return to_device(content, self._device, self._dtype)

    def contents(
        self, loading: Loading, epoch: int, requests: Iterable[SampleRequest], *, train: bool
    ) -> Iterator[list[Any]]:
        """For each request the contents of its shards, each collated by itself."""
        job, dataset = self._job, loading.dataset
        if isinstance(dataset, ArraySet) and loading.collate_fn is collated:
            reader = self._readers.get(dataset)
            if reader is None:  # it may hold the whole set on the device, so there is one for each set
                reader = ArrayReader(dataset, self._device, self._dtype, job.channels_last, job.seed)
                self._readers[dataset] = reader
            read = ([reader.read(epoch, shard, train) for shard in request.shards] for request in requests)
            return prefetched(read, self._device)
        return prefetched(read_samples(loading, requests, epoch=epoch, train=train, **self._placed), self._device)


def loading_of(job: Job, dataset: Any, purpose: str, **given: Any) -> Loading:
    """How `dataset` is read, by what is given here, by the DataLoader that it is, or by the job."""
    if given["num_workers"] is None and not isinstance(dataset, DataLoader):
        given["num_workers"] = job.data.loader_workers
    return Loading.of(dataset, job.global_batch_size, purpose, **given)


def prefetched(contents: Iterable[T], device: torch.device) -> Iterator[T]:
    """The same contents, each read while the one before is trained on; on a CPU as they are.

    What reading enqueues on the GPU (copies from pinned memory, augmentation) runs on a stream of its own. An error is
    raised in the place of the content that it belongs to.
    """
    if device.type != "cuda":
        yield from contents
        return
    reading = iter(contents)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # a data set that lies on the GPU may still be on its way

    def read() -> list[T] | Exception:
        """The next content; an empty list at the end."""
        try:
            with torch.cuda.stream(side):
                return [next(reading)]
        except StopIteration:
            return []
        except Exception as error:
            return error

    found = read()
    while found:
        if isinstance(found, Exception):
            raise found
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(side)  # for this content, not for the next one
        content = found[0]
        for tensor in tensors(content):
            if tensor.is_cuda:
                tensor.record_stream(computing)  # its memory is not the side stream's again before it is used
        found = read()
        yield content


# --- the position of a run in its data: the next global batch, and this worker's assignment of it ---


Orders = Callable[[int], EpochOrder]
"""The order of every epoch, by its number."""


@dataclass(frozen=True)
class GlobalBatch:
    """One global batch, and this worker's assignment of it."""

    epoch: int
    number: int
    """Index of the batch within its epoch, from 0."""
    index: int
    """Index of the batch over all epochs of the job, from 0."""
    num_left: int
    """How many batches this run trains on until the epoch ends, including this one; of a stream until the run ends, 0
    where that is not known."""
    samples: NDArray[np.int64]
    """The numbers of the samples of all workers."""
    assignment: Assignment
    samples_per_epoch: int
    position: StreamPosition | None = None
    """How far the stream has been read after this batch, if it is of a stream."""

    @property
    def own_shards(self) -> tuple[NDArray[np.int64], ...]:
        """The indices of the samples of each of this worker's shards, 1-D; if it has none, the batch's first sample."""
        ends = itertools.accumulate(self.assignment.sizes, initial=self.assignment.span[0])
        return tuple(self.samples[start:stop] for start, stop in itertools.pairwise(ends)) or (self.samples[:1],)


class DataProgress:
    """The progress of a run through its epochs. A resumed run continues after its last trained batch.

    Attributes:
        steps: optimizer updates made.
        samples_seen: by these updates, over all workers.
        epoch: the epoch that the last batch belongs to; the next one once that is left.
        digest: the fingerprint of this epoch's order, once it is entered.
        gather: returns the values of all workers, while a stream is trained on; a collective.
    """

    def __init__(self, job: Job, rank: int, num_assignments: int, max_steps: int | None = None) -> None:
        """`rank` is the index of this worker among the `num_assignments` of a global batch."""
        self.steps, self.samples_seen, self.epoch = 0, 0, 0
        self.digest: str | None = None
        self.gather: Callable[[Any], list[Any]] = lambda value: [value]
        self.job, self._rank, self._num_assignments = job, rank, num_assignments
        self._max_steps = max_steps
        self._end = max_steps
        """The number of updates after which the run ends: `max_steps`, or fewer once it has been stopped."""
        self._set_size: int | None = None
        """The number of samples in the training set; None: of a stream, or not known yet."""
        self._next = 0
        """The number of the next batch in its epoch."""
        self._checks_order = True
        self._is_resumed = False
        """Whether the position comes from a checkpoint, and the run has not reached it yet."""
        self._orders: Orders | None = None
        """Returns the order of an epoch; the one used last is cached. None: a stream has none."""
        self._position: StreamPosition | None = None
        """How far the stream of this epoch has been trained on; its states are those that this worker knows."""
        self.has_ended = False
        """Whether the stream of this epoch is known to have ended."""

    # --- the whole run ---

    def total_steps(self, num_samples: int) -> int:
        """Updates of the whole run on a training set of `num_samples`, in batches of the job's size."""
        steps = self.job.epochs * -(-num_samples // self.job.global_batch_size)
        return steps if self._max_steps is None else min(steps, self._max_steps)

    @property
    def last_step(self) -> int | None:
        """The number of the run's last step, if all epochs are as long as this one; None: not known, of a stream."""
        if self._orders is None:
            return self._end
        steps = self.job.epochs * self._orders(self.epoch).num_batches
        return steps if self._end is None else min(steps, self._end)

    @property
    def steps_left(self) -> int | None:
        """How many updates the run may still make; None: any number."""
        return None if self._end is None else max(0, self._end - self.steps)

    def end_here(self) -> None:
        """Make no more updates."""
        self._end = self.steps

    # --- epochs ---

    def epochs(self) -> range:
        """The numbers of the remaining epochs."""
        return range(self.epoch if self._is_resumed else 0, self.job.epochs)

    def is_over(self, epoch: int) -> bool:
        """Whether no batch of an epoch is left: it had ended before the run resumed, or all steps have been made."""
        return (self._is_resumed and epoch < self.epoch) or self.steps_left == 0

    def enter(self, epoch: int, orders: Orders, set_size: int) -> range:
        """The numbers of the remaining batches of an epoch that is not over; `batch` makes them. Raises `DataError`
        where a resumed run had a training set of another size, or another order in the epoch that it was saved in."""
        self._orders, self._position = functools.lru_cache(1)(orders), None
        order = self.order(epoch)
        self._begin(epoch, order.digest(), set_size)
        left = order.num_batches if self.steps_left is None else self._next + self.steps_left
        return range(self._next, min(order.num_batches, left))

    def enter_stream(self, epoch: int, digest: str) -> StreamPosition:
        """Where to begin in an epoch of a stream that is not over; `stream_batch` makes its batches. Raises `DataError`
        where a resumed run had another stream in the epoch that it was saved in."""
        self._orders = None
        self._begin(epoch, digest, None)
        if self._next == 0 or self._position is None:
            self._position = StreamPosition(0, (0,) * self.job.virtual_shards)
        return self._position

    def _begin(self, epoch: int, digest: str, set_size: int | None) -> None:
        """Go to the beginning of an epoch, or to the place in it where the run was saved."""
        if not self._is_resumed and (epoch, 0) < (self.epoch, self._next):  # its order and draws would come again
            raise JobError(
                f"Epoch {epoch} of this run has been trained on; call run.batches(data) once for all epochs of "
                "paceline.init, or write: for epoch in run.epochs(): for batch in run.batches(data, epoch); two data "
                "sets of one epoch are put into one (torch.utils.data.ConcatDataset)."
            )
        if not (self._is_resumed and epoch == self.epoch):
            self.epoch, self._next = epoch, 0
        elif self._next > 0 and self._set_size not in (None, set_size):
            now = "no length" if set_size is None else f"{set_size:,} samples"
            raise DataError(
                f"The training set has {now}, but {self._set_size:,} samples when this run was saved; resume with the "
                "same data, or begin in another folder."
            )
        elif self._next > 0 and self._checks_order and digest != self.digest:
            raise DataError(
                f"The samples of epoch {epoch} come in another order than when this run was saved; give the same data "
                "and a sampler that depends on the epoch alone (set_epoch, or torch's own generators)."
            )
        self._set_size, self.digest = set_size, digest
        self._is_resumed = self.has_ended = False

    @property
    def at_epoch_start(self) -> bool:
        """Whether no batch of the current epoch has been trained on."""
        return self._next == 0

    @property
    def epochs_done(self) -> int | None:
        """How many epochs have been trained on; None in the middle of one."""
        if self._next == 0 and not self.has_ended:
            return self.epoch  # maybe none that comes: a sampler need not know its order
        is_complete = self.has_ended if self._orders is None else self._next == self._orders(self.epoch).num_batches
        return self.epoch + 1 if is_complete else None

    def leave_epoch(self) -> None:
        """Note that the epoch is complete, including its evaluation, if all its batches have been trained on."""
        if self.epochs_done is not None:
            self.epoch, self._next, self._position, self.has_ended = self.epochs_done, 0, None, False

    # --- batches ---

    def order(self, epoch: int) -> EpochOrder:
        """The order of an epoch of a map-style set, once the first one is entered."""
        assert self._orders is not None
        return self._orders(epoch)

    def batch(self, epoch: int, number: int, stop: int) -> GlobalBatch:
        """A batch of an epoch of a map-style set, of which those before `stop` are trained on."""
        order = self.order(epoch)
        index = epoch * order.num_batches + number
        samples = order.batch(number)
        assignment = Assignment.of(len(samples), self.job.virtual_shards, self._rank, self._num_assignments)
        return GlobalBatch(epoch, number, index, stop - number, samples, assignment, order.num_samples)

    @property
    def own_substreams(self) -> range:
        """The numbers of the substreams that this worker reads."""
        return range(*shards_of_rank(self._rank, self._num_assignments, self.job.virtual_shards))

    def stream_batch(
        self, sizes: Sequence[int], states: Mapping[str, Any], fingerprint: int, samples_per_epoch: int
    ) -> GlobalBatch:
        """The next batch of a stream: how many samples each substream gives, the stream's own states after it as far as
        this worker knows them, and the fingerprint of its samples so far (0: not known)."""
        position = self._position
        assert position is not None  # `enter_stream` was called
        assignment = Assignment.of_sizes(sizes, self.job.virtual_shards, self._rank, self._num_assignments)
        before = sum(position.taken)
        taken = tuple(had + more for had, more in zip(position.taken, sizes, strict=True))
        after = StreamPosition(position.step + 1, taken, states, fingerprint)
        samples = np.arange(before, before + sum(sizes))
        num_left, number = self.steps_left or 0, position.step
        return GlobalBatch(self.epoch, number, number, num_left, samples, assignment, samples_per_epoch, after)

    def trained_on(self, batch: GlobalBatch) -> None:
        """Note that an update by `batch` has been made, by this worker or a server."""
        self.steps += 1
        self.samples_seen += batch.assignment.global_size
        self.epoch, self._next = batch.epoch, batch.number + 1
        self._position = batch.position or self._position

    # --- checkpoints ---

    def state_dict(self, *, collective: bool = False) -> dict[str, Any]:
        """What a checkpoint keeps: if all workers call this together, with streams' own states, without which a resumed
        run reads again what it had read."""
        course: dict[str, Any] = {
            "epoch": self.epoch,
            "next": self._next,
            "num_samples": self._set_size,
            "order": self.digest,
        }
        if self._position is not None:
            states: dict[str, Any] = {}
            for known in self.gather(dict(self._position.states)) if collective else []:
                states |= known
            taken, fingerprint = list(self._position.taken), self._position.fingerprint
            course["stream"] = {"taken": taken, "states": json.dumps(states), "fingerprint": fingerprint}
        return {"steps": self.steps, "samples_seen": self.samples_seen, "course": course}

    def load_state_dict(self, state: dict[str, Any], *, check_order: bool = True) -> None:
        """Continue from `state`; with `check_order` the order of samples has to be the same as then."""
        self.steps, self.samples_seen, course = state["steps"], state["samples_seen"], state["course"]
        self.epoch, self._next = course["epoch"], course["next"]
        self._set_size, self.digest = course["num_samples"], course["order"]
        if (stream := course.get("stream")) is not None:
            fingerprint = stream["fingerprint"] if check_order else 0
            states = json.loads(stream["states"])
            self._position = StreamPosition(self._next, tuple(stream["taken"]), states, fingerprint)
        self._is_resumed, self._checks_order = True, check_order
