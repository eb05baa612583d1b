"""`paceline plan --fit`: what it prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.console import print_table
from paceline.workflows.step_times import PAGE_FILE, FittedSteps, fit_step_times

if TYPE_CHECKING:
    from paceline.plan.model import Layout, StepForecast
    from paceline.plan.step_constants import Placement


def fit_and_predict(
    obs: Path,
    queries: Path,
    as_json: bool,
    efficiency_floor: float = 0.5,
    price: str | None = None,
    out: Path | None = None,
) -> None:
    """Fit the rows of `obs`, forecast those of `queries`, and print what follows and how sure it is."""
    fitted = fit_step_times(obs, queries, efficiency_floor=efficiency_floor, price=price, out=out)
    if as_json:
        print(json.dumps(_answer(fitted)))
        return
    rows = []
    for one, forecast, compared in fitted.rows:
        cells = {
            **_cells(one, fitted.placements),
            "step": f"{forecast.total_s:.4g} s",
            "90 % interval": f"{forecast.low_s:.4g} … {forecast.high_s:.4g} s",
            "samples/s": f"{one.global_batch_size / forecast.total_s:.4g}",
            "speed-up": f"{compared.speedup:.3g}x",
            "efficiency": f"{100 * compared.efficiency:.0f} %",
            "bound by": forecast.bound_by,
        }
        if compared.cost_per_million_samples is not None:
            cells["cost / million samples"] = f"{compared.cost_per_million_samples:.4g}"
        rows.append(cells)
    print_table(rows)
    if fitted.forecast is not None:
        print(f"{fitted.forecast.verdict} {fitted.forecast.reason}")
    headings = ("what the rows tell", "usual", "90 % interval")
    print_table([dict(zip(headings, row, strict=True)) for row in fitted.learnt], left=headings[:1])
    print(f"The rows differ from the fit by {100 * fitted.calibration.error:.1f} % (standard deviation).")
    for sentence in (*(one.sentence for one in fitted.contradictions), *fitted.warnings):
        print(sentence)
    if out is not None and fitted.forecast is not None:
        print(out / PAGE_FILE)


def _answer(fitted: FittedSteps) -> dict[str, Any]:
    """The answer as JSON has it."""
    predictions = []
    for one, forecast, row in fitted.rows:
        names = ("speedup", "efficiency", "cost_per_million_samples")
        compared = {name: getattr(row, name) for name in names}
        predictions.append({**_placement(one), **_forecast(forecast), **compared})
    return {
        "predictions": predictions,
        "constants": fitted.constants,
        "uncertain_by_factor": fitted.uncertain_by_factor,
        "gradient_bytes": fitted.calibration.gradient_bytes,
        "error": fitted.calibration.error,
        "contradictions": [vars(one) for one in fitted.contradictions],
        "warnings": list(fitted.warnings),
        "recommended": None if fitted.recommended is None else _placement(fitted.recommended),
        "recommended_devices": None if fitted.forecast is None else fitted.forecast.recommended_devices,
        "verdict": None if fitted.forecast is None else fitted.forecast.verdict,
        "reason": None if fitted.forecast is None else fitted.forecast.reason,
    }


def _cells(placement: Placement, shown: Sequence[Placement]) -> dict[str, str]:
    """What tells a placement in a table of several."""
    cells = {"nodes x devices": placement.layout.name, "micro-batch": placement.passes_name}
    if any(one.algorithm != "all_reduce" for one in shown):
        cells["algorithm"] = placement.algorithm
    return cells


def _placement(placement: Placement) -> dict[str, Any]:
    """The columns that a row of a file would have; devices_per_node is null where nodes differ."""
    counts = placement.layout.workers_per_node
    return {
        "num_nodes": len(counts),
        "devices_per_node": counts[0] if len(set(counts)) == 1 else None,
        "devices_on_node": _devices_on_node(placement.layout),
        "micro_batch_size": placement.micro_batch_size,
        "algorithm": placement.algorithm,
        **({} if placement.num_passes == 1 else {"grad_accum_steps": placement.num_passes}),
        **({} if placement.gradient_bytes is None else {"gradient_bytes": placement.gradient_bytes}),
        **({} if placement.link_bytes_per_s is None else {"link_bytes_per_s": placement.link_bytes_per_s}),
    }


def _forecast(forecast: StepForecast) -> dict[str, Any]:
    names = ("low_s", "high_s", "bound_by", "compute_s", "communication_s", "exposed_s", "overhead_s")
    return {"step_time_s": forecast.total_s, **{name: getattr(forecast, name) for name in names}}


def _devices_on_node(layout: Layout) -> str:
    return "+".join(map(str, layout.workers_per_node))
