"""A forecast of several numbers of devices: a row for each, the recommended one, and why.

A job's rows follow from the steps that `probe` timed on 1, 2, … N workers; those of a table from the rows that were
measured. Both go through one step model and one recommendation. What was not measured is what hardware usually has, and
the forecast says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from paceline.errors import JobError
from paceline.mathematics import NEARLY, fewest_near_fastest
from paceline.plan.inputs import ForecastRequest, PlanInputs, plan_inputs
from paceline.plan.memory import fits, job_memory
from paceline.plan.meshes import needs_replicas, search_meshes
from paceline.plan.step_model import StepForecast, fit, predict
from paceline.spec import Cluster, Job, Mesh, StepRow
from paceline.spec.forecast import BoundBy, Forecast, ForecastRow, fastest_of_each_count
from paceline.spec.model_cost import ModelCost
from paceline.words import duration, number_of, size

_MOST_ROWS_IN_FULL = 64
"""A range up to here has a row for every count; beyond, four counts for each doubling."""
_DISTURBED_SPREAD = 0.1
"""Steps of an idle machine vary less than by this part."""


def counts_between(first: int, last: int) -> list[int]:
    """Every count of a small range; of a large one the first ones, then a few for each doubling; always the last."""
    counts = list(range(first, min(last, first + _MOST_ROWS_IN_FULL - 1) + 1))
    while counts[-1] < last:
        step = max(1, (1 << (counts[-1].bit_length() - 1)) // 4)
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
    timed, asked = inputs.timing.steps, [inputs.step(count) for count in sorted({1, *devices})]
    steps = predict(inputs.fit, asked)
    base_per_s = job.global_batch_size / steps[0].step_s
    rows = [
        _row_of_job(inputs, row, step, base_per_s)
        for row, step in zip(asked, steps, strict=True)
        if row.num_workers in devices
    ]
    found = _recommended(
        rows,
        request,
        job=job.name,
        device=inputs.timing.device,
        device_kind=cluster.device_kind,
        grow=request.grow,
        run_samples=inputs.timing.num_samples and job.epochs * inputs.timing.num_samples,
        past_error=_past_error(cluster.forecast_errors),
        assumptions=(*_unmeasured(timed, asked), *_assumed(inputs, rows)),
    )
    spread = max(row.spread for row in timed)
    if spread > _DISTURBED_SPREAD:
        warning = f"These figures may be wrong: timed steps varied by {100 * spread:.0f} %, as on a busy machine"
        found = replace(found, verdict=f"{warning}; probe again while it is idle. By these steps: {found.verdict}")
    if found.recommended_devices == 1 or needs_replicas(job):
        return found
    try:
        meshes = search_meshes(inputs, found.recommended_devices)[:2]
        return replace(found, strategy=tuple(f"{mesh.in_words()}." for mesh in meshes))
    except JobError as problem:
        return replace(found, strategy=(str(problem),))


def forecast_of_rows(
    name: str, measured: Sequence[StepRow], asked: Sequence[StepRow], request: ForecastRequest
) -> Forecast:
    """The forecast of a table: a row for each step that is asked for, and for the one that speed-ups are over: with the
    fewest devices of all, and of several such steps the fastest.

    Args:
        measured, asked: one at least of both.

    Raises:
        JobError: a row has an algorithm without a cost formula.
    """
    found = fit(measured)
    every = dict.fromkeys([*(row.unmeasured() for row in measured), *asked])
    fewest = min(row.num_workers for row in every)
    bases = [row for row in every if row.num_workers == fewest]
    rates = [row.samples_per_worker / step.step_s for row, step in zip(bases, predict(found, bases), strict=True)]
    base = bases[rates.index(max(rates))]
    shown = sorted(dict.fromkeys([*({base} - {*asked}), *asked]), key=lambda row: (row.num_workers, row.num_nodes))
    steps = predict(found, shown)
    base_per_s = base.samples_per_worker / steps[shown.index(base)].step_s
    counts = [row.num_workers for row in shown]
    rows = []
    for row, step in zip(shown, steps, strict=True):  # of several rows of as many devices each is named
        passes = f"{row.num_passes} x " if row.num_passes > 1 else ""
        several = f"{row.layout_name}, micro-batch {passes}{row.micro_batch_size}, {row.algorithm}"
        placement = several if counts.count(row.num_workers) > 1 else ""
        rows.append(_row(row, step, base_per_s, request, row.global_batch_size, placement=placement))
    return _recommended(
        rows,
        request,
        job=name,
        device="the measured devices",
        device_kind="measured step times",
        grow="batch" if len({row.global_batch_size / row.devices for row in rows}) == 1 else "none",
        is_fitted=True,
        base_devices=fewest,
        assumptions=tuple(_unmeasured(measured, asked)),
    )


def _row(
    row: StepRow,
    step: StepForecast,
    base_per_s: float,
    request: ForecastRequest,
    global_batch_size: int,
    *,
    base_batch_size: int = 0,
    loader_s: float = 0.0,
    **known: Any,
) -> ForecastRow:
    """A step beside the base.

    Args:
        base_per_s: samples/s of one device of the base.
        base_batch_size: the job's global batch, which the samples to the target are counted with.
        known: further fields of the row.
    """
    waits: dict[BoundBy, float] = {
        "compute": step.compute_s - loader_s,
        "overhead": step.overhead_s,
        "communication": max(step.communication_s, step.exposed_s),
        "loader": loader_s,
    }
    samples_per_s, noise_scale = global_batch_size / step.step_s, request.noise_scale
    efficiency, useful, target = samples_per_s / base_per_s / row.num_workers, None, request.target_samples
    if noise_scale is not None:
        useful = efficiency * statistical_efficiency(global_batch_size, noise_scale)
        target = target and target / statistical_efficiency(global_batch_size, noise_scale, base_batch_size)
    price_per_s = request.price_per_device_hour and request.price_per_device_hour * row.num_workers / 3600
    return ForecastRow(
        devices=row.num_workers,
        nodes=row.num_nodes,
        algorithm=row.algorithm,
        global_batch_size=global_batch_size,
        micro_batch_size=row.micro_batch_size,
        num_micro_batches=row.num_passes,
        **vars(step),
        exposed_s=step.exposed_s,
        loader_s=loader_s,
        bound_by=max(waits, key=waits.__getitem__),
        samples_per_s=samples_per_s,
        speedup=samples_per_s / base_per_s,
        efficiency=efficiency,
        useful_efficiency=useful,
        samples_to_target=target,
        time_to_target_s=target and target / samples_per_s,
        cost_to_target=target and price_per_s and price_per_s * target / samples_per_s,
        cost_per_million_samples=price_per_s and price_per_s * 1e6 / samples_per_s,
        **known,
    )


def _row_of_job(inputs: PlanInputs, row: StepRow, step: StepForecast, base_per_s: float) -> ForecastRow:
    """The row of a job's step by replicas; where they do not fit, of the best mesh that does, if one does."""
    count = row.num_workers
    job, room, needed = inputs.job_on(count), inputs.worker_bytes(count), None
    if inputs.is_memory_known:
        needed = job_memory(job, inputs.model, Mesh(dp=count)).total_bytes
    known: dict[str, Any] = {"memory_bytes": needed}
    if count > job.virtual_shards:
        known["objection"] = f"it needs virtual_shards = {count}, which is part of the job"
    if needed is not None and not fits(needed, room):
        shard = f"a virtual shard of {job.shard_size} samples"
        known["objection"] = f"{shard} needs {size(needed)} of a device's {size(room)}"
        with suppress(JobError):  # no mesh fits either
            best = search_meshes(inputs, count)[0]
            known = {"memory_bytes": best.memory.total_bytes, "placement": str(best.mesh)}
            row = replace(row, micro_batch_size=job.shard_size, num_passes=best.num_micro_batches)
            step = best.forecast_like(step)
    # The timed row where a worker waited least for its samples counts.
    waits = [row.loading_s / row.samples_per_worker for row in inputs.timing.steps if row.loading_s is not None]
    return _row(
        row,
        step,
        base_per_s,
        inputs.request,
        job.global_batch_size,
        base_batch_size=inputs.job.global_batch_size,
        loader_s=min(min(waits, default=0.0) * row.samples_per_worker, step.compute_s),
        **known,
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
        efficiency_floor=request.efficiency_floor,
        price_per_device_hour=request.price_per_device_hour,
        currency=request.currency,
        noise_scale=request.noise_scale,
        base_devices=base_devices,
        **values,
    )


