"""Works with measured step times: fits them and forecasts other placements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import JobError
from paceline.plan.model import StepForecast
from paceline.workflows.arguments import checked
from paceline.workflows.jobs import check_amounts, read_price
from paceline.workflows.step_time_files import read_observations, read_placements

if TYPE_CHECKING:
    from paceline.plan.calibrate import Calibration
    from paceline.plan.step_constants import Placement
    from paceline.spec.forecast import Forecast, ForecastRow

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
