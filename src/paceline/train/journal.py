"""The journal of a run: what happened so far, for the terminal, for trackers, and for the record."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.optim.swa_utils import AveragedModel

from paceline import __version__, env
from paceline.errors import JobError
from paceline.files import replace_text, run_file_mode
from paceline.spec import RunRecord
from paceline.spec.codec import DivergingFloat, NonNegativeFloat, NonNegativeInt, from_mapping
from paceline.spec.record import EpochRecord
from paceline.train.callbacks import Callback, Training, best_evaluation
from paceline.train.meters import batch_warning, samples_per_s, shown_metrics
from paceline.train.model_state import weights_sha256
from paceline.train.optim import describe_scaling
from paceline.train.process_group import World
from paceline.train.run import Run

# Reading a loss makes the CPU wait for the GPU, so losses are read and logged this many steps at a time.
_LOG_STEPS = 50
# Before so many measurements a noise scale is too uncertain to warn of.
_NOISE_STEPS = 50


@dataclass
class _SoFar:
    """What the journal knows across checkpoints."""

    epochs: tuple[EpochRecord, ...] = ()
    epoch_loss: DivergingFloat = 0.0
    """The sum over this epoch's samples."""
    epoch_values: dict[str, DivergingFloat] = field(default_factory=dict)
    """The same of other numbers from the loss function, by name."""
    epoch_start: tuple[NonNegativeInt, NonNegativeFloat] = (0, 0.0)
    """Samples and seconds of training when the epoch began."""
    samples_logged: NonNegativeInt = 0
    has_warned: bool = False
    train_s: NonNegativeFloat = 0.0
    wall_s: float = 0.0
    """The time that this run took before it was resumed, up to the checkpoint."""


