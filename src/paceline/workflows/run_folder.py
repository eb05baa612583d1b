"""The folder of a run: its input files, and the record that the run writes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from paceline.errors import PacelineError, file_problems
from paceline.regular_files import make_run_folder, run_file_mode
from paceline.spec import Job, Plan, RunRecord
from paceline.spec.job import JOB_FILE, differences
from paceline.spec.plan import LIMIT_FILE, PLAN_FILE, RunLimit
from paceline.spec.record import RECORD_FILE
from paceline.words import number_of

STALE_VIEW_S = 60.0
"""For at most this long a node takes the old content of a shared file for the present one, or believes it absent."""

NO_LIMIT = RunLimit()
"""A run that ends with its epochs."""
_MOST_NAME_CHARACTERS = 50
"""What a folder's name keeps of its job's: 200 bytes at most in UTF-8, and file systems take 255."""


def new_run_dir(out: Path | str | None, name: str) -> Path:
    """The folder of a run: `out`, or a fresh one under runs/. Raises `PacelineError` where none can be made there."""
    if out:
        return Path(out)
    # Whatever a job is called, its folder lies below runs/, and its name is one that file systems take.
    safe = re.sub(r"[^\w.+=@ -]", "-", name)[:_MOST_NAME_CHARACTERS].strip(". ") or "run"
    stem = f"{safe}-{datetime.now():%Y%m%d-%H%M%S}"
    with file_problems("No run folder can be made under runs", remedy="name another one with out = DIR"):
        Path("runs").mkdir(exist_ok=True)
        for number in itertools.count(1):
            run_dir = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
            with contextlib.suppress(FileExistsError):
                run_dir.mkdir(mode=0o700)
                break
        return run_dir


def finished_run(run_dir: Path, job: Job, max_steps: int | None, *, force: bool) -> RunRecord | None:
    """The record of the run in `run_dir` if nothing is left to do of `job`; None if there is. Changes nothing.

    Raises:
        PacelineError: the folder holds a finished run of another job, or of more epochs or steps.
    """
    file, limit_file = run_dir / RECORD_FILE, run_dir / LIMIT_FILE
    if not file.exists():
        return None
    record = RunRecord.load(file)
    before = record.job
    changes = differences(before.to_mapping(), dataclasses.replace(job, epochs=before.epochs).to_mapping())
    if changes and not force:
        raise PacelineError(
            f"{run_dir} already holds a finished run of another job ({'; '.join(changes)}); name another folder, or "
            "remove the folder."
        )
    if job.epochs < before.epochs or (max_steps is not None and max_steps < record.steps):
        raise PacelineError(
            f"{run_dir} already holds a finished run that is longer: it has made {number_of(record.steps, 'step')} of "
            f"{number_of(before.epochs, 'epoch')}, and epochs = {job.epochs}, max_steps = {max_steps} here; name "
            "another folder, or remove the folder."
        )
    limit = RunLimit.load(limit_file).max_steps if limit_file.exists() else -1
    is_same = not changes and (job.epochs, max_steps, job.early_stopping) == (
        before.epochs,
        limit,
        before.early_stopping,
    )
    return record if is_same and record.is_complete else None


def put_record_aside(run_dir: Path) -> None:
    """Give the record of a finished run, of which more is wanted, the number of its steps as a name.

    The caller must hold the folder: a run that is about to end there looks for its own record.
    """
    file = run_dir / RECORD_FILE
    if file.exists():
        file.rename(run_dir / f"record-{RunRecord.load(file).steps}-steps.json")


def write_run(
    job: Job,
    plan: Plan,
    run_dir: Path,
    limit: RunLimit = NO_LIMIT,
    *,
    quiet: bool = False,
    trackers: Sequence[str] = (),
    force: bool = False,
) -> list[str]:
    """Write job, plan and limit into the run folder; return the program that trains them, as python's arguments."""
    with file_problems(f"The run folder {run_dir} cannot be made", remedy="name another one with out = DIR"):
        make_run_folder(run_dir)  # that only its owner can read
    values = {JOB_FILE: job, PLAN_FILE: plan, LIMIT_FILE: limit}
    with file_problems(f"The run folder {run_dir} cannot be written to"):
        for name, value in values.items():
            value.save(run_dir / name, run_file_mode())
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
    limit = RunLimit.load(run_dir / LIMIT_FILE)
    return Job.load(run_dir / JOB_FILE), Plan.load(run_dir / PLAN_FILE), limit.max_steps


def finished_record(run_dir: Path, started: float, *, was_elsewhere: bool) -> RunRecord:
    """The record of a run that has just ended, with its time since `started` (`time.monotonic`), in its file too.

    Args:
        was_elsewhere: whether another node may have written it, so that it may not be seen here yet.

    Raises:
        PacelineError: it is not there, or damaged.
    """
    file, wall_s = run_dir / RECORD_FILE, time.monotonic() - started  # only here is known when the last worker ended
    until = time.monotonic() + (STALE_VIEW_S if was_elsewhere else 0.0)
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.1)
    if not file.exists():
        raise PacelineError(f"The run has ended well, but its record {file} is gone: was the folder deleted?")
    record = dataclasses.replace(RunRecord.load(file), wall_s=wall_s)
    with contextlib.suppress(OSError):  # the worker's own record is there
        record.save(file, run_file_mode())
    return record
