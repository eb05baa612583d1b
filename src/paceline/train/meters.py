"""What a run measures of its steps and shows of them: where their time goes, on rank 0's own clock, and the noise of
their gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import torch
from torch import Tensor

from paceline.parallel import Assignment
from paceline.parallel.engine import Mark, seconds_between
from paceline.parallel.step_input import GradientNorms, TakeNorms
from paceline.spec import Job
from paceline.spec.codec import from_mapping
from paceline.spec.record import StepTime
from paceline.train.batches import DataProgress
from paceline.words import number_of

if TYPE_CHECKING:
    from paceline.train.run import Run

# The first steps warm caches and allocators; a median over a window of later ones is what lasts.
WARMUP_STEPS = 3
_WINDOW_STEPS = 2000

# Gradient noise changes slowly, and norms in every step would cost 3 % of the time of a small model.
_EVERY_STEPS = 4
# Reading a number makes the host wait for a GPU, so norms are read this many steps at a time.
_READ_STEPS = 50
_FAR_BEYOND = 4.0
"""A batch of so many noise scales is worth a warning: four fifths of what its samples could teach are lost."""


class StepTimer:
    """Measures from the end of one step to the end of the next: waiting for data, computing, waiting for peers."""

    def __init__(self) -> None:
        self._steps = 0
        self._since = time.perf_counter()
        self._asked_at = self._since
        self._data_s = 0.0
        self._unread: deque[tuple[float, float, tuple[Mark, Mark]]] = deque()
        self._read: deque[StepTime] = deque(maxlen=_WINDOW_STEPS)
        self.train_s = 0.0

    def resume(self) -> None:
        """Start or restart timing; the time since the last step (an evaluation, say) is not counted."""
        self._since = time.perf_counter()

    def data_asked(self) -> None:
        self._asked_at = time.perf_counter()

    def data_arrived(self) -> None:
        self._data_s = time.perf_counter() - self._asked_at

    def step_ended(self, communication: tuple[Mark, Mark]) -> None:
        now = time.perf_counter()
        total_s, self._since = now - self._since, now
        self.train_s += total_s
        self._steps += 1
        if self._steps > WARMUP_STEPS:
            self._unread.append((total_s, self._data_s, communication))
        self._data_s = 0.0  # a second step on the same batch waits for none
        # Marks on a GPU's time line are read two steps late, when they are surely past: reading never stalls it.
        while len(self._unread) > 2:
            self._read_oldest()

    def _read_oldest(self) -> None:
        total_s, data_s, (begin, end) = self._unread.popleft()
        exposed_s = max(0.0, seconds_between(begin, end))
        self._read.append(StepTime(total_s, data_s, max(0.0, total_s - data_s - exposed_s), exposed_s))

    @property
    def own_s(self) -> float:
        """Seconds of the last known step without waiting for other workers; 0 before any."""
        return self._read[-1].total_s - self._read[-1].exposed_comm_s if self._read else 0.0

    def recent(self, num_steps: int) -> StepTime:
        """The median of each component over the last steps known; on a GPU, the latest two are not yet."""
        return _median(list(self._read)[-num_steps:])

    def median(self) -> StepTime:
        """The median of each component; these medians need not add up to the median total exactly."""
        return _median(self._all())

    def p10_p90(self) -> tuple[float, float] | tuple[None, None]:
        """Seconds than which one step in ten was shorter, and one in ten longer; None before there are two steps."""
        totals_s = [step.total_s for step in self._all()]
        if len(totals_s) < 2:
            return None, None
        p10_s, p90_s = np.quantile(totals_s, (0.1, 0.9)).tolist()
        return p10_s, p90_s

    def _all(self) -> Collection[StepTime]:
        while self._unread:
            self._read_oldest()
        return self._read


def _median(steps: Collection[StepTime]) -> StepTime:
    if not steps:
        return StepTime()
    return StepTime(*np.median([dataclasses.astuple(step) for step in steps], axis=0).tolist())


# --- the gradient noise scale B_noise = tr(Sigma) / |G|^2 ---


@dataclass(frozen=True)
class NoiseScale:
    """Estimates of |G|^2 and tr(Sigma) in the units of the squared gradient; either may come out below zero.

    For the gradient of one sample's loss, with mean G and covariance Sigma over the data, the mean over a batch of B
    samples has E|G_B|^2 = |G|^2 + tr(Sigma) / B; the two terms are equal at B_noise (McCandlish, Kaplan, Amodei et al.,
    "An Empirical Model of Large-Batch Training", 2018, arXiv 1812.06162, section 2.2). It grows while a model learns.
    """

    grad_sqr: float
    grad_var: float
    """The variance of one sample's gradient."""

    @property
    def samples(self) -> float:
        """B_noise; 0 without variance, infinite where no signal can be told from zero."""
        if self.grad_var <= 0:
            return 0.0
        return self.grad_var / self.grad_sqr if self.grad_sqr > 0 else math.inf

    @classmethod
    def from_norms(cls, small_sqr: float, small_batch: float, large_sqr: float, large_batch: float) -> NoiseScale:
        """Unbiased, from mean squared norms of gradients over `small_batch` and over `large_batch` samples.

        McCandlish et al. 2018, appendix A.1: two equations E|G_B|^2 = |G|^2 + tr(Sigma) / B for two unknowns. The two
        norms may come from the same samples, since expectations add up whatever depends on what. Where batches of one
        kind differ in size, `small_batch` is 1 / (mean of 1 / B), with the weights of the mean of the norms.
        """
        grad_sqr = (large_batch * large_sqr - small_batch * small_sqr) / (large_batch - small_batch)
        grad_var = (small_sqr - large_sqr) / (1 / small_batch - 1 / large_batch)
        return cls(grad_sqr, grad_var)


