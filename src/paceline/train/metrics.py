"""Sinks of measured values: JSON lines always, experiment trackers where asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import JobError


class Sink(Protocol):
    """Takes named numbers at a step."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl in the run folder: one object a call, readable while the run goes on."""

    def __init__(self, run_dir: Path, first_step: int = 0) -> None:
        """Goes on after `first_step`: what an earlier process logged beyond it will come again."""
        path = run_dir / "metrics.jsonl"
        before = _lines_until(path, first_step)
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the run is
        self._file.writelines(before)
        self._file.flush()

    def log(self, step: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files for TensorBoard under the run folder."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A Weights & Biases run, named after the run folder; its own settings decide where it goes."""

    def __init__(self, run_dir: Path) -> None:
        import wandb

        self._run: Any = wandb.init(project="paceline", name=run_dir.name, dir=str(run_dir))

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """An MLflow run, named after the run folder; its own settings decide where it goes."""

    def __init__(self, run_dir: Path) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        self._mlflow.start_run(run_name=run_dir.name)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics(values, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


SINKS: dict[str, Callable[[Path], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def _lines_until(path: Path, step: int) -> list[str]:
    if not step or not path.exists():
        return []
    # A line that a crash has cut is no line.
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("}\n")]
    return [line for line in lines if json.loads(line)["step"] <= step]


def open_sinks(run_dir: Path, trackers: Sequence[str], first_step: int = 0) -> list[Sink]:
    """JSON lines and every tracker named. Raises `JobError` for a tracker that is unknown or not installed."""
    sinks: list[Sink] = [JsonLines(run_dir, first_step)]
    for name in trackers:
        if name not in SINKS:
            raise JobError(f"There is no tracker '{name}'; it is one of {', '.join(SINKS)}.")
        try:
            sinks.append(SINKS[name](run_dir))
        except ImportError:
            raise JobError(f"The tracker '{name}' is not installed; pip install 'paceline[{name}]'.") from None
    return sinks
