"""Works with measured step times: fits them, forecasts other placements, suggests what to measure next."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import JobError
from paceline.plan.model import Layout, StepForecast
from paceline.words import listing, number_of
from paceline.workflows.arguments import checked
from paceline.workflows.jobs import check_amounts, check_counts, read_price
from paceline.workflows.step_time_files import read_observations, read_placements

if TYPE_CHECKING:
    from paceline.plan.calibrate import Calibration
    from paceline.plan.step_constants import Placement
    from paceline.plan.suggest import Suggestion
    from paceline.spec.forecast import Forecast, ForecastRow

_MOST_NODES = 16
"""The most nodes in the range of forecasts if the file names none."""

PAGE_FILE = "plan.html"


@dataclass(frozen=True)
class ContradictingRow:
    """A measured row that the other rows contradict."""

    line: int
    step_time_s: float
    forecast_s: float
    sentence: str


@dataclass(frozen=True)
class FittedSteps:
    """Forecasts of the placements that were asked for, and the fit that they come from."""

    placements: tuple[Placement, ...]
    forecasts: tuple[StepForecast, ...]
    calibration: Calibration
    contradictions: tuple[ContradictingRow, ...]
    compared: Mapping[Placement, ForecastRow]
    """Speed-up, efficiency and cost of each placement, and of the one that they refer to."""
    forecast: Forecast | None
    """The same with the recommendation and why; None: no placement was asked for."""
    learnt: tuple[tuple[str, str, str], ...]
    """What the rows tell of this job, in words: what, the usual value, and from where to where it may be."""
    warnings: tuple[str, ...]
    """A sentence for each thing that looks wrong or was not measured."""

    @property
    def rows(self) -> list[tuple[Placement, StepForecast, ForecastRow]]:
        """Each placement, its forecast, and the row that compares it with others."""
        return [
            (one, forecast, self.compared[one]) for one, forecast in zip(self.placements, self.forecasts, strict=True)
        ]

    @property
    def recommended(self) -> Placement | None:
        """None: no placement was asked for."""
        row = None if self.forecast is None else self.forecast.recommended
        return next((one for one, compared in self.compared.items() if compared is row), None)

    @property
    def constants(self) -> dict[str, float]:
        return self.calibration.medians()

    @property
    def uncertain_by_factor(self) -> dict[str, float]:
        """The uncertainty of each constant as a factor (one standard deviation)."""
        return {name: math.exp(deviation) for name, deviation in self.calibration.deviations().items()}

    def page(self) -> str:
        """The HTML page: the table, with plots of the forecasts and their uncertainty."""
        from paceline.report.plan_page import render_plan_page

        if self.forecast is None:
            raise JobError("There is no page, because no placement was asked for; name one in the file of queries.")
        return render_plan_page(self.forecast)


@checked
def fit_step_times(
    observations: Path | str,
    queries: Path | str,
    *,
    efficiency_floor: float = 0.5,
    price: float | str | None = None,
    out: Path | str | None = None,
) -> FittedSteps:
    """Fit the step times in one CSV file and forecast the placements in another.

    Example: `paceline.fit_step_times("obs.csv", "q.csv").forecasts[0].total_s`.

    Args:
        observations: columns num_nodes, devices_per_node (or devices_on_node, "2+4"), micro_batch_size, step_time_s;
            if known also grad_accum_steps or global_batch_size, sync_time_s, algorithm, gradient_bytes,
            link_bytes_per_s. Commas, semicolons or tabs divide them; their order is free, others are ignored.
        queries: the same without times.
        efficiency_floor: least scaling efficiency worth recommending, in [0, 1].
        price: price of one device for an hour, such as 2.5 or "2.5 USD".
        out: the folder for plan.html; None: nothing is written.

    Raises:
        JobError: a file cannot be read, or has an invalid value; the message names line and column.
        PacelineError: the page cannot be written.
    """
    from paceline.plan.calibrate import predict
    from paceline.plan.contradictions import fit_without_mistakes
    from paceline.plan.measured_forecast import compare_placements, forecast_of_steps
    from paceline.plan.step_words import assumed_in_words, learnt_in_words, unit_in_words

    check_amounts(efficiency_floor=efficiency_floor)
    amount, currency = read_price(price)
    measured, _ = read_observations(Path(observations), need_times=True)
    wanted = tuple(read_placements(Path(queries)))
    calibration, found = fit_without_mistakes([observation for _, observation in measured])
    contradictions = []
    for one in found:
        line = measured[one.row][0]
        sentence = one.sentence(f"{observations}, line {line},")
        contradictions.append(ContradictingRow(line, one.measured_s, one.forecast_s, sentence))
    left_out = {one.row for one in found if one.is_left_out}
    kept = [observation for row, (_, observation) in enumerate(measured) if row not in left_out]
    unit, assumed = unit_in_words(kept), assumed_in_words(kept, wanted)
    compared = compare_placements(calibration, kept, wanted, amount) if wanted else {}
    fitted = FittedSteps(
        placements=wanted,
        forecasts=tuple(predict(calibration, wanted)),
        calibration=calibration,
        contradictions=tuple(contradictions),
        compared=compared,
        forecast=forecast_of_steps(
            Path(observations).stem,
            list(compared.values()),
            assumptions=assumed,
            warnings=(*(one.sentence for one in contradictions), *unit),
            efficiency_floor=efficiency_floor,
            price_per_device_hour=amount,
            currency=currency,
        )
        if wanted
        else None,
        learnt=tuple(learnt_in_words(calibration, kept)),
        warnings=(*unit, *assumed),
    )
    if out is not None and fitted.forecast is not None:
        from paceline.report.files import write_files

        write_files({PAGE_FILE: fitted.page()}, Path(out), "page")
    return fitted


@checked
def suggest_measurements(
    observations: Path | str, budget: int = 1, *, max_nodes: int | None = None, max_devices: int | None = None
) -> tuple[Suggestion, ...]:
    """Which placements to measure next, in order, so that forecasts over the user's range get surer by most.

    Rows without a step_time_s are the range to choose from; without such rows it is up to 16 nodes with as many devices
    as were seen on one, with steps as they were seen: micro-batches (of one, smaller ones too, which fit), passes,
    algorithms and sizes.
    Example: `paceline.suggest_measurements("obs.csv", budget=3, max_nodes=2)`.

    Args:
        observations: as for `fit_step_times`.
        budget: how many, at least 1.
        max_nodes, max_devices: what there is to measure on; forecasts are wanted for the whole range nevertheless.

    Raises:
        JobError: the file cannot be read, has an invalid value or no rows, or nothing is within the limits.
    """
    from paceline.plan.suggest import suggest

    check_counts(budget=budget, max_nodes=max_nodes, max_devices=max_devices)
    measured, unmeasured = read_observations(Path(observations))
    known = [observation for _, observation in measured]
    candidates = unmeasured or _assumed_range([observation.placement for observation in known])
    if not (known or candidates):
        raise JobError(
            f"{observations} has no rows; write down what could be measured, a row each, with an empty step_time_s."
        )
    suggestions = suggest(known, candidates, budget, max_nodes=max_nodes, max_devices=max_devices)
    if not suggestions:
        limits = [number_of(most, noun) for most, noun in ((max_nodes, "node"), (max_devices, "device")) if most]
        within, raised = (f" within {listing(limits)}", "raise these limits, or ") if limits else ("", "")
        raise JobError(
            f"{observations} leaves nothing to measure{within}; {raised}write down what could be measured, a row each, "
            "with an empty step_time_s."
        )
    return tuple(suggestions)


def _assumed_range(measured: Sequence[Placement]) -> list[Placement]:
    """Other layouts of steps like the measured ones: with their micro-batches, passes, algorithms and sizes."""
    from paceline.plan.step_constants import usual_sizes

    most = max((max(placement.layout.workers_per_node) for placement in measured), default=0)
    vector, link = usual_sizes(measured)  # of rows that leave it open
    measured = [
        dataclasses.replace(
            one, gradient_bytes=one.gradient_bytes or vector, link_bytes_per_s=one.link_bytes_per_s or link
        )
        for one in measured
    ]
    alike = list(dict.fromkeys(dataclasses.replace(placement, layout=Layout((1,))) for placement in measured))
    alike.sort(key=lambda one: (one.micro_batch_size, one.num_passes))
    if len({one.micro_batch_size for one in alike}) == 1:
        size = alike[0].micro_batch_size
        sizes = sorted({max(1, size // divisor) for divisor in (1, 2, 4)})
        alike = [dataclasses.replace(one, micro_batch_size=size) for size in sizes for one in alike]
    per_node = sorted({count for count in (1, 2, 4, 8, 16, most) if count <= most})
    layouts = [Layout((count,) * nodes) for nodes in (1, 2, 3, 4, 6, 8, 12, _MOST_NODES) for count in per_node]
    candidates = [dataclasses.replace(one, layout=layout) for layout in layouts for one in alike]
    known = set(measured)
    return [candidate for candidate in candidates if candidate not in known]
