"""Sinks of measured values: JSON lines always, experiment trackers on request."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import JobError
from paceline.regular_files import create, parse_json, read_bytes, run_file_mode

_MOST_UNWRITTEN = 10_000


@dataclass(frozen=True)
class Sink:
    """Takes named numbers at a step."""

    log: Callable[[int, dict[str, float]], object]
    close: Callable[[], object]


def json_lines(run_dir: Path, first_step: int, say: Callable[[str], None]) -> Sink:
    """metrics.jsonl in the run folder: one object a call, readable during the run.

    It continues after `first_step`: later lines of an earlier process are removed, because these steps are repeated.
    """
    path = run_dir / "metrics.jsonl"
    file: io.TextIOWrapper | None = None
    unwritten: list[str] = []
    """Lines for a file that could not be begun yet."""
    has_told = False

    def write(line: str) -> None:
        nonlocal file, has_told
        try:
            if file is None:
                file = _begin_lines(path, first_step, "".join(unwritten))
                unwritten.clear()
            file.write(line)
            file.flush()
        except OSError as problem:  # what could not be written is tried again with the next line
            if file is None and len(unwritten) < _MOST_UNWRITTEN:
                unwritten.append(line)
            if not has_told:
                say(f"{path} cannot be written to ({problem.strerror}); training goes on.")
            has_told = True

    def close() -> None:
        with contextlib.suppress(OSError):  # that was told
            if file is not None:
                file.close()

    write("")
    return Sink(lambda step, values: write(json.dumps({"step": step, **values}) + "\n"), close)


def _begin_lines(path: Path, first_step: int, text: str) -> io.TextIOWrapper:
    """The file, open for writing behind its lines until a step and behind `text`. Raises `OSError`."""
    before = _lines_until(path, first_step)
    draft = path.with_name(path.name + ".tmp")
    file = io.TextIOWrapper(io.BufferedWriter(create(draft, run_file_mode())), encoding="utf-8")
    try:
        file.writelines([*before, text])
        file.flush()
        draft.replace(path)  # it stays open as long as the run is
    except OSError:
        with contextlib.suppress(OSError):
            file.close()
        raise
    return file


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


def _lines_until(path: Path, step: int) -> list[str]:
    if not step or not path.exists():
        return []
    lines = read_bytes(path).decode("utf-8", "replace").splitlines(keepends=True)
    return [line for line in lines if _step(line) <= step]


def _step(line: str) -> float:
    """The step of a line of metrics.jsonl; infinite for what is none, such as a line that a crash has cut."""
    try:
        step = parse_json(line)["step"] if line.endswith("}\n") else math.inf
    except (ValueError, TypeError, KeyError):
        return math.inf
    return step if isinstance(step, int) else math.inf


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
