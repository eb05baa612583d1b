"""A forecast of several numbers of devices: a row for each, the recommended one, and why.

A job's rows follow from the steps that `probe` timed on 1, 2, … N workers; those of a table from the rows that were
measured. Both go through one step model and one recommendation. What was not measured is what hardware usually has, and
the forecast says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from paceline.errors import JobError
from paceline.plan.fit import Fit, StepForecast, fit, predict
from paceline.plan.inputs import AskedStep, ForecastRequest, PlanInputs, plan_inputs
from paceline.plan.memory import USABLE_FRACTION
from paceline.plan.meshes import needs_replicas, search_meshes
from paceline.plan.recommendation import batch_advice, explain_choice, recommend, scaling_knee, statistical_efficiency
from paceline.spec import Cluster, Job, StepRow
from paceline.spec.forecast import Forecast, ForecastRow, fastest_of_each_count
from paceline.spec.model_cost import ModelCost
from paceline.words import number_of

MOST_ROWS_IN_FULL = 64
"""A range up to here has a row for every count; beyond, four counts for each doubling."""
_DISTURBED_SPREAD = 0.1
"""Steps of an idle machine vary less than by this part."""


def counts_between(first: int, last: int) -> list[int]:
    """Every count of a small range; of a large one the first ones, then a few for each doubling; always the last."""
    counts = list(range(first, min(last, first + MOST_ROWS_IN_FULL - 1) + 1))
    while counts[-1] < last:
        power = 1 << (counts[-1].bit_length() - 1)
        step = max(1, power // 4)
        counts.append(min(last, (counts[-1] // step + 1) * step))
    return counts


def forecast(
    job: Job,
    cluster: Cluster,
    devices: Sequence[int],
    request: ForecastRequest | None = None,
    model: ModelCost | None = None,
) -> Forecast:
    """A row for every count in `devices`, the recommended one, and why; speed-ups are over one device.

    Args:
        model: the costs from a trace; None: those from timed steps.

    Raises:
        ClusterError: the cluster has no timed steps of this job, or nothing is known of links that a count needs.
        JobError: no count can run the job.
    """
    request = request or ForecastRequest()
    inputs = plan_inputs(job, cluster, request, max(devices), model)
    asked = [inputs.asked(count) for count in sorted({1, *devices})]
    steps = predict(inputs.fit, [one.row for one in asked])
    base_per_s = asked[0].global_batch_size / steps[0].step_s
    rows = [
        _of_a_run(inputs, _row(*_on_a_mesh(inputs, one, step), base_per_s, request, inputs.timing.steps))
        for one, step in zip(asked, steps, strict=True)
        if one.row.num_workers in devices
    ]
    found = _recommended(
        rows,
        request,
        job=job.name,
        device=inputs.timing.device,
        device_kind=cluster.device_kind,
        grow=request.grow,
        run_samples=inputs.timing.num_samples and job.epochs * inputs.timing.num_samples,
        past_error=past_error(cluster.forecast_errors),
        assumptions=(*_unmeasured(inputs.timing.steps, [one.row for one in asked]), *_assumed(inputs, rows)),
    )
    count = found.recommended_devices
    if request.noise_scale is not None:
        found = replace(found, reason=found.reason + batch_advice(found.recommended, request.noise_scale))
    spread = max(row.spread for row in inputs.timing.steps)
    if spread > _DISTURBED_SPREAD:
        warning = f"These figures may be wrong: timed steps varied by {100 * spread:.0f} %, as on a busy machine"
        found = replace(found, verdict=f"{warning}; probe again while it is idle. By these steps: {found.verdict}")
    if count == 1 or needs_replicas(job):
        return found
    try:
        return replace(found, strategy=tuple(f"{one.in_words()}." for one in search_meshes(inputs, count)[:2]))
    except JobError as problem:
        return replace(found, strategy=(str(problem),))


def forecast_of_rows(
    name: str, measured: Sequence[StepRow], asked: Sequence[StepRow], request: ForecastRequest
) -> Forecast:
    """The forecast of a table: a row for each step that is asked for, and for the one that speed-ups are over.

    Args:
        measured, asked: one at least of both.

    Raises:
        JobError: a row has an algorithm without a cost formula.
    """
    found = fit(measured)
    base = _base(found, measured, asked)
    shown = sorted(dict.fromkeys([*({base} - {*asked}), *asked]), key=lambda row: (row.num_workers, row.num_nodes))
    steps, counts = predict(found, shown), [row.num_workers for row in shown]
    base_per_s = base.global_batch_size / base.num_workers / steps[shown.index(base)].step_s
    rows = []
    for row, step in zip(shown, steps, strict=True):  # of several rows of as many devices each is named
        passes = f"{row.num_passes} x " if row.num_passes > 1 else ""
        name = f"{row.layout_name}, micro-batch {passes}{row.micro_batch_size}, {row.algorithm}"
        several = counts.count(row.num_workers) > 1
        rows.append(_row(AskedStep(row, row.global_batch_size, name=name * several), step, base_per_s, request))
    return _recommended(
        rows,
        request,
        job=name,
        device="the measured devices",
        device_kind="measured step times",
        grow="batch" if len({row.global_batch_size / row.devices for row in rows}) == 1 else "none",
        is_fitted=True,
        base_devices=base.num_workers,
        assumptions=tuple(_unmeasured(measured, asked)),
    )


def _base(found: Fit, measured: Sequence[StepRow], asked: Sequence[StepRow]) -> StepRow:
    """The step that speed-ups are over.

    It has the fewest devices of all, and if there is one a batch that is asked for: that of a device, or the global
    one. Of several such steps it is the fastest.
    """
    every = dict.fromkeys([*(row.unmeasured() for row in measured), *asked])
    fewest = min(row.num_workers for row in every)
    smallest = [row for row in every if row.num_workers == fewest]
    batches = {row.global_batch_size for row in asked}
    per_device = {row.samples_per_worker for row in asked}
    alike = [row for row in smallest if row.global_batch_size in batches or row.samples_per_worker in per_device]
    steps = zip(alike or smallest, predict(found, alike or smallest), strict=True)
    return max(steps, key=lambda pair: pair[0].global_batch_size / pair[1].step_s)[0]


def _row(
    one: AskedStep,
    step: StepForecast,
    base_per_s: float,
    request: ForecastRequest,
    measured: Sequence[StepRow] = (),
) -> ForecastRow:
    """A step beside the base, a device of which does `base_per_s` samples/s.

    Args:
        measured: rows that may say how long a worker waited for its samples; the one where it waited least counts.
    """
    devices, samples_per_s = one.row.num_workers, one.global_batch_size / step.step_s
    price = request.price_per_device_hour
    waited = [row.loading_s / row.samples_per_worker for row in measured if row.loading_s is not None]
    loader_s = min(min(waited, default=0.0) * one.row.samples_per_worker, step.compute_s)
    rest_s = max(step.compute_s - loader_s, step.communication_s, step.exposed_s, step.overhead_s)
    if loader_s > rest_s:
        step = replace(step, bound_by="loader")
    return ForecastRow(
        **vars(step),
        devices=devices,
        nodes=one.row.num_nodes,
        algorithm=one.row.algorithm,
        global_batch_size=one.global_batch_size,
        micro_batch_size=one.row.micro_batch_size,
        num_micro_batches=one.row.num_passes,
        loader_s=loader_s,
        samples_per_s=samples_per_s,
        speedup=samples_per_s / base_per_s,
        efficiency=samples_per_s / base_per_s / devices,
        cost_per_million_samples=None if price is None else price * devices / 3600 * 1e6 / samples_per_s,
        memory_bytes=one.memory_bytes,
        objection=one.objection,
        placement=one.name,
    )


def _recommended(
    rows: Sequence[ForecastRow], request: ForecastRequest, base_devices: int = 1, **values: Any
) -> Forecast:
    """The forecast of compared rows with the recommended one, and why.

    Args:
        base_devices: the devices that speed-ups are over.
        values: other fields of the forecast.
    """
    curve = fastest_of_each_count(rows)
    chosen = recommend(curve, request.efficiency_floor)
    verdict, reason = explain_choice(curve, chosen, request.efficiency_floor, base_devices)
    return Forecast(
        rows=tuple(rows),
        recommended_devices=chosen.devices,
        recommended_row=next(place for place, row in enumerate(rows) if row is chosen),
        verdict=verdict,
        reason=reason,
        bend=scaling_knee(curve),
        efficiency_floor=request.efficiency_floor,
        price_per_device_hour=request.price_per_device_hour,
        currency=request.currency,
        noise_scale=request.noise_scale,
        base_devices=base_devices,
        **values,
    )


# --- a job: meshes, target, noise ---


def _on_a_mesh(inputs: PlanInputs, one: AskedStep, step: StepForecast) -> tuple[AskedStep, StepForecast]:
    """The step, or where its replicas do not fit, that of the best mesh that does; itself if none does."""
    count = one.row.num_workers
    is_small = (one.memory_bytes or 0.0) <= USABLE_FRACTION * inputs.worker_bytes(count)
    if is_small or count == 1 or needs_replicas(inputs.job):
        return one, step
    try:
        best = search_meshes(inputs, count)[0]
    except JobError:
        return one, step
    row = replace(one.row, micro_batch_size=best.micro_batch_size, num_passes=best.num_micro_batches)
    communication_s = best.tensor_s + best.exposed_s
    exposed_s = communication_s + best.bubble_s
    return AskedStep(row, one.global_batch_size, best.memory.total_bytes, name=str(best.mesh)), StepForecast(
        step_s=best.step_s,
        compute_s=best.compute_s,
        communication_s=communication_s,
        exposed_s=exposed_s,
        overhead_s=best.optimizer_s,
        bound_by="communication" if exposed_s > best.compute_s else "compute",
        low_s=best.step_s * step.low_s / step.step_s,
        high_s=best.step_s * step.high_s / step.step_s,
    )


def _of_a_run(inputs: PlanInputs, row: ForecastRow) -> ForecastRow:
    """`row` with its efficiency in useful samples, and time and cost to the target."""
    request, target = inputs.request, inputs.request.target_samples
    noise_scale, price = request.noise_scale, request.price_per_device_hour
    if noise_scale is not None:
        useful = statistical_efficiency(row.global_batch_size, noise_scale)
        row = replace(row, useful_efficiency=useful * row.efficiency)
    if target is None:
        return row
    if noise_scale is not None:
        target /= statistical_efficiency(row.global_batch_size, noise_scale, inputs.job.global_batch_size)
    time_s = target / row.samples_per_s
    return replace(
        row,
        samples_to_target=target,
        time_to_target_s=time_s,
        cost_to_target=None if price is None else price * row.devices / 3600 * time_s,
    )


def past_error(forecast_errors: Sequence[float]) -> str:
    """ "within 4 % on the last 12 runs", the 90th percentile of the errors of forecasts; empty without a run."""
    if not forecast_errors:
        return ""
    errors = sorted(map(abs, forecast_errors))
    worst = errors[math.ceil(0.9 * len(errors)) - 1]
    runs = "run" if len(errors) == 1 else f"{len(errors)} runs"
    return f"within {worst:.0%} on the last {runs}".replace("%", " %")


# --- what was not measured ---


def _unmeasured(measured: Sequence[StepRow], asked: Sequence[StepRow]) -> Iterator[str]:
    """A sentence for each thing that forecasts need and nobody measured."""
    most_on_node = max(row.most_on_node for row in measured)
    fewest = min(row.num_workers for row in (*measured, *asked))
    if fewest > 1:
        yield f"Nobody measured one device: speed-up and efficiency are over the fewest, {fewest}."
    if len(measured) == 1:
        yield "One row alone says nothing of how steps scale: measure a second row with more devices."
    if all(row.num_nodes == 1 for row in measured) and any(row.num_nodes > 1 for row in asked):
        yield "Nobody measured two nodes: forecasts across nodes are what networks usually do; measure one such row."
    if len(measured) > 1 and any(row.most_on_node > most_on_node for row in asked):
        yield f"Nobody measured more than {number_of(most_on_node, 'device')} of one node; measure one such row."


def _assumed(inputs: PlanInputs, rows: Sequence[ForecastRow]) -> Iterator[str]:
    """A sentence for each value that was assumed for a job's rows."""
    rate, wire = inputs.request.link_bytes_per_s, inputs.job.aggregation.wire
    if rate is not None and any(row.nodes > 1 for row in rows):
        yield f"Links between nodes carry at most {rate / 1e9:g} GB/s, as given."
    if rows[-1].devices > len(inputs.cluster.devices):
        yield (
            f"Beyond the {len(inputs.cluster.devices)} devices of this cluster there are more nodes of "
            f"{inputs.devices_per_node} like the first."
        )
    if wire == "auto-lossy":
        yield f"The wire format {wire} is priced as float32, which is the most it costs."
    if any(row.placement for row in rows):
        yield "Steps of meshes are priced by the links alone: nobody timed one, and no run's error is noted for them."
