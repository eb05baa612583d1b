"""What a job will do on 1, 2, … N devices, from a few measurements: a row for each count, and which one to take.

Everything comes from `cluster.json`: passes of the model by micro-batch, the loader, checkpoints, links inside of
and between nodes. Counts beyond the cluster are forecast on more nodes of the same kind. What was not measured is
assumed, and the forecast says what.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ClusterError, JobError
from paceline.noise import efficiency as statistical_efficiency
from paceline.plan.advice import about_batch, bend, gib, recommend, words
from paceline.plan.buckets import exposed_s, num_buckets, sums_of_exposed_s, sums_s
from paceline.plan.collectives import COSTS, WIRE_FACTORS, cost_s
from paceline.plan.memory import (
    StateBytes,
    TransformerShape,
    device_memory,
    largest_micro_batch,
    measured_activations,
    state_bytes,
    transformer_layers,
)
from paceline.plan.model import Layout, Level, Network
from paceline.plan.network_costs import BETWEEN_ALPHA_S, PER_MESSAGE_S, SHARED_MEMORY, between_level, inside_level
from paceline.plan.search import SearchResult, Workload, explain, search
from paceline.plan.simulate import Faults, Jitter, Machine, Pattern, availability, exchange_s, simulate_steps
from paceline.plan.step_time import (
    ComputeTime,
    StepModel,
    bound_by,
    expected_maximum,
    forecast_step,
    neighbour_slowdown,
    neighbours_factor,
    slowest_s,
)
from paceline.spec import AlgorithmName, Cluster, Job, JobTiming, Mesh
from paceline.spec.forecast import Forecast, ForecastRow, Grow, SimulatedRow
from paceline.spec.model_cost import Activations, Layers, ModelCost

MOST_ROWS_IN_FULL = 64
"""A range up to here has a row for every count; beyond, four counts for each doubling."""
ALGORITHM_MARGIN = 0.1
"""An algorithm has to be so much faster than the backend's own to be chosen, as at the start of a run."""
# What the probe does not measure.
DEVICE_MTBF_S = 50_000 * 3600.0
"""Llama 3 (Dubey et al. 2024, section 3.3.4): 419 unexpected interruptions in 54 days of 16,384 H100."""
RESTART_S = 300.0
"""Noticing a failure, starting workers, loading a checkpoint."""
STRAGGLER_SPREAD = 0.02
_LEAST_SUM_FACTOR = 0.25
"""No step is believed that shows a sum to cost less than this part of its price: links cannot be that wrong."""
STEP_OVERHEAD_S = 3e-4
"""Around the optimizer: launching it, counting samples, schedules."""
_MOST_BUCKETS = 8
"""Simulated one by one; more of them hardly change when the last one has arrived."""
_MEMORY_RATE = {"cuda": 800e9, "cpu": 8e9}
"""Bytes/s at which one worker's optimizer goes through parameters, gradients and state, where it was not timed."""
_COMPUTE_ERROR, _COMMUNICATION_ERROR, _UNSEEN_ERROR = 0.05, 0.2, 0.03
"""Standard deviations of logarithms: of measured compute, of priced communication, and for each doubling of devices
beyond those that were measured."""


@dataclass(frozen=True)
class Question:
    """What the user wants to know, besides the job and the devices."""

    grow: Grow = "none"
    efficiency_floor: float = 0.5
    price_per_device_hour: float | None = None
    noise_scale: float | None = None
    """In samples."""
    target_samples: float | None = None
    """Samples that the job needs to its target with its own global batch."""
    link_bytes_per_s: float | None = None
    """Between nodes, where no probe measured it."""
    devices_per_node: int | None = None
    """Of nodes beyond the cluster; None: as many as its largest one has."""


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
    question: Question | None = None,
    facts: ModelCost | None = None,
) -> Forecast:
    """A row for every count in `devices`, the recommended one, and why.

    Args:
        facts: what a trace of the model told; None: what was timed, and what the job's options tell.

    Raises:
        ClusterError: the cluster has no timing of this job, or knows nothing of a link that a count needs.
        JobError: no count can run the job.
    """
    question = question or Question()
    known = ForecastInputs.of(job, cluster, question, max(devices), facts)
    base_per_s, base_goodput_per_s = known.row(1).samples_per_s, known.best_batch(1)[1]
    rows = tuple(known.compared(known.row(count), base_per_s, base_goodput_per_s) for count in sorted(set(devices)))
    chosen = recommend(rows, question.efficiency_floor)
    verdict, reason = words(rows, chosen, question.efficiency_floor)
    if question.noise_scale is not None:
        better = known.best_batch(chosen.devices) if question.grow == "none" else None
        reason += about_batch(chosen, question.noise_scale, better)
    return Forecast(
        job=job.name,
        device=known.timing.device,
        device_kind=cluster.device_kind,
        grow=question.grow,
        rows=rows,
        recommended_devices=chosen.devices,
        verdict=verdict,
        reason=reason,
        bend=bend(rows),
        strategy=known.strategy(chosen.devices),
        simulated=known.simulated(max(devices)),
        assumptions=known.assumptions(rows),
        efficiency_floor=question.efficiency_floor,
        price_per_device_hour=question.price_per_device_hour,
        noise_scale=question.noise_scale,
        past_error=cluster.past_error(),
    )


