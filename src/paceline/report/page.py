"""The study as one HTML page that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.device_count import RULE
from paceline.report import formats
from paceline.report.figure import series_color
from paceline.report.job_text import job_toml
from paceline.report.study import Study, StudyRow
from paceline.report.study_plots import study_plots
from paceline.report.study_table import figures
from paceline.report.templates import render
from paceline.spec.record import RunRecord
from paceline.words import listing, number_of


def render_page(study: Study) -> str:
    """The whole page."""
    return render(
        "page.html",
        study=study,
        best=study.recommended,
        accuracy_aside=_accuracy_aside(study),
        columns=_columns(study),
        color=lambda row: series_color(study.rows.index(row)),
        plots=study_plots(study),
        notes=_notes(study),
        device=_device(study),
        seeds=_seeds(study),
        differences=_differences(study),
        job_text=job_toml(study.job),
        environment=_environment(study),
        rule=RULE,
    )


def _accuracy_aside(study: Study) -> str:
    """What stands below the accuracy of the recommended device count."""
    best = study.recommended
    if best is not study.base:
        return "same weights" if best.same_weights else f"{formats.points(best.accuracy_change)} points"
    return f"seeds {formats.spread(best.accuracy_min, best.accuracy_max)} %" if best.has_spread else "one seed"


def _columns(study: Study) -> list[tuple[str, Callable[[StudyRow], str]]]:
    """Heading and cell of every column that this study has figures for."""
    shown = {"devices": "Devices", "time": "Training time", "step": "Step", "p10 to p90": "p10\N{EN DASH}p90"}
    shown |= {"samples/s": "Samples/s", "speed-up": "Speed-up", "efficiency": "Efficiency"}
    if study.has_accuracy:
        shown |= {"accuracy": "Accuracy", "spread": "Spread (%)", "change": "Change (points)"}
    if study.has_forecast:
        shown |= {"forecast": "Forecast", "error": "Error"}
    if study.grow == "batch":
        shown |= {"batch": "Global batch", "rate": "Learning rate"}
    shown |= {"first step": "First step", "wall": "Wall"}
    if len(study.rows) > 1 and study.grow == "none":
        shown["weights"] = "Weights"
    cells = figures(study)
    return [(heading, cells[name]) for name, heading in shown.items()]


def _notes(study: Study) -> list[tuple[str, str]]:
    """(who, note) of the notes of the runs, each note once."""
    holders: dict[str, list[RunRecord]] = {}
    for run in study.records:
        for note in dict.fromkeys(run.notes):
            holders.setdefault(note, []).append(run)
    return [(_who(study, runs), note) for note, runs in holders.items()]


def _who(study: Study, runs: Iterable[RunRecord]) -> str:
    held = {(run.world_size, run.job.seed) for run in runs}
    if len(held) == len({(run.world_size, run.job.seed) for run in study.records}):
        return "All runs"
    said = []
    for row in study.rows:
        seeds = [seed for seed in row.seeds if (row.devices, seed) in held]
        if seeds:
            which = "" if len(seeds) == len(row.seeds) else f" (seed {listing([str(seed) for seed in seeds])})"
            said.append(formats.devices(row.devices) + which)
    return listing(said)


def _environment(study: Study) -> list[tuple[str, str]]:
    """(key, value); where runs disagree, all values, because such a comparison needs a second look."""
    keys = dict.fromkeys(key for run in study.records for key in run.environment)
    values = {key: dict.fromkeys(run.environment.get(key, "not known") for run in study.records) for key in keys}
    return [
        (key, next(iter(found)) if len(found) == 1 else "differs between runs: " + "; ".join(found))
        for key, found in values.items()
    ]


def _device(study: Study) -> str:
    plan = study.base.runs[0].plan
    if plan.device_kind == "cuda":
        return "One GPU, driven by one worker process."
    threads = number_of(plan.threads_per_worker, "thread")
    return (
        f"One worker process that computes with {threads} of the processor. The workers of one machine share "
        "its memory and caches, and more workers than cores cannot be faster."
    )


def _seeds(study: Study) -> str:
    if len(study.seeds) == 1:
        return (
            f"One (seed {study.seeds[0]}). A single seed shows no spread, so a small difference in accuracy "
            "may be chance; run three or more to know."
        )
    sentence = f"{len(study.seeds)} ({listing([str(seed) for seed in study.seeds])})"
    partial = [
        f"{formats.devices(row.devices)} has only {listing([str(seed) for seed in row.seeds])}"
        for row in study.rows
        if set(row.seeds) != set(study.seeds)
    ]
    if partial:
        return f"{sentence}, but {listing(partial)}, so its averages are over other runs than the rest."
    return f"{sentence} on every device count. The spread is the range from the lowest to the highest of them."


def _differences(study: Study) -> str:
    if study.same_weights:
        return "None: every device count ended with the same weights."
    inside = [formats.devices(row.devices) for row in study.rows if row.within_spread is True]
    outside = [formats.devices(row.devices) for row in study.rows if row.within_spread is False]
    base = formats.devices(study.base.devices)
    said = []
    if inside:
        said.append(
            f"Within the spread on {listing(inside)}: the seeds' ranges overlap with that of {base}, "
            "so the difference may be chance."
        )
    if outside:
        said.append(f"Outside the spread on {listing(outside)}: no seed's result lies in the range of {base}.")
    if not said:
        return "Cannot be told from chance with a single seed on either side."
    return " ".join(said)
