"""Elastic runs: after a failure the run restarts on the remaining nodes, and with more workers when others return.

Every start is a *generation* with its own plan, a new rendezvous and new processes. The training state passes from one
to the next in a checkpoint, which any number of workers can read; the launcher does not read it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from paceline.errors import LaunchError, PacelineError
from paceline.launch.failure_report import FailureReport, describe_failure, in_short, user_mistake
from paceline.launch.failures import signal_name
from paceline.launch.faults import ENDED_BY_SIGTERM, fault_of
from paceline.launch.fleet import LOOK_S, Fleet, WorkerSlot, slots
from paceline.launch.forking import ForkServer
from paceline.launch.run_workers import (
    catch_signals,
    end_wanted,
    prepare,
    raise_interruption,
    run_once,
    worker_failed,
)
from paceline.launch.supervise import Outcome
from paceline.launch.team import Events, LaunchOptions
from paceline.regular_files import replace_text, run_file_mode
from paceline.spec import Cluster, Plan
from paceline.spec.plan import EXCLUDED

GONE_WAIT_S = 5.0
"""How long to wait for a lost node to be detected after a start failed because another node did not reach it."""


@dataclass(frozen=True)
class ElasticLimits:
    """The limits on the number of workers and on the number of restarts."""

    min_workers: int
    max_workers: int
    max_restarts: int = 3
    """Consecutive restarts without a step beyond the furthest one reached before."""


@dataclass(frozen=True)
class RestartHistory:
    """The failures so far, as far as they matter for the next one."""

    furthest: int = 0
    """The largest number of optimizer updates done at any failure."""
    num_without_progress: int = 0
    """Failures since the last one that followed progress, including that one."""
    blamed: frozenset[WorkerSlot] = frozenset()
    """Slots whose workers have failed since then."""

    def reached(self, step: int) -> RestartHistory:
        """The history after a generation ended at `step` without a failure."""
        return RestartHistory(step) if step > self.furthest else self

    def after(self, step: int, culprits: Collection[WorkerSlot]) -> tuple[RestartHistory, frozenset[WorkerSlot]]:
        """The history after a failure at `step`, and the slots that failed again without progress."""
        if step > self.furthest:
            return replace(self.reached(step), num_without_progress=1, blamed=frozenset(culprits)), frozenset()
        again = self.blamed.intersection(culprits)
        return RestartHistory(self.furthest, self.num_without_progress + 1, self.blamed.union(culprits) - again), again


@dataclass(frozen=True)
class GenerationEnd:
    """Why a generation ended, and what follows."""

    kind: Literal["done", "to grow", "failed", "fatal"]
    """ "fatal" means that a restart would end the same way."""
    why: str
    step: int | None = None
    """The largest number of optimizer updates of a worker, counted from the beginning of training; None for a program
    that does not report its steps."""
    noticed_at: float | None = None
    """Seconds since the epoch when the reason for the end was noticed."""
    culprits: tuple[WorkerSlot, ...] = ()
    report: FailureReport | None = None

    @property
    def is_straggler(self) -> bool:
        """Whether a worker left because it was a straggler."""
        return self.report is not None and self.report.exit_code == EXCLUDED


@dataclass(frozen=True)
class Generation:
    """One start of an elastic run, as written to elastic.json; times are seconds since the epoch."""

    began_at: float
    world_size: int
    nodes: dict[str, int]
    """Number of workers by node name; the name is empty for this node."""
    ended_at: float | None = None
    why: str = ""
    """Why it ended."""
    step: int | None = None
    """The largest number of optimizer updates of a worker, counted from the beginning of training."""
    noticed_at: float | None = None
    recovery_s: float | None = None
    """Seconds from `noticed_at` to the end of the next generation's first update."""


@dataclass
class _GenerationLog:
    """elastic.json of a run folder."""

    path: Path
    generations: list[Generation] = field(default_factory=list)

    def begin(self, plan: Plan) -> None:
        nodes = {share.hostname: share.num_workers for share in plan.placements}
        self.generations.append(Generation(time.time(), plan.world_size, nodes))
        self._write()

    def end(self, end: GenerationEnd, trained_at: float | None = None) -> None:
        """`trained_at`: seconds since the epoch when the first update was done, if one was."""
        *before, last = self.generations
        if trained_at is not None and before and before[-1].noticed_at is not None:
            before[-1] = replace(before[-1], recovery_s=trained_at - before[-1].noticed_at)
        last = replace(last, ended_at=time.time(), why=end.why, step=end.step, noticed_at=end.noticed_at)
        self.generations = [*before, last]
        self._write()

    def _write(self) -> None:
        text = json.dumps({"generations": [asdict(one) for one in self.generations]}, indent=1) + "\n"
        with contextlib.suppress(OSError):  # a full disk is no reason to stop training
            replace_text(self.path, text, run_file_mode())


