"""A `Forecast` from measured step times alone: speed-up, efficiency, cost and a recommendation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from paceline.plan.calibrate import Calibration, predict
from paceline.plan.model import StepForecast
from paceline.plan.recommendation import explain_choice, recommend, scaling_knee
from paceline.plan.step_constants import Observation, Placement
from paceline.spec.forecast import Forecast, ForecastRow, fastest_of_each_count
from paceline.words import size


def compare_placements(
    calibration: Calibration,
    measured: Sequence[Observation],
    asked: Sequence[Placement],
    price_per_device_hour: float | None = None,
) -> dict[Placement, ForecastRow]:
    """A row for the base of speed-up and efficiency, and for each placement that was asked for, in ascending order.

    The base has the fewest devices of all that were measured or asked for, if it can be the batch that was asked for:
    that of a device, or the global one. Of several such placements it is the fastest.

    Args:
        asked: at least one.
    """
    every = list(dict.fromkeys([*asked, *(row.placement for row in measured)]))
    fewest = min(one.layout.num_workers for one in every)
    smallest = [one for one in every if one.layout.num_workers == fewest]
    needed = list(dict.fromkeys([*asked, *smallest]))
    forecasts = dict(zip(needed, predict(calibration, needed), strict=True))
    batches, per_device = {one.global_batch_size for one in asked}, {one.samples_per_device for one in asked}
    alike = [one for one in smallest if one.global_batch_size in batches or one.samples_per_device in per_device]
    base = max(alike or smallest, key=lambda one: one.global_batch_size / forecasts[one].total_s)
    base_per_s = base.samples_per_device / forecasts[base].total_s
    wanted = sorted(
        {base: None, **dict.fromkeys(asked)}, key=lambda one: (one.layout.num_workers, one.layout.num_nodes)
    )
    names = _names(wanted)
    return {one: _row(one, forecasts[one], base_per_s, price_per_device_hour, names[one]) for one in wanted}


def forecast_of_steps(
    name: str,
    rows: Sequence[ForecastRow],
    *,
    assumptions: Sequence[str] = (),
    warnings: Sequence[str] = (),
    efficiency_floor: float = 0.5,
    price_per_device_hour: float | None = None,
    currency: str = "",
) -> Forecast:
    """The forecast of rows that were compared, the recommended one and why."""
    curve = fastest_of_each_count(rows)
    chosen = recommend(curve, efficiency_floor)
    base_devices = rows[0].devices
    verdict, reason = explain_choice(curve, chosen, efficiency_floor, base_devices)
    return Forecast(
        job=name,
        device="the measured devices",
        device_kind="measured step times",
        grow="batch" if len({row.global_batch_size / row.devices for row in rows}) == 1 else "none",
        rows=tuple(rows),
        recommended_devices=chosen.devices,
        recommended_row=next(place for place, row in enumerate(rows) if row is chosen),
        verdict=verdict,
        reason=reason + _doubt(curve[0], chosen, efficiency_floor),
        bend=scaling_knee(curve),
        assumptions=tuple(assumptions),
        warnings=tuple(warnings),
        efficiency_floor=efficiency_floor,
        price_per_device_hour=price_per_device_hour,
        currency=currency,
        is_fitted=True,
        base_devices=base_devices,
    )


def _names(placements: Sequence[Placement]) -> dict[Placement, str]:
    """What tells each placement from the others of as many devices; empty where there is no other."""
    rivals: dict[int, dict[Placement, tuple[str, ...]]] = {}
    for one in placements:
        rivals.setdefault(one.layout.num_workers, {})[one] = _traits(one)
    names = {}
    for traits_of in rivals.values():
        differs = [len(set(column)) > 1 for column in zip(*traits_of.values(), strict=True)]
        for one, traits in traits_of.items():
            names[one] = ", ".join(filter(None, itertools.compress(traits, differs)))
    return names


def _traits(placement: Placement) -> tuple[str, ...]:
    vector, link = placement.gradient_bytes, placement.link_bytes_per_s
    return (
        placement.layout.name,
        f"micro-batch {placement.passes_name}",
        placement.algorithm,
        "" if vector is None else f"gradients of {size(vector)}",
        "" if link is None else f"links of {link / 1e9:g} GB/s",
    )


def _row(
    placement: Placement, forecast: StepForecast, base_per_s: float, price: float | None, name: str
) -> ForecastRow:
    """A placement beside the base, a device of which does `base_per_s` samples/s."""
    devices = placement.layout.num_workers
    samples_per_s = placement.global_batch_size / forecast.total_s
    speedup = samples_per_s / base_per_s
    return ForecastRow(
        devices=devices,
        nodes=placement.layout.num_nodes,
        algorithm=placement.algorithm,
        global_batch_size=placement.global_batch_size,
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
        placement=name,
    )


def _doubt(base: ForecastRow, chosen: ForecastRow, floor: float) -> str:
    """A sentence where the slow end of the interval would change the choice."""
    slow_efficiency = chosen.efficiency * chosen.step_s / chosen.high_s
    if chosen.devices == base.devices or math.isclose(chosen.high_s, chosen.step_s) or slow_efficiency >= floor:
        return ""
    return (
        f" This is not sure: at the slow end of the 90 % interval the efficiency is {100 * slow_efficiency:.3g} %, "
        f"below the floor of {100 * floor:g} %; measure that placement before you rely on it."
    )