def statistical_efficiency(batch_size: float, noise_scale: float, base_batch_size: float = 0.0) -> float:
    """What a sample is worth in a batch of `batch_size`, measured by one in a batch of `base_batch_size`.

    To reach one loss with a global batch of B samples takes S(B) = S_min (1 + B_noise / B) steps, so
    B S(B) = E_min (1 + B / B_noise) samples (McCandlish et al. 2018, arXiv 1812.06162, section 2.3 and appendix A.1):
    (B_noise + B_0) / (B_noise + B), as in Qiao et al., "Pollux", 2021, arXiv 2008.12260, section 3. With B_0 = 0, the
    limit of small batches, it is 1 / (1 + B / B_noise). An infinite noise scale makes every sample worth the same.
    """
    if math.isinf(noise_scale) or batch_size == base_batch_size:
        return 1.0
    return (noise_scale + base_batch_size) / (noise_scale + batch_size)


def _efficiency(row: ForecastRow) -> float:
    return row.efficiency if row.useful_efficiency is None else row.useful_efficiency


def _worth(row: ForecastRow) -> float:
    """Useful samples/s, up to a factor that all rows share."""
    return _efficiency(row) * row.devices


def recommend(rows: Sequence[ForecastRow], floor: float) -> ForecastRow:
    """The fewest devices that come near the fastest that keeps its efficiency; the smallest if none does."""
    possible = [row for row in rows if not row.objection]
    if not possible:
        raise JobError(f"None of these device counts can run this job: {rows[0].objection}.")
    efficient = [row for row in possible if _efficiency(row) >= floor - 1e-9] or possible[:1]
    return efficient[fewest_near_fastest([_worth(row) for row in efficient])]


