"""A forecast of several numbers of devices: a row for each, the recommended one, and why.

A job's rows follow from the steps that `probe` timed on 1, 2, … N workers; those of a table from the rows that were
measured. Both go through one step model, one comparison and one recommendation. What was not measured is what hardware
usually has, and the forecast says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import JobError
from paceline.noise import efficiency as statistical_efficiency
from paceline.plan.fit import Fit, StepForecast, fit, predict
from paceline.plan.inputs import AskedStep, ForecastRequest, PlanInputs, needs_replicas, plan_inputs, search_meshes
from paceline.plan.memory import state_bytes
from paceline.plan.peak_memory import USABLE_FRACTION
from paceline.plan.recommendation import batch_advice, explain_choice, recommend, scaling_knee
from paceline.plan.reliability import DEVICE_MTBF_S, RESTART_S, availability
from paceline.spec import Cluster, Job, StepRow
from paceline.spec.cluster import ForecastCheck
from paceline.spec.forecast import BoundBy, Forecast, ForecastRow, fastest_of_each_count
from paceline.spec.model_cost import ModelCost
from paceline.words import duration, size

MOST_ROWS_IN_FULL = 64
"""A range up to here has a row for every count; beyond, four counts for each doubling."""
_DISTURBED_SPREAD = 0.1
"""Steps of an idle machine vary less than by this part."""
_LONG_STEP_S, _LONG_SAMPLE_S = 20.0, 0.1
"""A step and a sample of this many seconds are rare; of so many milliseconds, usual."""


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
        model: the costs from a trace; None: those from timed steps and the job's options.

    Raises:
        ClusterError: the cluster has no timed steps of this job, or nothing is known of links that a count needs.
        JobError: no count can run the job.
    """
    request = request or ForecastRequest()
    inputs = plan_inputs(job, cluster, request, max(devices), model)
    asked = [inputs.asked(count) for count in sorted({1, *devices})]
    loading_s = _loading_s_per_sample(inputs.timing.steps)
    rows = [row for row in _compared(inputs.fit, (), asked, request, loading_s) if row.devices in devices]
    rows = [_with_target(inputs, _on_a_mesh(inputs, row)) for row in rows]
    if request.noise_scale is not None:
        best_per_s = _best_batch(inputs, 1)[1]
        rows = [_useful(row, request.noise_scale, best_per_s) for row in rows]
    found = _recommended(
        job.name,
        rows,
        request,
        device=inputs.timing.device,
        device_kind=cluster.device_kind,
        grow=request.grow,
        run_samples=inputs.timing.num_samples and job.epochs * inputs.timing.num_samples,
        past_error=past_error(cluster.checks),
        assumptions=(*_unmeasured(inputs.timing.steps, [one.row for one in asked]), *_assumed(inputs, rows)),
    )
    if request.noise_scale is not None:
        count = found.recommended_devices
        better = _best_batch(inputs, count) if request.grow == "none" else None
        found = replace(found, reason=found.reason + batch_advice(found.recommended, request.noise_scale, better))
    spread = max(row.spread for row in inputs.timing.steps)
    if spread > _DISTURBED_SPREAD:
        doubt = f"These figures may be wrong: timed steps varied by {100 * spread:.0f} %, as on a busy machine"
        found = replace(found, verdict=f"{doubt}; probe again while it is idle. By these steps: {found.verdict}")
    return replace(found, strategy=_mesh_words(inputs, found.recommended_devices))


def forecast_of_rows(
    name: str, measured: Sequence[StepRow], asked: Sequence[StepRow], request: ForecastRequest
) -> Forecast:
    """The forecast of a table: a row for each step that is asked for, and for the one that speed-ups are over.

    Args:
        measured, asked: one at least of both.

    Raises:
        JobError: a row has an algorithm without a cost formula.
    """
    steps = [AskedStep(row, row.global_batch_size) for row in asked]
    rows = _compared(fit(measured), [row.unmeasured() for row in measured], steps, request)
    found = _recommended(
        name,
        rows,
        request,
        device="the measured devices",
        device_kind="measured step times",
        grow="batch" if len({row.global_batch_size / row.devices for row in rows}) == 1 else "none",
        is_fitted=True,
        base_devices=rows[0].devices,
        warnings=_unit_warning(measured),
        assumptions=_unmeasured(measured, asked),
    )
    return replace(found, reason=found.reason + _doubt(found))


