"""A run that goes on: after a failure it starts again on what is left, and with more workers when nodes return.

Every start is a *generation*: a plan of its own, a new rendezvous, new processes. What carries the training from one
to the next is its checkpoint, which any number of workers can read; the launcher knows nothing of it.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from paceline.errors import LaunchError, PacelineError
from paceline.launch.failure_report import FailureReport, describe_failure, user_mistake
from paceline.launch.failures import is_consequence, signal_name
from paceline.launch.fleet import LOOK_S, Fleet, Slot, slots
from paceline.launch.forking import ForkServer
from paceline.launch.run_workers import (
    Conditions,
    Signals,
    catch_signals,
    prepare,
    raise_interruption,
    run_once,
    worker_failed,
)
from paceline.launch.supervise import Outcome
from paceline.spec import Cluster, Plan
from paceline.spec.plan import EXCLUDED

GONE_WAIT_S = 5.0
"""For a node to show that it is gone, when a new start fails because another one does not reach it."""

ENDED_BY_SIGTERM = 128 + signal.SIGTERM


@dataclass(frozen=True)
class ElasticLimits:
    """How far a run may shrink and grow, and how often it may fail."""

    min_workers: int
    max_workers: int
    max_restarts: int = 3
    """In a row, without a step beyond the furthest that was reached before."""


@dataclass(frozen=True)
class Tally:
    """What the failures so far mean for the next one."""

    furthest: int = 0
    """The most updates that had been done at any failure."""
    num_in_vain: int = 0
    """Failures since the last that came after progress, that one included."""
    blamed: frozenset[Slot] = frozenset()
    """Places whose workers have failed since then."""

    def reached(self, step: int) -> Tally:
        """The tally after an end at `step` that was no failure."""
        return Tally(step) if step > self.furthest else self

    def after(self, step: int, culprits: Collection[Slot]) -> tuple[Tally, frozenset[Slot]]:
        """The tally after a failure at `step`, and the places that failed again without progress: not to be used."""
        if step > self.furthest:
            return replace(self.reached(step), num_in_vain=1, blamed=frozenset(culprits)), frozenset()
        again = self.blamed.intersection(culprits)
        return Tally(self.furthest, self.num_in_vain + 1, self.blamed.union(culprits) - again), again


@dataclass(frozen=True)
class EndVerdict:
    """What the end of a generation means."""

    kind: Literal["done", "to grow", "failed", "hopeless"]
    """ "hopeless": it would end the same way again."""
    why: str
    step: int = 0
    """The most updates that a worker had done, counted from the beginning of training."""
    noticed_at: float | None = None
    """Seconds since the epoch when it turned out that it could not go on like this."""
    culprits: tuple[Slot, ...] = ()
    report: FailureReport | None = None


@dataclass(frozen=True)
class Generation:
    """One start of an elastic run, as elastic.json has it; times are seconds since the epoch."""

    began_at: float
    world_size: int
    nodes: dict[str, int]
    """Workers by node; the name is empty for this one."""
    ended_at: float | None = None
    why: str = ""
    """Why it ended."""
    step: int | None = None
    """As in `EndVerdict`."""
    noticed_at: float | None = None
    recovery_s: float | None = None
    """From `noticed_at` to the end of the next generation's first update."""


@dataclass
class _Chronicle:
    """elastic.json of a run folder."""

    path: Path
    generations: list[Generation] = field(default_factory=list)

    def begin(self, plan: Plan) -> None:
        nodes = {share.hostname: share.num_workers for share in plan.placements}
        self.generations.append(Generation(time.time(), plan.world_size, nodes))
        self._write()

    def end(self, verdict: EndVerdict, trained_at: float | None = None) -> None:
        """`trained_at`: seconds since the epoch when the first update was done, if one was."""
        *before, last = self.generations
        if trained_at is not None and before and before[-1].noticed_at is not None:
            before[-1] = replace(before[-1], recovery_s=trained_at - before[-1].noticed_at)
        last = replace(last, ended_at=time.time(), why=verdict.why, step=verdict.step, noticed_at=verdict.noticed_at)
        self.generations = [*before, last]
        self._write()

    def _write(self) -> None:
        draft = self.path.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # a full disk is no reason to stop training
            draft.write_text(json.dumps({"generations": [asdict(one) for one in self.generations]}, indent=1) + "\n")
            draft.replace(self.path)


def tell(line: str) -> None:
    """The user, beside what the workers write."""
    print(f"paceline: {line}", file=sys.stderr, flush=True)


