"""What one part of the page finds, written line by line, so that nothing is lost when the part ends early."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
Device = Literal["cuda", "simulated", "cpu"]
_MOST_CHARACTERS = 4000
"""Of an output or a traceback."""


@dataclass(frozen=True)
class Notes:
    """The results of a part, and what it has to know."""

    lines: Path
    """One JSON value a line, read while the part runs."""
    out: Path
    """The folder of the page."""
    scratch: Path
    """For everything that is not kept."""
    data: Path | None
    device: Device
    deadline: float
    """In seconds of `time.monotonic`."""

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def row(self, table: str, *, good: bool = True, **values: Any) -> None:
        """A row of a table of the page, by heading; not `good`: the part has failed."""
        self._write(table=table, row=values, good=good)

    def say(self, text: str) -> None:
        self._write(said=text)

    def each(self, names: Iterable[str], least_s: float = 3.0) -> Iterator[str]:
        """The names of cases, while so much time is left; the page says which were left out, and shows tracebacks."""
        names = list(names)
        self._write(planned=names)
        return (name for name in names if self.left_s > least_s)

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """One of `each`: an error is written down, and the next case begins."""
        try:
            yield
        except Exception:
            self._write(failed=name, why=traceback.format_exc()[-_MOST_CHARACTERS:])
        self._write(done=name)

    def command(self, *command: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, output and errors together; `paceline` is this Python's."""
        if command[0] == "paceline":
            command = (sys.executable, "-m", *command)
        environ = {**os.environ, "PACELINE_DATA": str(self.scratch / "data"), "NO_COLOR": "1", "COLUMNS": "140", **extra}
        if self.device != "cuda":
            environ["PACELINE_DEVICE"] = "cpu"  # programs of their own find no simulated GPU
        return subprocess.run(
            command,
            cwd=self.scratch,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(1.0, self.left_s),
            check=False,
        )

    def succeeded(self, done: subprocess.CompletedProcess[str]) -> str:
        """What a program has said. Raises `RuntimeError` with it, if the program failed."""
        if done.returncode:
            raise RuntimeError(f"{' '.join(done.args)}\nexit code {done.returncode}\n{done.stdout[-_MOST_CHARACTERS:]}")
        return done.stdout

    def _write(self, **line: Any) -> None:
        with self.lines.open("a") as file:
            file.write(json.dumps(line) + "\n")


def use_device(device: Device) -> None:
    """Let runs of this process compute on it. Before anything else asks torch for a GPU."""
    if device == "simulated":
        from tests.kit.sim_gpu.build import build
        from tests.kit.sim_gpu.torch_cuda import simulate

        simulate(build(), 1)
    os.environ["PACELINE_DEVICE"] = "cpu" if device == "cpu" else "cuda"
