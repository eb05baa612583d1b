"""`analyse`: what the runs of one job on several device counts say about adding devices. Has no side effects."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean, median
from typing import Any

from paceline.errors import PacelineError
from paceline.mathematics import RULE, fewest_near_fastest
from paceline.report import formats
from paceline.spec.forecast import Grow
from paceline.spec.job import flattened
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
    accuracy: float | None
    """Mean over seeds, in [0, 1]."""
    accuracy_min: float | None
    accuracy_max: float | None
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


@dataclass(frozen=True)
class Recommendation:
    """How many devices to use, in words that stand alone."""

    devices: int
    verdict: str
    """One short line."""
    reason: str
    """One or two sentences, with the rule."""
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
    def records(self) -> tuple[RunRecord, ...]:
        return tuple(run for row in self.rows for run in row.runs)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({run.job.seed for run in self.records}))

    @property
    def same_weights(self) -> bool:
        """All device counts ended with the same weights, bit for bit, for every seed."""
        return len(self.rows) > 1 and all(row.same_weights for row in self.rows)

    def page(self) -> str:
        """The HTML page: the table, with plots."""
        from paceline.report.study_page import study_page

        return study_page(self)

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        from paceline.report.study_page import study_table
        from paceline.report.tables import html_of

        return html_of(study_table(self))


def analyse(records: Sequence[RunRecord], *, grow: Grow, tolerance: float, efficiency_floor: float = 0.5) -> Study:
    """The study of one job's runs on several device counts and seeds.

    Speed-up is Xn/X1 and scaling efficiency (Xn/X1) / (n/n1), where X is the throughput that the records hold, from the
    median step, and 1 stands for the smallest device count among them. Slow first steps are part of the training time
    and not of the throughput. Raises `PacelineError` where there are no records, or they are not runs of one job and
    one length, each given once.

    Args:
        records: finished runs, in any order; runs that failed are simply not among them.
        grow: "none" when all ran the same global batch (strong scaling), "batch" when it grew with devices.
        tolerance: how much accuracy may be lost, absolute; 0.01 is one point.
        efficiency_floor: least scaling efficiency of a device count worth recommending, in [0, 1].
    """
    if not records:
        raise PacelineError("There is no finished run to report on; train the job on at least one device count.")
    _check_one_study(records, grow)
    by_devices: dict[int, list[RunRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda run: (run.world_size, run.job.seed)):
        by_devices[record.world_size].append(record)
    base = next(iter(by_devices.values()))
    rows = tuple(_row(runs, base) for runs in by_devices.values())
    recommendation = _recommend(rows, tolerance, efficiency_floor)
    return Study(base[0].job.name, grow, tolerance, efficiency_floor, rows, recommendation)


def detect_grow(records: Iterable[RunRecord]) -> Grow:
    """How the batch grew over records whose study is unknown: "batch" if global batches differ."""
    return "batch" if len({record.job.global_batch_size for record in records}) > 1 else "none"


def _check_one_study(records: Sequence[RunRecord], grow: Grow) -> None:
    """Raise `PacelineError` unless these are runs of one job and one length, one for each device count and seed.

    Names, seeds and folders of data may differ, and what `grow` lets grow. Runs that stopped early may be shorter.
    """

    def identity(record: RunRecord) -> dict[str, Any]:
        plain = flattened(record.job.to_mapping())
        free = {"name", "seed", "data.dir", "checkpoint.dir"}
        if grow == "batch":
            free |= {"global_batch_size", "virtual_shards", "optim.base_batch_size"}
            plain["the batch per device"] = record.job.global_batch_size / record.world_size
        return {key: value for key, value in plain.items() if key not in free}

    def which(record: RunRecord) -> str:
        return f"{formats.devices(record.world_size)} (seed {record.job.seed})"

    first, *others = records
    expected = identity(first)
    for record in others:
        found = identity(record)
        for key in sorted(expected.keys() | found.keys()):
            if expected.get(key) != found.get(key):
                raise PacelineError(
                    f"These are not runs of one job: {key} is {expected.get(key)!r} on {which(first)} and "
                    f"{found.get(key)!r} on {which(record)}."
                )
    (most_common, count), *_ = Counter(map(which, records)).most_common()
    if count > 1:
        raise PacelineError(
            f"Two of these runs are on {most_common}; leave one of them out, or train it with another seed."
        )
    whole = [record for record in records if record.stopped is None or not record.is_complete]
    for record in whole[1:]:
        longer, shorter = sorted((whole[0], record), key=lambda run: run.steps, reverse=True)
        has_as_many_epochs = grow == "batch" and len(longer.epochs) == len(shorter.epochs)
        if longer.steps != shorter.steps and not has_as_many_epochs:
            raise PacelineError(
                f"These runs are not of one length: {number_of(longer.steps, 'step')} on {which(longer)} and "
                f"{number_of(shorter.steps, 'step')} on {which(shorter)}; train the shorter one on, with the same "
                "--out and the epochs and steps of the longer one."
            )


def _row(runs: Sequence[RunRecord], base: Sequence[RunRecord]) -> StudyRow:
    """The row of these runs, compared with those at the smallest device count."""

    def middle(name: str, of: Sequence[RunRecord] = runs) -> float:
        return median(float(getattr(run, name)) for run in of)

    def mean(values: Sequence[float]) -> float | None:
        return fmean(values) if values else None

    accuracies, base_accuracies = (
        [run.accuracy for run in group if run.accuracy is not None and math.isfinite(run.accuracy)]
        for group in (runs, base)
    )
    accuracy, base_accuracy = mean(accuracies), mean(base_accuracies)
    within_spread = None
    if runs is not base and len(accuracies) > 1 and len(base_accuracies) > 1:
        within_spread = min(accuracies) <= max(base_accuracies) and min(base_accuracies) <= max(accuracies)
    rate, base_rate = middle("samples_per_s"), middle("samples_per_s", base)
    speedup = rate / base_rate if rate > 0 and base_rate > 0 else None
    expected = [run.plan.forecast_samples_per_s for run in runs if run.plan.forecast_samples_per_s is not None]
    weights = {run.job.seed: run.weights_sha256 for run in base}
    pairs = [(run.weights_sha256, weights.get(run.job.seed, "")) for run in runs]
    is_known = all(here and there for here, there in pairs)
    return StudyRow(
        devices=runs[0].world_size,
        runs=tuple(runs),
        accuracy=accuracy,
        accuracy_min=min(accuracies, default=None),
        accuracy_max=max(accuracies, default=None),
        accuracy_change=None if accuracy is None or base_accuracy is None else accuracy - base_accuracy,
        within_spread=within_spread,
        train_s=middle("train_s"),
        samples_per_s=rate,
        speedup=speedup,
        efficiency=None if speedup is None else speedup * base[0].world_size / runs[0].world_size,
        forecast_samples_per_s=median(expected) if expected else None,
        time_to_first_step_s=middle("time_to_first_step_s"),
        wall_s=middle("wall_s"),
        step_time=StepTime(*map(fmean, zip(*(astuple(run.step_time) for run in runs), strict=True))),
        same_weights=all(here == there for here, there in pairs) if is_known else None,
    )


def _recommend(rows: Sequence[StudyRow], tolerance: float, floor: float) -> Recommendation:
    """The count that `RULE` recommends among those that keep accuracy and are efficient; the smallest always is."""
    base, *larger = rows
    objections = {row.devices: _objections(row, base, tolerance, floor) for row in larger}
    accepted = [base, *(row for row in larger if not objections[row.devices])]
    best = accepted[fewest_near_fastest([row.samples_per_s for row in accepted])]
    limits = f"scaling efficiency is at least {formats.short_percent(floor)}"
    if base.accuracy is not None:
        near = f"{formats.short_points(tolerance)} of that on {formats.devices(base.devices)}"
        limits = f"mean accuracy is within {near} and whose {limits}"
    reason = f"{formats.devices(best.devices)}: {RULE}, of the counts whose {limits}."
    if len(rows) == 1:
        reason = "Runs on more devices would show what they bring."
    elif best is base:
        reason = f"No larger count whose {limits} is as much as 3 % faster."
    if base.accuracy is None:
        reason += " No accuracy was measured, so this rests on time alone."
    if (most := max(row.efficiency or 0.0 for row in rows)) > 1.1:
        reason += f" An efficiency of {formats.percent(most, 0)} means that the smallest run was held up: repeat it."
    rejected = {count: f"Not {formats.devices(count)}: {listing(said)}." for count, said in objections.items() if said}
    return Recommendation(best.devices, _verdict(best, rows), reason, rejected)


def _objections(row: StudyRow, base: StudyRow, tolerance: float, floor: float) -> list[str]:
    found = []
    if base.accuracy is not None and row.accuracy_change is None:
        found.append("its accuracy was not measured")
    elif row.accuracy_change is not None and row.accuracy_change < -tolerance - _ROUNDING:
        found.append(
            f"it loses {-100 * row.accuracy_change:.2f} points of accuracy, more than the tolerance of "
            f"{formats.short_points(tolerance)}"
        )
    if row.efficiency is None:
        found.append("its speed-up is unknown because a throughput is missing")
    elif row.efficiency < floor - _ROUNDING:
        found.append(
            f"its efficiency of {formats.percent(row.efficiency)} is below the floor of {formats.short_percent(floor)} "
            f"(it trains at {formats.times(row.speedup)} the speed of {formats.devices(base.devices)})"
        )
    return found


def _verdict(best: StudyRow, rows: Sequence[StudyRow]) -> str:
    name, base = formats.devices(best.devices), rows[0]
    if len(rows) == 1:
        return f"Only {name} measured: there is nothing to compare with yet."
    if best is base:
        return f"Stay with {name}: adding devices does not pay here."
    speed = f"Use {name}: {formats.times(best.speedup)} the speed of {formats.devices(base.devices)}"
    if best.same_weights:
        return f"{speed}, the same weights bit for bit."
    if best.accuracy_change is None:
        return f"{speed}."
    return f"{speed}, accuracy {formats.percent(best.accuracy)} ({formats.points(best.accuracy_change)} points)."
