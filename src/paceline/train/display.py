"""How far a run is: on a terminal one line that stays in its place, else a line now and then; at the end a table."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor

from paceline.train.batches import DataProgress
from paceline.words import number_of

if TYPE_CHECKING:
    from paceline.train.run import Run

_LIVE_S = 0.2
"""Seconds between two updates of the line on a terminal."""
_PLAIN_S, _LATER_S = 10.0, 60.0
"""Seconds between two plain lines: in the first minute, and later."""
_PLAIN_COLUMNS = 80
_CLEAR = "\r\x1b[2K"


class Progress:
    """Shows step, epoch, loss, throughput, time left and a GPU's memory. Only that of rank 0 prints."""

    def __init__(self, stream: TextIO | None, *, is_shown: bool = True) -> None:
        """
        Args:
            stream: where to; None: nowhere.
            is_shown: whether progress is shown there; messages are in any case.
        """
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
        if not isinstance(sys.stdout, _Above) and not isinstance(sys.stderr, _Above):
            # From now on, whatever this process prints takes the place of the line, which comes back below it.
            self._redirected.enter_context(contextlib.redirect_stdout(_Above(sys.stdout, self._clear)))
            self._redirected.enter_context(contextlib.redirect_stderr(_Above(sys.stderr, self._clear)))
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
            self.say(table(rows))

    def say(self, text: str) -> None:
        """Print permanent lines."""
        if self._stream is not None:
            self._clear()
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        self._clear()
        self._redirected.close()


class _Above:
    """A standard stream whose text takes the place of the progress line."""

    def __init__(self, stream: Any, clear: Callable[[], None]) -> None:
        self._stream = stream
        self._clear = clear

    def write(self, text: str) -> Any:
        self._clear()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Names and texts in two columns, in lines of 80 characters where words allow it."""
    width = max(len(name) for name, _ in rows) + 2
    lines = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, _PLAIN_COLUMNS - width, break_long_words=False, break_on_hyphens=False)
        lines += [f"{key:{width}}{line}" for key, line in zip((name, *[""] * len(wrapped)), wrapped, strict=False)]
    return "\n".join(lines)


def rate(per_s: float) -> str:
    """A number of samples per second."""
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"


def end_rows(run: Run, progress: DataProgress, checkpoint: str | None) -> list[tuple[str, str]]:
    """The rows (name, value) of the table at the end of a run; none on other ranks than 0, which print nothing.

    Args:
        checkpoint: the address of the newest checkpoint, or that there is none; None: the run saves none.
    """
    if run.rank != 0:
        return []
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
        parts = {"compute": median.compute_s, "data": median.data_s, "waiting for others": median.exposed_comm_s}
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
