"""`analyse`: what the runs of one job on several device counts say about adding devices. Has no side effects."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean, median, stdev
from typing import Any

from paceline.device_count import RULE, fewest_near_fastest
from paceline.errors import PacelineError
from paceline.report import formats
from paceline.report.job_text import flat
from paceline.spec.forecast import Grow
from paceline.spec.job import Job
from paceline.spec.record import RunRecord, StepTime
from paceline.words import listing, number_of

_ROUNDING = 1e-9
"""Slack of comparisons with a limit, so that losing exactly one point meets a tolerance of one point."""


@dataclass(frozen=True)
class StudyRow:
    """One device count, over its seeds. `None` stands for what was not measured or cannot be said."""

    devices: int
    runs: tuple[RunRecord, ...]
    """Ordered by seed."""
    global_batch_size: int
    learning_rate: float
    """Peak rate, after the job's scaling rule."""
    accuracy: float | None
    """Mean over seeds, in [0, 1]."""
    accuracy_min: float | None
    accuracy_max: float | None
    accuracy_std: float | None
    """Sample standard deviation over seeds (n - 1); None with fewer than two."""
    accuracy_change: float | None
    """Mean accuracy minus that of the smallest device count."""
    within_spread: bool | None
    """Whether the seeds' ranges here and at the smallest device count overlap; None without a spread."""
    train_s: float
    """Median over seeds of the time spent in training steps."""
    samples_per_s: float
    speedup: float | None
    """samples_per_s here over samples_per_s at the smallest device count."""
    efficiency: float | None
    """speedup / (devices / smallest device count)."""
    forecast_samples_per_s: float | None
    """The planner's forecast; None if there is none."""
    time_to_first_step_s: float
    wall_s: float
    """Median over seeds, as the other times and rates above."""
    step_time: StepTime
    """Mean over seeds, part by part, so that the parts still add up."""
    step_p10_s: float | None
    step_p90_s: float | None
    """Means over seeds of the 10th and 90th percentile of a run's steps."""
    same_weights: bool | None
    """Whether every seed ended with the weights of that seed at the smallest device count, bit for bit."""

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.job.seed for run in self.runs)

    @property
    def forecast_error(self) -> float | None:
        """The relative error of the forecast: 0.1 is 10 % more than was measured."""
        expected = self.forecast_samples_per_s
        return None if expected is None or not self.samples_per_s else expected / self.samples_per_s - 1

    @property
    def weights_sha256(self) -> dict[int, str]:
        """The fingerprint of the trained weights, by seed."""
        return {run.job.seed: run.weights_sha256 for run in self.runs}

    @property
    def has_spread(self) -> bool:
        return self.accuracy_std is not None

    @property
    def speedup_range(self) -> tuple[float, float] | None:
        """The speed-up at a step of the 90th and of the 10th percentile; None where a step's time is no measure of
        throughput, because workers synchronise every few steps only."""
        is_steady = self.runs[0].job.aggregation.method == "every_step"
        if not (is_steady and self.speedup and self.step_p10_s and self.step_p90_s):
            return None
        return (
            self.speedup * self.step_time.total_s / self.step_p90_s,
            self.speedup * self.step_time.total_s / self.step_p10_s,
        )


@dataclass(frozen=True)
class Recommendation:
    """How many devices to use, in words that stand alone."""

    devices: int
    verdict: str
    """One short line."""
    reason: str
    """One or two sentences."""
    rejected: Mapping[int, str]
    """Device count to the sentence that says why not; in ascending order."""


