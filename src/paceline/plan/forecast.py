"""A forecast of several numbers of devices: a row for each, the recommended one, and why.

A job's rows follow from the steps that `probe` timed on 1, 2, … N workers; those of a table from the rows that were
measured. Both go through one step model and one recommendation. What was not measured is what hardware usually has, and
the forecast says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from paceline.errors import ClusterError, JobError
from paceline.mathematics import NEARLY, fewest_near_fastest
from paceline.plan.memory import fits, job_memory, with_measured_memory, worker_memory_bytes
from paceline.plan.meshes import MeshCandidate, Workload, needs_replicas, search
from paceline.plan.placement import pick, workers_by_node
from paceline.plan.step_model import PRIORS, Fit, StepForecast, fit, predict
from paceline.spec import AlgorithmName, Cluster, Job, Mesh, Node, StepRow
from paceline.spec.algorithm import automatic_algorithm
from paceline.spec.cluster import JobTiming
from paceline.spec.forecast import BoundBy, Forecast, ForecastRow, Grow, ModelCost, fastest_of_each_count
from paceline.words import duration, number_of, size

_DISTURBED_SPREAD = 0.1
"""Steps of an idle machine vary less than by this part."""
_CLEARLY_FASTER = 0.9
"""A mesh is taken in place of replicas where its step takes at most this fraction of theirs."""


@dataclass(frozen=True)
class ForecastRequest:
    """The user's request, besides the job and the devices."""

    grow: Grow = "none"
    efficiency_floor: float = 0.5
    price_per_device_hour: float | None = None
    currency: str = ""
    noise_scale: float | None = None
    """The gradient noise scale, in samples."""
    target_samples: float | None = None
    """Samples that the job needs to reach its target with its own global batch."""
    link_bytes_per_s: float | None = None
    """A datasheet's rate between nodes."""
    devices_per_node: int | None = None
    """Devices of each node beyond the cluster; None: as many as its largest node has."""


@dataclass(frozen=True)
class PlanInputs:
    """Job, cluster and request, with what follows from them for every number of devices."""

    job: Job
    cluster: Cluster
    request: ForecastRequest
    timing: JobTiming
    fit: Fit
    model: ModelCost

    def traced(self, model: ModelCost) -> PlanInputs:
        """These inputs with a traced model; its memory is the measured one where that is known."""
        model = replace(model, num_parameters=self.timing.num_parameters)
        return replace(self, model=with_measured_memory(model, self.job, self.timing))

    @property
    def devices_per_node(self) -> int:
        """Devices of each node beyond the cluster."""
        return self.request.devices_per_node or max(len(node.devices) for node in self.cluster.nodes)

    def job_on(self, count: int) -> Job:
        return self.job.scaled_for(count) if self.request.grow == "batch" else self.job

    def layout(self, count: int) -> tuple[int, ...]:
        """Workers on each node: all on the only one if so many were timed there, else the nodes are filled in turn, and
        further ones like them."""
        if len(self.cluster.nodes) == 1 and any(row.workers_per_node == (count,) for row in self.timing.steps):
            return (count,)
        return workers_by_node(count, [len(node.devices) for node in self.cluster.nodes], self.devices_per_node)

    def workload(self, count: int) -> Workload:
        """The job on `count` devices, by the steps that were timed."""
        on_node = max(self.layout(count))
        room = worker_memory_bytes(self.cluster, on_node)
        return Workload(self.job_on(count), self.model, count, on_node, room, self.fit.typical)

    def replica_bytes(self, count: int) -> float:
        """Memory that each of `count` workers with the whole model needs; 0: not known."""
        if self.model.bytes_per_sample is None:
            return 0.0
        return job_memory(self.job_on(count), self.model, Mesh(dp=count)).total_bytes

    def has_room(self, count: int) -> bool:
        """Whether each of `count` workers can hold the whole model, as far as is known."""
        return fits(self.replica_bytes(count), self.workload(count).memory_bytes)