class Journal(Callback):
    """Records every step and epoch; on rank 0 it also prints and logs them."""

    def __init__(self, run: Run, run_dir: Path, trackers: Sequence[str] = ()) -> None:
        self._run = run
        self._sinks = open_sinks(run_dir, trackers, run.steps, run.say) if run.rank == 0 else []
        if (scaling := describe_scaling(run.job)) is not None:
            run.notes.append(scaling)
            run.say(scaling)
        self._launched_at, self._first_step_s = env.value(env.LAUNCHED_AT, float) or time.time(), 0.0
        self._so_far = _SoFar()
        self._unread: list[tuple[tuple[str, ...], torch.Tensor]] = []
        """For each step: the names of its values, and [loss, samples, values]."""
        self._samples_read = 0
        self._timed_s, self._samples_timed = 0.0, 0
        """Training time and samples when times were last logged."""
        run.keep("journal", self)

    def _since_launch_s(self) -> float:
        """Not below zero: the launcher's clock may be another node's, and either may be set back."""
        return max(0.0, time.time() - self._launched_at)

    def state_dict(self) -> dict[str, Any]:
        self._read_losses()
        wall_s = self._so_far.wall_s + self._since_launch_s()
        return dataclasses.asdict(dataclasses.replace(self._so_far, train_s=self._run.timer.train_s, wall_s=wall_s))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._so_far = from_mapping(_SoFar, state)
        self._samples_read = self._run.samples_seen
        self._run.timer.train_s = self._timed_s = self._so_far.train_s
        self._samples_timed = self._so_far.samples_logged

    def _log(self, step: int, values: dict[str, float]) -> None:
        for sink in self._sinks:
            sink.log(step, values)

    def step_made(self, training: Training, loss: torch.Tensor) -> None:  # noqa: ARG002 - an event's arguments
        run = self._run
        if not self._first_step_s:
            float(loss)  # on a GPU the step is over when its loss can be read
            self._first_step_s = self._since_launch_s()
        num_samples = run.samples_seen - self._samples_read
        self._samples_read = run.samples_seen
        numbers = [loss, loss.new_full((), num_samples), *run.values.values()]
        self._unread.append((tuple(run.values), torch.stack([number.double() for number in numbers])))
        if len(self._unread) == _LOG_STEPS:
            self._read_losses()

    def _read_losses(self) -> None:
        """Log the steps since the last call, and how fast they were."""
        if not self._unread:
            return
        so_far = self._so_far
        numbers = iter(torch.cat([numbers for _, numbers in self._unread]).tolist())
        for step, (names, _) in enumerate(self._unread, start=self._run.steps - len(self._unread) + 1):
            loss, num_samples = next(numbers), next(numbers)
            named = {name: next(numbers) for name in names}
            so_far.epoch_loss += loss * num_samples
            so_far.samples_logged += int(num_samples)
            for name, value in named.items():
                so_far.epoch_values[name] = so_far.epoch_values.get(name, 0.0) + value * num_samples
            self._log(step, named | {"loss": loss, "samples_seen": so_far.samples_logged})
        train_s, samples = self._run.timer.train_s - self._timed_s, so_far.samples_logged - self._samples_timed
        self._timed_s, self._samples_timed = self._run.timer.train_s, so_far.samples_logged
        if self._sinks and train_s > 0:
            parts = dataclasses.asdict(self._run.timer.recent(len(self._unread)))
            times = {f"step_{part}": seconds for part, seconds in parts.items()}
            self._log(self._run.steps, {"time": time.time(), "samples_per_s": samples / train_s, **times})
        self._unread.clear()

    def evaluated(self, training: Training, metrics: Mapping[str, float]) -> None:
        if training.is_between_epochs:
            return  # `epoch_ended` says it
        self._read_losses()
        self._log(self._run.steps, {f"test_{name}": value for name, value in metrics.items()})
        self._run.say(f"step {self._run.steps}  {shown_metrics(metrics)}")

    def epoch_ended(self, training: Training) -> None:
        self._read_losses()
        run, epoch, metrics, so_far = self._run, training.epoch, training.metrics, self._so_far
        samples, train_s = run.samples_seen - so_far.epoch_start[0], run.timer.train_s - so_far.epoch_start[1]
        if not samples:
            return  # the epoch's end was recorded before
        lr, noise_scale = float(run.optimizer.param_groups[0]["lr"]), run.noise_scale
        mean_loss = so_far.epoch_loss / samples
        means = {name: total / samples for name, total in so_far.epoch_values.items()}
        # A run that ended in the middle of an epoch, and was resumed, has a record of its first batches.
        before = tuple(record for record in so_far.epochs if record.epoch != epoch)
        record = EpochRecord(epoch, mean_loss, lr, train_s, metrics, noise_scale, means)
        so_far.epochs = (*before, record)
        if training.is_epoch_complete:  # else the run that goes on has the rest of it
            so_far.epoch_loss, so_far.epoch_values = 0.0, {}
            so_far.epoch_start = run.samples_seen, run.timer.train_s
        values = {"time": time.time(), "epoch": epoch + 1, "train_loss": mean_loss, "lr": lr}
        values |= {f"train_{name}": value for name, value in means.items()}
        values |= {} if noise_scale is None else {"noise_scale": noise_scale}
        self._log(run.steps, values | {f"test_{name}": value for name, value in metrics.items()})
        noise = "" if noise_scale is None else f"  noise scale {noise_scale:,.0f}"
        tested = f"  {shown_metrics(metrics)}" if metrics else ""
        run.say(f"epoch {epoch + 1}/{run.job.epochs}  train loss {mean_loss:.4f}{tested}{noise}")
        if noise_scale is not None and not so_far.has_warned and run.noise.num_measured >= _NOISE_STEPS:
            warning = batch_warning(run.job.global_batch_size, noise_scale)
            if warning is not None:
                so_far.has_warned = True
                run.notes.append(warning)
                run.say(warning)

    def record(self, training: Training, average: AveragedModel | None) -> RunRecord:
        """What happened. A collective. `average` is that of the weights, if it is what is saved."""
        run, kept = self._run, self._run.job.kept_checkpoints
        for sink in self._sinks:
            sink.close()
        evaluations, epochs = tuple(training.evaluations), self._so_far.epochs
        best = None if kept.keep_best is None else best_evaluation(evaluations, kept.keep_best, kept.best_mode)
        if best is not None:
            run.display.rows["best"] = f"{shown_metrics(best.metrics)} at step {best.step}"
        last = evaluations[-1].metrics if evaluations else {}
        return RunRecord(
            job=run.job,
            plan=run.plan,
            steps=run.steps,
            samples_seen=run.samples_seen,
            accuracy=last.get("accuracy"),
            loss=last.get("loss"),
            train_loss=epochs[-1].train_loss if epochs else None,
            train_s=run.timer.train_s,
            wall_s=self._so_far.wall_s + self._since_launch_s(),
            time_to_first_step_s=self._first_step_s,
            samples_per_s=samples_per_s(run),
            step_time=run.timer.median(),
            weights_sha256=run.weights_sha256() if average is None else weights_sha256(average.module.state_dict()),
            epochs=epochs,
            notes=tuple(run.notes),
            environment=describe_environment(run.world),
            evaluations=evaluations,
            best=best,
            stopped=run.stopping.reason,
            is_complete=not run.stopping.is_out_of_time,
        )