def _compared(
    found: Fit,
    others: Sequence[StepRow],
    asked: Sequence[AskedStep],
    request: ForecastRequest,
    loading_s_per_sample: float = 0.0,
) -> list[ForecastRow]:
    """A row for each step, in ascending order, with speed-up and efficiency over the base.

    The base has the fewest devices of all that are asked for and of `others`, and if there is one a batch that is asked
    for: that of a device, or the global one. Of several such steps it is the fastest.
    """
    every = {one.row: one for one in (*(AskedStep(row, row.global_batch_size) for row in others), *asked)}
    fewest = min(row.num_workers for row in every)
    smallest = [one for row, one in every.items() if row.num_workers == fewest]
    batches = {one.global_batch_size for one in asked}
    per_device = {one.row.samples_per_worker for one in asked}
    alike = [one for one in smallest if one.global_batch_size in batches or one.row.samples_per_worker in per_device]
    steps = dict.fromkeys([*asked, *(alike or smallest)])
    forecasts = dict(zip(steps, predict(found, [one.row for one in steps]), strict=True))
    base = max(alike or smallest, key=lambda one: one.global_batch_size / forecasts[one].total_s)
    base_per_s = base.global_batch_size / fewest / forecasts[base].total_s
    shown = sorted(
        dict.fromkeys([*({base} - {*asked}), *asked]), key=lambda one: (one.row.num_workers, one.row.num_nodes)
    )
    names = _names([one.row for one in shown])
    price = request.price_per_device_hour
    return [_row(one, forecasts[one], base_per_s, price, names[one.row], loading_s_per_sample) for one in shown]


def _row(
    one: AskedStep,
    found: StepForecast,
    base_per_s: float,
    price: float | None,
    name: str,
    loading_s_per_sample: float,
) -> ForecastRow:
    """A step beside the base, a device of which does `base_per_s` samples/s."""
    devices, samples_per_s = one.row.num_workers, one.global_batch_size / found.total_s
    speedup = samples_per_s / base_per_s
    loader_s = min(loading_s_per_sample * one.row.samples_per_worker, found.compute_s)
    rest_s = max(found.compute_s - loader_s, found.communication_s, found.exposed_s, found.overhead_s)
    bound_by: BoundBy = "loader" if loader_s > rest_s else found.bound_by
    return ForecastRow(
        devices=devices,
        nodes=one.row.num_nodes,
        algorithm=one.row.algorithm,
        global_batch_size=one.global_batch_size,
        micro_batch_size=one.row.micro_batch_size,
        num_micro_batches=one.row.num_passes,
        step_s=found.total_s,
        compute_s=found.compute_s,
        communication_s=found.communication_s,
        exposed_s=found.exposed_s,
        loader_s=loader_s,
        overhead_s=found.overhead_s,
        bound_by=bound_by,
        low_s=found.low_s,
        high_s=found.high_s,
        samples_per_s=samples_per_s,
        speedup=speedup,
        efficiency=speedup / devices,
        cost_per_million_samples=None if price is None else price * devices / 3600 * 1e6 / samples_per_s,
        memory_bytes=one.memory_bytes,
        objection=one.objection,
        placement=name,
    )


def _loading_s_per_sample(measured: Sequence[StepRow]) -> float:
    """Seconds that one worker waited for a sample, in the row where it waited least."""
    return min((row.loading_s / row.samples_per_worker for row in measured if row.loading_s is not None), default=0.0)


def _names(rows: Sequence[StepRow]) -> dict[StepRow, str]:
    """What tells each step from the others of as many devices; empty where there is no other."""
    names: dict[StepRow, str] = {}
    for _, group in itertools.groupby(rows, key=lambda row: row.num_workers):
        traits_of = {row: _traits(row) for row in group}
        differs = [len(set(column)) > 1 for column in zip(*traits_of.values(), strict=True)]
        for row, traits in traits_of.items():
            names[row] = ", ".join(filter(None, itertools.compress(traits, differs)))
    return names


def _traits(row: StepRow) -> tuple[str, ...]:
    passes = f"{row.num_passes} x " if row.num_passes > 1 else ""
    return (
        row.layout_name,
        f"micro-batch {passes}{row.micro_batch_size}",
        row.algorithm,
        "" if row.gradient_bytes is None else f"gradients of {size(row.gradient_bytes)}",
        "" if row.link_bytes_per_s is None else f"links of {row.link_bytes_per_s / 1e9:g} GB/s",
    )