def job_step(job: Job, workers_per_node: Sequence[int], num_parameters: int, has_gpus: bool) -> StepRow:
    """A step of the job by workers with the whole model; the worker with the most virtual shards counts."""
    count, wire = sum(workers_per_node), job.aggregation.wire
    if wire == "auto-lossy":
        wire = "bfloat16" if len(workers_per_node) > 1 else "float32"
    algorithm: AlgorithmName = "tree_exact"  # which sends values as they are
    if job.parity == "numeric":
        algorithm = automatic_algorithm(workers_per_node, is_gloo=not has_gpus, wire=wire)
    width = 4 if wire == "float32" or algorithm == "tree_exact" else 2
    shards = max(job.virtual_shards, min(count, job.global_batch_size))
    return StepRow(
        tuple(workers_per_node),
        -(-job.global_batch_size // shards),
        -(-shards // count),
        algorithm,
        gradient_bytes=width * num_parameters or None,
        sync_every=job.aggregation.sync_every if job.aggregation.is_infrequent else 1,
    )


def plan_inputs(job: Job, cluster: Cluster, most_devices: int, request: ForecastRequest | None = None) -> PlanInputs:
    """Everything that forecasts of up to `most_devices` devices need; of the model they know what was timed. Raises
    `ClusterError` where the cluster has no devices or no timing of this job, or nothing is known of links between
    nodes."""
    if not cluster.devices:
        raise ClusterError("This cluster has no devices; write one with paceline probe.")
    request, timing = request or ForecastRequest(), _timing_of(job, cluster)
    on_node = max(len(cluster.nodes[0].devices), *(row.most_on_node for row in timing.steps))
    if request.link_bytes_per_s is None and most_devices > on_node and all(row.num_nodes == 1 for row in timing.steps):
        raise ClusterError(
            f"{most_devices} devices need several nodes (one has {on_node}), and no step was timed on several; probe "
            "them, or give the rate of the links between them in one direction: link_rate = 1.25e9."
        )
    steps = tuple(replace(row, link_bytes_per_s=request.link_bytes_per_s) for row in timing.steps)
    inside = None if any(row.most_on_node > 1 for row in steps) else _inside_bytes_per_s(cluster.nodes[0])
    model = with_measured_memory(ModelCost(timing.num_parameters), job, timing)
    return PlanInputs(job, cluster, request, timing, _fit_once(steps, inside), model)


_fit_once = lru_cache(maxsize=8)(fit)


def _inside_bytes_per_s(node: Node) -> float | None:
    """The rate of the slowest link in the best ring of all GPUs of a node; None: not known, or it has CPU workers."""
    if node.device_kind != "cuda" or len(node.devices) < 2:
        return None
    slowest = pick(node, len(node.devices)).ring.bottleneck
    return slowest.bytes_per_s if slowest else None


def _timing_of(job: Job, cluster: Cluster) -> JobTiming:
    """The latest timing of this job. Raises `ClusterError` if there is none, or if settings on which its times depend
    have changed since."""
    now, found, changed = job.timed_settings, None, []
    for timing in cluster.timings:
        if timing.job == job.name and timing.steps:
            others = [key for key, value in timing.settings.items() if now.get(key, value) != value]
            changed = [f"{key} = {timing.settings[key]}, now {now[key]}" for key in others]
            found = found if changed else timing
    if found is not None:
        return found
    if changed:
        told = f"The job '{job.name}' was timed with other settings: {', '.join(changed)}"
        raise ClusterError(f"{told}; run paceline probe with the present settings first.")
    timed = ", ".join(sorted({timing.job for timing in cluster.timings if timing.steps})) or "no job"
    raise ClusterError(
        f"The cluster has no timed steps of the job '{job.name}' (it has timings of {timed}); run paceline probe JOB "
        "first."
    )


def forecast(inputs: PlanInputs, devices: Sequence[int]) -> Forecast:
    """A row for every count in `devices`, the recommended one, and why; speed-ups are over one device. Raises
    `JobError` where no count can run the job."""
    job, request, cluster, timing = inputs.job, inputs.request, inputs.cluster, inputs.timing
    has_gpus = cluster.device_kind == "cuda"
    asked = [
        job_step(inputs.job_on(count), inputs.layout(count), timing.num_parameters, has_gpus)
        for count in sorted({1, *devices})
    ]
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
        device=timing.device,
        device_kind=cluster.device_kind,
        grow=request.grow,
        run_samples=timing.num_samples and job.epochs * timing.num_samples,
        past_error=_past_error(cluster.forecast_errors),
        assumptions=(*_unmeasured(timing.steps, asked), *_assumed(inputs, rows)),
    )
    spread = max(row.spread for row in timing.steps)
    if spread > _DISTURBED_SPREAD:
        warning = f"These figures may be wrong: timed steps varied by {100 * spread:.0f} %, as on a busy machine"
        found = replace(found, verdict=f"{warning}; probe again while it is idle. By these steps: {found.verdict}")
    if found.recommended_devices == 1 or needs_replicas(job):
        return found
    try:
        meshes = [f"{mesh.in_words()}." for mesh in search(inputs.workload(found.recommended_devices))[:2]]
        hint = "Pipelines and tensor parallelism are compared where the model is traced: --trace, or trace=True."
        basis = "Meshes are priced by compute and links alone; the rows of the table also follow the timed steps."
        return replace(found, strategy=(*meshes, basis, *[hint] * (not inputs.model.layers)))
    except JobError as problem:
        return replace(found, strategy=(str(problem),))


def forecast_of_rows(
    name: str, measured: Sequence[StepRow], asked: Sequence[StepRow], request: ForecastRequest
) -> Forecast:
    """The forecast of a table: a row for each step in `asked`, and one for the base of speed-ups, which of the steps
    with the fewest devices is the fastest. Raises `JobError` where a row has an algorithm without a cost formula.

    Args:
        measured, asked: one at least of both.
    """
    every = list(dict.fromkeys([*(row.unmeasured() for row in measured), *asked]))
    steps = dict(zip(every, predict(fit(measured), every), strict=True))
    rates = {row: row.samples_per_worker / step.step_s for row, step in steps.items()}
    fewest = min(row.num_workers for row in every)
    base = max((row for row in every if row.num_workers == fewest), key=rates.__getitem__)
    shown = sorted(dict.fromkeys([*({base} - {*asked}), *asked]), key=lambda row: (row.num_workers, row.num_nodes))
    counts, rows = [row.num_workers for row in shown], []
    for row in shown:  # of several rows of as many devices each is named
        passes = f"{row.num_passes} x " if row.num_passes > 1 else ""
        several = f"{row.layout_name}, micro-batch {passes}{row.micro_batch_size}, {row.algorithm}"
        placement = several if counts.count(row.num_workers) > 1 else ""
        rows.append(_row(row, steps[row], rates[base], request, row.global_batch_size, placement=placement))
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
    """The row of a step, whose speed-up is over the base.

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
    job, needed = inputs.job_on(count), inputs.replica_bytes(count)
    known: dict[str, Any] = {"memory_bytes": needed or None}
    if count > job.virtual_shards:
        known["objection"] = f"it needs virtual_shards = {count}, which is part of the job"
    if not inputs.has_room(count):
        workload, shard = inputs.workload(count), f"a virtual shard of {job.shard_size} samples"
        known["objection"] = f"{shard} needs {size(needed)} of a device's {size(workload.memory_bytes)}"
        with suppress(JobError):  # no mesh fits either
            best = search(workload)[0]
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
    """The forecast of compared rows with the recommended one, and why: the fewest devices that come near the fastest
    that keeps its efficiency, or the smallest number if none does. `values`: other fields of the forecast.
    """
    curve, floor = fastest_of_each_count(rows), request.efficiency_floor
    possible = [row for row in curve if not row.objection]
    if not possible:
        raise JobError(f"None of these device counts can run this job: {rows[0].objection}.")
    efficient = [row for row in possible if _worth(row) >= (floor - 1e-9) * row.devices] or possible[:1]
    chosen = efficient[fewest_near_fastest([_worth(row) for row in efficient])]
    verdict, reason = explain_choice(curve, chosen, floor, base_devices)
    return Forecast(
        rows=tuple(rows),
        recommended_devices=chosen.devices,
        verdict=verdict,
        reason=reason,
        efficiency_floor=floor,
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


def _worth(row: ForecastRow) -> float:
    """The speed-up in useful samples."""
    return row.devices * (row.efficiency if row.useful_efficiency is None else row.useful_efficiency)


def explain_choice(
    rows: Sequence[ForecastRow], chosen: ForecastRow, floor: float, base_devices: int = 1
) -> tuple[str, str]:
    """The verdict in one line, and the reason in a few sentences.

    Args:
        rows: one for each number of devices.
        base_devices: the devices that speed-ups are said over.
    """
    most = max((row for row in rows if not row.objection), key=lambda row: row.devices)
    name = number_of(chosen.devices, "device") + (f" ({chosen.placement})" if chosen.placement else "")

    def speed(row: ForecastRow) -> str:
        return f"{row.speedup / base_devices:,.2f}x the speed of {base_devices if base_devices > 1 else 'one'}"

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
    sentences = [f"{number_of(chosen.devices, 'device')}: {reason(chosen)}."] if chosen.devices > 1 else []
    if most is not chosen:
        efficient = f"the least efficiency is {100 * floor:g} %"
        sentences.append(f"Not {number_of(most.devices, 'device')}: {reason(most)}; {efficient}.")
    best = max(rows, key=_worth)
    if best.objection and (gain := _worth(best) / _worth(chosen)) > 1 / NEARLY:
        sentences.append(
            f"{number_of(best.devices, 'device')} would be {gain:,.2f}x as fast, but this job does not run there: "
            f"{best.objection}."
        )
    return verdict, " ".join(sentences)


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


def choose_mesh(job: Job, model: ModelCost, cluster: Cluster, num_workers: int) -> tuple[MeshCandidate, str]:
    """The mesh to train on, and why in one sentence: replicas where they fit and nothing is clearly faster, else the
    fastest mesh, or where no step of the job was timed the simplest one that fits. Raises `JobError` where no mesh
    fits. `model`: what a trace of it told."""
    try:
        workload = plan_inputs(job, cluster, num_workers).traced(model).workload(num_workers)
    except ClusterError:
        most_on_node = max(min(num_workers, len(cluster.nodes[0].devices)), -(-num_workers // len(cluster.nodes)))
        room = worker_memory_bytes(cluster, most_on_node)
        workload = Workload(job, model, num_workers, most_on_node, room, dict.fromkeys(PRIORS, 0.0))
    found = search(workload)
    winner, replicas = found[0], next((one for one in found if one.mesh.is_plain), None)
    why = "whole replicas do not fit"
    if replicas is not None:
        why = f"whole replicas take {duration(replicas.step_s)} a step"
        if winner.step_s >= _CLEARLY_FASTER * replicas.step_s:
            winner, why = replicas, "no other mesh that was timed is clearly faster"
    return winner, f"{winner.mesh}: it holds {size(winner.memory.total_bytes)} a worker, and {why}."
