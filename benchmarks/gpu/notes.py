"""What one part of the page finds, kept line by line: nothing is lost when the part ends early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Device = Literal["cuda", "simulated", "cpu"]
Cases = Mapping[str, Callable[[], None]]
RESULTS = "results.jsonl"
_LEAST_S = 4.0
"""What has to be left of a part's time for a case to begin."""


@dataclass(frozen=True)
class Notes:
    """Where a part's results go, and what its cases have to know; `deadline` is a time of `time.monotonic`."""

    part: str
    out: Path
    scratch: Path
    data: Path | None
    device: Device
    deadline: float

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def write(self, **found: Any) -> None:
        """Append to the lines of results.jsonl."""
        with (self.out / RESULTS).open("a") as file:
            file.write(json.dumps({"part": self.part, **found}) + "\n")

    def row(self, table: str, values: Mapping[str, Any], *, good: bool = True) -> None:
        """A row of a table, by heading. Not `good`: the part has failed."""
        self.write(table=table, values=values, good=good)

    def run(self, cases: Cases) -> None:
        """Run every case for which there is time; an error of one is kept, and does not stop the others."""
        for name, case in cases.items():
            try:
                if self.left_s < _LEAST_S:
                    raise TimeoutError("no time left")
                case()
            except Exception:
                self.write(failure=f"{name}\n{traceback.format_exc()[-5000:]}")

    def command(self, *command: str, may_fail: bool = False, **environ: str) -> str:
        """The output of a program, errors included; "paceline" is run by this Python. Raises `RuntimeError` with it."""
        whole = [sys.executable, "-m", *command] if command[0] == "paceline" else command
        cpu = {} if self.is_gpu else {"PACELINE_DEVICE": "cpu"}  # programs of their own find no simulated GPU
        env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "140", **cpu, **environ}
        log = self.scratch / f"{time.monotonic_ns()}.log"  # also what a program has said that takes too long
        with log.open("w") as output:
            try:
                done = subprocess.run(
                    whole, cwd=self.scratch, env=env, stdout=output, stderr=output, timeout=self.left_s
                )
                exit_code = f"exit code {done.returncode}" if done.returncode else ""
            except subprocess.TimeoutExpired:
                exit_code = "no time left"
        if exit_code and not (may_fail and exit_code != "no time left"):
            raise RuntimeError(f"{' '.join(command)}: {exit_code}\n{log.read_text()[-3000:]}")
        return log.read_text()


def use_device(device: Device) -> None:
    """Let runs of this process compute on it, before anything asks torch for a GPU."""
    if device == "simulated":
        from tests.kit.sim_gpu.build import build
        from tests.kit.sim_gpu.torch_cuda import simulate

        simulate(build(), 1)
    os.environ["PACELINE_DEVICE"] = "cpu" if device == "cpu" else "cuda"
