"""Sinks of measured values: JSON lines always, experiment trackers on request."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from paceline.errors import JobError
from paceline.regular_files import parse_json, replace_text, run_file_mode


@dataclass(frozen=True)
class Sink:
    """Takes named numbers at a step."""

    log: Callable[[int, dict[str, float]], object]
    close: Callable[[], object]


def json_lines(run_dir: Path, first_step: int, say: Callable[[str], None]) -> Sink:
    """metrics.jsonl in the run folder: one object a call, readable during the run.

    It continues after `first_step`: later lines of an earlier process are removed, because these steps are repeated.
    Where it cannot be written, that is said once and training goes on.
    """
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
                kept += [line] if line.endswith("}\n") and parse_json(line)["step"] <= first_step else []
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
    """JSON lines and every tracker named. Raises `JobError` for a tracker that is unknown or not installed."""
    sinks: list[Sink] = [json_lines(run_dir, first_step, say)]
    for name in trackers:
        if name not in TRACKERS:
            raise JobError(f"There is no tracker '{name}'; it is one of {', '.join(TRACKERS)}.")
        try:
            sinks.append(TRACKERS[name](run_dir))
        except ImportError:
            raise JobError(f"The tracker '{name}' is not installed; pip install 'paceline[{name}]'.") from None
    return sinks
