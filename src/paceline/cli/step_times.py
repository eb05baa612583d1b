"""`paceline plan --fit` and `--suggest`: what they print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.console import print_table
from paceline.workflows.step_times import fit_step_times, suggest_measurements

if TYPE_CHECKING:
    from paceline.plan.model import Layout, StepForecast
    from paceline.plan.step_constants import Placement


def fit_and_predict(obs: Path, queries: Path, as_json: bool) -> None:
    """Fit the rows of `obs`, forecast those of `queries`, and print both with the constants."""
    fitted = fit_step_times(obs, queries)
    forecasts = list(zip(fitted.placements, fitted.forecasts, strict=True))
    if as_json:
        contradictions = [
            {
                "line": one.line,
                "step_time_s": one.step_time_s,
                "forecast_s": one.forecast_s,
                "sentence": one.sentence,
            }
            for one in fitted.contradictions
        ]
        answer = {
            "predictions": [{**_placement(one), **_forecast(forecast)} for one, forecast in forecasts],
            "constants": fitted.constants,
            "uncertain_by_factor": fitted.uncertain_by_factor,
            "gradient_bytes": fitted.calibration.gradient_bytes,
            "error": fitted.calibration.error,
            "contradictions": contradictions,
        }
        print(json.dumps(answer))
        return
    rows = [
        [
            _where(one.layout),
            str(one.micro_batch_size),
            f"{forecast.total_s:.4g} s",
            f"{forecast.low_s:.4g} … {forecast.high_s:.4g} s",
            f"{one.micro_batch_size * one.layout.num_workers / forecast.total_s:.4g}",
            forecast.bound_by,
        ]
        for one, forecast in forecasts
    ]
    print_table(["nodes x devices", "micro-batch", "step", "90 % interval", "samples/s", "bound by"], rows)
    factors = fitted.uncertain_by_factor
    constants = [[name, f"{value:.3g}", f"{factors[name]:.2f}"] for name, value in fitted.constants.items()]
    print_table(["constant", "fitted", "uncertain by a factor of"], constants, left=["constant"])
    print(f"The rows differ from the fit by {100 * fitted.calibration.error:.1f} % (standard deviation).")
    for contradiction in fitted.contradictions:
        print(contradiction.sentence)


def suggest_next(obs: Path, budget: int, as_json: bool) -> None:
    """Print which placements to measure next, in order."""
    suggestions = suggest_measurements(obs, budget)
    if as_json:
        rows = [{**_placement(one.placement), "expected_error": one.expected_error} for one in suggestions]
        print(json.dumps({"suggestions": rows}))
        return
    cells = [
        [
            str(number),
            _where(one.placement.layout),
            str(one.placement.micro_batch_size),
            f"{100 * one.expected_error:.0f} %",
        ]
        for number, one in enumerate(suggestions, 1)
    ]
    print_table(["measure", "nodes x devices", "micro-batch", "then forecasts are off by about"], cells)


def _placement(placement: Placement) -> dict[str, Any]:
    """The columns that a row of a file would have; devices_per_node is null where nodes differ."""
    counts = placement.layout.workers_per_node
    return {
        "num_nodes": len(counts),
        "devices_per_node": counts[0] if len(set(counts)) == 1 else None,
        "devices_on_node": _devices_on_node(placement.layout),
        "micro_batch_size": placement.micro_batch_size,
        "algorithm": placement.algorithm,
        **({} if placement.gradient_bytes is None else {"gradient_bytes": placement.gradient_bytes}),
        **({} if placement.link_bytes_per_s is None else {"link_bytes_per_s": placement.link_bytes_per_s}),
    }


def _forecast(forecast: StepForecast) -> dict[str, Any]:
    names = ("low_s", "high_s", "bound_by", "compute_s", "communication_s", "exposed_s", "overhead_s")
    return {"step_time_s": forecast.total_s, **{name: getattr(forecast, name) for name in names}}


def _devices_on_node(layout: Layout) -> str:
    return "+".join(map(str, layout.workers_per_node))


def _where(layout: Layout) -> str:
    """ "16 x 4" for many equal nodes, else "2+4"."""
    counts = set(layout.workers_per_node)
    if len(counts) == 1 and layout.num_nodes > 1:
        return f"{layout.num_nodes} x {counts.pop()}"
    return _devices_on_node(layout)
