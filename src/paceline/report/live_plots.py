"""The plots of the live page: one line a run."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report import formats
from paceline.report.figure import (
    STEP_PARTS,
    SYMBOLS,
    Plot,
    Trace,
    axis,
    figure,
    fill_the_grid,
    line,
    series_color,
    stacked_bar,
)
from paceline.report.live_run import LiveRun

_MOST_POINTS = 1500
"""On a line; more are not seen on a screen, and slow the page down."""


def live_plots(runs: Sequence[LiveRun]) -> list[Plot]:
    """The same plots for any runs, so that the page need not grow while they train."""
    metrics = list(dict.fromkeys(name for run in runs for _, found in run.metrics.evaluations for name in found))
    metric = "accuracy" if "accuracy" in metrics or not metrics else metrics[0]
    return fill_the_grid(
        [
            _curves(
                runs,
                ("loss", "Training loss", "loss of the global batch"),
                [_thinned(run.metrics.steps, run.metrics.losses) for run in runs],
            ),
            _curves(
                runs,
                ("evaluation", f"Evaluation: {metric}", metric),
                [
                    (
                        [step for step, found in run.metrics.evaluations if metric in found],
                        [found[metric] for _, found in run.metrics.evaluations if metric in found],
                    )
                    for run in runs
                ],
                has_markers=True,
            ),
            _curves(
                runs,
                ("throughput", "Throughput", "samples/s"),
                [_thinned(run.metrics.timed_steps, run.metrics.samples_per_s) for run in runs],
                from_zero=True,
            ),
            _step_time(runs),
        ]
    )


def _thinned(steps: Sequence[int], values: Sequence[float | None]) -> tuple[list[int], list[float | None]]:
    stride = -(-len(steps) // _MOST_POINTS) or 1
    # From the end, so that the last value is always there.
    return list(steps[::-1][::stride][::-1]), list(values[::-1][::stride][::-1])


def _curves(
    runs: Sequence[LiveRun],
    names: tuple[str, str, str],
    curves: Sequence[tuple[Sequence[int], Sequence[float | None]]],
    *,
    has_markers: bool = False,
    from_zero: bool = False,
) -> Plot:
    """One line a run. `names`: key, title, what the vertical axis shows."""
    key, title, quantity = names
    data: list[Trace] = [
        line(
            steps,
            values,
            series_color(index),
            name=run.name,
            marker={"size": 7, "symbol": SYMBOLS[index % len(SYMBOLS)]} if has_markers else None,
            hover=f"{run.name}: %{{y:.4~g}} at step %{{x:,}}",
        )
        for index, (run, (steps, values)) in enumerate(zip(runs, curves, strict=True))
    ]
    last = [
        f"{run.name}: {values[-1]:.4g}"
        for run, (_, values) in zip(runs, curves, strict=True)
        if values and values[-1] is not None
    ]
    xaxis, yaxis = axis("step"), axis(quantity, **({"rangemode": "tozero"} if from_zero else {}))
    if all(len(steps) < 2 for steps, _ in curves):  # else one point chooses both axes, around itself
        xaxis |= {"range": [0, 1.05 * max(1, *(run.step for run in runs))]}
        yaxis |= {"range": _from_zero([value for _, values in curves for value in values if value is not None])}
    return Plot(
        key,
        title,
        _caption(runs, curves),
        f"{title}. Last value: {'; '.join(last) or 'none yet'}.",
        figure(data, xaxis, yaxis, showlegend=len(runs) > 1),
    )


def _from_zero(values: Sequence[float]) -> list[float]:
    """A range with zero and all values in it, and some room behind them."""
    low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0)
    return [1.1 * low, 1.1 * high] if low < high else [0.0, 1.0]


def _caption(runs: Sequence[LiveRun], curves: Sequence[tuple[Sequence[int], Sequence[float | None]]]) -> str:
    """What the lines are, and which of them lie on one another."""
    said = ["One line a run."] if len(runs) > 1 else []
    for place, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        covered = [runs[earlier].name for earlier in range(place) if curve[0] and curves[earlier] == curve]
        if covered:
            said.append(f"{run.name} has the values of {covered[0]} and covers its line.")
    return " ".join(said)


def _step_time(runs: Sequence[LiveRun]) -> Plot:
    """Stacked bars: where the time of the latest steps went."""
    times = [(run.name, run.metrics.step_time) for run in runs if run.metrics.step_time is not None]
    names = [run for run, _ in times]
    data = [
        stacked_bar(name, token, names, [1e3 * getattr(step, part) for _, step in times], hover="%{x:.2f} ms")
        for name, token, part in STEP_PARTS
    ]
    said = [f"{run}: {formats.duration(step.total_s)}" for run, step in times]
    return Plot(
        "step-time",
        "Where each step's time goes",
        "The latest steps, on rank 0.",
        f"Time of a step. {'; '.join(said) or 'None was timed yet'}.",
        figure(
            data,
            axis("step (ms)", showgrid=True),
            axis("", type="category", autorange="reversed", showgrid=False),
            barmode="stack",
            showlegend=True,
            legend={"traceorder": "normal"},
        ),
    )