@dataclass(frozen=True)
class SmoothedNoise:
    """Exponential averages of |G|^2 and of tr(Sigma), each by itself: a mean of ratios would be biased.

    The first measurements would count for too little, so averages are divided by 1 - decay^n (Kingma and Ba, "Adam",
    2014, section 3).
    """

    decay: float = 0.99
    num_measured: int = 0
    _grad_sqr: float = 0.0
    _grad_var: float = 0.0

    def after(self, one: NoiseScale) -> SmoothedNoise:
        """With one more measurement; one that is not finite, as after an overflow, is left out."""
        if not (math.isfinite(one.grad_sqr) and math.isfinite(one.grad_var)):
            return self
        kept, new = self.decay, 1 - self.decay
        return SmoothedNoise(
            self.decay,
            self.num_measured + 1,
            kept * self._grad_sqr + new * one.grad_sqr,
            kept * self._grad_var + new * one.grad_var,
        )

    @property
    def mean(self) -> NoiseScale | None:
        """None before the first measurement."""
        if not self.num_measured:
            return None
        weight = 1 - self.decay**self.num_measured
        return NoiseScale(self._grad_sqr / weight, self._grad_var / weight)


@dataclass
class NoiseMeter:
    """Takes gradient norms step by step; knows the smoothed noise."""

    job: Job
    scaler: torch.amp.GradScaler
    device: torch.device
    _smoothed: SmoothedNoise = field(default_factory=SmoothedNoise)
    _unread: list[GradientNorms] = field(default_factory=list)

    def for_step(self, step: int, assignment: Assignment) -> TakeNorms | None:
        """The function that takes the gradient norms of a step; None if they are not needed."""
        is_short = 2 * assignment.global_size < self.job.global_batch_size  # its norms are too noisy to use
        if not self.job.measure_noise or is_short or step % _EVERY_STEPS:
            return None
        if not self.scaler.is_enabled():
            return self.take
        square = self.scaler.scale(torch.ones((), device=self.device)).square()
        return lambda norms: self.take(
            replace(norms, small_sqr=norms.small_sqr / square, large_sqr=norms.large_sqr / square)
        )

    def take(self, norms: GradientNorms) -> None:
        """Norms of gradients that are not scaled."""
        self._unread.append(norms)
        if len(self._unread) == _READ_STEPS:
            self.read()

    def read(self) -> SmoothedNoise:
        """The noise scale from all steps so far."""
        if self._unread:
            values = torch.stack([torch.stack([one.small_sqr, one.large_sqr]).double() for one in self._unread])
            for norms, (small_sqr, large_sqr) in zip(self._unread, values.tolist(), strict=True):
                one = NoiseScale.from_norms(small_sqr, norms.small_batch, large_sqr, norms.large_batch)
                self._smoothed = self._smoothed.after(one)
            self._unread.clear()
        return self._smoothed

    def scale(self) -> float | None:
        """The noise scale in samples; None where it was not measured or no signal shows in the noise yet."""
        mean = self.read().mean
        return None if mean is None or not math.isfinite(mean.samples) else mean.samples

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self.read())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.job.measure_noise:
            self._smoothed = from_mapping(SmoothedNoise, state)


