"""`Run`: one training run as its user's script holds it."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import env
from paceline.checkpoint import Snapshot
from paceline.data import ArrayReader, ArraySet, stream_batches
from paceline.errors import DataError, JobError, ModelError
from paceline.heartbeat import Heartbeat
from paceline.parallel import (
    Assignment,
    Engine,
    StepInput,
    check_batch,
    check_shards,
    parallelize,
    unwrapped,
)
from paceline.parallel.gradient_norms import TakeNorms
from paceline.parallel.parts import clip
from paceline.parallel.start import is_on_meta
from paceline.spec import Job, Mesh, Plan, parse_mesh
from paceline.spec.codec import from_mapping, to_mapping
from paceline.spec.job import differences
from paceline.spec.noise_scale import SmoothedNoise
from paceline.spec.plan import EXCLUDED
from paceline.train.checkpoints import Checkpoints
from paceline.train.data_progress import Batch, DataProgress
from paceline.train.digest import weights_sha256
from paceline.train.evaluate import Measure, chunk_ranges, evaluate, own_chunks
from paceline.train.noise_meter import NoiseMeter
from paceline.train.nonfinite import Guard
from paceline.train.process_group import abandon, join, leave_at_once
from paceline.train.schedule import lr_factor
from paceline.train.seeding import seed_between_steps, seed_evaluation, seed_generators, seed_shard
from paceline.train.state import Names, Trained, rebind
from paceline.train.status_exchange import StatusExchange
from paceline.train.stragglers import Stragglers
from paceline.train.timing import StepTimer
from paceline.train.trace import ParityTracer


class Stateful(Protocol):
    """Anything that a checkpoint can keep."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


LossFn = Callable[[nn.Module, Any], Tensor]
"""The mean loss over the samples of a batch, from the prepared model and the batch."""

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

# Gradient noise changes slowly, and a small model's norms every step would cost more than 1 % of its time.
_NOISE_EVERY_STEPS = 2

_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def init(
    job: Job | None = None,
    /,
    *,
    plan: Plan | None = None,
    strategy: str | None = None,
    max_steps: int | None = None,
    checkpoint_dir: str | Path | None = None,
    force: bool = False,
    **values: Any,
) -> Run:
    """Join the other workers of this run, as many as whoever started this script chose.

    Args:
        job: what to train; None: the defaults.
        plan: how it is spread; None: one worker a process of this launch, on GPUs if there are any.
        strategy: how the workers share out the model where no plan says so: "dp", "fsdp", "hsdp", "pp", "tp", or a
            mesh such as "fsdp2 x tp2"; None: as `paceline launch --strategy` says, else "dp". One worker alone
            has nobody to share with, whatever this says.
        max_steps: end `Run.batches` after this many steps, whatever the epochs say.
        checkpoint_dir: where checkpoints go if the job does not say; None: there are none.
        force: resume even a checkpoint of another job.
        values: any key of a job over that, `global_batch_size=256, optim={"clip_norm": 1.0}`. The schedule in
            `optim` acts as a factor on the learning rates of the optimizer that `prepare` is given.

    Raises:
        JobError: a key or value that cannot be meant, or more workers than virtual shards.
        LaunchError: an environment that contradicts itself.
    """
    job = (job or Job()).with_values(**values)  # a Job made in Python is checked here too
    facts = env.worker_facts()
    plan = plan or _default_plan(job, facts, strategy or env.strategy() or "dp")
    limits = [limit for limit in (max_steps, env.max_steps()) if limit is not None]
    plan = dataclasses.replace(plan, world_size=facts.world_size)
    if plan.mesh is not None and plan.mesh.num_workers != facts.world_size:
        raise JobError(
            f"The plan lays out {plan.mesh.num_workers} workers as {plan.mesh}, but {facts.world_size} were started; "
            "start as many, or leave the plan's mesh out."
        )
    address = job.checkpoint.dir or checkpoint_dir
    return Run(job, plan, facts, min(limits, default=None), None if address is None else str(address), force=force)


