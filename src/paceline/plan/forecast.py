"""Forecasts a job on 1, 2, … N devices from a few measurements: a row for each count, and the recommended one.

Everything comes from `cluster.json`: passes of the model by micro-batch, the loader, checkpoints, links inside of
and between nodes. Counts beyond the cluster are forecast on more nodes of the same kind. What was not measured is
assumed, and the forecast says what.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from paceline.errors import JobError
from paceline.noise import efficiency as statistical_efficiency
from paceline.plan.assumptions import DEVICE_MTBF_S, RESTART_S, assumptions, past_error
from paceline.plan.forecast_row import forecast_row, search_meshes
from paceline.plan.inputs import ForecastRequest, PlanInputs, needs_replicas, plan_inputs
from paceline.plan.memory import state_bytes
from paceline.plan.mesh_words import explain
from paceline.plan.recommendation import batch_advice, explain_choice, recommend, scaling_knee
from paceline.plan.reliability import Faults, availability
from paceline.spec import Cluster, Job
from paceline.spec.forecast import Forecast, ForecastRow
from paceline.spec.model_cost import ModelCost

MOST_ROWS_IN_FULL = 64
"""A range up to here has a row for every count; beyond, four counts for each doubling."""


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
    """A row for every count in `devices`, the recommended one, and why.

    Args:
        model: the costs from a trace; None: those from timings and the job's options.

    Raises:
        ClusterError: the cluster has no timing of this job, or knows nothing of a link that a count needs.
        JobError: no count can run the job.
    """
    request = request or ForecastRequest()
    inputs = plan_inputs(job, cluster, request, max(devices), model)
    base_per_s, base_goodput_per_s = forecast_row(inputs, 1).samples_per_s, _best_batch(inputs, 1)[1]
    rows = tuple(
        _compared(inputs, forecast_row(inputs, count), base_per_s, base_goodput_per_s) for count in sorted(set(devices))
    )
    chosen = recommend(rows, request.efficiency_floor)
    verdict, reason = explain_choice(rows, chosen, request.efficiency_floor)
    if request.noise_scale is not None:
        better = _best_batch(inputs, chosen.devices) if request.grow == "none" else None
        reason += batch_advice(chosen, request.noise_scale, better)
    load = inputs.timing.load
    if load is not None and load.is_disturbing:
        doubt = f"These figures may be wrong: {load.sentence()}. Probe again while the machine is idle."
        verdict = f"{doubt} By these timings: {verdict}"
    return Forecast(
        job=job.name,
        device=inputs.timing.device,
        device_kind=cluster.device_kind,
        grow=request.grow,
        rows=rows,
        recommended_devices=chosen.devices,
        verdict=verdict,
        reason=reason,
        bend=scaling_knee(rows),
        strategy=_mesh_words(inputs, chosen.devices),
        assumptions=assumptions(inputs, rows),
        efficiency_floor=request.efficiency_floor,
        price_per_device_hour=request.price_per_device_hour,
        currency=request.currency,
        run_samples=inputs.timing.num_samples and job.epochs * inputs.timing.num_samples,
        noise_scale=request.noise_scale,
        past_error=past_error(cluster.checks),
    )


def _compared(inputs: PlanInputs, row: ForecastRow, base_per_s: float, base_goodput_per_s: float) -> ForecastRow:
    """`row` with the values that depend on the noise scale, the target, the price and the single-device row.

    Args:
        base_per_s, base_goodput_per_s: samples/s of one device; useful ones with the best batch for it.
    """
    request = inputs.request
    speedup = row.samples_per_s / base_per_s
    price = request.price_per_device_hour
    price_per_s = None if price is None else price * row.devices / 3600
    lasting = availability(_faults(inputs), row.nodes)
    samples = _samples_to_target(inputs, row.global_batch_size)
    time_s = None if samples is None or lasting == 0 else samples / row.samples_per_s / lasting
    useful = None
    if request.noise_scale is not None:
        goodput = row.samples_per_s * statistical_efficiency(row.global_batch_size, request.noise_scale)
        useful = goodput / (row.devices * base_goodput_per_s)
    return dataclasses.replace(
        row,
        speedup=speedup,
        efficiency=speedup / row.devices,
        useful_efficiency=useful,
        samples_to_target=samples,
        time_to_target_s=time_s,
        cost_to_target=None if price_per_s is None or time_s is None else price_per_s * time_s,
        cost_per_million_samples=None if price_per_s is None else price_per_s * 1e6 / row.samples_per_s,
    )


def _best_batch(inputs: PlanInputs, count: int) -> tuple[int, float]:
    """Which of the job's batch on this count, its half, quarter, … brings the most useful samples/s, and how many.

    Without a noise scale every sample is as useful as another.
    """
    noise_scale = inputs.request.noise_scale
    noise = math.inf if noise_scale is None else noise_scale
    found = []
    batch = inputs.job_on(count).global_batch_size
    while batch >= count:
        shards = min(max(inputs.job.virtual_shards, count), batch)
        row = forecast_row(inputs.with_batch(batch, shards), count)
        found.append((batch, row.samples_per_s * statistical_efficiency(batch, noise)))
        batch //= 2
    return max(found, key=lambda pair: pair[1], default=(count, 0.0))


def _samples_to_target(inputs: PlanInputs, global_batch_size: int) -> float | None:
    target, noise_scale = inputs.request.target_samples, inputs.request.noise_scale
    if target is None or noise_scale is None:
        return target
    return target / statistical_efficiency(global_batch_size, noise_scale, inputs.job.global_batch_size)


def _faults(inputs: PlanInputs) -> Faults:
    devices_per_node = max(inputs.more_devices_per_node, *inputs.node_sizes)
    rate, state = inputs.timing.checkpoint_bytes_per_s, state_bytes(inputs.job)
    size_bytes = inputs.timing.num_parameters * (state.parameter + state.optimizer)
    return Faults(DEVICE_MTBF_S / devices_per_node, size_bytes / rate if rate else 1.0, RESTART_S)


def _mesh_words(inputs: PlanInputs, count: int) -> tuple[str, ...]:
    """The best meshes of `count` devices in words; none for one device, and where bits must not depend on it."""
    if count == 1 or needs_replicas(inputs.job):
        return ()
    try:
        return explain(search_meshes(inputs, count))
    except JobError as problem:
        return (str(problem),)