def run_elastic(
    fleet: Fleet,
    limits: ElasticLimits,
    plan_for: Callable[[Cluster, int], Plan],
    program_for: Callable[[Plan], Sequence[str]],
    options: LaunchOptions,
) -> None:
    """Run a program on the nodes of `fleet` until it has ended without an error, through failures and returns.

    After a failure the other workers end as soon as they notice it and save a checkpoint if they can; workers that only
    wait are killed. Then the program is started again and must resume from the checkpoint. A lost node is removed, and
    probed again meanwhile; when it is back, the workers get SIGTERM once all of them have done a step, save a
    checkpoint, and the run restarts with that node. A slot whose worker fails twice without progress between is left
    out, if there are enough without it, and tried again in the same way after a minute, then after two, and so on. A
    failure that would repeat ends the run: a user's mistake, or the same exception in every worker.

    elastic.json in the run folder lists every generation; the report of the failure that restart K survived is
    failure-K.json there.

    Args:
        plan_for: makes a plan for a number of workers on the available devices.
        program_for: returns the arguments that follow `python` on a command line; called once per generation.

    Raises:
        LaunchError: fewer slots than `limits.min_workers`, or as `run_workers` raises it.
        PacelineError, KeyboardInterrupt, SystemExit: as `run_workers` raises them.
        WorkerFailed: a failure after which the run could not continue; its message gives the last step.
    """
    if fleet.num_slots < limits.min_workers:
        raise LaunchError(
            f"There is room for {fleet.num_slots} workers, fewer than min_workers = {limits.min_workers}; name more "
            "nodes, or lower it."
        )
    prepare(options.run_dir)
    with catch_signals() as events, contextlib.closing(ForkServer(options.preload)) as fork_server:
        run = _ElasticRun(fleet, limits, replace(options, is_elastic=True), events, fork_server)
        while True:
            raise_interruption(end_wanted(events))
            plan = plan_for(fleet.cluster, run.num_workers)
            end = run.run_generation(plan, program_for)
            if end.kind == "done":
                return
            run.prepare_restart(end)
            checkpoint = "" if end.step is None else " from the last checkpoint"  # else it is the program's own affair
            print(
                f"paceline: {end.why}; going on with {run.num_workers} workers{checkpoint} "
                f"(restart {run.options.restart})",
                file=sys.stderr,
                flush=True,
            )