def explain_choice(
    rows: Sequence[ForecastRow], chosen: ForecastRow, floor: float, base_devices: int = 1
) -> tuple[str, str]:
    """The verdict in one line, and the reason in a few sentences.

    Args:
        rows: one for each number of devices.
        base_devices: the devices that speed-ups are said over.
    """
    most = max((row for row in rows if not row.objection), key=lambda row: row.devices)
    name = _devices(chosen) + (f" ({chosen.placement})" if chosen.placement else "")

    def speed(row: ForecastRow) -> str:
        return f"{row.speedup / base_devices:.2f}x the speed of {base_devices if base_devices > 1 else 'one'}"

    def reason(row: ForecastRow) -> str:
        useful = "" if row.useful_efficiency is None else f" ({100 * row.useful_efficiency:.0f} % in useful samples)"
        times_s = {"communication": row.exposed_s, "loader": row.loader_s, "compute": row.compute_s}
        bound = f"{row.bound_by} ({duration(times_s.get(row.bound_by, row.overhead_s))} of {duration(row.step_s)})"
        return f"{speed(row)}, an efficiency of {100 * row.efficiency:.0f} %{useful}, bound by {bound}"

    if len(rows) == 1:
        verdict = f"{name}: {chosen.samples_per_s:,.0f} samples/s."
    elif chosen is rows[0]:
        why = "this job, as it is, runs on no more" if chosen is most else "adding devices does not pay here"
        verdict = f"Stay with {name}: {why}."
    else:
        verdict = f"Use {name}: {speed(chosen)}."
    sentences = [f"{_devices(chosen)}: {reason(chosen)}."] if chosen.devices > 1 else []
    if most is not chosen:
        sentences.append(f"Not {_devices(most)}: {reason(most)}; the least efficiency is {100 * floor:g} %.")
    best = max(rows, key=_worth)
    if best.objection and (gain := _worth(best) / _worth(chosen)) > 1 / NEARLY:
        sentences.append(
            f"{_devices(best)} would be {gain:.2f}x as fast, but this job does not run there: {best.objection}."
        )
    return verdict, " ".join(sentences)


def _devices(row: ForecastRow) -> str:
    return number_of(row.devices, "device")


def _past_error(forecast_errors: Sequence[float]) -> str:
    """ "within 4 % on the last 12 runs", the 90th percentile of the errors of forecasts; empty without a run."""
    if not forecast_errors:
        return ""
    errors = sorted(map(abs, forecast_errors))
    worst = errors[math.ceil(0.9 * len(errors)) - 1]
    return f"within {100 * worst:.0f} % on the last {'run' if len(errors) == 1 else f'{len(errors)} runs'}"


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
    rate = inputs.request.link_bytes_per_s
    if rate is not None and any(row.nodes > 1 for row in rows):
        yield f"Links between nodes carry at most {rate / 1e9:g} GB/s, as given."
    if rows[-1].devices > len(inputs.cluster.devices):
        yield (
            f"Beyond the {len(inputs.cluster.devices)} devices of this cluster there are more nodes of "
            f"{inputs.devices_per_node} like the first."
        )
    if any(row.placement for row in rows):
        yield "Steps of meshes are priced by the links alone: nobody timed one, and no run's error is noted for them."
