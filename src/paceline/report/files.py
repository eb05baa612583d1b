"""The files of a scaling study."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.errors import file_problems
from paceline.report.page import render_page
from paceline.report.study import Study, StudyRow
from paceline.spec.record import RunRecord


def write_study(study: Study, out: Path) -> None:
    """Write scaling.json (everything), scaling.csv (one line per run) and report.html into the folder `out`.

    Raises:
        PacelineError: the folder cannot be made or written to.
    """
    files = {
        "scaling.json": json.dumps(_finite(study_mapping(study)), indent=2, allow_nan=False) + "\n",
        "scaling.csv": _csv(study),
        "report.html": render_page(study),
    }
    write_files(files, out)


def write_files(files: Mapping[str, str], out: Path, what: str = "report") -> None:
    """Write texts by their names into the folder `out`, which is made.

    Raises:
        PacelineError: the folder cannot be made or written to; says that `what` could not be written.
    """
    with file_problems(f"The {what} cannot be written into '{out}'", remedy="name another folder"):
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8", newline="\n")


def study_mapping(study: Study) -> dict[str, Any]:
    """The study as plain values, as scaling.json holds it; times in seconds, accuracies in [0, 1]."""
    found = study.recommendation
    return {
        "name": study.name,
        "grow": study.grow,
        "tolerance": study.tolerance,
        "efficiency_floor": study.efficiency_floor,
        "recommended_devices": found.devices,
        "verdict": found.verdict,
        "reason": found.reason,
        "rejected": {str(devices): sentence for devices, sentence in found.rejected.items()},
        "same_weights": study.same_weights,
        "rows": [_row_mapping(row) for row in study.rows],
        "job": study.job.to_mapping(),
        "environment": dict(study.base.runs[0].environment),
        "runs": [_run_mapping(run) for run in study.records],
    }


_ROW_KEYS = (
    *("devices", "seeds", "global_batch_size", "learning_rate", "accuracy", "accuracy_min", "accuracy_max"),
    *("accuracy_std", "accuracy_change", "within_spread", "train_s", "speedup", "efficiency", "samples_per_s"),
    *("forecast_samples_per_s", "forecast_error", "time_to_first_step_s", "wall_s", "step_time", "step_p10_s"),
    *("step_p90_s", "same_weights", "weights_sha256"),
)
"""The attributes of a row that scaling.json holds."""


def _row_mapping(row: StudyRow) -> dict[str, Any]:
    plain = {key: getattr(row, key) for key in _ROW_KEYS}
    digests = {str(seed): digest for seed, digest in row.weights_sha256.items()}
    return plain | {"seeds": list(row.seeds), "step_time": asdict(row.step_time), "weights_sha256": digests}


def _run_mapping(run: RunRecord) -> dict[str, Any]:
    return {
        "devices": run.world_size,
        "seed": run.job.seed,
        "global_batch_size": run.job.global_batch_size,
        "learning_rate": run.job.optim.lr * run.job.lr_scale,
        **run.summary(),
        "train_loss": run.train_loss,
        "train_s": run.train_s,
        "step_time": asdict(run.step_time),
        "step_p10_s": run.step_p10_s,
        "step_p90_s": run.step_p90_s,
        "plan": run.plan.to_mapping(),
        "epochs": [asdict(epoch) for epoch in run.epochs],
        "notes": list(run.notes),
        "environment": dict(run.environment),
    }


def _csv(study: Study) -> str:
    """One line per run; an empty cell is a number that was not measured."""
    lines = []
    for run in study.records:
        plain = _finite(_run_mapping(run))
        step_time = {f"step_{part}": seconds for part, seconds in plain.pop("step_time").items()}
        for nested in ("plan", "epochs", "notes", "environment", "world_size"):
            plain.pop(nested)
        lines.append(
            {
                "name": run.job.name,
                **plain,
                **step_time,
                "recommended": int(run.world_size == study.recommendation.devices),
            }
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _finite(value: Any) -> Any:
    """JSON has no NaN: the loss of a run that diverged becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