@dataclass(frozen=True)
class Study:
    """The scaling study: rows in ascending order of devices; all others are compared with the first."""

    name: str
    grow: Grow
    tolerance: float
    """How much accuracy may be lost, absolute: 0.01 is one point."""
    efficiency_floor: float
    rows: tuple[StudyRow, ...]
    recommendation: Recommendation

    @property
    def base(self) -> StudyRow:
        return self.rows[0]

    @property
    def recommended(self) -> StudyRow:
        return next(row for row in self.rows if row.devices == self.recommendation.devices)

    @property
    def job(self) -> Job:
        """The job of the first run at the smallest device count."""
        return self.base.runs[0].job

    @property
    def records(self) -> tuple[RunRecord, ...]:
        return tuple(run for row in self.rows for run in row.runs)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({run.job.seed for run in self.records}))

    @property
    def same_weights(self) -> bool:
        """All device counts ended with the same weights, bit for bit, for every seed."""
        return len(self.rows) > 1 and all(row.same_weights for row in self.rows)

    @property
    def has_spread(self) -> bool:
        return any(row.has_spread for row in self.rows)

    @property
    def has_forecast(self) -> bool:
        return any(row.forecast_samples_per_s is not None for row in self.rows)

    @property
    def has_accuracy(self) -> bool:
        return any(row.accuracy is not None for row in self.rows)

    def page(self) -> str:
        """The HTML page: the table, with plots of every run."""
        from paceline.report.page import render_page

        return render_page(self)

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        from paceline.report.study_table import study_table
        from paceline.report.tables import html_of

        return html_of(study_table(self))


def analyse(records: Sequence[RunRecord], *, grow: Grow, tolerance: float, efficiency_floor: float = 0.5) -> Study:
    """The study of one job's runs on several device counts and seeds.

    Speed-up is Xn/X1 and scaling efficiency (Xn/X1) / (n/n1), where X is the throughput that the records hold, from the
    median step, and 1 stands for the smallest device count among them. Slow first steps are part of the training time
    and not of the throughput.

    Args:
        records: finished runs, in any order; runs that failed are simply not among them.
        grow: "none" when all ran the same global batch (strong scaling), "batch" when it grew with devices.
        tolerance: how much accuracy may be lost, absolute; 0.01 is one point.
        efficiency_floor: least scaling efficiency of a device count worth recommending, in [0, 1].

    Raises:
        PacelineError: there are no records, or they are not runs of one job and one length, each given once.
    """
    if not records:
        raise PacelineError("There is no finished run to report on; train the job on at least one device count.")
    _check_one_job(records, grow)
    _check_given_once(records)
    _check_one_length(records, grow)
    by_devices: dict[int, list[RunRecord]] = defaultdict(list)
    for record in records:
        by_devices[record.world_size].append(record)
    groups = [tuple(sorted(by_devices[count], key=lambda run: run.job.seed)) for count in sorted(by_devices)]
    rows = tuple(_row(group, base=groups[0]) for group in groups)
    return Study(
        name=rows[0].runs[0].job.name,
        grow=grow,
        tolerance=tolerance,
        efficiency_floor=efficiency_floor,
        rows=rows,
        recommendation=_recommend(rows, tolerance, efficiency_floor),
    )


def detect_grow(records: Iterable[RunRecord]) -> Grow:
    """How the batch grew over records whose study is unknown: "batch" if global batches differ."""
    return "batch" if len({record.job.global_batch_size for record in records}) > 1 else "none"


def _check_one_job(records: Sequence[RunRecord], grow: Grow) -> None:
    """All runs have one job, but for its name, its seed, where its data lie and what `grow` lets grow."""

    def identity(record: RunRecord) -> dict[str, Any]:
        plain = flat(record.job.to_mapping())
        free = {"name", "seed", "data.dir"}
        if grow == "batch":
            free |= {"global_batch_size", "virtual_shards", "optim.base_batch_size"}
            plain["the batch per device"] = record.job.global_batch_size / record.world_size
        return {key: value for key, value in plain.items() if key not in free}

    first = records[0]
    expected = identity(first)
    for record in records[1:]:
        found = identity(record)
        for key in sorted(expected.keys() | found.keys()):
            if expected.get(key) != found.get(key):
                hint = "; if the batch grew with the devices, say grow = 'batch'" if key == "global_batch_size" else ""
                raise PacelineError(
                    f"These are not runs of one job: {key} is {expected.get(key)!r} on {_which(first)} and "
                    f"{found.get(key)!r} on {_which(record)}{hint}."
                )