def run_elastic(
    fleet: Fleet,
    limits: ElasticLimits,
    plan_for: Callable[[Cluster, int], Plan],
    program_for: Callable[[Plan], Sequence[str]],
    conditions: Conditions,
    say: Callable[[str], None] = tell,
) -> None:
    """Run a program on the nodes of `fleet` until it has ended without an error, through failures and returns.

    After a failure the other workers end as soon as they notice, saving what they have if they can; who only waits is
    killed. Then the program is started again, which has to go on from what was saved. A node that is lost leaves, and
    is tried again beside the run; when it is back, the workers get SIGTERM once all of them have done a step, save what
    they have, and the run starts again with it. A place whose worker fails twice without progress in between is used no
    more. What would end the same way again ends the run: a mistake of the user, or the same exception in every worker.

    elastic.json in the run folder tells of every generation; the report of the failure that restart K survived is
    failure-K.json there.

    Args:
        plan_for: a plan for so many workers on what there is.
        program_for: what would follow `python` on a command line; called once for every generation.

    Raises:
        LaunchError: fewer places than `limits.min_workers`, or what `run_workers` raises.
        PacelineError, KeyboardInterrupt, SystemExit: as `run_workers` raises them.
        WorkerFailed: a failure after which the run could not go on; its message says how far it got.
    """
    if fleet.num_slots < limits.min_workers:
        raise LaunchError(
            f"There is room for {fleet.num_slots} workers, fewer than --min-workers {limits.min_workers}; name more "
            "nodes, or lower it."
        )
    conditions = replace(conditions, goes_on=True)
    prepare(conditions.run_dir)
    chronicle = _Chronicle(conditions.run_dir / "elastic.json")
    tally, restart = Tally(), 0
    newcomers: list[str] = []
    with catch_signals() as signals, contextlib.closing(ForkServer(conditions.preload)) as fork_server:
        while True:
            raise_interruption(signals.end_wanted())
            plan = plan_for(fleet.cluster, min(limits.max_workers, fleet.num_slots))
            chronicle.begin(plan)
            could_grow = plan.world_size < limits.max_workers
            # After a start that came to nothing, the next one owes nothing to what was loaded before.
            preload = conditions.preload if tally.num_in_vain < 2 else ()
            try:
                outcome = run_once(
                    plan,
                    program_for(plan),
                    fleet.teams,
                    replace(conditions, preload=preload),
                    signals=signals,
                    restart=restart,
                    fork_server=fork_server,
                    could_grow=(lambda: fleet.has_returned) if could_grow else lambda: False,
                )
            except LaunchError as error:
                # The first start shows the user what is wrong; later it can only be a node that was lost or is new.
                gone = fleet.lose_unusable(newcomers, GONE_WAIT_S) if restart else []
                if not gone:
                    raise
                what = f"node {', '.join(gone)} was lost while workers were started ({error})"
                verdict = EndVerdict("failed", what, noticed_at=time.time())
                chronicle.end(verdict)
            else:
                verdict = judge_end(outcome, plan, conditions.run_dir)
                chronicle.end(verdict, outcome.trained_at)
                raise_interruption(outcome.signalled)
                for loss in outcome.losses:
                    fleet.lose(loss.hostname)
            if verdict.kind == "done":
                return
            if verdict.kind == "hopeless":
                raise _last_error(verdict, conditions.run_dir)
            if verdict.kind == "failed":
                tally, spoilt = tally.after(verdict.step, verdict.culprits)
                for slot in verdict.culprits if _left_as_straggler(verdict) else spoilt:
                    fleet.leave_out(slot)
            else:
                tally = tally.reached(verdict.step)
            newcomers = _regrouped(fleet, limits, signals)
            if (objection := _objection(fleet, limits, tally)) is not None:
                raise _last_error(verdict, conditions.run_dir, objection)
            restart += 1
            if verdict.report is not None:
                with contextlib.suppress(OSError):  # a full disk is no reason to stop training
                    verdict.report.save(conditions.run_dir, f"failure-{restart}")
            num_workers = min(limits.max_workers, fleet.num_slots)
            say(f"{verdict.why}; going on with {num_workers} workers from the last checkpoint (restart {restart})")


