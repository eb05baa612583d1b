"""The folder of a run: its input files, and the record that the run writes."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.spec import Job, Plan, RunRecord

RECORD_FILE = "record.json"


def new_run_dir(out: Path | str | None, name: str) -> Path:
    """The folder of a new run: `out`, which must not hold a finished run, or a fresh one under runs/.

    Raises:
        PacelineError: `out` holds a finished run, which would be lost.
    """
    if out is not None:
        if (Path(out) / RECORD_FILE).exists():
            raise PacelineError(f"{out} already holds a finished run; choose another --out or remove the folder.")
        return Path(out)
    stem = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (stem if n == 0 else stem.with_name(f"{stem.name}-{n}") for n in range(1000))
    for candidate in candidates:
        try:
            candidate.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            continue
        return candidate
    raise PacelineError(f"No free folder name under {stem}; name one with --out.")


def make_folder(folder: Path) -> None:
    """Make a folder that only its owner can read. Raises `PacelineError` where that is not possible."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        raise PacelineError(f"The run folder {folder} cannot be made: {problem}.") from None


def write_run(
    job: Job,
    plan: Plan,
    run_dir: Path,
    *,
    max_steps: int | None = None,
    quiet: bool = False,
    trackers: Sequence[str] = (),
    force: bool = False,
) -> list[str]:
    """Write job, plan and limit into the run folder; return the program that trains them, as python's arguments."""
    make_folder(run_dir)
    _write_json(run_dir / "job.json", job.to_mapping())
    _write_json(run_dir / "plan.json", plan.to_mapping())
    _write_json(run_dir / "limit.json", {"max_steps": max_steps})
    return training_program(run_dir, quiet, trackers, force)


def training_program(run_dir: Path, quiet: bool, trackers: Sequence[str], force: bool) -> list[str]:
    """The program that trains the job in a run folder, as plan and limit there say, as python's arguments."""
    # Absolute: on another node the working directory may be another.
    program = ["-m", "paceline.train", str(run_dir.absolute())]
    program += ["--quiet"] if quiet else []
    program += ["--force"] if force else []
    return program + [word for tracker in trackers for word in ("--track", tracker)]


def begun_with(run_dir: Path) -> tuple[Job, Plan, int | None]:
    """The job, plan and `max_steps` that the run in `run_dir` was begun with; its record tells what came of them."""
    job, plan, limit = (
        json.loads((run_dir / f"{name}.json").read_text(encoding="utf-8")) for name in ("job", "plan", "limit")
    )
    return Job.from_mapping(job), Plan.from_mapping(plan), limit["max_steps"]


def finished_record(run_dir: Path, started: float) -> RunRecord:
    """The record of a run that has just ended, with its time since `started` (`time.monotonic`), in its file too."""
    # Only here is it known when the last worker ended.
    record = dataclasses.replace(RunRecord.load(run_dir / RECORD_FILE), wall_s=time.monotonic() - started)
    record.save(run_dir / RECORD_FILE)
    return record


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