def _check_given_once(records: Sequence[RunRecord]) -> None:
    """A study has one run for each device count and seed: a second one would count as another seed."""
    seen = set()
    for record in records:
        run = record.world_size, record.job.seed
        if run in seen:
            raise PacelineError(
                f"Two of these runs are on {_which(record)}: a study takes one run for each number of devices and "
                "seed; leave one of them out, or train it with another seed."
            )
        seen.add(run)


def _check_one_length(records: Sequence[RunRecord], grow: Grow) -> None:
    """All runs made as many steps, or as many epochs where the batch grew; but those that stopped by themselves."""
    whole = [record for record in records if record.stopped is None or not record.is_complete]

    def is_as_long(one: RunRecord, other: RunRecord) -> bool:
        return one.steps == other.steps or (grow == "batch" and len(one.epochs) == len(other.epochs))

    for record in whole[1:]:
        if not is_as_long(record, whole[0]):
            shorter, longer = sorted((whole[0], record), key=lambda run: run.steps)
            raise PacelineError(
                f"These runs are not of one length: {number_of(longer.steps, 'step')} on {_which(longer)} and "
                f"{number_of(shorter.steps, 'step')} on {_which(shorter)}; train the shorter one on, with the same "
                "--out and the epochs and steps of the longer one."
            )


def _which(record: RunRecord) -> str:
    return f"{formats.devices(record.world_size)} (seed {record.job.seed})"


def _row(runs: tuple[RunRecord, ...], base: tuple[RunRecord, ...]) -> StudyRow:
    accuracies, base_accuracies = _accuracies(runs), _accuracies(base)
    accuracy, base_accuracy = _mean(accuracies), _mean(base_accuracies)
    devices, base_devices = runs[0].world_size, base[0].world_size
    rate, base_rate = median(run.samples_per_s for run in runs), median(run.samples_per_s for run in base)
    speedup = rate / base_rate if rate > 0 and base_rate > 0 else None
    expected = [run.plan.forecast_samples_per_s for run in runs if run.plan.forecast_samples_per_s is not None]
    within_spread = None
    if runs is not base and len(accuracies) > 1 and len(base_accuracies) > 1:
        within_spread = min(accuracies) <= max(base_accuracies) and min(base_accuracies) <= max(accuracies)
    return StudyRow(
        devices=devices,
        runs=runs,
        global_batch_size=runs[0].job.global_batch_size,
        learning_rate=runs[0].job.optim.lr * runs[0].job.lr_scale,
        accuracy=accuracy,
        accuracy_min=min(accuracies, default=None),
        accuracy_max=max(accuracies, default=None),
        accuracy_std=stdev(accuracies) if len(accuracies) > 1 else None,
        accuracy_change=None if accuracy is None or base_accuracy is None else accuracy - base_accuracy,
        within_spread=within_spread,
        train_s=median(run.train_s for run in runs),
        samples_per_s=rate,
        speedup=speedup,
        efficiency=None if speedup is None else speedup * base_devices / devices,
        forecast_samples_per_s=median(expected) if expected else None,
        time_to_first_step_s=median(run.time_to_first_step_s for run in runs),
        wall_s=median(run.wall_s for run in runs),
        step_time=StepTime(*map(fmean, zip(*(astuple(run.step_time) for run in runs), strict=True))),
        step_p10_s=_mean([run.step_p10_s for run in runs if run.step_p10_s is not None]),
        step_p90_s=_mean([run.step_p90_s for run in runs if run.step_p90_s is not None]),
        same_weights=_same_weights(runs, base),
    )