@dataclass(frozen=True)
class ForecastInputs:
    """Job, cluster and question, with what follows from them for every count."""

    job: Job
    cluster: Cluster
    question: Question
    timing: JobTiming
    node_sizes: tuple[int, ...]
    """Devices of each node that there is."""
    more_devices_per_node: int
    """Of every further one."""
    between: Level | None
    activations: Activations | None
    memory_bytes: float | None
    """Of the smallest device."""
    layers: Layers
    """Of the model, as far as anybody knows them."""

    @classmethod
    def of(
        cls, job: Job, cluster: Cluster, question: Question, most_devices: int, facts: ModelCost | None = None
    ) -> ForecastInputs:
        if not cluster.nodes or not cluster.devices:
            raise ClusterError("This cluster has no devices; write one with paceline probe.")
        timing = _timing_of(job, cluster)
        sizes = tuple(len(node.devices) for node in cluster.nodes)
        between = between_level(cluster, question.link_bytes_per_s)
        more = question.devices_per_node or max(sizes)
        num_here = sizes[0] if between is None else math.inf
        if most_devices > num_here:
            raise ClusterError(
                f"{most_devices} devices need several nodes, and nobody measured what links them (one node has "
                f"{sizes[0]}); run paceline probe with --hosts, or give the rate in one direction: --link-rate 1.25e9."
            )
        device_bytes = min(device.memory_bytes for device in cluster.devices)
        state = state_bytes(job)
        shape = transformer_shape(job)
        layers = () if shape is None else transformer_layers(shape, timing.num_parameters)
        measured = measured_activations(timing.micro_batches, timing.num_parameters, state)
        return cls(
            job,
            cluster,
            question,
            timing,
            sizes,
            more,
            between,
            measured if measured or facts is None else facts.activations,
            float(device_bytes) if cluster.device_kind == "cuda" and device_bytes else None,
            facts.layers if facts else layers,
        )

    # --- one count ---

    def job_on(self, count: int) -> Job:
        return self.job.grown(count) if self.question.grow == "batch" else self.job

    def layout(self, count: int) -> Layout:
        """The nodes that there are, the first ones first, then more of the same kind."""
        workers: list[int] = []
        left = count
        for size in self.node_sizes:
            if left:
                workers.append(min(size, left))
                left -= workers[-1]
        full, rest = divmod(left, self.more_devices_per_node)
        return Layout((*workers, *(self.more_devices_per_node,) * full, *((rest,) if rest else ())))

    def network(self, layout: Layout, label: str | None = None) -> Network:
        kind = self.cluster.device_kind
        inside = inside_level(self.cluster.nodes[0], max(layout.workers_per_node), label)
        return Network(inside, self.between or inside, PER_MESSAGE_S[kind])

    def row(self, count: int) -> ForecastRow:
        """Without what compares it with others."""
        job, layout = self.job_on(count), self.layout(count)
        samples, shard, num_shards = largest_share(job, count)
        micro_batch_size, objection = self._micro_batch(job, count, samples, shard)
        num_passes = -(-samples // micro_batch_size)
        if job.parity == "bitwise":  # a pass for each virtual shard
            micro_batch_size, num_passes = shard, num_shards
        algorithm, communication_s = self._cheapest(job, layout)
        pass_s = samples / num_passes * self._sample_s(micro_batch_size)
        beside_s = pass_s * self._neighbours_factor(layout)
        exposed = self._exposed_s(beside_s, communication_s, layout)
        loads_between = self.timing.loads_between_passes
        model = StepModel(
            compute=ComputeTime(pass_s, 0.0),
            overlap_exponent=1.0,  # what is hidden is left out already
            tail_fraction=0.0,
            straggler_spread=STRAGGLER_SPREAD,
            neighbour_slowdown=self._neighbour_slowdown,
            overhead_s=self._overhead_s(job, layout),
            loader_samples_per_s=self._node_loader_rate(layout),
            loads_between_passes=loads_between,
        )
        step = forecast_step(model, layout, samples / num_passes, exposed, num_passes)
        limit = bound_by(step.compute_s, communication_s, step.loader_s, step.overhead_s, step.total_s, loads_between)
        width = math.exp(1.645 * self._error(count, step.exposed_s / step.total_s))
        memory = self._memory_bytes(count, micro_batch_size, num_passes)
        row = ForecastRow(
            devices=count,
            nodes=layout.num_nodes,
            algorithm=algorithm,
            global_batch_size=job.global_batch_size,
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_passes,
            step_s=step.total_s,
            compute_s=step.compute_s,
            communication_s=communication_s,
            exposed_s=step.exposed_s,
            loader_s=step.loader_s,
            overhead_s=step.overhead_s,
            bound_by=limit,
            low_s=step.total_s / width,
            high_s=step.total_s * width,
            samples_per_s=job.global_batch_size / step.total_s,
            speedup=1.0,
            efficiency=1.0,
            useful_efficiency=None,
            samples_to_target=None,
            time_to_target_s=None,
            cost_to_target=None,
            cost_per_million_samples=None,
            memory_bytes=memory,
            objection=objection or _impossible(job, count),
        )
        return self._meshed(row) if objection and count > 1 and not needs_replicas(job) else row

    def _meshed(self, row: ForecastRow) -> ForecastRow:
        """`row`, whose replicas do not fit, with the step of the best mesh that does; itself if none does."""
        try:
            best = self.found(row.devices).winner
        except JobError:
            return row
        step_s = best.step_s - best.optimizer_s + row.overhead_s
        said_s = best.tensor_s + best.exposed_s
        return dataclasses.replace(
            row,
            micro_batch_size=best.micro_batch_size,
            num_micro_batches=best.num_micro_batches,
            step_s=step_s,
            compute_s=best.compute_s,
            communication_s=said_s,
            exposed_s=said_s + best.bubble_s,
            bound_by=bound_by(best.compute_s, said_s, row.loader_s, row.overhead_s, step_s),
            low_s=step_s * row.low_s / row.step_s,
            high_s=step_s * row.high_s / row.step_s,
            samples_per_s=row.global_batch_size / step_s,
            memory_bytes=best.memory.total_bytes,
            objection=_impossible(self.job_on(row.devices), row.devices),
        )

    def compared(self, row: ForecastRow, base_per_s: float, base_goodput_per_s: float) -> ForecastRow:
        """`row` with what depends on the noise scale, the target and the price, and on what one device does.

        Args:
            base_per_s, base_goodput_per_s: samples/s of one device; useful ones with the best batch for it.
        """
        speedup = row.samples_per_s / base_per_s
        price = self.question.price_per_device_hour
        lasting = availability(self.faults(), row.nodes)
        price_per_s = None if price is None else price * row.devices / 3600
        samples = self.samples_to_target(row.global_batch_size)
        time_s = None if samples is None or lasting == 0 else samples / row.samples_per_s / lasting
        useful = None
        if self.question.noise_scale is not None:
            goodput = row.samples_per_s * statistical_efficiency(row.global_batch_size, self.question.noise_scale)
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

    def best_batch(self, count: int) -> tuple[int, float]:
        """Of the job's batch on this count, its half, quarter, …: which brings the most useful samples/s, and how many.

        Without a noise scale every sample is as useful as another.
        """
        noise = math.inf if self.question.noise_scale is None else self.question.noise_scale
        alike = dataclasses.replace(self.question, grow="none")
        found = []
        batch = self.job_on(count).global_batch_size
        while batch >= count:
            shards = min(max(self.job.virtual_shards, count), batch)
            job = dataclasses.replace(self.job, global_batch_size=batch, virtual_shards=shards)
            row = dataclasses.replace(self, job=job, question=alike).row(count)
            found.append((batch, row.samples_per_s * statistical_efficiency(batch, noise)))
            batch //= 2
        return max(found, key=lambda pair: pair[1], default=(count, 0.0))

    def samples_to_target(self, global_batch_size: int) -> float | None:
        target, noise = self.question.target_samples, self.question.noise_scale
        if target is None or noise is None:
            return target
        return target / statistical_efficiency(global_batch_size, noise, self.job.global_batch_size)

    def faults(self) -> Faults:
        g = max(self.more_devices_per_node, *self.node_sizes)
        rate = self.timing.checkpoint_bytes_per_s
        kept = state_bytes(self.job)
        size_bytes = self.timing.num_parameters * (kept.parameter + kept.optimizer)
        return Faults(DEVICE_MTBF_S / g, size_bytes / rate if rate else 1.0, RESTART_S)

    # --- parts of a step ---

    def _micro_batch(self, job: Job, count: int, samples: int, shard: int) -> tuple[int, str]:
        """Samples of one pass, and why even the smallest one does not fit.

        A share goes through the model at once if memory has room for it; what is not known to fit is split into what
        was seen to fit.
        """
        if self.memory_bytes is None:
            return samples, ""
        seen = self.timing.largest_micro_batch_size or 1
        if self.activations is not None:
            fitting = largest_micro_batch(
                self.timing.num_parameters,
                state_bytes(job),
                Mesh(dp=count),
                self.activations,
                self.memory_bytes,
                samples,
            )
            if fitting < shard:
                need = self._memory_bytes(count, shard, 1)
                return shard, (
                    f"a virtual shard of {shard} samples needs {gib(need)} of a device's {gib(self.memory_bytes)}"
                )
        else:
            fitting = seen
            if fitting < shard:
                return shard, f"a virtual shard has {shard} samples, and {seen} are all that was seen to fit"
        # As few passes as fit, all of nearly the same size.
        num_passes = -(-samples // (fitting // shard * shard))
        return min(samples, -(-samples // num_passes // shard) * shard), ""

    def _sample_s(self, micro_batch_size: int) -> float:
        return pass_s(self.timing, micro_batch_size) / micro_batch_size

    def _cheapest(self, job: Job, layout: Layout) -> tuple[AlgorithmName, float]:
        """Which algorithm sums a step's gradients, and in how many seconds, by the rules of `algorithm = "auto"`."""
        if layout.num_workers == 1:
            return "all_reduce", 0.0
        candidates, factors = self._candidates(job, layout), self._sum_factors(layout)
        # What was timed is not beaten by what nobody has seen.
        names = [name for name in candidates if name in factors] or candidates
        # Workers that meet every k-th step pay the k-th part.
        every = job.aggregation.sync_every if job.aggregation.method in ("local_sgd", "diloco") else 1
        wire = job.aggregation.wire
        prices = {name: self._sum_s(name, layout, wire) * factors.get(name, 1.0) / every for name in names}
        best = min(prices, key=lambda name: prices[name])
        plain = prices.get("all_reduce")
        if plain is not None and prices[best] > (1 - ALGORITHM_MARGIN) * plain:
            best = "all_reduce"
        return best, prices[best]

    def _candidates(self, job: Job, layout: Layout) -> list[AlgorithmName]:
        if job.parity == "bitwise":
            return ["tree_exact"]
        if layout.num_nodes == 1:
            return ["all_reduce"] if self.cluster.device_kind == "cuda" else ["all_reduce", "hierarchical"]
        has_levels = max(layout.workers_per_node) > 1
        return [
            name
            for name in COSTS
            if name in ("all_reduce", "ring", "halving_doubling") or (name == "hierarchical" and has_levels)
        ]

    def _sum_s(self, name: AlgorithmName, layout: Layout, wire: str) -> float:
        """What links make of it, in seconds; a wire format without a price is taken for float32."""
        # The two-level sum moves data inside a CPU node through memory that its workers share.
        label = SHARED_MEMORY if name == "hierarchical" and self.cluster.device_kind == "cpu" else None
        network = self.network(layout, label)
        priced = wire if wire in WIRE_FACTORS else "float32"
        return sums_s(
            4.0 * self.timing.num_parameters, lambda size_bytes: cost_s(name, size_bytes, layout, network, wire=priced)
        )

    def _sum_factors(self, layout: Layout) -> dict[AlgorithmName, float]:
        """How many times its price a sum has cost in steps of all workers, on one node or several as here.

        Of the algorithms that were timed so.
        """
        together = self.layout(self.timing.workers_together)
        if (together.num_nodes == 1) != (layout.num_nodes == 1):
            return {}
        beside_s = self._neighbours_factor(together) * pass_s(self.timing, self.timing.together_micro_batch_size)
        factors: dict[AlgorithmName, float] = {}
        for timed in self.timing.sums:
            took_s = self._all_sums_s(beside_s, timed.waiting_s, together)
            # A compressor may send far less than its price says.
            least = _LEAST_SUM_FACTOR if timed.wire in WIRE_FACTORS else 0.0
            factors[timed.algorithm] = max(least, took_s / self._sum_s(timed.algorithm, together, timed.wire))
        return factors

    @property
    def _neighbour_slowdown(self) -> float:
        """As timed, without what waiting for the slowest is taken to cost."""
        timing = self.timing
        waiting = slowest_s(1.0, STRAGGLER_SPREAD, expected_maximum(timing.workers_together))
        return neighbour_slowdown(timing.together_slowdown / waiting, timing.workers_together_on_node)

    def _neighbours_factor(self, layout: Layout) -> float:
        return float(neighbours_factor(self._neighbour_slowdown, max(layout.workers_per_node)))

    def _exposed_s(self, pass_s: float, communication_s: float, layout: Layout) -> float:
        """What of the sums a step waits for."""
        if layout.num_workers == 1:
            return 0.0
        if self._sums_on_busy_cores(layout):
            return communication_s
        return exposed_s(pass_s, 4.0 * self.timing.num_parameters, communication_s)

    def _all_sums_s(self, pass_s: float, waiting_s: float, layout: Layout) -> float:
        """How long the sums take for which a step waits so long."""
        if self._sums_on_busy_cores(layout):
            return waiting_s
        return sums_of_exposed_s(pass_s, 4.0 * self.timing.num_parameters, waiting_s)

    def _sums_on_busy_cores(self, layout: Layout) -> bool:
        """On CPU, cores that all compute cannot add up on their node meanwhile."""
        num_busy = max(layout.workers_per_node) * self.timing.threads_per_worker
        is_full = self.cluster.device_kind == "cpu" and num_busy >= self.cluster.nodes[0].num_cores
        return is_full and layout.num_nodes == 1

    def _overhead_s(self, job: Job, layout: Layout) -> float:
        busy_s = self._update_s(job)
        if layout.num_workers > 1 and job.measure_noise and job.parity == "numeric":
            # In every second step gradients are read twice more, before they are summed and after.
            state = state_bytes(job)
            busy_s *= 1 + state.gradient / _moved_bytes(state)
        return STEP_OVERHEAD_S + busy_s * self._neighbours_factor(layout)

    def _update_s(self, job: Job) -> float:
        """As timed; else as memory lets the optimizer."""
        if self.timing.update_s is not None:
            return self.timing.update_s
        moved_bytes = self.timing.num_parameters * _moved_bytes(state_bytes(job))
        return moved_bytes / _MEMORY_RATE[self.cluster.device_kind]

    def _node_loader_rate(self, layout: Layout) -> float | None:
        """Every worker has a loader of its own; who loads between passes is slowed by neighbours as in passes."""
        rate = self.timing.loader_samples_per_s
        if rate is not None and self.timing.loads_between_passes:
            rate /= self._neighbours_factor(layout)
        return None if rate is None else rate * max(layout.workers_per_node)

    def _memory_bytes(self, count: int, micro_batch_size: int, num_passes: int) -> float | None:
        if self.activations is None:
            return None
        return device_memory(
            self.timing.num_parameters,
            state_bytes(self.job),
            Mesh(dp=count),
            self.activations,
            micro_batch_size,
            num_micro_batches=num_passes,
        ).total_bytes

    def _error(self, count: int, exposed_share: float) -> float:
        """Standard deviation of log(measured / forecast); every doubling beyond the cluster adds to it."""
        unseen = max(0.0, math.log2(count / sum(self.node_sizes)))
        return math.hypot(_COMPUTE_ERROR, _COMMUNICATION_ERROR * exposed_share, _UNSEEN_ERROR * unseen)

    # --- beyond data parallelism, and beyond the cluster ---

    def workload(self, count: int, memory_bytes: float | None = None) -> Workload:
        """What `search` goes by; on CPU a worker has its part of its node's memory."""
        job, layout = self.job_on(count), self.layout(count)
        node = self.cluster.nodes[0]
        on_node = max(len(node.devices), max(layout.workers_per_node))
        return Workload(
            num_parameters=self.timing.num_parameters,
            global_batch_size=job.global_batch_size,
            state=state_bytes(job),
            activations=self.activations or Activations(0.0),
            compute_s=lambda samples: pass_s(self.timing, samples) * self._neighbours_factor(layout),
            optimizer_s=self._update_s(job),
            memory_bytes=memory_bytes or self.memory_bytes or node.memory_bytes / on_node or math.inf,
            layers=self.layers,
            shard_size=shard_size(job),
            backend="nccl" if self.cluster.device_kind == "cuda" else "gloo",
        )

    def found(self, count: int, memory_bytes: float | None = None) -> SearchResult:
        """The meshes of `count` devices. Raises `JobError` where none fits."""
        layout = self.layout(count)
        return search(self.workload(count, memory_bytes), count, max(layout.workers_per_node), self.network(layout))

    def strategy(self, count: int) -> tuple[str, ...]:
        """The best meshes of `count` devices in words; none for one device, and where bits must not depend on it."""
        if count == 1 or needs_replicas(self.job):
            return ()
        try:
            return explain(self.found(count), self.workload(count))
        except JobError as problem:
            return (str(problem),)

    def simulated(self, most: int) -> tuple[SimulatedRow, ...]:
        """Powers of two beyond one node, node by node; only equal nodes can be simulated."""
        g = self.more_devices_per_node
        counts = [g << power for power in range(1, 64) if (g << power) <= most]
        return tuple(self._simulated(count) for count in counts if self.between is not None and len(counts) < 20)

    def _simulated(self, count: int) -> SimulatedRow:
        g = self.more_devices_per_node
        row = self.row(count)
        machine = Machine(count // g, g, self.network(Layout((g, g))))
        size_bytes = 4.0 * self.timing.num_parameters * WIRE_FACTORS.get(self.job.aggregation.wire, 1.0)
        pattern = _faster_pattern(machine, size_bytes)
        jitter = Jitter(STRAGGLER_SPREAD, slow_share=0.01, slow_factor=1.05, link_spread=0.1)
        steps = simulate_steps(
            machine,
            row.compute_s,
            size_bytes,
            jitter=jitter,
            pattern=pattern,
            num_buckets=min(_MOST_BUCKETS, num_buckets(size_bytes)),
            num_steps=12,
        )
        optimizer_s = self._overhead_s(self.job, self.layout(count))
        ordered = sorted(float(value) + optimizer_s for value in steps.total_s)
        faults = self.faults()
        return SimulatedRow(
            devices=count,
            nodes=machine.num_nodes,
            step_s=ordered[len(ordered) // 2],
            low_s=ordered[0],
            high_s=ordered[-1],
            availability=availability(faults, machine.num_nodes),
            hours_between_failures=faults.mtbf_s(machine.num_nodes) / 3600,
        )

    def assumptions(self, rows: Sequence[ForecastRow]) -> tuple[str, ...]:
        """What was taken because nobody measured it."""
        said = [
            f"A step has {STEP_OVERHEAD_S * 1e3:.1f} ms of overhead besides passes and optimizer.",
            f"A worker's pass varies by {STRAGGLER_SPREAD:.0%}; all wait for the slowest.",
        ]
        if self.timing.update_s is None:
            said.append(f"The optimizer moves {_MEMORY_RATE[self.cluster.device_kind] / 1e9:.0f} GB/s.")
        if self.timing.workers_together == 1 and any(row.devices > row.nodes for row in rows):
            said.append("Workers of a node do not slow each other; nobody timed them together.")
        if not self.timing.sums and any(row.devices > 1 for row in rows):
            said.append("Sums of gradients cost in a step what links alone make of them; nobody timed them in steps.")
        if not self.cluster.network and any(row.nodes > 1 for row in rows):
            rate = self.question.link_bytes_per_s or 0.0
            said.append(
                f"Links between nodes carry {rate / 1e9:g} GB/s as given, after {BETWEEN_ALPHA_S * 1e6:.0f} µs."
            )
        if rows[-1].devices > sum(self.node_sizes):
            said.append(
                f"Beyond the {sum(self.node_sizes)} devices of this cluster there are more nodes of "
                f"{self.more_devices_per_node} like the first."
            )
            hours = DEVICE_MTBF_S / 3600
            said.append(
                f"A device fails every {hours:,.0f} hours, as in the training of Llama 3, and a restart takes "
                f"{RESTART_S / 60:.0f} minutes."
            )
        largest = max(timing.micro_batch_size for timing in self.timing.micro_batches)
        if any(row.micro_batch_size > largest for row in rows):
            said.append(
                f"Passes of more than {largest} samples were not timed; they continue the line of the last two."
            )
        if self.activations is None:
            said.append("Memory of activations was not measured; meshes are compared without it.")
        if self.job.aggregation.wire not in WIRE_FACTORS:
            said.append(
                f"The wire format {self.job.aggregation.wire} is priced as float32, which is the most it costs."
            )
        return tuple(said)


def _moved_bytes(state: StateBytes) -> float:
    """Of each parameter in an update: the optimizer reads parameters, gradients and state, writes all but gradients."""
    return state.gradient + 2 * (state.parameter + state.optimizer)


def pass_s(timing: JobTiming, num_samples: float) -> float:
    """Seconds of one pass: straight lines between the sizes that were timed, the last one continued beyond them.

    Below the smallest size a pass takes as long as that one: it is launching kernels that takes the time. Over the only
    size that was timed all grows with the samples.
    """
    known = sorted((row.micro_batch_size, row.seconds) for row in timing.micro_batches)
    if num_samples <= known[0][0]:
        return known[0][1]
    if len(known) == 1:
        return known[0][1] * num_samples / known[0][0]
    place = next((place for place, (size, _) in enumerate(known) if size >= num_samples), len(known) - 1)
    (size, seconds), (next_size, next_s) = known[place - 1], known[place]
    slope = (next_s - seconds) / (next_size - size)
    if num_samples > next_size:
        return next_s + max(0.0, slope) * (num_samples - next_size)
    return seconds + slope * (num_samples - size)


def transformer_shape(job: Job) -> TransformerShape | None:
    """The shape that a job's own options tell; None where they leave any of it open."""
    options = job.model.options | job.data.options
    try:
        return TransformerShape(*(int(options[name]) for name in ("num_layers", "width", "num_heads", "context")))
    except (KeyError, TypeError, ValueError):
        return None


def shard_size(job: Job) -> int:
    """Samples of the largest virtual shard."""
    return -(-job.global_batch_size // job.virtual_shards)


def needs_replicas(job: Job) -> bool:
    """Whether only workers with the whole model can train it."""
    return (
        job.parity == "bitwise"
        or job.aggregation.method != "every_step"
        or job.aggregation.wire in ("powersgd", "topk", "randomk", "auto-lossy")
        or job.norm == "sync"
        or job.precision == "float16"
    )


def _timing_of(job: Job, cluster: Cluster) -> JobTiming:
    """The timing of this job; of several, the latest one. Raises `ClusterError` where there is none."""
    found = [timing for timing in cluster.timings if timing.job == job.name and timing.micro_batches]
    if found:
        return found[-1]
    others = sorted({timing.job for timing in cluster.timings})
    known = f"it has timings of {', '.join(others)}" if others else "it has timings of no job"
    raise ClusterError(f"The cluster has no timing of the job '{job.name}' ({known}); run paceline probe JOB first.")


def largest_share(job: Job, count: int) -> tuple[int, int, int]:
    """Of the worker with the most to do: samples, samples of its largest shard, and shards."""
    shards = max(job.virtual_shards, min(count, job.global_batch_size))
    shard = -(-job.global_batch_size // shards)
    num_shards = -(-shards // count)
    return min(job.global_batch_size, num_shards * shard), shard, num_shards


def _impossible(job: Job, count: int) -> str:
    """Why so many workers cannot share the job's batch; empty: they can."""
    if count > job.global_batch_size:
        return f"a global batch of {job.global_batch_size} has no sample for each of {count} devices"
    if count > job.virtual_shards:
        return f"it needs --set virtual_shards={count}, which is part of the job"
    return ""


def _faster_pattern(machine: Machine, size_bytes: float) -> Pattern:
    patterns: tuple[Pattern, ...] = ("ring", "halving_doubling")
    return min(patterns, key=lambda pattern: exchange_s(machine, size_bytes, pattern))