def _recommended(
    name: str, rows: Sequence[ForecastRow], request: ForecastRequest, base_devices: int = 1, **values: object
) -> Forecast:
    """The forecast of compared rows with the recommended one, and why.

    Args:
        base_devices: the devices that speed-ups are over.
        values: other fields of the forecast.
    """
    curve = fastest_of_each_count(rows)
    chosen = recommend(curve, request.efficiency_floor)
    verdict, reason = explain_choice(curve, chosen, request.efficiency_floor, base_devices)
    found = Forecast(
        job=name,
        device="",
        device_kind="",
        grow="none",
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
    )
    return replace(found, **values)  # type: ignore[arg-type]


# --- a job: meshes, target, failures, noise ---


def _on_a_mesh(inputs: PlanInputs, row: ForecastRow) -> ForecastRow:
    """`row`, and where its replicas do not fit, the step of the best mesh that does; itself if none does."""
    room = inputs.worker_bytes(row.devices)
    is_small = room is None or row.memory_bytes is None or row.memory_bytes <= USABLE_FRACTION * room
    if is_small or row.devices == 1 or needs_replicas(inputs.job):
        return row
    try:
        best = search_meshes(inputs, row.devices).winner
    except JobError:
        return row
    communication_s = best.tensor_s + best.exposed_s
    return replace(
        row,
        micro_batch_size=best.micro_batch_size,
        num_micro_batches=best.num_micro_batches,
        step_s=best.step_s,
        compute_s=best.compute_s,
        communication_s=communication_s,
        exposed_s=communication_s + best.bubble_s,
        overhead_s=best.optimizer_s,
        low_s=best.step_s * row.low_s / row.step_s,
        high_s=best.step_s * row.high_s / row.step_s,
        samples_per_s=row.global_batch_size / best.step_s,
        speedup=row.speedup * row.step_s / best.step_s,
        efficiency=row.efficiency * row.step_s / best.step_s,
        memory_bytes=best.memory.total_bytes,
        placement=str(best.mesh),
        objection="",
    )


def _with_target(inputs: PlanInputs, row: ForecastRow) -> ForecastRow:
    """`row` with time and cost to the target, failures included."""
    request = inputs.request
    target, noise_scale = request.target_samples, request.noise_scale
    if target is None:
        return row
    if noise_scale is not None:
        target /= statistical_efficiency(row.global_batch_size, noise_scale, inputs.job.global_batch_size)
    state = state_bytes(inputs.job)
    checkpoint_bytes = inputs.timing.num_parameters * (state.parameter + state.optimizer)
    lasting = availability(row.devices, checkpoint_bytes)
    time_s = target / row.samples_per_s / lasting if lasting else None
    price = request.price_per_device_hour
    return replace(
        row,
        samples_to_target=target,
        time_to_target_s=time_s,
        cost_to_target=None if price is None or time_s is None else price * row.devices / 3600 * time_s,
    )


def _useful(row: ForecastRow, noise_scale: float, best_per_s: float) -> ForecastRow:
    """`row` with its efficiency in useful samples.

    Args:
        best_per_s: useful samples/s of one device with the best batch for it.
    """
    useful_per_s = row.samples_per_s * statistical_efficiency(row.global_batch_size, noise_scale)
    return replace(row, useful_efficiency=useful_per_s / (row.devices * best_per_s))