def _accuracies(runs: Iterable[RunRecord]) -> list[float]:
    return [run.accuracy for run in runs if run.accuracy is not None and math.isfinite(run.accuracy)]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _same_weights(runs: Iterable[RunRecord], base: Iterable[RunRecord]) -> bool | None:
    """None where a seed has no run, or no hash, to be compared with."""
    expected = {run.job.seed: run.weights_sha256 for run in base}
    pairs = [(run.weights_sha256, expected.get(run.job.seed, "")) for run in runs]
    if not all(here and there for here, there in pairs):
        return None
    return all(here == there for here, there in pairs)


def _recommend(rows: Sequence[StudyRow], tolerance: float, floor: float) -> Recommendation:
    """The fewest devices near the fastest that keep accuracy and are efficient; the smallest count always is one."""
    base = rows[0]
    objections = {row.devices: _objections(row, base, tolerance, floor) for row in rows[1:]}
    accepted = [base, *(row for row in rows[1:] if not objections[row.devices])]
    best = accepted[fewest_near_fastest([row.samples_per_s for row in accepted])]
    return Recommendation(
        devices=best.devices,
        verdict=_verdict(best, rows),
        reason=_reason(best, rows, accepted, tolerance, floor),
        rejected={
            count: f"Not {formats.devices(count)}: {listing(found)}." for count, found in objections.items() if found
        },
    )


def _objections(row: StudyRow, base: StudyRow, tolerance: float, floor: float) -> list[str]:
    found = []
    if base.accuracy is not None:
        if row.accuracy_change is None:
            found.append("its accuracy was not measured")
        elif row.accuracy_change < -tolerance - _ROUNDING:
            found.append(
                f"it loses {-100 * row.accuracy_change:.2f} points of accuracy "
                f"({formats.percent(row.accuracy, 2)} after {formats.percent(base.accuracy, 2)}), more than "
                f"the tolerance of {formats.short_points(tolerance)}"
            )
    if row.efficiency is None:
        found.append("its speed-up is unknown because a throughput is missing")
    elif row.efficiency < floor - _ROUNDING:
        found.append(
            f"its efficiency of {formats.percent(row.efficiency)} is below the floor of "
            f"{formats.short_percent(floor)} (it trains at {formats.times(row.speedup)} the speed of "
            f"{formats.devices(base.devices)})"
        )
    return found


def _verdict(best: StudyRow, rows: Sequence[StudyRow]) -> str:
    base = rows[0]
    if len(rows) == 1:
        return f"Only {formats.devices(base.devices)} measured: there is nothing to compare with yet."
    if best is base:
        return f"Stay with {formats.devices(base.devices)}: adding devices does not pay here."
    speed = f"{formats.times(best.speedup)} the speed of {formats.devices(base.devices)}"
    if best.same_weights:
        return f"Use {formats.devices(best.devices)}: {speed}, the same weights bit for bit."
    if best.accuracy_change is None:
        return f"Use {formats.devices(best.devices)}: {speed}."
    change = f"{formats.points(best.accuracy_change)} points"
    return f"Use {formats.devices(best.devices)}: {speed}, accuracy {formats.percent(best.accuracy)} ({change})."


def _reason(
    best: StudyRow, rows: Sequence[StudyRow], accepted: Sequence[StudyRow], tolerance: float, floor: float
) -> str:
    base = rows[0]
    if len(rows) == 1:
        return f"Only one device count has finished runs, so {formats.devices(base.devices)} stands by default."
    limits = f"an efficiency of at least {formats.short_percent(floor)}"
    if base.accuracy is not None:
        near = f"{formats.short_points(tolerance)} of that on {formats.devices(base.devices)}"
        limits = f"accuracy within {near} and {limits}"
    if len(accepted) == 1:
        return f"No larger device count has {limits}."
    facts = f"{formats.percent(best.efficiency)} efficiency"
    if best.accuracy_change is not None:
        facts += f", {formats.percent(best.accuracy, 2)} accuracy ({formats.points(best.accuracy_change)} points)"
    sentence = f"{RULE.capitalize()}, of the counts with {limits}: {formats.devices(best.devices)}, {facts}."
    if base.accuracy is None:
        sentence += " No accuracy was measured, so this rests on time alone."
    return sentence
