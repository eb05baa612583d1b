"""`init` and `Run`: one training run as its user's script holds it."""

from __future__ import annotations

import atexit
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paceline import env
from paceline.data.loading import Collate
from paceline.errors import JobError
from paceline.heartbeat import beat
from paceline.object_collectives import broadcast_object
from paceline.parallel import Engine
from paceline.parallel.pass_state import seed_generators
from paceline.spec import Job, Mesh, Plan, parse_mesh
from paceline.spec.codec import PositiveInt, checked
from paceline.spec.plan import RunLimit, check_mesh
from paceline.train.batches import DataProgress, DatasetReader, GlobalBatches, loading_of
from paceline.train.evaluate import Measure, evaluate_between_steps
from paceline.train.meters import NoiseMeter, Progress, SmoothedNoise, StepTimer, summary_rows
from paceline.train.model_state import LossFn, Precision, Trained, TrainedModels, weights_sha256
from paceline.train.peers import tell_failures
from paceline.train.preparation import check_several, freeze, prepare_model
from paceline.train.process_group import decide_precision, join, leave, torch_settings
from paceline.train.run_state import Keepable, KeptObjects, RunState
from paceline.train.session import Session, Stopping
from paceline.train.step import Stepper, UpdateRecorder

ModuleT = TypeVar("ModuleT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound="Optimizer | Sequence[Optimizer]")

_recorder: ContextVar[Callable[[Run], UpdateRecorder] | None] = ContextVar("recorder of runs", default=None)


@contextmanager
def recorded_by(make: Callable[[Run], UpdateRecorder]) -> Iterator[None]:
    """A context in which each run that begins, as in a script that is run there, tells what `make(run)` returns of
    every update: `paceline verify` has them recorded so."""
    token = _recorder.set(make)
    try:
        yield
    finally:
        _recorder.reset(token)


class Run:
    """One worker's handle on a training run: prepare, batches, step, evaluate. Use it as a context manager.

    Attributes:
        rank, world_size, device: this worker's rank, the number of workers, and this worker's device.
        job: what is trained.
        plan, mesh: how the job is spread over workers.
        notes: notes for the run's report on how the result came about.
        metrics: the results of the last `evaluate`, by name.
        values: what the loss function returned besides the loss of the last `step`, by name: detached scalars, the same
            on every worker. Reading one waits for the device.
        say: receives messages for the user during the run, on rank 0; may be replaced.
        timer, display, stopping: the times of each step; the progress display, on rank 0; whether to end early.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        facts: env.WorkerFacts,
        max_steps: int | None = None,
        checkpoint_address: str | None = None,
        *,
        force: bool = False,
        max_minutes: float | None = None,
        display: Progress | None = None,
    ) -> None:
        self.plan = plan
        self.mesh = plan.mesh or Mesh(dp=facts.world_size)
        check_mesh(job, self.mesh)
        self._at_close = ExitStack()
        world = join(facts, plan)
        job, notes = decide_precision(job, world)
        self.job = job
        notes += torch_settings(job, plan, world.device, self._at_close)
        self.reader, self.precision = DatasetReader(job, world.device), Precision(job, world.device)
        progress = DataProgress(job, self.mesh.assignment_index(facts.rank), self.mesh.num_assignments, max_steps)
        self.world = world
        self.rank, self.world_size, self.device = world.rank, world.world_size, world.device
        self._progress = progress
        self._noise = NoiseMeter(job, self.precision.scaler, world.device)
        self._models = TrainedModels()
        self._prepared: Stepper | None = None
        self.notes: list[str] = notes
        self.metrics: dict[str, float] = {}
        self.values: Mapping[str, Tensor] = {}
        self.display = display or Progress(None)
        self._at_close.callback(self.display.close)
        self.say: Callable[[str], None] = self.display.say
        self.timer = StepTimer()
        self.stopping = Stopping(world, progress, env.value(env.LAUNCHED_AT, float) or time.time(), max_minutes)
        self._batches = GlobalBatches(job, progress, self.reader, world, plan.timeout_s)
        self._kept = KeptObjects()
        self._resume_from: dict[str, Any] = {"checkpoint_address": checkpoint_address, "force": force}
        self._has_read_batches = False
        self._averages: list[tuple[AveragedModel, Trained]] = []
        beat(0)
        make = _recorder.get()
        self._recorder = None if make is None else make(self)
        if self._recorder is not None:
            self._at_close.callback(self._recorder.close)
        seed_generators(job.seed, self.device)

    @overload
    def prepare(self, model: ModuleT, optimizer: None = None, *, name: str | None = None) -> ModuleT: ...

    @overload
    def prepare(self, model: ModuleT, optimizer: OptimizerT, **options: Any) -> tuple[ModuleT, OptimizerT]: ...

    def prepare(  # type: ignore[misc]  # the options of the second form are named here
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        name: str | None = None,
        scheduler: Any = None,
        find_unused_parameters: bool = False,
        example: Any = None,
        tensor_plan: Mapping[str, str] | None = None,
    ) -> Any:
        """Place `model` on this worker's device and tie it to its copies on the other workers.

        Call it once for each model, before the first batch; then `step` needs the model that it trains.

        Args:
            model: built alike on every worker (`init` seeds torch, NumPy and random); rank 0's weights win. It may be
                on the meta device (`with torch.device("meta")`): then every layer draws its weights here by its own
                `reset_parameters()`, and no worker ever holds more than its shard.
            optimizer: over the parameters of `model`. They stay the same objects where every worker holds the
                whole model; else the optimizer is given their shards in their place. Or a list of optimizers of
                distinct parameters. None: the model is frozen, in evaluation mode, the same whole model on every
                worker; checkpoints keep a fingerprint of its weights, and the weights where the script changes them.
            name: what checkpoints and messages call the model; None: "model", then "model 2" and so on.
            scheduler: a learning-rate scheduler of torch or transformers over the optimizer, or a list of them: moved
                after each update, and kept with checkpoints.
            find_unused_parameters: set it if some parameters get no gradient in some steps.
            example: what the loss function calls `model` with, for a few samples: a tensor, a tuple of positional
                arguments, or a mapping of keyword arguments, such as a batch of a tokenizer. A pipeline needs it, to
                cut the model into stages that compute equally much.
            tensor_plan: which modules the workers of the mesh axis tp share, and how: {"blocks.*.up": "colwise",
                "blocks.*.down": "rowwise"}; None: the plan's, or the model's own `_tp_plan`.

        Returns:
            The model to call and the optimizer; of a frozen model the model alone.
        """
        number = len(self._models.by_name) + len(self._models.frozen) + 1
        name = name or ("model" if number == 1 else f"model {number}")
        if self._has_read_batches:
            raise JobError("This run has read batches already; call run.prepare for every model before run.batches.")
        self._models.check_new(name, model)
        if optimizer is None:
            companion = freeze(model, self.job, self.plan, self.world)
            self._models.add_frozen(name, companion, is_saved=self._resume_from["checkpoint_address"] is not None)
            if self._prepared is not None:
                self._prepared.session.add(name)
            return companion.model
        if self._models.by_name:
            check_several(self.job, self.plan)
        plan = self.plan if tensor_plan is None else dataclasses.replace(self.plan, tensor_plan=dict(tensor_plan))
        precision = Precision(self.job, self.device) if self._models.by_name else self.precision
        spread = {"find_unused_parameters": find_unused_parameters, "example": example}
        trained = prepare_model(model, optimizer, scheduler, self.job, plan, self.world, precision, **spread)
        engine = trained.engine
        self._at_close.push(lambda _kind, error, _trace: engine.close(error))
        num_told = len(self.notes) if self._models.by_name else 0
        self.notes += engine.notes
        self._models.add(name, trained)
        if self._prepared is None:
            # What "auto" has chosen.
            self.plan = dataclasses.replace(plan, algorithm=engine.algorithm or plan.algorithm)
            state = RunState(self.job, self._progress, self._noise, self._models, self._kept, self.metrics)
            session = Session(state, self)
            self._at_close.callback(session.close)
            session.resume(**self._resume_from)
            self._prepared = Stepper(session, self.mesh, self.timer, self._batches, self._recorder)
        else:
            self._prepared.session.add(name)
        for number, one in enumerate(trained.schedulers):
            self._kept.add(f"scheduler {number} of {name}", one, in_step=True)
        self._prepared.add(name, trained)
        for note in self.notes[num_told:] if self.display.is_shown else ():
            self.say(note)
        return engine.module, optimizer

    def keep(self, name: str, thing: Keepable) -> None:
        """Save something of the script's own with every checkpoint, and restore it where the run is resumed.

        Checkpoints are taken when the next batch is asked for, or the next epoch begins: what the script changes
        after `step`, such as a learning-rate scheduler or an average of the weights, belongs to that step.

        Args:
            thing: a dictionary of tensors, numbers, texts, and lists and dictionaries of these, alike on all workers,
                which gets its content back now if the run was resumed (tensors on the CPU); something with such a
                `state_dict()` and `load_state_dict(state)`; or a generator of torch, NumPy or Python.
        """
        self._kept.add(name, thing)

    def average(self, decay: float = 0.999, model: nn.Module | None = None) -> AveragedModel:
        """An exponential moving average of the weights, moved after every step and kept with checkpoints (Polyak and
        Juditsky 1992; Tarvainen and Valpola 2017); its buffers are the model's.

        Call it after `prepare`; give it to `evaluate(..., model=average)`, and save its `module.state_dict()`.

        Args:
            decay: the average moves by 1 - decay, in (0, 1], towards the weights with every step.
            model: which of several models that are trained; None: the first. Raises `JobError` where workers do not
                all hold the same whole model.
        """
        trained = self._trained(model)
        if not trained.engine.holds_all or trained.engine.weights_diverge:
            raise JobError(
                "run.average needs the whole model, the same on every worker after every step: the strategy dp and "
                "aggregation.method = 'every_step'."
            )
        average = AveragedModel(trained.model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        average.requires_grad_(False)
        self._kept.add(f"average {len(self._averages)}", average, in_step=True)
        self._averages.append((average, trained))
        return average

    def epochs(self) -> Iterator[int]:
        """The numbers of the remaining epochs, from 0: all of the job's, or in a resumed run those not yet finished.

        The last one is the epoch in which the run ends, because of `max_steps`, `max_minutes` or `stop`.
        """
        progress = self._progress
        if progress.steps and progress.steps_left == 0 and progress.at_epoch_start:
            return  # the run had ended with the epoch before
        for epoch in progress.epochs():
            yield epoch
            if progress.steps_left == 0:
                return

    def batches(
        self,
        dataset: Any,
        epoch: int | None = None,
        *,
        collate_fn: Collate | None = None,
        sampler: Any = None,
        num_workers: int | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        pin_memory: bool | None = None,
        samples_per_epoch: int | None = None,
    ) -> Iterator[Any]:
        """This worker's samples of every global batch of `epoch`, or without one, once in a run, of all epochs.

        Which samples form a batch is a function of (seed, epoch, number) alone. A run that was resumed begins where it
        stopped: what was trained before does not come again. Each batch must be given to `step` before the next is
        taken. A worker with no sample in a short batch gets one stand-in sample, counted as zero. Workers of
        asynchronous servers, which read what they compute in `step`, get one all the time.

        Args:
            dataset: map-style; or a stream, which is cut into a substream for each virtual shard; or a torch DataLoader
                over either, whose settings are taken over; its batch size is that of all workers together.
            collate_fn: makes a batch of a list of samples, and may pad them: called for one virtual shard's samples at
                a time, so that padding does not depend on the number of workers. None: torch's
                default.
            sampler: a torch Sampler, or a BatchSampler whose batches are global batches and may differ in size, or a
                function of (seed, epoch) that returns the numbers of samples or lists of them; the same on all
                workers. None: all samples, shuffled by the job's seed.
            num_workers: loader processes of each worker; None: as the job's data.loader_workers says.
            worker_init_fn: called in each loader process with its number.
            pin_memory: None: where the device is a GPU.
            samples_per_epoch: by which schedules count the epochs of a stream; None: its own length, if it has one.

        Raises:
            DataError: what the data set, the loader or the sampler says cannot be done.
            JobError: an epoch is asked for a second time, be it with other data.
        """
        loading = loading_of(
            self.job,
            dataset,
            "training",
            num_workers=num_workers,
            collate_fn=collate_fn,
            sampler=sampler,
            worker_init_fn=worker_init_fn,
            pin_memory=pin_memory,
        )
        for number in self.epochs() if epoch is None else [epoch]:
            self._has_read_batches = True
            yield from self.stepper.batches(loading, number, samples_per_epoch)
            if self._recorder is not None and self.steps == env.value(env.MAX_STEPS, int):
                sys.exit()  # `verify` has seen what it asked for: the script should not write its own files

    def step(
        self, batch: Any, loss_fn: LossFn, *, model: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> Tensor:
        """Forward, backward, aggregate, clip, update.

        With `model` or `optimizer` a batch may have several steps, each of one model: see docs/training.md.

        Args:
            batch: what `batches` just yielded.
            loss_fn: called as loss_fn(model, samples of the batch); returns the mean loss over these samples, a scalar.
                Or `paceline.Mean(loss, weight=number of tokens)`, the mean over another number of units; the step's
                loss is then the mean over all units of the global batch. Or a pair of either and a dict of further
                numbers, each a mean over the samples or a `Mean`: see `values`.
            model: the model to train, as `prepare` returned it; None: the only one.
            optimizer: the one of several optimizers given to `prepare` that makes the update; None: all of them.

        Returns:
            The loss of the global batch, the same on every worker; a detached scalar. Workers that synchronise
            only every few steps (aggregation.method = "local_sgd" or "diloco") do not send each other: theirs is the
            mean over the samples of this worker, and NaN where there are none.
        """
        steps = self.steps
        result, trained = self.stepper.step(batch, loss_fn, model, optimizer)
        self.values = result.values
        if self.steps > steps:
            self.display.step(self._progress, result.loss)
        for average, averaged_model in self._averages:
            if averaged_model is trained:
                average.update_parameters(trained.model)
        return result.loss

    def evaluate(
        self,
        dataset: Any,
        measure: Measure,
        metrics: Mapping[str, Any] | None = None,
        *,
        collate_fn: Collate | None = None,
        num_workers: int | None = None,
        model: nn.Module | None = None,
    ) -> dict[str, float]:
        """Every metric over `dataset`, each sample counted exactly once on any number of workers.

        Args:
            dataset: map-style, visited in order; a stream; or a torch DataLoader over either, with its settings.
            collate_fn: makes a batch of a list of samples; None: torch's default.
            num_workers: loader processes of each worker; None: as the job's data.loader_workers says.
            model: the model to evaluate, one of those that were prepared or an `average`; None: the first one.
            measure: called as measure(model, batch) in evaluation mode without gradients; returns one value per
                sample for every metric, {"accuracy": correct, "loss": losses}, each of shape (samples in batch,), or
                `paceline.Mean(loss, weight=number of tokens)`; the result is the mean over all samples, or tokens.
            metrics: metrics that are not means, by name: a torchmetrics metric, or three functions (update, merge,
                compute). `measure` then returns under this name what `update` takes, {"f1": (predictions, targets)}.
        """
        loading = loading_of(self.job, dataset, "evaluation", collate_fn=collate_fn, num_workers=num_workers)
        companions = list(self._models.companions.values())
        results = evaluate_between_steps(self, loading, measure, metrics, model or self.model, companions)
        self.timer.resume()
        self.metrics.clear()
        self.metrics.update(results)
        return results

    def consensus(self) -> AbstractContextManager[None]:
        """A context in which the model is the same on every worker: the mean of their weights where they synchronise
        every few steps only. Training then continues unchanged. `evaluate` enters it by itself. A collective.
        """
        return self.engine.consensus()

    def whole_state(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """The state_dict of the whole `model` (None: the first), in whole shapes. A collective; where the model is
        spread, rank 0 alone gets it."""
        trained = self._trained(model)
        if not trained.engine.holds_all:
            self.stepper.session.enter_together("run.whole_state")
        return trained.engine.whole(trained.model.state_dict(keep_vars=True))

    def weights_sha256(self, model: nn.Module | None = None) -> str:
        """A fingerprint of the weights of `model` (None: the first), equal exactly when every bit is: of this worker's
        own copy where it holds the whole model, else a collective."""
        state = self.whole_state(model)
        if self.engine.holds_all:
            return weights_sha256(state)
        digest: str = broadcast_object(weights_sha256(state) if self.rank == 0 else None, self.world.group)
        return digest

    def _trained(self, model: nn.Module | None = None) -> Trained:
        """The prepared model; of several, the first, or the one that is named."""
        if model is not None:
            return self._models.of(model)
        return self.stepper.session.state.models.first

    def close(self) -> None:
        """End the run: files are closed and torch's settings are again what they were before it."""
        self._at_close.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # Exit without a shutdown of the group, which could block on peers that wait in a collective.
            atexit.unregister(leave)
        try:
            lost = None if self._prepared is None else self._prepared.end(error)
            if self._prepared is not None and error is None:
                self.display.end(summary_rows(self, self._progress, self._prepared.session.newest_checkpoint))
        finally:
            self._at_close.__exit__(kind, error, trace)
        if lost is not None:
            raise lost from error

    def stop(self, reason: str) -> None:
        """Ask for the end of the run: `batches` ends on all workers, one step later than this. No collective."""
        self.stopping.ask(reason)

    def save(self) -> None:
        """Save a checkpoint of the run as it is now, when all steps of a batch are made. A collective."""
        self.stepper.finish_step()
        self.stepper.session.save()

    # --- what the run is ---

    @property
    def stepper(self) -> Stepper:
        """The object that makes the steps of the prepared models."""
        if self._prepared is None:
            raise JobError("Call run.prepare(model, optimizer) first.")
        return self._prepared

    @property
    def engine(self) -> Engine:
        """The engine that trains the prepared model, the first if there are several."""
        return self._trained().engine

    @property
    def model(self) -> nn.Module:
        """The prepared model, the first if there are several."""
        return self._trained().model

    @property
    def optimizer(self) -> Optimizer:
        """The prepared optimizer, of the first model if there are several."""
        return self._trained().optimizer

    @property
    def steps(self) -> int:
        """Number of optimizer updates made so far."""
        return self._progress.steps

    @property
    def samples_seen(self) -> int:
        """Number of samples, over all workers, used by optimizer updates so far."""
        return self._progress.samples_seen

    def total_steps(self, num_samples: int) -> int:
        """Optimizer updates of the whole run on a training set of `num_samples`: of all epochs, or `max_steps`."""
        return self._progress.total_steps(checked(PositiveInt, num_samples, "num_samples"))

    @property
    def noise(self) -> SmoothedNoise:
        """The measurements of gradient noise so far. On a GPU, reading it waits for the steps before."""
        return self._noise.read()

    @property
    def noise_scale(self) -> float | None:
        """The gradient noise scale in samples; None if not measured, or while noise hides the gradient."""
        return self._noise.scale()


def init(
    job: Job | None = None,
    /,
    *,
    plan: Plan | None = None,
    strategy: str | None = None,
    max_steps: int | None = None,
    max_minutes: float | None = None,
    checkpoint_dir: str | Path | None = None,
    force: bool = False,
    progress: bool | TextIO = True,
    **values: Any,
) -> Run:
    """Join the other workers of this run; their number is set by the launcher of this script.

    Args:
        job: what to train; None: the defaults.
        plan: how the job is spread over workers; None: one worker for each process of this launch, on GPUs if there
            are any.
        strategy: how the model is spread over the workers without a plan: "dp", "fsdp", "hsdp", "pp", "tp", or a
            mesh such as "fsdp2 x tp2"; None: as `paceline launch --strategy` says, else "dp". It has no effect on one
            worker alone.
        max_steps: end `Run.batches` after this many steps, whatever the epochs say.
        max_minutes: save a checkpoint and end `Run.batches` this many minutes after the launch; the same command,
            run again, resumes.
        checkpoint_dir: the folder of checkpoints if the job names none; None: no checkpoints are written.
        force: resume even a checkpoint of another job.
        progress: whether rank 0 shows the progress of the run on standard error: in a terminal one line that is
            updated in place, else a new line now and then; or the stream to write to.
        values: keys of a job, which replace those of `job`: `global_batch_size=256, optim={"clip_norm": 1.0}`. The
            schedule in `optim` acts as a factor on the learning rates of the optimizer that `prepare` is given.

    Raises:
        JobError: an unknown key, an invalid value, or more workers than virtual shards.
        LaunchError: an environment that contradicts itself.
    """
    facts = env.worker_facts()
    tell_failures(facts)
    job = (checked(Job | None, job, "job") or Job()).with_values(**values)
    strategy = checked(str | None, strategy, "strategy") or env.text(env.STRATEGY) or "dp"
    parse_mesh(strategy)
    plan = checked(Plan | None, plan, "plan") or _default_plan(job, facts, strategy)
    limit = RunLimit.from_mapping({"max_steps": max_steps, "max_minutes": max_minutes})
    limits = [one for one in (limit.max_steps, env.value(env.MAX_STEPS, int)) if one is not None]
    plan = dataclasses.replace(plan, world_size=facts.world_size)
    if plan.mesh is not None and plan.mesh.num_workers != facts.world_size:
        raise JobError(
            f"The plan lays out {plan.mesh.num_workers} workers as {plan.mesh}, but {facts.world_size} were started; "
            "start as many, or leave the plan's mesh out."
        )
    address = job.checkpoint.dir or checkpoint_dir
    if address is not None and (of_verify := env.text(env.TRACE_DIR)):  # the user's checkpoints are of another run
        address = f"{of_verify}/checkpoints"
    stream = sys.stderr if isinstance(progress, bool) else progress
    return Run(
        job,
        plan,
        facts,
        min(limits, default=None),
        None if address is None else str(address),
        force=force,
        max_minutes=limit.max_minutes,
        display=Progress(stream, is_shown=progress is not False) if facts.rank == 0 else None,
    )


def _default_plan(job: Job, facts: env.WorkerFacts, strategy: str) -> Plan:
    kind = env.device_kind() or ("cuda" if torch.cuda.is_available() else "cpu")
    limit = int(env.text("OMP_NUM_THREADS").partition(",")[0] or 0)  # the launcher sets it
    threads = limit or max(1, torch.get_num_threads() // facts.local_world_size)
    num_nodes = max(1, facts.world_size // facts.local_world_size)
    return Plan(
        world_size=facts.world_size,
        device_kind="cuda" if kind == "cuda" else "cpu",
        # How a kernel splits its sums among threads may change their last bits.
        threads_per_worker=1 if job.parity == "bitwise" else threads,
        algorithm="tree_exact" if job.parity == "bitwise" else "auto",
        mesh=parse_mesh(strategy, facts.world_size, num_nodes) if facts.world_size > 1 else None,
        debug_comm=bool(env.text(env.DEBUG_COMM)),
    )
