"""`paceline.verify`: proof, on the user's own model, that N workers compute what one does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline import env
from paceline.errors import LaunchError
from paceline.hardware import detect
from paceline.launch.run import LaunchOptions, run_workers
from paceline.plan import spread
from paceline.report.parity import ParityVerdict, compare, load_trace
from paceline.spec import Cluster, Job, Plan, parse_mesh
from paceline.spec.mesh_name import check_strategy
from paceline.words import number_of
from paceline.workflows.arguments import checked
from paceline.workflows.jobs import Say, check_counts, is_script, read_counts, resolve_job, silent
from paceline.workflows.run_folder import write_run
from paceline.workflows.strategy import Strategy


@checked
def verify(
    job: Job | str | Path,
    arguments: Sequence[str] = (),
    *,
    workers: Sequence[int] | str = (1, 2, 4),
    steps: int = 5,
    model: str | Callable[..., Any] | None = None,
    data: str | Path | Callable[..., Any] | None = None,
    settings: Sequence[str] = (),
    strategy: str | None = None,
    say: Say = silent,
) -> tuple[ParityVerdict, ...]:
    """Compare a few training steps on several numbers of workers with those on the smallest number.

    A job with numeric parity is compared in float64, so that rounding cannot hide a difference; a script runs as it is.
    The smallest number runs twice, so that what differs between equal runs is not put down to the number of workers.
    Example: `paceline.verify("digits-lenet", workers=[1, 2])`.

    Args:
        job: a job, a job file (TOML), the name of a recipe; or a script that calls `paceline.init`, such as "train.py".
        arguments: for the script.
        workers: the numbers of workers to compare; or a text such as "1,2,4" or "1..4".
        steps: training steps to compare.
        strategy: how more than one worker divide the model, such as "fsdp" or "dp2 x pp2"; None: dp.
        say: receives progress messages, one line at a time.
        model, data, settings: as for `train`.

    Returns:
        A verdict for each number of workers: whether it passed, or the first tensor that differs and the likely cause.

    Raises:
        PacelineError: an invalid argument, a mistake in the job, a script that takes no step.
        WorkerFailed: a worker failed; says which rank, and why.
    """
    cluster = detect()
    check_counts(steps=steps)
    counts = read_counts("workers", workers)
    if strategy not in (None, "auto", "dp_one_process"):  # which ones there are does not depend on the counts
        check_strategy(strategy)
    resolved = None
    if not is_script(job, arguments, settings, data, model):
        resolved = _in_float64(resolve_job(job, settings, data, model))
    plans = {}
    for count in counts:  # all of them before the first is trained
        shared = _shared(strategy, count)
        if resolved is not None:
            plans[count] = Strategy(shared).placed(resolved, cluster, count, say=say, threads_per_worker=1)
        else:
            plans[count] = _script_plan(Path(str(job)), shared, count, cluster)
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as scratch:
        traces = []
        for number, count in enumerate([counts[0], *counts]):
            run_dir = Path(scratch) / str(number)
            program = [str(job), *arguments]
            if resolved is not None:
                program = write_run(resolved, plans[count], run_dir, quiet=True)
            say(f"training {steps} steps on {number_of(count, 'worker')} …")
            # A script reads it from the environment. Every worker is a new process: those that are forked hash texts
            # alike, and would hide what depends on the order of a set.
            environ = env.trace_request(run_dir / "trace", steps) | env.note(env.STRATEGY, _shared(strategy, count))
            run_workers(plans[count], program, LaunchOptions(run_dir, environ=environ))
            traces.append(load_trace(run_dir / "trace", count))
        return tuple(compare(traces[0], traces[1], traces[2:]))


def _in_float64(job: Job) -> Job:
    return job.with_values(precision="float64") if job.parity == "numeric" else job


def _shared(strategy: str | None, count: int) -> str | None:
    """The strategy of so many workers: one has nobody to share with."""
    return strategy if count > 1 else None


def _script_plan(script: Path, strategy: str | None, count: int, cluster: Cluster) -> Plan:
    if not script.is_file():
        raise LaunchError(f"There is no script '{script}'.")
    if strategy is not None:
        parse_mesh(strategy, count)  # as the script will read it
    return spread(cluster, count, threads_per_worker=1)