def _best_batch(inputs: PlanInputs, count: int) -> tuple[int, float]:
    """Which of the job's batch on this count, its half, quarter, … brings the most useful samples/s, and how many."""
    noise_scale = inputs.request.noise_scale or math.inf
    batches: list[int] = [inputs.job_on(count).global_batch_size]
    while batches[-1] // 2 >= count:
        batches.append(batches[-1] // 2)
    shards = [min(max(inputs.job.virtual_shards, count), batch) for batch in batches]
    asked = [inputs.with_batch(*pair).asked(count).row for pair in zip(batches, shards, strict=True)]
    found = [
        (batch, batch / one.total_s * statistical_efficiency(batch, noise_scale))
        for batch, one in zip(batches, predict(inputs.fit, asked), strict=True)
    ]
    return max(found, key=lambda pair: pair[1])


def _mesh_words(inputs: PlanInputs, count: int) -> tuple[str, ...]:
    """The best meshes of `count` devices in words; none for one device, and where bits must not depend on it."""
    if count == 1 or needs_replicas(inputs.job):
        return ()
    try:
        return search_meshes(inputs, count).in_words()
    except JobError as problem:
        return (str(problem),)


def past_error(checks: Sequence[ForecastCheck]) -> str:
    """ "within 4 % on the last 12 runs", the 90th percentile of the errors of forecasts; empty without a run."""
    if not checks:
        return ""
    errors = sorted(abs(check.error) for check in checks)
    worst = errors[math.ceil(0.9 * len(errors)) - 1]
    runs = "run" if len(errors) == 1 else f"{len(errors)} runs"
    return f"within {worst:.0%} on the last {runs}".replace("%", " %")


# --- what was not measured ---


def _unmeasured(measured: Sequence[StepRow], asked: Sequence[StepRow]) -> tuple[str, ...]:
    """A sentence for each thing that forecasts need and nobody measured."""
    most_nodes = max(row.num_nodes for row in measured)
    most_on_node = max(row.most_on_node for row in measured)
    asks_more = any(row.most_on_node > most_on_node for row in asked)
    smallest = min(row.micro_batch_size for row in measured)
    fewest = min(row.num_workers for row in (*measured, *asked))
    sentences = [
        (
            fewest > 1,
            f"Nobody measured one device: speed-up and efficiency are over the fewest, {fewest}, each of which counts "
            "as one; measure one device.",
        ),
        (
            len(measured) == 1,
            "One row alone says nothing of how steps scale: all of that is what hardware usually has; measure a second "
            "row with more devices.",
        ),
        (
            most_nodes == 1 and any(row.num_nodes > 1 for row in asked),
            "Nobody measured two nodes: forecasts across nodes are what networks usually do, and their interval is as "
            "wide as that; measure one row on several nodes.",
        ),
        (
            len(measured) > 1 and most_on_node == 1 and asks_more,
            "Nobody measured two devices of one node; measure one such row.",
        ),
        (
            most_on_node > 1 and asks_more,
            f"Nobody measured more than {most_on_node} devices of one node, where a bus, the host or the loader may "
            "become the limit; measure one such row.",
        ),
        (
            any(row.micro_batch_size < smallest / 4 for row in asked),
            f"Micro-batches below a quarter of the smallest measured one ({smallest}) may be bound by launching "
            "kernels; measure one such row.",
        ),
    ]
    return tuple(sentence for is_assumed, sentence in sentences if is_assumed)


def _assumed(inputs: PlanInputs, rows: Sequence[ForecastRow]) -> tuple[str, ...]:
    """A sentence for each value that was assumed for a job's rows."""
    num_devices, rate = sum(inputs.node_sizes), inputs.request.link_bytes_per_s
    is_beyond, wire = rows[-1].devices > num_devices, inputs.job.aggregation.wire
    more = inputs.request.devices_per_node or max(inputs.node_sizes)
    sentences = [
        (
            rate is not None and any(row.nodes > 1 for row in rows),
            f"Links between nodes carry at most {(rate or 0.0) / 1e9:g} GB/s, as given.",
        ),
        (
            is_beyond,
            f"Beyond the {num_devices} devices of this cluster there are more nodes of {more} like the first.",
        ),
        (
            any(row.time_to_target_s is not None for row in rows),
            f"A device fails every {DEVICE_MTBF_S / 3600:,.0f} hours, as in the training of Llama 3, and a restart "
            f"takes {RESTART_S / 60:.0f} minutes.",
        ),
        (wire == "auto-lossy", f"The wire format {wire} is priced as float32, which is the most it costs."),
        (
            any(row.placement for row in rows),
            "Steps of meshes are priced by the links alone: nobody timed one, and no run's error is noted for them.",
        ),
    ]
    return tuple(sentence for is_assumed, sentence in sentences if is_assumed)


def _unit_warning(measured: Sequence[StepRow]) -> tuple[str, ...]:
    """A sentence where all times look like milliseconds; else none."""
    times_s = [row.step_time_s or 0.0 for row in measured]
    samples_s = (time_s / row.samples_per_worker for time_s, row in zip(times_s, measured, strict=True))
    if min(times_s) < _LONG_STEP_S or min(samples_s) < _LONG_SAMPLE_S:
        return ()
    return (
        f"All steps take {_LONG_STEP_S:.0f} s and more, the first one {times_s[0]:g} s; if these are milliseconds, "
        "divide step_time_s by 1000: fixed costs are then priced right.",
    )


def _doubt(found: Forecast) -> str:
    """A sentence where the slow end of the interval would change the choice."""
    chosen, floor = found.recommended, found.efficiency_floor
    slow_efficiency = chosen.efficiency * chosen.step_s / chosen.high_s
    if chosen.devices == found.base_devices or slow_efficiency >= floor:
        return ""
    return (
        f" This is not sure: at the slow end of the 90 % interval ({duration(chosen.high_s)} a step) the efficiency is "
        f"{100 * slow_efficiency:.3g} %, below the floor of {100 * floor:g} %; measure that row before you rely on it."
    )