def batch_warning(batch_size: int, noise_scale: float) -> str | None:
    """One sentence with numbers if the global batch is too large for the noise scale B_noise in samples, else None.

    Relative to B single-sample steps, a batch of B makes 1 / (1 + B / B_noise) of the progress; one of B_noise needs
    twice the minimum of samples and twice the minimum of steps (McCandlish et al. 2018, section 2.3).
    """
    ratio = batch_size / noise_scale if noise_scale > 0 else 0.0
    if ratio <= _FAR_BEYOND:
        return None
    return (
        f"The global batch of {batch_size:,} samples is {ratio:.1f} times the gradient noise scale "
        f"({noise_scale:,.0f}): {ratio / (1 + ratio):.0%} of what its samples could teach is lost. A batch of "
        f"{max(1, round(noise_scale)):,} would come as far with {2 / (1 + ratio):.0%} of the samples, in "
        f"{2 * ratio / (1 + ratio):.1f} times the steps."
    )


# --- progress: on a terminal one line that stays in its place, else a line now and then; at the end a table ---


_LIVE_S = 0.2
"""Seconds between two updates of the line on a terminal."""
_PLAIN_S, _LATER_S = 10.0, 60.0
"""Seconds between two plain lines: in the first minute, and later."""
_PLAIN_COLUMNS = 80
_CLEAR = "\r\x1b[2K"


