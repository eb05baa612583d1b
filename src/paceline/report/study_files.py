"""The files of a scaling study: scaling.json (everything), scaling.csv (one line per run) and report.html."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from paceline.errors import file_problems
from paceline.report.study import Study
from paceline.spec.record import RunRecord


def write_study(study: Study, out: Path) -> None:
    """Write the files into the folder `out`, which is made. Times are in seconds, accuracies in [0, 1].

    Raises:
        PacelineError: the folder cannot be made or written to.
    """
    rows = [
        {field.name: getattr(row, field.name) for field in fields(row) if field.name != "runs"}
        | {"seeds": row.seeds, "forecast_error": row.forecast_error, "weights_sha256": row.weights_sha256}
        | {"step_time": asdict(row.step_time)}
        for row in study.rows
    ]
    everything = {
        "name": study.name,
        "grow": study.grow,
        "tolerance": study.tolerance,
        "efficiency_floor": study.efficiency_floor,
        "recommended_devices": study.recommendation.devices,
        "verdict": study.recommendation.verdict,
        "reason": study.recommendation.reason,
        "rejected": study.recommendation.rejected,
        "same_weights": study.same_weights,
        "rows": rows,
        "job": study.job.to_mapping(),
        "environment": study.base.runs[0].environment,
        "runs": [_run_mapping(run) for run in study.records],
    }
    text = json.dumps(_finite(everything), indent=2, allow_nan=False) + "\n"
    with file_problems(f"The report cannot be written into '{out}'", remedy="name another folder"):
        out.mkdir(parents=True, exist_ok=True)
        for name, content in {"scaling.json": text, "scaling.csv": _csv(study), "report.html": study.page()}.items():
            (out / name).write_text(content, encoding="utf-8", newline="\n")


def _run_mapping(run: RunRecord) -> dict[str, Any]:
    """The record without its job, which is the study's but for its seed and batch."""
    known = {"devices": run.world_size, "seed": run.job.seed, "global_batch_size": run.job.global_batch_size}
    return known | {key: value for key, value in run.to_mapping().items() if key != "job"}


def _csv(study: Study) -> str:
    """One line per run; an empty cell is a number that was not measured."""
    lines = [
        {
            "name": run.job.name,
            "devices": run.world_size,
            "seed": run.job.seed,
            "global_batch_size": run.job.global_batch_size,
            "learning_rate": run.job.optim.lr * run.job.lr_scale,
            **run.summary(),
            "train_loss": run.train_loss,
            "train_s": run.train_s,
            **{f"step_{part}": seconds for part, seconds in asdict(run.step_time).items()},
            "step_p10_s": run.step_p10_s,
            "step_p90_s": run.step_p90_s,
            "recommended": int(run.world_size == study.recommendation.devices),
        }
        for run in study.records
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_finite, lines))
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
