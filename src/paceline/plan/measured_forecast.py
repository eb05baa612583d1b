"""A `Forecast` from measured step times alone: speed-up, efficiency, cost and a recommendation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.plan.calibrate import Calibration, predict
from paceline.plan.model import StepForecast
from paceline.plan.recommendation import explain_choice, recommend, scaling_knee
from paceline.plan.step_constants import Observation, Placement
from paceline.plan.step_words import assumed_in_words
from paceline.spec.forecast import Forecast, ForecastRow


def forecast_of_steps(
    name: str,
    calibration: Calibration,
    measured: Sequence[Observation],
    placements: Sequence[Placement],
    *,
    efficiency_floor: float = 0.5,
    price_per_device_hour: float | None = None,
    currency: str = "",
) -> Forecast:
    """The placements beside the smallest measured one, to which speed-up and efficiency refer.

    Args:
        placements: what to forecast, at least one.
    """
    base = min(measured, key=lambda row: row.placement.layout.num_workers)
    per_device = base.num_samples / base.step_time_s
    wanted = [base.placement, *(one for one in placements if one != base.placement)]
    rows = [
        _row(placement, forecast, per_device, price_per_device_hour)
        for placement, forecast in zip(wanted, predict(calibration, wanted), strict=True)
    ]
    rows.sort(key=lambda row: (row.devices, row.nodes))
    chosen = recommend(rows, efficiency_floor)
    verdict, reason = explain_choice(rows, chosen, efficiency_floor)
    return Forecast(
        job=name,
        device="the measured devices",
        device_kind="measured step times",
        grow="batch" if len({row.micro_batch_size for row in rows}) == 1 else "none",
        rows=tuple(rows),
        recommended_devices=chosen.devices,
        verdict=verdict,
        reason=reason + _doubt(rows[0], chosen, efficiency_floor),
        bend=scaling_knee(_one_a_count(rows)),
        assumptions=assumed_in_words(measured, placements),
        efficiency_floor=efficiency_floor,
        price_per_device_hour=price_per_device_hour,
        currency=currency,
    )


def _row(placement: Placement, forecast: StepForecast, per_device: float, price: float | None) -> ForecastRow:
    devices = placement.layout.num_workers
    num_samples = devices * placement.micro_batch_size * placement.num_passes
    samples_per_s = num_samples / forecast.total_s
    speedup = samples_per_s / per_device
    return ForecastRow(
        devices=devices,
        nodes=placement.layout.num_nodes,
        algorithm=placement.algorithm,
        global_batch_size=num_samples,
        micro_batch_size=placement.micro_batch_size,
        num_micro_batches=placement.num_passes,
        step_s=forecast.total_s,
        compute_s=forecast.compute_s,
        communication_s=forecast.communication_s,
        exposed_s=forecast.exposed_s,
        loader_s=0.0,
        overhead_s=forecast.overhead_s,
        bound_by=forecast.bound_by,
        low_s=forecast.low_s,
        high_s=forecast.high_s,
        samples_per_s=samples_per_s,
        speedup=speedup,
        efficiency=speedup / devices,
        cost_per_million_samples=None if price is None else price * devices / 3600 * 1e6 / samples_per_s,
    )


def _doubt(base: ForecastRow, chosen: ForecastRow, floor: float) -> str:
    """A sentence where the slow end of the interval would change the choice."""
    slow_efficiency = chosen.efficiency * chosen.step_s / chosen.high_s
    if chosen.devices == base.devices or math.isclose(chosen.high_s, chosen.step_s) or slow_efficiency >= floor:
        return ""
    return (
        f" This is not sure: at the slow end of the 90 % interval the efficiency is {100 * slow_efficiency:.0f} %, "
        f"below the floor of {100 * floor:g} %; measure that placement before you rely on it."
    )


def _one_a_count(rows: Sequence[ForecastRow]) -> list[ForecastRow]:
    """The fastest row of each number of devices."""
    best: dict[int, ForecastRow] = {}
    for row in rows:
        if row.devices not in best or row.samples_per_s > best[row.devices].samples_per_s:
            best[row.devices] = row
    return list(best.values())