# --- the environment of a result ---


def describe_environment(world: World) -> dict[str, str]:
    """Facts for the reader of a record, as text: versions, hardware, and the commit of the working directory."""
    facts = {
        "paceline": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": env.cpu_name(),
        "threads per worker": str(torch.get_num_threads()),
        "backend": "none (one worker)" if world.group is None else torch.distributed.get_backend(world.group),
        "started by": world.started_by,
    }
    if world.device.type == "cuda":
        facts["GPU"] = torch.cuda.get_device_name(world.device)
        facts["CUDA"] = str(torch.version.cuda)
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    if image := env.text(env.CONTAINER):
        facts["container"] = image
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        git = subprocess.run(describe, capture_output=True, text=True, errors="replace", timeout=5, check=False)
        if git.returncode == 0:  # the working directory is in a repository
            facts["git commit"] = git.stdout.strip()
    return facts


# --- where measured values go: JSON lines always, experiment trackers on request ---


@dataclass(frozen=True)
class Sink:
    """Takes named numbers at a step."""

    log: Callable[[int, dict[str, float]], object]
    close: Callable[[], object]


def json_lines(run_dir: Path, first_step: int, say: Callable[[str], None]) -> Sink:
    """metrics.jsonl in the run folder: one object a call, readable during the run. Lines of an earlier process after
    `first_step` are removed, because these steps are repeated. Where it cannot be written, that is said once and
    training goes on."""
    path, has_told = run_dir / "metrics.jsonl", False
    file: TextIO | None = None

    def tell(problem: OSError) -> None:
        nonlocal has_told
        if not has_told:
            say(f"{path} cannot be written to ({problem.strerror}); training goes on.")
        has_told = True

    def log(step: int, values: dict[str, float]) -> None:
        try:
            if file is not None:
                file.write(json.dumps({"step": step, **values}) + "\n")
                file.flush()  # what could not be written is tried again with the next line
        except OSError as problem:
            tell(problem)

    def close() -> None:
        with contextlib.suppress(OSError):  # that was told
            if file is not None:
                file.close()

    try:
        kept = []
        for line in path.read_text(errors="replace").splitlines(keepends=True) if first_step and path.exists() else []:
            with contextlib.suppress(ValueError, TypeError, KeyError):  # such as the last one, which a crash has cut
                kept += [line] if line.endswith("}\n") and json.loads(line)["step"] <= first_step else []
        replace_text(path, "".join(kept), run_file_mode())
        file = open(os.open(path, os.O_WRONLY | os.O_APPEND), "w", encoding="utf-8")  # noqa: SIM115 - by `close`
    except OSError as problem:
        tell(problem)
    return Sink(log, close)


def _tensorboard(run_dir: Path) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Sink(log, writer.close)


def _wandb(run_dir: Path) -> Sink:
    import wandb

    run: Any = wandb.init(project="paceline", name=run_dir.name, dir=str(run_dir))  # its settings decide where it goes
    return Sink(lambda step, values: run.log(values, step=step), run.finish)


def _mlflow(run_dir: Path) -> Sink:
    import mlflow

    tracking: Any = mlflow
    tracking.start_run(run_name=run_dir.name)
    return Sink(lambda step, values: tracking.log_metrics(values, step=step), tracking.end_run)


TRACKERS: dict[str, Callable[[Path], Sink]] = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}


def open_sinks(run_dir: Path, trackers: Sequence[str], first_step: int, say: Callable[[str], None]) -> list[Sink]:
    """JSON lines and every tracker named. Raises `JobError` for a tracker that is not installed."""
    sinks: list[Sink] = [json_lines(run_dir, first_step, say)]
    for name in trackers:
        try:
            sinks.append(TRACKERS[name](run_dir))
        except ImportError:
            raise JobError(f"The tracker '{name}' is not installed; pip install 'paceline[{name}]'.") from None
    return sinks