class Progress:
    """Shows step, epoch, loss, throughput, time left and a GPU's memory. Only that of rank 0 prints."""

    def __init__(self, stream: TextIO | None, *, is_shown: bool = True) -> None:
        """Print messages to `stream`, if there is one, and if `is_shown` the progress too."""
        self._stream = stream
        self.is_shown = is_shown and stream is not None
        self.rows: dict[str, str] = {}
        """Further rows of the table at the run's end, by name."""
        self._is_live = stream is not None and stream.isatty()
        self._begun: tuple[float, int, int] | None = None
        """Time, step and samples at the end of the first step that was seen."""
        self._shown_at = 0.0
        self._has_line = False
        """Whether the line that stays in its place is on the terminal."""
        self._redirected = contextlib.ExitStack()

    def step(self, progress: DataProgress, loss: Tensor) -> None:
        """Note a step and its loss, a scalar, which is read only when a line is due: on a GPU that waits."""
        if not self.is_shown:
            return
        now = time.perf_counter()
        if self._begun is None:
            self._begun, self._shown_at = (now, progress.steps, progress.samples_seen), now
        elapsed_s = now - self._begun[0]
        interval_s = _LIVE_S if self._is_live else _PLAIN_S if elapsed_s <= 60 else _LATER_S
        if now - self._shown_at >= interval_s:
            self._shown_at = now
            self._show(self._line(progress, loss, elapsed_s, *self._begun[1:]))

    def _line(self, progress: DataProgress, loss: Tensor, elapsed_s: float, first_step: int, first_samples: int) -> str:
        last = progress.last_step
        parts = [
            f"step {progress.steps}" + ("" if last is None else f"/{last}"),
            f"epoch {progress.epoch + 1}/{progress.job.epochs}",
            f"loss {float(loss):.4f}",
            f"{rate((progress.samples_seen - first_samples) / elapsed_s)} samples/s",
        ]
        if last is not None:
            left_s = elapsed_s / (progress.steps - first_step) * (last - progress.steps)
            parts.append(f"{timedelta(seconds=round(left_s))} left")
        if torch.cuda.is_initialized():
            parts.append(f"GPU {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        width = shutil.get_terminal_size().columns - 1 if self._is_live else _PLAIN_COLUMNS
        while len(parts) > 1 and len("  ".join(parts)) > width:
            parts.pop()
        return "  ".join(parts)[:width]

    def _show(self, line: str) -> None:
        assert self._stream is not None
        if not self._is_live:
            self.say(line)
            return
        if not isinstance(sys.stdout, _ClearingStream) and not isinstance(sys.stderr, _ClearingStream):
            # From now on, whatever this process prints takes the place of the line, which comes back below it.
            self._redirected.enter_context(contextlib.redirect_stdout(_ClearingStream(sys.stdout, self._clear)))
            self._redirected.enter_context(contextlib.redirect_stderr(_ClearingStream(sys.stderr, self._clear)))
        # The launcher, which shows other workers' lines, erases what stands behind the cursor.
        self._stream.write(f"{_CLEAR}{line}\r")
        self._stream.flush()
        self._has_line = True

    def _clear(self) -> None:
        if self._stream is not None and self._has_line:
            self._stream.write(_CLEAR)
            self._stream.flush()
            self._has_line = False

    def end(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print the table of a run that has ended, if this process made steps of it."""
        if self.is_shown and self._begun is not None:
            width = max(len(name) for name, _ in rows) + 2
            self.say("\n".join(f"{name:{width}}{text}" for name, text in rows))

    def say(self, text: str) -> None:
        """Print permanent lines."""
        if self._stream is not None:
            self._clear()
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        self._clear()
        self._redirected.close()


class _ClearingStream:
    """A standard stream whose text takes the place of the progress line."""

    def __init__(self, stream: Any, clear: Callable[[], None]) -> None:
        self._stream = stream
        self._clear = clear

    def write(self, text: str) -> Any:
        self._clear()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def rate(per_s: float) -> str:
    """A number of samples per second."""
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"


def summary_rows(run: Run, progress: DataProgress, checkpoint: str | None) -> list[tuple[str, str]]:
    """The rows (name, value) of the table at the end of a run. `checkpoint`: as `Session.newest_checkpoint` says."""
    done = progress.epochs_done
    epochs = f"epoch {progress.epoch + 1} of {progress.job.epochs}" if done is None else number_of(done, "epoch")
    steps = f"{progress.steps:,} in {epochs}, {number_of(progress.samples_seen, 'sample')}"
    rows = [("steps", steps), ("workers", f"{number_of(run.world_size, 'worker')}, {run.device.type}")]
    if run.metrics:
        rows.append(("evaluated", shown_metrics(run.metrics)))
    rows += run.display.rows.items()
    if run.stopping.reason is not None:
        rows.append(("stopped", run.stopping.reason))
    if run.timer.train_s:
        median = run.timer.median()
        parts = {"compute": median.compute_s, "data": median.data_s}
        parts |= {"waiting for others": median.exposed_comm_s} if run.world_size > 1 else {}
        total_s = sum(parts.values())
        shown = [f"{name} {part_s / total_s:.0%}" for name, part_s in parts.items() if part_s >= 0.005 * total_s > 0]
        rows.append(("speed", f"{rate(samples_per_s(run))} samples/s"))
        rows.append(("time", f"{run.timer.train_s:.1f} s of training" + (f": {', '.join(shown)}" if shown else "")))
    if checkpoint is not None:
        rows.append(("checkpoint", checkpoint))
    return rows


def samples_per_s(run: Run) -> float:
    """Steady throughput over all workers: as `RunRecord.samples_per_s`."""
    step_s = run.timer.median().total_s
    # Where workers synchronise every few steps, the median step is one without a synchronisation.
    if step_s and run.job.aggregation.method == "every_step":
        return min(run.job.global_batch_size, run.samples_seen) / step_s
    return run.samples_seen / run.timer.train_s if run.timer.train_s else 0.0


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """Metrics as people read them."""
    return "  ".join(
        f"{name} {value:.2%}" if name == "accuracy" else f"{name} {value:.4f}" for name, value in metrics.items()
    )
