"""Progress output of a run: one live line on a terminal, an occasional plain line in a pipe."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

from torch import Tensor

# Seconds between lines: short on a terminal, long in a log.
_LIVE_S, _PLAIN_S = 0.2, 10.0


class Progress:
    """Shows step, loss, throughput and time left. Only that of rank 0 prints."""

    def __init__(self, stream: TextIO | None, total_steps: int, label: str) -> None:
        self._stream = stream
        self._total_steps = total_steps
        self._label = label
        self._live = stream is not None and stream.isatty()
        self._start = time.perf_counter()
        self._shown = self._start
        self._samples = 0
        self._live_line = False

    def step(self, step: int, epoch: int, loss: Tensor, num_samples: int) -> None:
        """One step of `num_samples` samples is done. The loss is read only when a line is due."""
        self._samples += num_samples
        now = time.perf_counter()
        if self._stream is None or now - self._shown < (_LIVE_S if self._live else _PLAIN_S):
            return
        self._shown = now
        elapsed_s = now - self._start
        left_s = elapsed_s / step * (self._total_steps - step)
        line = (
            f"{self._label}  epoch {epoch + 1}  step {step}/{self._total_steps}  loss {float(loss):.4f}  "
            f"{self._samples / elapsed_s:,.0f} samples/s  {_clock(left_s)} left"
        )
        if self._live:
            width = shutil.get_terminal_size().columns
            self._stream.write(f"\r\x1b[2K{line[: width - 1]}")
            self._live_line = True
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def say(self, line: str) -> None:
        """Print a permanent line."""
        if self._stream is None:
            return
        self._stream.write(("\r\x1b[2K" if self._live_line else "") + f"{self._label}  {line}\n")
        self._live_line = False
        self._stream.flush()

    def close(self) -> None:
        if self._stream is not None and self._live_line:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
