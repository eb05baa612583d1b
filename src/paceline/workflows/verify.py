"""`paceline.verify`: does a job or a training script compute on N workers what it computes on one?"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import env
from paceline.errors import JobError, PacelineError
from paceline.hardware import detect
from paceline.launch.command_lines import with_variables
from paceline.launch.run import LaunchOptions, Transport, run_workers
from paceline.plan.placement import spread
from paceline.spec import Job, Plan, parse_mesh
from paceline.spec.codec import PositiveInt
from paceline.words import number_of
from paceline.workflows.arguments import Say, checked, read_counts, silent
from paceline.workflows.jobs import is_script, plan_run, resolve_job
from paceline.workflows.runs import check_script, write_run

if TYPE_CHECKING:  # these load NumPy
    from paceline.verify.comparison import ParityVerdict
    from paceline.verify.records import ObservedRun

_TO_STDERR = Transport(argv=lambda *told: ("sh", "-c", 'exec "$@" >&2', "sh", *with_variables(*told)))
"""Starts workers on this node whose output goes to standard error: standard output is for verdicts."""


@checked
def verify(
    job: Job | str | Path,
    arguments: Sequence[str] = (),
    *,
    workers: Sequence[int] | str = "1,2",
    batch: PositiveInt | None = None,
    steps: PositiveInt = 4,
    deal: bool = False,
    data: str | Path | None = None,
    settings: Sequence[str] = (),
    strategy: str | None = None,
    say: Say = silent,
) -> tuple[ParityVerdict, ...]:
    """Compare the first training steps on several numbers of workers with those on the smallest number.

    A job with numeric parity is compared in float64, so that rounding cannot hide a difference; a script runs as it is.
    If something differs, the smallest number runs again: what differs between equal runs is not put down to workers.
    Example: `paceline.verify("train.py", ["--batch-size", "{batch}"], batch=8)`.

    Args:
        job: a training script, with any library; a job file (TOML), the name of a recipe, or a `Job`.
        arguments: for the script. {batch} stands for its batch size per worker, so that all workers together have the
            same batch; {accumulate} for the micro-steps of an update.
        workers: the numbers of workers to compare, such as "1,2,4" or "1..4"; a single one is compared with one worker.
        batch: the samples of all workers in a step, which {batch} divides; for a script that does not call
            `paceline.init`.
        steps: optimizer steps to compare.
        deal: compare with the same number of workers, of which some compute more virtual shards than others: where one
            worker cannot hold the model.
        strategy: how more than one worker divide the model, such as "fsdp" or "dp2 x pp2"; None: dp.
        data, settings, say: as for `train`.

    Returns:
        A verdict for each further number of workers: equal, the first difference and the likely cause, or why that
        cannot be told.

    Raises:
        PacelineError: an invalid argument, or a mistake in the job.
    """
    cluster, counts = detect(), read_counts("workers", workers)
    if counts[1:] == [] and counts[0] > 1 and not deal:
        counts = [1, *counts]
    launches: dict[int, _Launch] = {}
    shared = {count: strategy if count > 1 else None for count in counts}  # one worker has nobody to share with
    if is_script(job, arguments, set=settings, data=data):
        check_script(str(job), is_module=False)
        for count in counts:
            if strategy is not None:  # as the script will read it
                parse_mesh(strategy, count if count > 1 else None)
            words = ["-m", "paceline.verify.observe", str(job), *_filled(arguments, batch, count, counts[-1])]
            plan = spread(cluster, count, threads_per_worker=1)
            launches[count] = _Launch(plan, words, None, shared[count], steps, say)
    else:
        if batch is not None:
            raise JobError("A job says its own global_batch_size; leave batch out.")
        resolved = resolve_job(job, settings, data)
        resolved = resolved.with_values(precision="float64") if resolved.parity == "numeric" else resolved
        for count in counts:
            plan = plan_run(resolved, cluster, count, shared[count], ["plan.threads_per_worker=1"], say=say)
            words = ["-m", "paceline.measure.recorder"]
            launches[count] = _Launch(plan, words, resolved, shared[count], steps, say)
    first, others = launches[counts[0]], [counts[0]] if deal else counts[1:] or counts
    try:
        base = first.observed()
    except PacelineError as problem:
        return tuple(_unknown(count, str(problem)) for count in others)
    return tuple(_compared(base, first, launches[count], deal) for count in others)


@dataclass(frozen=True)
class _Launch:
    """What is run on one number of workers."""

    plan: Plan
    program: Sequence[str]
    """What would follow `python`."""
    job: Job | None
    """The job, if one is compared: it is written into the folder of a run, which the program is given."""
    strategy: str | None
    steps: int
    say: Say

    def observed(self, *, uneven_deal: bool = False, may_fail: bool = False) -> ObservedRun:
        """A run in new processes: forked ones hash texts alike, and so hide what depends on the order of a set.
        If it `may_fail`, its steps before are those of the record."""
        from paceline.verify.records import load

        num_workers, failure = self.plan.world_size, ""
        self.say(f"training {self.steps} steps on {number_of(num_workers, 'worker')} …")
        with tempfile.TemporaryDirectory(prefix="paceline-verify-") as scratch:
            run_dir, program = Path(scratch) / "run", list(self.program)
            if self.job is not None:
                program += write_run(self.job, self.plan, run_dir)[2:]
            environ = {env.TRACE_DIR: str(run_dir / "trace"), env.MAX_STEPS: str(self.steps)}
            environ |= env.variable(env.UNEVEN_DEAL, "1" * uneven_deal) | env.variable(env.STRATEGY, self.strategy)
            try:
                run_workers(self.plan, program, LaunchOptions(run_dir, environ=environ), [_TO_STDERR])
            except PacelineError as problem:
                if not may_fail:
                    raise
                failure = str(problem)
            return load(run_dir / "trace", num_workers, failure)


def _compared(base: ObservedRun, first: _Launch, other: _Launch, deal: bool) -> ParityVerdict:
    """The verdict on a launch; `base` is the run of the `first` one."""
    from paceline.verify.comparison import compare

    count = other.plan.world_size
    try:
        verdict = compare(base, other.observed(uneven_deal=deal, may_fail=True))
        # Where weights, samples and losses are the same on all ranks, no draw can be the reason.
        if verdict.first_difference not in ("initial_weights", "samples", "loss") or verdict.ranks:
            return verdict
        again = verdict if other is first and not deal else compare(base, first.observed())
    except PacelineError as problem:
        return _unknown(count, str(problem))
    if again.passed:
        return verdict
    what = again.first_difference.replace("_", " ")
    return _unknown(
        count,
        f"the same run twice differs, first in the {what} of step {again.step}",
        "draw random numbers from generators that are seeded alike in every run, and let nothing follow from the "
        "clock, the process or the order of a set.",
    )


def _unknown(count: int, why: str, advice: str = "") -> ParityVerdict:
    from paceline.verify.comparison import MEND, ParityVerdict

    return ParityVerdict(count, "could not tell", 0, cause=why, advice=advice or MEND)


def _filled(arguments: Sequence[str], batch: int | None, count: int, most: int) -> list[str]:
    """The arguments of the script on `count` of at most `most` workers, with the names in braces filled in."""
    text = " ".join(arguments)
    if batch is None and "{batch}" in text:
        raise JobError("{batch} needs a batch to divide, as in: paceline verify --batch 8 train.py -- --size {batch}.")
    micro_steps = most // count if "{accumulate}" in text else 1
    size, rest = divmod(batch or 0, count * micro_steps)
    if rest:
        raise JobError(f"A batch of {batch} cannot be divided by {count * micro_steps}; take another one.")
    return [one.replace("{batch}", str(size)).replace("{accumulate}", str(micro_steps)) for one in arguments]