def judge_end(outcome: Outcome, plan: Plan, run_dir: Path) -> EndVerdict:
    """What the end of a generation that ran as `plan` means; reads what its workers left in the run folder."""
    steps = [ending.step for ending in outcome.endings] + [state.step for state in outcome.states]
    step = max((step for step in steps if step is not None), default=0)
    if outcome.signalled is not None:
        return EndVerdict("done", f"ended by {signal_name(outcome.signalled)}", step)
    failed_before = any(ending.failed and ending.time <= outcome.stopped_at for ending in outcome.endings)
    lost_before = any(loss.ranks and not loss.was_stopping for loss in outcome.losses)
    if outcome.made_room and any(ending.failed for ending in outcome.endings) and not (failed_before or lost_before):
        return EndVerdict("to grow", f"a node is back at step {step}", step, outcome.stopped_at)
    report = describe_failure(outcome, plan.world_size, run_dir)
    if report is None:
        return EndVerdict("done", "done", step)
    mistake = user_mistake(outcome)
    hopeless = mistake is not None or _is_everybodys(outcome, plan)
    culprits = tuple(slots(plan)[rank] for rank in report.ranks) if _is_to_blame(report) else ()
    return EndVerdict(
        "hopeless" if hopeless else "failed",
        mistake or in_words(report, step),
        step,
        report.noticed_at,
        culprits,
        None if mistake else report,
    )


def _is_everybodys(outcome: Outcome, plan: Plan) -> bool:
    """Whether every worker raised the same of its own accord, or left with the same exit code."""
    endings = outcome.endings
    if len(endings) < plan.world_size or any(ending.exit_code <= 0 for ending in endings):
        return False
    if any(ending.failure is not None and is_consequence(ending.failure) for ending in endings):
        return False
    kinds = {(ending.exit_code, ending.failure and ending.failure.type) for ending in endings}
    return len(kinds) == 1 and kinds != {(ENDED_BY_SIGTERM, None)}  # a node that shuts down asks its workers to leave


def _left_as_straggler(verdict: EndVerdict) -> bool:
    """Whether a worker left because it held the others up."""
    return verdict.report is not None and verdict.report.exit_code == EXCLUDED


def _is_to_blame(report: FailureReport) -> bool:
    """Whether the places of the ranks in the report may be what is wrong."""
    if report.exit_code == ENDED_BY_SIGTERM:
        return False
    return report.cause in ("exception", "exit", "signal", "out_of_memory", "hung", "stopped")


def _regrouped(fleet: Fleet, limits: ElasticLimits, signals: Signals) -> list[str]:
    """Take back the nodes that have returned; their names.

    Where the run cannot do without one that was lost just now, waits for it to be tried: it may be there after all,
    and only its agent had ended.
    """
    names = fleet.take_back()
    while fleet.num_slots < limits.min_workers and fleet.is_hopeful and not signals.are_waiting:
        time.sleep(LOOK_S)
        names += fleet.take_back()
    return names


def _objection(fleet: Fleet, limits: ElasticLimits, tally: Tally) -> str | None:
    """Why the run cannot go on, in a sentence; None where it can."""
    if tally.num_in_vain > limits.max_restarts:
        return f"The run was started again {limits.max_restarts} times without getting beyond step {tally.furthest}."
    if fleet.num_slots < limits.min_workers:
        return (
            f"The run got to step {tally.furthest}; with room for {fleet.num_slots} workers left, fewer than "
            f"--min-workers {limits.min_workers}, it does not go on."
        )
    return None


def _last_error(verdict: EndVerdict, run_dir: Path, objection: str = "") -> PacelineError:
    if verdict.report is None:
        return PacelineError(f"{verdict.why[0].upper()}{verdict.why[1:]}. {objection}" if objection else verdict.why)
    verdict.report.save(run_dir)
    return worker_failed(verdict.report, run_dir, objection)


def in_words(report: FailureReport, step: int) -> str:
    """What happened, for a line on the terminal: "worker 2 on node1 was killed at step 512"."""
    many = len(report.ranks) > 1
    who = f"worker{'s' * many} {', '.join(map(str, report.ranks))}"
    if report.hostname:
        who += f" on {report.hostname}"
    match report.cause:
        case "node_silent" | "node_down" | "agent_lost":
            what = f"node {report.hostname} was lost"
        case "signal" if report.exit_code == -signal.SIGKILL:
            what = f"{who} was killed"
        case "signal":
            what = f"{who} crashed ({signal_name(-(report.exit_code or 0))})"
        case "out_of_memory":
            what = f"{who} ran out of memory"
        case "exit" if report.exit_code == EXCLUDED:
            what = f"{who} left, for it held the others up,"
        case "exit":
            what = f"{who} left with exit code {report.exit_code}"
        case "exception":
            what = f"{who} raised an error ({report.evidence.rstrip().splitlines()[-1] if report.evidence else '?'})"
        case "hung":
            what = f"{who} hung"
        case "stopped":
            what = f"{who} {'were' if many else 'was'} stopped"
        case "lost_touch":
            what = f"{who} lost touch with the others"
        case "mismatch":
            what = "the workers waited for each other"
    return f"{what} at step {step}" if step else f"{what} before the first step"