def _default_plan(job: Job, facts: env.WorkerFacts, strategy: str) -> Plan:
    kind = env.device_kind() or ("cuda" if torch.cuda.is_available() else "cpu")
    threads = env.thread_limit() or max(1, torch.get_num_threads() // facts.local_world_size)
    num_nodes = max(1, facts.world_size // facts.local_world_size)
    return Plan(
        world_size=facts.world_size,
        device_kind="cuda" if kind == "cuda" else "cpu",
        # How a kernel splits its sums among threads may change their last bits.
        threads_per_worker=1 if job.parity == "bitwise" else threads,
        algorithm="tree_exact" if job.parity == "bitwise" else "auto",
        mesh=parse_mesh(strategy, facts.world_size, num_nodes) if facts.world_size > 1 else None,
    )


class Run:
    """One worker's hold on a run: prepare, batches, step, evaluate. Use it as a context manager."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        facts: env.WorkerFacts,
        max_steps: int | None = None,
        checkpoint_address: str | None = None,
        *,
        force: bool = False,
    ) -> None:
        self.mesh = plan.mesh or Mesh(dp=facts.world_size)
        check_shards(self.mesh.num_assignments, job.virtual_shards)
        self.job = job
        self.plan = plan
        self._at_close = ExitStack()
        self._at_close.enter_context(_torch_settings(job, plan))
        self.world = join(facts, plan)
        self.timer = StepTimer()
        self.samples_seen = 0
        self.steps = 0
        self.lr_factor = 1.0
        self._max_steps = max_steps
        self.notes: list[str] = []
        """What a reader of the result must know of how it came about."""
        self._tracer = ParityTracer.from_environment(self.world, job)
        self._heartbeat = Heartbeat(env.heartbeat_path())
        self._heartbeat.step(0)
        self._engine: Engine | None = None
        self._optimizer: Optimizer | None = None
        self._base_lrs: list[float] = []
        self._names = Names((), {})
        self._given: Batch | None = None
        self._share = self.mesh.share(facts.rank)
        """Which share of every global batch is this worker's; with others, who compute another part of the model."""
        self._progress = DataProgress(job, self._share, self.mesh.num_assignments)
        self.metrics: dict[str, float] = {}
        """Of the last `evaluate`."""
        self._checkpoint_address = checkpoint_address
        self._force = force
        self._checkpoints: Checkpoints | None = None
        self._status_exchange = StatusExchange(None)
        self._stragglers = Stragglers(_worker_names(plan))
        self._kept: dict[str, Stateful] = {}
        self._restored: dict[str, Any] = {}
        """What is kept and was not asked for yet."""
        self._phase: Literal["between", "gradients", "update"] = "between"
        """Of a step: what an error interrupts."""
        self._guard = Guard(job.nonfinite)
        self.say: Callable[[str], None] = self._say
        """Told what a user should know while the run goes on, on rank 0."""
        self._readers: WeakKeyDictionary[ArraySet, ArrayReader] = WeakKeyDictionary()
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=job.precision == "float16")
        self._noise = NoiseMeter() if job.measure_noise else None
        seed_generators(job.seed, self.device)
        self._at_close.callback(self._tracer.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        checkpoints = self._checkpoints
        if error is not None:
            abandon()
            is_whole = self._phase == "between" or (self._phase == "gradients" and not self.engine.changes_buffers)
            if checkpoints is not None and isinstance(error, Exception | KeyboardInterrupt) and is_whole:
                self._heartbeat.save()  # whoever would end this worker waits for it
                checkpoints.rescue()
        else:
            self.save_end()
        self.close()

    def close(self) -> None:
        """End the run: files are closed and torch's settings are again what they were before it."""
        self._at_close.close()

    def _say(self, sentence: str) -> None:
        if self.rank == 0:
            print(sentence, file=sys.stderr)

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def world_size(self) -> int:
        return self.world.world_size

    @property
    def device(self) -> torch.device:
        return self.world.device

    def total_steps(self, num_samples: int) -> int:
        """Optimizer updates of the whole run on a training set of `num_samples`."""
        steps = self.job.epochs * -(-num_samples // self.job.global_batch_size)
        return steps if self._max_steps is None else min(steps, self._max_steps)

    @property
    def model(self) -> nn.Module:
        """The prepared model itself, under whatever spreads it."""
        return unwrapped(self.engine.module)

    @property
    def optimizer(self) -> Optimizer:
        """The prepared optimizer."""
        if self._optimizer is None:
            raise JobError("Call run.prepare(model, optimizer) first.")
        return self._optimizer

    def whole_state(self) -> dict[str, Tensor]:
        """The whole model's state_dict. A common act; where the model is spread, rank 0 alone gets it."""
        return self.engine.whole(self.model.state_dict(keep_vars=True))

    def weights_sha256(self) -> str:
        """A fingerprint of the weights: equal exactly when every bit is. A common act where the model is spread.

        Of this worker's own copy where it holds all of the model.
        """
        state = self.whole_state()
        if self.engine.holds_all:
            return weights_sha256(state)
        digest = [weights_sha256(state)] if self.rank == 0 else [""]
        dist.broadcast_object_list(digest, src=0, group=self.world.group)
        return digest[0]

    def prepare(
        self,
        model: nn.Module,
        optimizer: OptimizerT,
        *,
        find_unused_parameters: bool = False,
        example: Any = None,
    ) -> tuple[nn.Module, OptimizerT]:
        """Place `model` on this worker's device and tie it to its copies on the other workers.

        Args:
            model: built alike on every worker (`init` seeds torch, NumPy and random); rank 0's weights win. It may be
                on the meta device (`with torch.device("meta")`): then every layer draws its weights here by its own
                `reset_parameters()`, and no worker ever holds more than its part.
            optimizer: over the parameters of `model`. They stay the same objects where every worker holds the
                whole model; else the optimizer is given their parts in their place.
            find_unused_parameters: set it if some parameters get no gradient in some steps.
            example: what `model` is called with for a few samples, a tensor or a tuple; a pipeline needs it, to cut the
                model into stages that take equally long.

        Returns:
            The model to call and the optimizer.
        """
        if self._engine is not None:
            raise JobError("This run has a model already; a second one needs a paceline.init of its own.")
        job = self.job
        self._base_lrs = [float(parameters["lr"]) for parameters in optimizer.param_groups]
        self._names = Names.of(optimizer, model)
        if not is_on_meta(model) and self.mesh.is_plain:
            model.to(self.device)
        if job.precision == "float64":
            model.double()
        if job.channels_last and self.mesh.is_plain:  # torch shards parameters of the plain format only
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.train()
        parallelized = parallelize(
            model,
            job,
            self.plan,
            self.device,
            self.world.group,
            find_unused_parameters=find_unused_parameters,
            example=example if example is None or isinstance(example, tuple) else (example,),
        )
        self._at_close.callback(parallelized.close)
        self._engine = parallelized.engine
        self.plan = dataclasses.replace(self.plan, algorithm=parallelized.algorithm)
        self.notes += parallelized.notes
        if job.compile:
            self.model.compile()
        self._optimizer = optimizer
        rebind(optimizer, self._names, self.model)
        self._open_agreement()
        return self._engine.module, optimizer

    def keep(self, name: str, thing: Stateful) -> None:
        """Save and restore something of the script's own with every checkpoint, after `prepare`.

        Checkpoints are taken at the end of `step`: what changes after it belongs to the next one.

        Args:
            thing: has `state_dict()`, of tensors, numbers, texts, and lists and dictionaries of these, alike on all
                workers, and `load_state_dict(state)`, which is called now if the run was resumed.
        """
        self._kept[name] = thing
        if name in self._restored:
            thing.load_state_dict(self._restored.pop(name))

    def _open_agreement(self) -> None:
        # Of its own, and in host memory whatever the others use: it speaks at moments of its own.
        timeout = timedelta(seconds=self.plan.timeout_s)
        group = None if self.world.group is None else dist.new_group(backend="gloo", timeout=timeout)
        self._status_exchange = StatusExchange(group)
        if self._checkpoint_address is not None:
            self._open_checkpoints(self._checkpoint_address, group)

    def _open_checkpoints(self, address: str, group: dist.ProcessGroup | None) -> None:
        parts = None if self.engine.holds_all else self._trained.parts
        checkpoints = Checkpoints(
            address, self.job.checkpoint, group, self._snapshot, lambda text: self.say(text), parts
        )
        self._at_close.callback(checkpoints.close)
        found = checkpoints.take_found()
        if found is not None:
            self._restore(found.shared, found.own)
            self.notes.append(f"resumed at step {self.steps} from {found.name} in {address}")
        self._checkpoints = checkpoints

    @property
    def _trained(self) -> Trained:
        return Trained(self.model, self.optimizer, self._names, self.engine, self._scaler)

    def _snapshot(self, together: bool) -> Snapshot | None:
        if not (self.engine.sync_buffers() if together else self.engine.holds_all and not self.engine.weights_diverge):
            return None
        shared, own = self._trained.take()
        shared |= {
            "progress": {"steps": self.steps, "samples_seen": self.samples_seen, "course": self._progress.state_dict()},
            "noise": to_mapping(self.noise),
            "metrics": self.metrics,
            "kept": {name: thing.state_dict() for name, thing in self._kept.items()},
        }
        return Snapshot(self.steps, self.job.to_mapping(), shared, own, is_part=not self.engine.holds_all)

    def _restore(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        # By way of a job: what a later release has added gets its default.
        changes = differences(Job.from_mapping(shared["job"]).to_mapping(), self.job.to_mapping())
        if changes and not self._force:
            raise JobError(
                f"The checkpoint to resume is of another job: {'; '.join(changes)}. Set it back, choose another "
                "folder, or go on all the same with --force (paceline.init(force=True))."
            )
        self._trained.put(shared, own, hyper=not changes)
        progress = shared["progress"]
        self.steps, self.samples_seen = progress["steps"], progress["samples_seen"]
        self._progress.load_state_dict(progress["course"])
        if self._noise is not None:
            self._noise = NoiseMeter(from_mapping(SmoothedNoise, shared["noise"]))
        self.metrics = shared["metrics"]
        self._restored = shared["kept"]
        self._heartbeat.step(self.steps)
        seed_between_steps(self.job.seed, self.steps, self.device)

    def batches(self, dataset: Any, epoch: int | None = None) -> Iterator[Any]:
        """This worker's share of every global batch of `epoch`, or of all epochs of the job.

        Which samples form a batch is a function of (seed, epoch, number) alone. A run that was resumed begins where it
        stopped: what was trained before does not come again. Each batch must be given to `step` before the next is
        taken. A worker with no sample in a short batch gets one stand-in sample, counted as zero.
        """
        for number in self.epochs() if epoch is None else [epoch]:
            yield from self._epoch_batches(dataset, number)

    def epochs(self) -> range:
        """The numbers of the epochs that are not over: all of the job's, or those left of a run that was resumed."""
        return self._progress.epochs()

    def enter_epoch(self, dataset: Any, epoch: int) -> list[Batch]:
        """What is left of an epoch; where all of it is, the one before has ended."""
        self._progress.start(_num_samples(dataset, "training"))
        batches = self._progress.enter(epoch, None if self._max_steps is None else self._max_steps - self.steps)
        if self._checkpoints is not None and self.steps and self._progress.at_epoch_start:
            self._checkpoints.epoch_ended()
        return batches

    def _epoch_batches(self, dataset: Any, epoch: int) -> Iterator[Any]:
        batches = self.enter_epoch(dataset, epoch)
        if not batches:
            return
        self.timer.resume()
        self.timer.data_asked()
        samples = [batch.own_samples for batch in batches]
        for batch, content in zip(batches, self.read(dataset, epoch, samples, train=True), strict=True):
            self.timer.data_arrived()
            self._given = batch
            yield content
            self._check_stepped()
            self.timer.data_asked()

    def _check_stepped(self) -> None:
        if self._given is not None:
            raise JobError("Every batch from run.batches needs its run.step before the next one is taken.")

    def read(self, dataset: Any, epoch: int, indices: list[np.ndarray[Any, Any]], train: bool) -> Iterator[Any]:
        """The samples with these numbers, batch by batch, on this worker's device; augmented if they are to `train`."""
        job = self.job
        dtype = torch.float64 if job.precision == "float64" else torch.float32
        if isinstance(dataset, ArraySet):
            reader = self._readers.get(dataset)
            if reader is None:  # it may hold the whole set on the device, so there is one for each set
                reader = ArrayReader(dataset, self.device, dtype, job.channels_last, job.seed)
                self._readers[dataset] = reader
            return (reader.read(epoch, part, train) for part in indices)
        return stream_batches(
            dataset,
            [part.tolist() for part in indices],
            seed=job.seed,
            epoch=epoch,
            num_workers=job.data.loader_workers,
            device=self.device,
            dtype=dtype,
        )

    def step(self, batch: Any, loss_fn: LossFn) -> Tensor:
        """Forward, backward, aggregate, clip, update.

        Args:
            batch: what `batches` just yielded.
            loss_fn: called as loss_fn(model, part of the batch); returns the mean loss over the part's samples.

        Returns:
            The mean loss over the global batch, the same on every worker; a detached scalar. Workers that meet only
            every few steps (aggregation.method = "local_sgd" or "diloco") do not send each other: theirs is the mean
            over the samples of this worker, or of its node where that meets every step, and NaN where there are none.
        """
        engine, optimizer, given = self.engine, self.optimizer, self._given
        if given is None:
            raise JobError("run.step needs a batch that run.batches just yielded; each is used once.")
        share = given.share
        num_samples = self._progress.num_samples
        assert num_samples is not None
        self._given = None
        self._phase = "gradients"
        check_batch(batch, sum(share.sizes) or 1)
        self.schedule_lr(num_samples)
        optimizer.zero_grad(set_to_none=True)

        loss = engine.gradients(
            StepInput(
                assignment=share,
                batch=batch,
                loss_of=lambda model, part: self.loss_of(model, part, loss_fn),
                seed_shard=lambda shard: seed_shard(self.job.seed, self.steps, shard, self.device),
                scale=self._scaler.scale,
                within=self._autocast,
                take_norms=self._take_norms(share),
            )
        )
        # A worker that is alone between two meetings may have no sample, hence no gradient and no update. One that has
        # a part of the model may have no parameter, and goes on with those that have.
        has_gradient = not engine.holds_all or any(parameter.grad is not None for parameter in self.model.parameters())
        norm = functools.cache(engine.gradient_norm)  # found once a step, where anybody asks for it
        has_gradient = has_gradient and self._is_sound(loss, given, norm)
        self._phase = "update"
        if has_gradient and self.job.optim.clip_norm is not None:
            self._scaler.unscale_(optimizer)
            clip(self.model.parameters(), self.job.optim.clip_norm, norm())
        # Workers that compute other parts of a model have the same samples: they count once.
        idle = not share.sizes or not self.mesh.leads_assignment(self.rank)
        self._tracer.before_update(self.steps, self.model, engine.whole, loss, batch, idle=idle)
        if has_gradient:
            self._scaler.step(optimizer)
            self._scaler.update()
        engine.after_update()
        self._tracer.after_update(self.model, engine.whole)

        self.count_step(given)
        self._phase = "between"
        if not engine.weights_diverge or engine.sync_buffers():
            self._exchange_status()
        return loss

    def _exchange_status(self) -> None:
        """Hear what all workers told a step ago, do what follows from it, and send them of this step."""
        received = self._status_exchange.received()
        if self._checkpoints is not None:
            self._checkpoints.step_ended(self.steps, received.requests)
        for sentence in self._stragglers.note(self.steps, received.own_times_s):
            self.notes.append(sentence)
            self.say(sentence)
        if self.plan.exclude_slower is not None and self.rank in self._stragglers.lasting(self.plan.exclude_slower):
            leave_at_once(EXCLUDED)  # the others notice, save what they have, and are started again without it
        self._status_exchange.send(
            set() if self._checkpoints is None else self._checkpoints.requests(), self.timer.own_s
        )

    def wants_save(self) -> bool:
        """Whether this worker requests a checkpoint, now that it could be written."""
        return self._checkpoints is not None and self._checkpoints.wants_save

    def next_save(self, until: int) -> int:
        """The number of the next step, up to `until`, at which all workers have to save."""
        return until if self._checkpoints is None else int(min(until, self._checkpoints.next_save(self.steps)))

    def exchange_status_at_rest(self) -> None:
        """Tell and hear at once, where updates are made elsewhere and rest; saves if that is due. A common act."""
        if self._checkpoints is not None:
            self._status_exchange.send(self._checkpoints.requests(), 0.0)
            self._checkpoints.step_ended(self.steps, self._status_exchange.received().requests)

    def save_end(self) -> None:
        """The training is over: save what is not saved yet. A common act."""
        self._status_exchange.received()  # nothing stays under way
        if self._checkpoints is not None:
            self._progress.leave_epoch()
            self._checkpoints.run_ended(self.steps)

    def _is_sound(self, loss: Tensor, batch: Batch, norm: Callable[[], Tensor]) -> bool:
        """Whether there is to be an update; the same answer on all workers that aggregate every step."""
        # Overflow under a loss scale is the scaler's business: it skips the step and scales less.
        looked_at: list[Tensor] = []
        if not self._scaler.is_enabled() and self._guard.is_on:
            held = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            looked_at = held if self.engine.holds_all else [norm()]
        wrong = self._guard.look(self.steps, loss, looked_at, self.model, batch.samples, self._names_of_all)
        if wrong is None:
            return True
        if self.job.nonfinite == "skip":
            self.say(f"{wrong}. The step is skipped.")
            return False
        found = None if self._checkpoints is None else self._checkpoints.read_again()
        if found is None:
            raise ModelError(f"{wrong}. There is no checkpoint yet to go back to; lower optim.lr or look at the data.")
        self._trained.put(found.shared, found.own, hyper=True)
        self.say(f"{wrong}. Weights and optimizer are again those of {found.name}; the data goes on.")
        return False

    def _names_of_all(self, names: list[str]) -> list[str]:
        """From this worker's names of parameters to all workers'; a common act where the model is spread."""
        if self.engine.holds_all:
            return names
        told: list[Any] = [None] * self.world_size
        dist.all_gather_object(told, names, group=self.world.group)
        found = {name for of_one in told for name in of_one}
        return [name for name in self._names.first if name in found]  # in the model's order

    def _take_norms(self, share: Assignment) -> TakeNorms | None:
        """What becomes of a step's gradient norms; those of a short last batch would be too noisy to use."""
        is_short = 2 * share.global_size < self.job.global_batch_size
        if self._noise is None or is_short or self.steps % _NOISE_EVERY_STEPS:
            return None
        if not self._scaler.is_enabled():
            return self._noise.take
        return self._noise.scaled_by(self._scaler.scale(torch.ones((), device=self.device)))

    @property
    def noise(self) -> SmoothedNoise:
        """What is known of gradient noise by now. On a GPU, reading it waits for the steps before."""
        return SmoothedNoise() if self._noise is None else self._noise.read()

    @property
    def noise_scale(self) -> float | None:
        """The gradient noise scale in samples; None where it was not measured or no signal shows in the noise yet."""
        mean = self.noise.mean
        return None if mean is None or not math.isfinite(mean.samples) else mean.samples

    def count_step(self, batch: Batch) -> None:
        """An update by this batch has been made, here or elsewhere."""
        self.steps += 1
        self._heartbeat.step(self.steps)
        self.samples_seen += batch.share.global_size
        self._progress.trained_on(batch)
        seed_between_steps(self.job.seed, self.steps, self.device)
        self.timer.step_ended(self.engine.communication)

    def consensus(self) -> AbstractContextManager[None]:
        """Inside, the model holds what all workers agree on, to be saved or looked at: the same on every one.

        A common act: every worker has to enter it. It makes a difference where workers meet only every few steps: the
        mean of their weights, after which training goes on as if nothing had been. `evaluate` enters it by itself.
        """
        return self.engine.consensus()

    def evaluate(self, dataset: Any, measure: Measure) -> dict[str, float]:
        """Mean of every metric over `dataset`, each sample counted exactly once on any number of workers.

        A common act: every worker has to call it.

        Args:
            dataset: map-style; visited in order.
            measure: called as measure(model, batch) in evaluation mode without gradients; returns one value per
                sample for every metric, {"accuracy": correct, "loss": losses}, each of shape (samples in batch,).
        """
        model = self.model
        chunks = chunk_ranges(_num_samples(dataset, "evaluation"), self.job.eval_batch_size)
        mine = own_chunks(len(chunks), self._share, self.mesh.num_assignments, in_step=not self.engine.holds_all)
        # Workers that compute other parts of the model have the same chunks: the first of them gives the results.
        leads = self.mesh.leads_assignment(self.rank)
        given = own_chunks(len(chunks), self._share, self.mesh.num_assignments, in_step=False) if leads else []
        indices = [np.arange(chunks[n].start, chunks[n].stop) for n in mine]
        numbers = iter(mine)

        def seeded(model: nn.Module, batch: Any) -> dict[str, Tensor]:
            seed_evaluation(self.job.seed, self.steps, next(numbers), self.device)
            return measure(model, batch)

        was_training = [module for module in model.modules() if module.training]  # some may be frozen
        model.eval()
        try:
            with self.consensus(), torch.no_grad(), self._autocast():
                batches = zip(mine, self.read(dataset, 0, indices, train=False), strict=True)
                self.metrics = evaluate(batches, chunks, given, model, seeded, self.world)
                return self.metrics
        finally:
            for module in was_training:
                module.training = True
            seed_between_steps(self.job.seed, self.steps, self.device)
            self.timer.resume()

    def loss_of(self, model: nn.Module, part: Any, loss_fn: LossFn) -> Tensor:
        """The mean loss over a part of a batch, in the job's precision."""
        with self._autocast():
            return loss_fn(model, part)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.job.precision not in ("bfloat16", "float16"):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=_DTYPES[self.job.precision])

    def schedule_lr(self, samples_per_epoch: int) -> None:
        """Set the optimizer's learning rates for the step that begins now."""
        optim = self.job.optim
        if optim.schedule == "constant" and not optim.warmup_epochs and optim.base_batch_size is None:
            return  # the rate is the user's own business
        self.set_lr_factor(lr_factor(self.job, self.samples_seen, samples_per_epoch))

    def set_lr_factor(self, factor: float) -> None:
        """On the rates that the optimizer had when it was given to `prepare`."""
        self.lr_factor = factor
        for group, base_lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base_lr * self.lr_factor

    @property
    def engine(self) -> Engine:
        """What the prepared model is trained by."""
        if self._engine is None:
            raise JobError("Call run.prepare(model, optimizer) first.")
        return self._engine


def _worker_names(plan: Plan) -> list[str]:
    """What to call each worker, by rank."""
    hostnames = [share.hostname for share in plan.placements for _ in range(share.num_workers)]
    return [f"Worker {rank}" + (f" on {hostname}" if hostname else "") for rank, hostname in enumerate(hostnames)]


@contextmanager
def _torch_settings(job: Job, plan: Plan) -> Iterator[None]:
    """The settings of the whole process that a run needs, for as long as it lasts."""
    threads = torch.get_num_threads()
    # Not use_deterministic_algorithms, which loads torch's whole compiler: seconds at the end of every run.
    determinism = torch.get_deterministic_debug_mode()
    benchmark = torch.backends.cudnn.benchmark
    torch.set_num_threads(plan.threads_per_worker)
    if job.parity == "bitwise":
        env.deterministic_cuda()
        torch.backends.cudnn.benchmark = False
        torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark
        torch.set_deterministic_debug_mode(determinism)


def _num_samples(dataset: Any, purpose: str) -> int:
    """How many samples there are. Raises `DataError` for none, and for what is no map-style data set."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"The {purpose} set, of type {type(dataset).__name__}, lacks a length or samples by number; give the "
            "map-style data set itself, not a loader over it."
        )
    if len(dataset) == 0:
        raise DataError(f"The {purpose} set is empty.")
    return len(dataset)