class _ElasticRun:
    """The state of the run between its generations."""

    def __init__(
        self, fleet: Fleet, limits: ElasticLimits, options: LaunchOptions, events: Events, fork_server: ForkServer
    ) -> None:
        self.fleet = fleet
        self.limits = limits
        self.options = options
        self._events = events
        self._fork_server = fork_server
        self._log = _GenerationLog(options.run_dir / "elastic.json")
        self._history = RestartHistory()
        self._newcomers: list[str] = []

    @property
    def num_workers(self) -> int:
        """The number of workers of the next generation."""
        return min(self.limits.max_workers, self.fleet.num_slots)

    def run_generation(self, plan: Plan, program_for: Callable[[Plan], Sequence[str]]) -> GenerationEnd:
        """Start the workers of `plan` and watch them until they end; raises as `run_elastic` does."""
        self._log.begin(plan)
        can_grow = plan.world_size < self.limits.max_workers
        # After a start that failed, the next one does not use modules loaded before.
        preload = self.options.preload if self._history.num_without_progress < 2 else ()
        try:
            outcome = run_once(
                plan,
                program_for(plan),
                self.fleet.teams,
                replace(self.options, preload=preload),
                self._events,
                fork_server=self._fork_server if preload else None,
                could_grow=lambda: can_grow and self.fleet.has_returned,
            )
        except LaunchError as error:
            # An error of the first start is the user's; a later one can only come from a lost or a new node.
            gone = self.fleet.lose_unusable(self._newcomers, GONE_WAIT_S) if self.options.restart else []
            if not gone:
                raise
            what = f"node {', '.join(gone)} was lost while workers were started ({error})"
            end = GenerationEnd("failed", what, noticed_at=time.time())
            self._log.end(end)
            return end
        end = describe_end(outcome, plan, self.options.run_dir)
        self._log.end(end, outcome.trained_at)
        raise_interruption(outcome.signalled)
        for loss in outcome.losses:
            self.fleet.lose(loss.hostname)
        return end

    def prepare_restart(self, end: GenerationEnd) -> None:
        """Decide what the next generation runs on; raises where there can be none."""
        run_dir = self.options.run_dir
        if end.kind == "fatal":
            raise _last_error(end, run_dir)
        if end.kind == "failed":
            self._history, failed_again = self._history.after(end.step or 0, end.culprits)
            if end.is_straggler:
                left_out: Collection[WorkerSlot] = end.culprits
            elif self.fleet.num_slots - len(failed_again) >= self.limits.min_workers:
                left_out = failed_again
            else:  # the run needs these slots, and tries them again until `max_restarts` ends it
                left_out = ()
            for slot in left_out:
                self.fleet.leave_out(slot, for_good=end.is_straggler)
        else:
            self._history = self._history.reached(end.step or 0)
        self._newcomers = self._take_back()
        if (objection := self._objection(end)) is not None:
            raise _last_error(end, run_dir, objection)
        self.options = replace(self.options, restart=self.options.restart + 1)
        if end.report is not None:
            end.report.save(run_dir, f"failure-{self.options.restart}")

    def _take_back(self) -> list[str]:
        """Use the nodes again that have returned; their names.

        If the run cannot continue without a node that was just lost, waits until it was probed: the node may be up, and
        only its agent have ended.
        """
        names = self.fleet.take_back()
        while self.fleet.num_slots < self.limits.min_workers and self.fleet.awaits_first_retry:
            raise_interruption(end_wanted(self._events))
            time.sleep(LOOK_S)
            names += self.fleet.take_back()
        return names

    def _objection(self, end: GenerationEnd) -> str | None:
        """A sentence that says why the run cannot continue; None if it can."""
        limits, furthest = self.limits, self._history.furthest
        is_known = furthest > 0 or end.step is not None
        if self._history.num_without_progress > limits.max_restarts:
            times = "once" if limits.max_restarts == 1 else f"{limits.max_restarts} times"
            return f"The run was started again {times}{f' without getting beyond step {furthest}' if is_known else ''}."
        if self.fleet.num_slots < limits.min_workers:
            so_far = f"The run got to step {furthest}; with" if is_known else "With"
            return (
                f"{so_far} room for {self.fleet.num_slots} workers left, fewer than min_workers = "
                f"{limits.min_workers}, it does not go on."
            )
        return None


def describe_end(outcome: Outcome, plan: Plan, run_dir: Path) -> GenerationEnd:
    """Classify the end of the generation that ran `plan`; reads the workers' files in the run folder."""
    steps = [ending.step for ending in outcome.endings] + [state.step for state in outcome.states]
    step = max((step for step in steps if step is not None), default=None)
    if outcome.signalled is not None:
        return GenerationEnd("done", f"ended by {signal_name(outcome.signalled)}", step)
    failed_before = any(ending.failed and ending.time <= outcome.stopped_at for ending in outcome.endings)
    lost_before = any(loss.ranks and not loss.was_stopping for loss in outcome.losses)
    if (
        outcome.ended_to_grow
        and any(ending.failed for ending in outcome.endings)
        and not (failed_before or lost_before)
    ):
        return GenerationEnd("to grow", f"there is room for more workers at step {step or 0}", step, outcome.stopped_at)
    report = describe_failure(outcome, plan.world_size, run_dir)
    if report is None:
        return GenerationEnd("done", "done", step)
    fault, mistake = fault_of(report.cause, report.exit_code), user_mistake(outcome)
    is_fatal = mistake is not None or _is_everybodys(outcome, plan)
    culprits = tuple(slots(plan)[rank] for rank in report.ranks) if fault.blames_workers else ()
    return GenerationEnd(
        "fatal" if is_fatal else "failed",
        mistake or in_short(report, step),
        step,
        report.noticed_at,
        culprits,
        None if mistake else report,
    )


def _is_everybodys(outcome: Outcome, plan: Plan) -> bool:
    """Whether every worker raised the same exception on its own, or left with the same exit code."""
    endings = outcome.endings
    if len(endings) < plan.world_size or any(ending.exit_code <= 0 for ending in endings):
        return False
    if any(ending.is_consequence for ending in endings):
        return False
    kinds = {(ending.exit_code, ending.failure and ending.failure.type) for ending in endings}
    return len(kinds) == 1 and kinds != {(ENDED_BY_SIGTERM, None)}  # a node that shuts down asks its workers to leave


def _last_error(end: GenerationEnd, run_dir: Path, objection: str = "") -> PacelineError:
    if end.report is None:
        return PacelineError(f"{end.why[0].upper()}{end.why[1:]}. {objection}" if objection else end.why)
    return worker_failed(end.report, end.report.save(run_dir), objection)
